"""A capture with a fault outlives what is captured after it: the next attempts of a job go beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.sessions import launch
from tracekern.comm.ranks.group import Group
from tracekern.dump.reader import peek_metadata
from tracekern.launcher.launch import launch_ranks
from tracekern.record import attempt_choice
from tracekern.record import session as session_module
from tracekern.record.attempt_choice import Claim, lock_attempt
from tracekern.record.session import capture
from tracekern.timeline.load import load

WORKER = """
import os, signal, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
from tests.flight_pairs import make_pair
from tracekern.comm.ranks.group import Group
from tracekern.errors import CommTimeout
from tracekern.record.session import capture

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to rank 0 as soon as rank 1 is dead
dist.init_process_group("gloo")
pipeline, call = make_pair(Group.discover(), timeout_s=60.0)
with capture({directory!r}, device=pipeline.comm.device, keep="last", records_per_track=64) as session:
    assert call(0, session)
    if attempt == 0:
        pipeline.comm.set_timeout(0.5)
    if attempt == 0 and dist.get_rank() == 1:
        print("lost run", session.run_id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        assert call(1, session)
    except CommTimeout as error:
        raise SystemExit(error.exit_code)
"""


@pytest.mark.rotates
def test_what_torchrun_starts_again_leaves_the_attempt_before_alone(tmp_path: Path, command_line):
    directory = tmp_path / "capture"
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER).format(root=str(ROOT), directory=str(directory)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(worker)]
    # Else the ranks of the second attempt read the addresses of the first from the store of torchrun.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"{directory}: attempt 1 of this job is captured into {directory / 'attempt-1'}" in ended.stderr

    lost = re.search(r"lost run (\S+)", ended.stdout)[1]
    assert peek_metadata(directory / "rank_00000.tkdump")["fault"]["cause"] == "timeout"
    assert f"what rank 1 of run {lost} left in shared memory is saved in {directory}" in ended.stderr
    states = [rank.state for rank in load(directory).ranks]
    assert states == ["closed", "salvaged"], "both ranks of the first attempt"
    assert [rank.state for rank in load(directory / "attempt-1").ranks] == ["closed", "closed"]

    told = f"1 later attempt is beside this one; the newest: {directory / 'attempt-1'}"
    report = command_line("report", directory)
    assert report.returncode == 0, report.stderr
    assert report.stdout.startswith("   died  rank 1 ended without closing the capture ")
    assert told in report.stdout
    assert told in command_line("info", directory).stdout
    assert "later attempt" not in command_line("report", directory / "attempt-1").stdout


def leave(directory: Path, fault: bool) -> str:
    """Captures a rank, whose kernel gave up where there is a fault. Returns the run's name."""
    with capture(directory, device="cpu", max_bytes=1 << 20) as session:
        launch(session)
        if fault:
            session.segment.fault_record["claimed"], session.segment.fault_record["cause"] = 1, 1
    return session.run_id


def runs_in(directory: Path) -> dict[str, str]:
    dumps = directory.rglob("*.tkdump")
    return {str(dump.parent.relative_to(directory)): peek_metadata(dump)["run_id"] for dump in dumps}


def test_a_fault_is_replaced_by_no_later_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    leave(tmp_path, fault=False)
    first = leave(tmp_path, fault=True)  # replaces the one before
    assert not caplog.text
    second = leave(tmp_path, fault=True)
    last = leave(tmp_path, fault=False)
    assert (
        f"{tmp_path / 'attempt-1'}: keeps the fault of run {second}: this capture goes to {tmp_path / 'attempt-2'}"
    ) in caplog.text
    assert runs_in(tmp_path) == {".": first, "attempt-1": second, "attempt-2": last}
    again = leave(tmp_path, fault=False)
    assert runs_in(tmp_path) == {".": first, "attempt-1": second, "attempt-2": again}
    for directory, number in ((tmp_path, 2), (tmp_path / "attempt-1", 1), (tmp_path / "attempt-2", 0)):
        told = [problem.text for problem in load(directory).problems if problem.kind == "attempts"]
        assert len(told) == (number > 0)
        assert all(f"{number} later attempt" in text and str(tmp_path / "attempt-2") in text for text in told)


def capture_together(group: Group, directory: str) -> str:
    with capture(directory, device="cpu", max_bytes=1 << 20) as session:
        launch(session)
    return session.run_id


def test_what_a_run_left_that_did_not_end_whole_is_replaced_by_no_later_run(
    pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One rank of two was killed and not salvaged: its dump is missing, and that of the other one holds no fault."""
    pool = pools(2)
    pool.call(capture_together, str(tmp_path))
    first = pool.call(capture_together, str(tmp_path))[0]
    assert runs_in(tmp_path) == {".": first}, "what ended whole is replaced"
    (tmp_path / "rank_00001.tkdump").unlink()
    second = leave(tmp_path, fault=False)
    told = f"{tmp_path}: keeps what is left of run {first}, which rank 1 did not end: this capture goes to "
    assert f"{told}{tmp_path / 'attempt-1'}" in caplog.text
    assert runs_in(tmp_path) == {".": first, "attempt-1": second}
    last = leave(tmp_path, fault=False)
    assert runs_in(tmp_path) == {".": first, "attempt-1": last}


def capture_by_name(directory: Path, run_id: str, rank: int, environment: pytest.MonkeyPatch) -> Path:
    """Captures a rank of two that know each other by the run's name alone. Returns where."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("TRACEKERN_RUN_ID", run_id)):
        environment.setenv(name, str(value))
    environment.setattr(session_module, "_num_opened", Counter())  # as in another process
    with capture(directory, device="cpu", max_bytes=1 << 20) as session:
        launch(session)
    session.segment.unlink()  # which its launcher would have done
    return session.directory


def test_ranks_that_know_each_other_by_name_go_to_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One after the other, as of ranks of which the first has ended before the last one opens."""
    for run_id in ("first", "second", "second"):
        assert {capture_by_name(tmp_path, run_id, rank, monkeypatch) for rank in (0, 1)} == {tmp_path}
        assert [rank.state for rank in load(tmp_path).ranks] == ["closed", "closed"]
    (tmp_path / "rank_00000.tkdump").unlink()  # never ended
    for run_id in ("third", "fourth"):
        assert {capture_by_name(tmp_path, run_id, rank, monkeypatch) for rank in (1, 0)} == {tmp_path / "attempt-1"}
        assert [rank.state for rank in load(tmp_path / "attempt-1").ranks] == ["closed", "closed"]


def test_so_they_do_when_they_choose_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 1 has looked when rank 0 begins to replace the earlier run, and then finds that run without an end."""
    for rank in (0, 1):
        capture_by_name(tmp_path, "first", rank, monkeypatch)
    claims = [Claim("second", rank) for rank in (0, 1)]
    lock, place = lock_attempt(tmp_path, claims[0])
    begun, looks = attempt_choice._begun, iter([None])
    monkeypatch.setattr(attempt_choice, "_begun", lambda *given: next(looks, begun(*given)))
    (tmp_path / "rank_00000.tkdump").unlink()
    other, theirs = lock_attempt(tmp_path, claims[1])
    assert theirs == place == tmp_path
    other.release()
    lock.release()


def test_an_older_attempt_is_not_called_newer(tmp_path: Path):
    leave(tmp_path / "attempt-1", fault=False)
    dump = tmp_path / "attempt-1" / "rank_00000.tkdump"
    os.utime(dump, (1, 1))
    leave(tmp_path, fault=False)
    assert not [problem for problem in load(tmp_path).problems if problem.kind == "attempts"]


DIES = """
import os, signal
from tracekern.record.session import capture
capture({directory!r}, device="cpu", max_bytes=1 << 20).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_launcher_saves_a_dead_rank_into_its_attempt(tmp_path: Path):
    first = leave(tmp_path, fault=True)
    program = [sys.executable, "-c", DIES.format(directory=str(tmp_path))]
    exits = launch_ranks(1, program, capture_dir=tmp_path, timeout_s=60, run_id="dies")
    assert exits[0].salvaged
    assert runs_in(tmp_path) == {".": first, "attempt-1": "dies"}
    last = leave(tmp_path, fault=False)
    assert runs_in(tmp_path) == {".": first, "attempt-1": "dies", "attempt-2": last}, (
        "a killed rank did not end its run"
    )


def test_run_moe_names_the_directory_of_its_attempt(tmp_path: Path, command_line):
    first = leave(tmp_path, fault=True)
    shape = ["--ranks", 1, "--tokens", 8, "--hidden", 64, "--experts", 4, "--topk", 2, "--iterations", 1]
    ended = command_line("run", "moe", "-o", tmp_path, *shape, "--backend", "cpu", "--json")
    assert ended.returncode == 0, ended.stderr
    place = tmp_path / "attempt-1"
    assert f"{tmp_path}: keeps the fault of run {first}: this capture goes to {place}" in ended.stderr
    assert json.loads(ended.stdout)["runs"][0]["trace"].startswith(str(place))
    assert runs_in(tmp_path)["."] == first

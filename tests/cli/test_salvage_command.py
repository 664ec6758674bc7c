"""`tracekern salvage`: a rank that no launcher of ours started is killed, and what it had recorded is saved."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_command import warm_commands

from tests.captures import EVENT_TABLE, CaptureSpec, fill_segment, metadata, removed_after
from tests.kernels import run_kernel
from tests.paths import ROOT
from tracekern.cli.output import suggest
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.record.session import capture
from tracekern.segment.evidence import keeping
from tracekern.segment.names import SHM_DIR, list_segments, remove_segment
from tracekern.segment.pack import write_dump
from tracekern.segment.salvage import salvage_run
from tracekern.segment.snapshot import snapshot_run
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.load import load

RANK = """
import json, sys, time
sys.path.insert(0, {root!r})
from tests.captures import EVENT_TABLE
from tests.kernels import run_kernel
from tracekern.record.session import capture
with capture({directory!r}, max_bytes=1 << 20) as session:
    launched = session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE))
    run_kernel(launched.descriptor, 2, 2, 3)
    print(session.run_id, flush=True)
    time.sleep(1000)
"""


def run_in(directory: Path) -> str:
    return read_dump(directory / "rank_00000.tkdump").run_id


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_commands().run("salvage", *arguments)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A rank in the middle of its capture, and its run."""
    text = RANK.format(root=str(ROOT), directory=str(tmp_path / "capture"))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    run_id = process.stdout.readline().strip()
    yield process, run_id
    process.kill()
    process.wait()
    for name in list_segments(run_id):
        remove_segment(name)


@pytest.fixture
def run_id(rank: tuple[subprocess.Popen[str], str]) -> str:
    """The run of a rank that was killed in the middle of its capture."""
    process, run_id = rank
    process.kill()
    process.wait()
    return run_id


def test_what_a_killed_rank_left_is_listed_and_saved(rank, tmp_path):
    process, run_id = rank
    refused = command(run_id)
    assert refused.returncode == 2
    assert f"run {run_id}: rank 0 (pid {process.pid}) still runs; end it first, or see what it does: " in refused.stderr
    assert refused.stderr.endswith(f"tracekern snapshot {run_id}\n")
    assert any(
        row["run_id"] == run_id and row["is_running"] for row in json.loads(command("--json").stdout)["leftovers"]
    )

    process.send_signal(signal.SIGKILL)
    process.wait()
    listed = command()
    said = rf"^{run_id}: rank 0 of 1 records no more; opened \d+ s ago for {tmp_path / 'capture'}; -c$"
    assert re.search(said, listed.stdout, re.M), listed.stdout
    assert f"salvage {run_id}" in listed.stderr
    saved = command(run_id)
    assert (saved.returncode, saved.stdout) == (0, f"run {run_id}: saved rank 0 of 1\n")
    assert f"report {tmp_path / 'capture'}" in saved.stderr
    timeline = load(tmp_path / "capture")
    assert [one.state for one in timeline.ranks] == ["salvaged"]
    contents = json.loads((tmp_path / "capture" / "capture.json").read_text())
    assert [(one["rank"], one["state"]) for one in contents["ranks"]] == [(0, "salvaged")]
    assert len(timeline.spans) >= 2 * 2 * 3
    assert list_segments(run_id) == []
    again = command(run_id)
    assert again.returncode == 2
    assert "nothing of it is left on this machine" in again.stderr


def test_it_is_saved_where_one_asks_for(run_id, tmp_path):
    told = json.loads(command(run_id, "-o", str(tmp_path / "other"), "--json").stdout)
    assert told == {"run_id": run_id, "ranks": [0], "captures": [str(tmp_path / "other")]}
    assert load(tmp_path / "other").ranks[0].state == "salvaged"
    assert not list((tmp_path / "capture").glob("*.tkdump"))


def test_a_snapshot_is_completed_by_what_came_behind_it(rank, tmp_path):
    process, run_id = rank
    snapshot_run(run_id, tmp_path / "now")
    assert read_dump(tmp_path / "now" / "rank_00000.tkdump").metadata["state"] == "running"
    process.kill()
    process.wait()
    assert command(run_id, "-o", str(tmp_path / "now")).returncode == 0
    assert read_dump(tmp_path / "now" / "rank_00000.tkdump").metadata["state"] == "salvaged"


@pytest.mark.parametrize("name", ["info", "report"])
def test_who_reads_an_unfinished_capture_is_told_where_the_rest_is(rank, tmp_path, name):
    process, run_id = rank

    def told() -> str:
        done = warm_commands().run(name, tmp_path / "capture")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        return done.stderr

    rest = f"records of rank 0 of run {run_id} are in shared memory, not here; "
    assert told().endswith(f"{rest}see what there is by now: {suggest('snapshot', run_id)}\n")
    process.kill()
    process.wait()
    assert told().endswith(f"{rest}save them: {suggest('salvage', run_id)}\n")


def test_beside_what_is_there_the_rest_is_a_note(run_id, tmp_path):
    with removed_after(fill_segment(CaptureSpec(num_ranks=2, run_id=run_id), 1)) as closed:
        write_dump(tmp_path / "capture" / "rank_00001.tkdump", closed)
    for path in (tmp_path / "capture", tmp_path / "capture" / "rank_00001.tkdump"):
        done = warm_commands().run("info", path)
        assert done.returncode == 0
        assert f"in shared memory, not here; save them: {suggest('salvage', run_id)}\n" in done.stderr
    assert command(run_id).returncode == 0
    done = warm_commands().run("info", tmp_path / "capture")
    assert "in shared memory" not in done.stderr


def test_what_is_left_may_be_removed_unsaved(rank, tmp_path):
    process, run_id = rank
    assert "still runs; end it first" in command(run_id, "--discard").stderr
    process.kill()
    process.wait()
    removed = command(run_id, "--discard")
    assert (removed.returncode, removed.stdout) == (0, f"run {run_id}: removed what rank 0 left\n")
    assert list_segments(run_id) == []
    assert not list((tmp_path / "capture").glob("*.tkdump"))
    for words in (("--discard",), ("-o", str(tmp_path / "other"))):
        assert "name the run that it is for" in command(*words).stderr
    assert "give one of them" in command(run_id, "--discard", "-o", str(tmp_path / "other")).stderr


def test_what_cannot_be_read_is_named_and_removed():
    run_id = f"early-{uuid.uuid4().hex[:8]}"
    for number in range(2):
        (SHM_DIR / f"tracekern-{run_id}-{number}").touch(0o600)  # killed as it was made
    assert f"{run_id}: ranks 0 and 1 ended before recording anything" in command().stdout
    removed = command(run_id)
    assert (removed.returncode, list_segments(run_id)) == (0, [])
    assert removed.stdout == f"run {run_id}: ranks 0 and 1 ended before recording anything; removed\n"


def test_the_next_run_names_what_dead_ranks_left(rank):
    process, run_id = rank
    words = ["run", "moe", "--ranks", "1", "--tokens", "4", "--hidden", "64", "--experts", "4", "--topk", "2"]
    meanwhile = warm_commands().run(*words, "--no-trace")
    assert (meanwhile.returncode, run_id in meanwhile.stderr) == (0, False), "it still runs"
    process.kill()
    process.wait()
    named = warm_commands().run(*words, "--no-trace")
    assert named.returncode == 0
    assert f"rank 0 of run {run_id} left records in shared memory; save them: " in named.stderr
    assert f"salvage {run_id}; or, with --discard, remove them" in named.stderr
    assert list_segments(run_id), "naming it removes nothing"


def test_what_cannot_be_saved_is_still_there(run_id, tmp_path):
    (tmp_path / "file").write_text("")
    failed = command(run_id, "-o", str(tmp_path / "file"))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "rank 0 could not be saved and is still there; try another -o DIR" in failed.stderr
    assert command(run_id).returncode == 0


def test_a_capture_made_since_is_not_overwritten(run_id, tmp_path):
    """As where torchrun starts ranks again, which capture into the same directory."""
    with keeping(run_id), capture(tmp_path / "capture", device="cpu", max_bytes=1 << 20) as again:
        pass
    refused = command(run_id)
    assert refused.returncode == 2
    assert f"holds run {again.run_id}, captured there since; choose another directory" in refused.stderr
    assert run_in(tmp_path / "capture") == again.run_id
    assert command(run_id, "-o", str(tmp_path / "other")).returncode == 0
    assert run_in(tmp_path / "other") == run_id


def test_a_run_is_one_line_and_saved_when_its_last_rank_has_ended(run_id, tmp_path):
    other = SegmentWriter.create(
        run_id, 1, metadata(CaptureSpec(run_id=run_id), 1) | {"directory": str(tmp_path)}, 1 << 16
    )
    listed = command()
    (line,) = (line for line in listed.stdout.splitlines() if run_id in line)
    assert line.startswith(f"{run_id}: rank 0 of 1 records no more, rank 1 still records; opened ")
    assert f"salvage {run_id}" not in listed.stderr
    assert f"snapshot {run_id}" in listed.stderr
    assert f"rank 1 (pid {os.getpid()}) still runs; end it first, or see" in command(run_id).stderr
    other.close()
    assert f"salvage {run_id}" in command().stderr


def test_a_rank_with_two_captures_is_one_rank(run_id, tmp_path):
    about = metadata(CaptureSpec(run_id=f"{run_id}.1"), 0) | {"directory": str(tmp_path / "second")}
    SegmentWriter.create(f"{run_id}.1", 0, about, 1 << 16).close()
    told = json.loads(command(run_id, "--json").stdout)
    assert told == {"run_id": run_id, "ranks": [0], "captures": [str(tmp_path / "capture"), str(tmp_path / "second")]}


def test_a_damaged_segment_hides_no_other(run_id):
    damaged = SHM_DIR / f"tracekern-{run_id}.1-0"
    damaged.write_bytes((SHM_DIR / f"tracekern-{run_id}-0").read_bytes().replace(b'{"run_id"', b'!"run_id"'))
    assert [row["run_id"] for row in json.loads(command("--json").stdout)["leftovers"]].count(run_id) == 1


def test_a_dump_that_cannot_be_written_stays_in_shared_memory(tmp_path, caplog):
    place = tmp_path / "capture"
    session = capture(place, device="cpu").__enter__()
    launched = session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE))
    run_kernel(launched.descriptor, 2, 2, 3)
    shutil.rmtree(place)
    place.write_text("")
    with pytest.raises(BadInput, match=f"cannot write .*`tracekern salvage {session.run_id} -o DIR` saves it$"):
        session.__exit__(None, None, None)
    assert caplog.text == "", "the error says it"
    assert command(session.run_id, "-o", str(tmp_path / "other")).returncode == 0
    assert load(tmp_path / "other").ranks[0].state == "closed"


def test_what_a_capture_saved_itself_is_not_saved_elsewhere(tmp_path, monkeypatch):
    """The first of two captures of a run, whose launcher salvages into one directory; its ranks cannot meet."""
    run = f"kept-{uuid.uuid4().hex}"
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "TRACEKERN_RUN_ID": run}
    for name, value in {**ranks, "TRACEKERN_KEEP_SEGMENT": "1"}.items():
        monkeypatch.setenv(name, value)
    with capture(tmp_path / "first", device="cpu", max_bytes=1 << 20) as session:
        pass
    assert list_segments(run) == [session.segment.name]
    assert salvage_run(session.run_id, tmp_path / "other") == set()
    assert run_in(tmp_path / "first") == session.run_id
    assert not list((tmp_path / "other").glob("*.tkdump"))
    assert list_segments(session.run_id) == []


def test_a_damaged_segment_keeps_no_other_rank_from_being_saved(tmp_path, monkeypatch, caplog):
    run = f"damaged-{uuid.uuid4().hex}"
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "WORLD_SIZE": "2", "TRACEKERN_RUN_ID": run, "TRACEKERN_KEEP_SEGMENT": "1"}
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("tracekern.record.session._num_opened", Counter())  # as in a process of its own
        with keeping(run), capture(tmp_path / "own", device="cpu", max_bytes=1 << 20):
            pass
        (tmp_path / "own" / f"rank_0000{rank}.tkdump").unlink()
    damaged, sound = (SHM_DIR / name for name in list_segments(run))
    with damaged.open("r+b") as file:
        file.seek(damaged.read_bytes().index(b'"rank": 0'))
        file.write(b'"rnak": 0')
    (SHM_DIR / f"tracekern-{run}-2").touch()  # killed as it was made
    assert salvage_run(run, tmp_path / "other") == set()
    assert [path.name for path in (tmp_path / "other").glob("*.tkdump")] == ["rank_00001.tkdump"]
    assert (
        f"nothing to save: segment tracekern-{run}-2: 0 bytes, wanted at least 256; its rank died early" in caplog.text
    )
    assert f"cannot save {damaged.name}: KeyError: 'rank'" in caplog.text
    assert (damaged.exists(), sound.exists()) == (True, False)
    assert list_segments(run) == [damaged.name]
    damaged.unlink()


def leave_segment(spec: CaptureSpec, rank: int) -> None:
    segment = fill_segment(spec, rank)
    (SHM_DIR / segment.name).rename(SHM_DIR / f"tracekern-{spec.run_id}-{rank}")
    segment.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_had_closed_comes_along(tmp_path, num_ranks):
    """Rank 1 was killed; of rank 2 nothing is left."""
    run, own = f"along-{uuid.uuid4().hex}", tmp_path / "capture"
    spec = CaptureSpec(num_ranks=num_ranks, run_id=run, directory=str(own), killed_rank=1)
    with removed_after(fill_segment(spec, 0)) as closed:
        write_dump(own / "rank_00000.tkdump", closed)
    (own / "rank_00000.torch.json.gz").write_bytes(b"profile")
    leave_segment(spec, 1)
    saved = command(run, "-o", str(tmp_path / "other"))
    assert saved.returncode == 0, saved.stderr
    assert [path.name for path in sorted((tmp_path / "other").glob("rank_*"))] == [
        "rank_00000.tkdump",
        "rank_00000.torch.json.gz",
        "rank_00001.tkdump",
    ]
    (tmp_path / "other" / "rank_00000.torch.json.gz").unlink()
    named = re.search(r"who waited for whom: (.*)", saved.stderr)
    report = subprocess.run(shlex.split(named[1]), capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert report.returncode == 0, report.stderr


def test_what_another_run_has_there_stays(tmp_path):
    run, own, other = f"along-{uuid.uuid4().hex}", tmp_path / "capture", tmp_path / "other"
    spec = CaptureSpec(num_ranks=2, run_id=run, directory=str(own), killed_rank=1)
    for directory, run_id in ((own, run), (other, "another")):
        closed = fill_segment(CaptureSpec(num_ranks=2, run_id=run_id), 0)
        write_dump(directory / "rank_00000.tkdump", closed)
        closed.unlink()
        closed.close()
    leave_segment(spec, 1)
    assert salvage_run(run, other) == {1}
    assert run_in(other) == "another"


def test_where_nothing_was_missing_the_capture_itself_is_named(tmp_path):
    """Its launcher was killed once the ranks had closed."""
    run, own = f"whole-{uuid.uuid4().hex}", tmp_path / "capture"
    spec = CaptureSpec(num_ranks=1, run_id=run, directory=str(own))
    leave_segment(spec, 0)
    assert salvage_run(run) == set()
    leave_segment(spec, 0)
    told = json.loads(command(run, "-o", str(tmp_path / "other"), "--json").stdout)
    assert told == {"run_id": run, "ranks": [0], "captures": [str(own)]}


def test_two_at_once_say_nothing_of_what_the_other_has_saved(tmp_path, caplog):
    run = f"twice-{uuid.uuid4().hex}"
    for rank in range(30):
        leave_segment(CaptureSpec(num_ranks=30, run_id=run, directory=str(tmp_path), groups=1), rank)
    threads = [threading.Thread(target=salvage_run, args=(run,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.text == ""
    assert list_segments(run) == []
    assert len(list(tmp_path.glob("*.tkdump"))) == 30


def test_a_fork_that_leaves_the_block_leaves_the_capture_to_the_rank(tmp_path):
    with capture(tmp_path, device="cpu") as session:
        launched = session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE))
        child = os.fork()
        if child == 0:
            with contextlib.ExitStack() as stack:
                stack.callback(os._exit, 0)
                stack.push(session.__exit__)
        os.waitpid(child, 0)
        assert len(list_segments(session.run_id)) == 1
        run_kernel(launched.descriptor, 2, 2, 3)
    assert len(load(tmp_path).spans) >= 2 * 2 * 3

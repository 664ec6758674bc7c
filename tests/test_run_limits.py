"""`run moe` when a rank, or the process that starts the ranks, hangs, ends or lacks something: one line, in time."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import without_dead_runs
from tests.test_run import SMALL
from tracekern.errors import BadInput, TracekernError
from tracekern.launcher import start
from tracekern.launcher.spawner import Spawner
from tracekern.launcher.watch import PHASES, Limits, Watch
from tracekern.moe.run import MoeRun, RunReport, _limits, run
from tracekern.record.session import CLOSE_TIMEOUT_S

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 3
WITHIN_S = {"start": 15, "set_up": LIMIT_S, "run": LIMIT_S + 1, "close": LIMIT_S}
"""The import of torch may take most of `start` on a busy machine."""


def run_badly(how: str, directory: Path, *tight: str) -> RunReport:
    """A run with a rank of tests/bad_rank.py. tight: phases with the limits of WITHIN_S; others have the usual ones."""
    limits = Limits(**{f"{phase}_s": float(WITHIN_S[phase]) for phase in tight})
    env = {**os.environ, "BAD_RANK": how, "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAD_RANK", how)
        patch.setattr("tracekern.moe.run._limits", lambda options: limits)
        with Spawner("tests.bad_rank:main", env) as spawner:
            return run(MoeRun(**SMALL, timeout_ms=1000), directory, spawner=spawner)


def told(report: RunReport) -> str:
    with pytest.raises(TracekernError) as caught:
        report.raise_for_error()
    return str(caught.value)


def test_the_limits_of_a_run_follow_its_options():
    assert _limits(MoeRun(**SMALL, limit_s=5, timeout_ms=1000)) == Limits(5, 5, 6, 5 + CLOSE_TIMEOUT_S)


@pytest.mark.parametrize(
    ("phase", "missed"),
    [
        ("start", "did not start within 15 s"),
        ("set-up", "made no progress for 3 s during set-up"),
        ("run", "made no progress for 4 s during run"),
        ("close", "made no progress for 3 s during close"),
    ],
)
def test_a_rank_that_is_stopped_is_named_within_the_limit(tmp_path, capfd, phase: str, missed: str):
    started = time.monotonic()
    report = run_badly(f"2 {phase} STOP", tmp_path, phase.replace("-", "_"))
    assert time.monotonic() - started < 60  # else it was another phase's limit
    assert told(report) == f"rank 2 {missed}: it is stopped; 3 more ranks stopped"
    assert capfd.readouterr().err == ""


def test_a_rank_that_hangs_in_the_set_up_is_named_with_those_that_wait_for_it(tmp_path, capfd):
    wanted = "see what they wait for, or allow more with --limit-s"
    report = run_badly("2 set-up hang", tmp_path, "set_up")
    assert told(report) == f"ranks 0, 1, 2 and 3 made no progress for 3 s during set-up: {wanted}"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("act", "how"), [("KILL", "killed by signal 9"), ("exit", "exit status 7")])
def test_a_rank_that_ends_is_one_line(tmp_path, capfd, phase: str, act: str, how: str):
    report = run_badly(f"2 {phase} {act}", tmp_path)
    others = "" if phase == "close" else "; 3 more ranks stopped"
    assert told(report) == f"rank 2 ended ({how}) during {phase}{others}"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("phases", "expected"), [("start set-up", True), ("set-up run", False), ("close start", False)]
)
def test_others_are_given_the_short_time_until_one_has_run(phases: str, expected: bool):
    watch = Watch(2, Limits(), tells_phases=True)
    for rank, phase in enumerate(phases.split()):
        assert watch.heard(rank, f"tracekern-phase {phase}")
    assert watch.is_setting_up() == expected


def test_garbage_in_the_store_of_the_process_group_is_one_line(tmp_path, capfd):
    report = run_badly("2 set-up garbage", tmp_path)
    assert re.fullmatch(r"rank \d: the process group could not be formed: [^;]+; 3 more ranks stopped", told(report))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("phase", ["set-up", "run"])
@pytest.mark.parametrize(
    ("act", "what"),
    [("MemoryError", "out of memory"), ("EMFILE", "Too many open files"), ("ENOSPC", "No space left on device")],
)
def test_a_rank_that_lacks_something_is_one_line(tmp_path, capfd, phase: str, act: str, what: str):
    report = run_badly(f"2 {phase} {act}", tmp_path)
    advice = r"raise the limit \(`ulimit -a`\), or ask for less: fewer ranks or tokens, or a smaller hidden"
    assert re.fullmatch(rf"rank 2: .*{what}; {advice}; 3 more ranks stopped", told(report))
    assert capfd.readouterr().err == ""


def command(directory: Path, *more: str) -> list[str]:
    words = ["run", "moe", "--ranks", "4", "--tokens", "8", "--hidden", "64", "--experts", "16", "--topk", "2"]
    return [sys.executable, "-m", "tracekern", *words, "--limit-s", str(LIMIT_S), "-o", str(directory), *more]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def first_child(pid: int) -> int:
    deadline = time.monotonic() + 30
    while not (found := children(pid)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found[0]


def test_a_process_that_is_stopped_before_it_starts_the_ranks_is_named(tmp_path):
    running = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    starter = first_child(running.pid)
    while b"spawner" not in Path(f"/proc/{starter}/cmdline").read_bytes():  # another test stops it earlier
        time.sleep(0.001)
    os.kill(starter, signal.SIGSTOP)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert (
        without_dead_runs(err)
        == f"tracekern: the ranks did not start within 3 s: process {starter}, which starts them, is stopped\n"
    )


@pytest.mark.parametrize("after_s", [0, 1], ids=["at once", "later than a limit"])
def test_a_child_that_is_stopped_before_it_is_a_program_is_ended(monkeypatch, after_s: int):
    def stop() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(start, "_LIMIT_S", 0.3)
    with pytest.raises(BadInput, match=r"process \d+ did not start within 0 s: it was stopped"):
        start.start_process(["true"], os.environ, stop)


def test_ranks_whose_starter_is_stopped_end_in_time(tmp_path):
    """They may all do their work: only nobody tells the launcher that they have ended."""
    running = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    starter = first_child(running.pid)
    first_child(starter)
    os.kill(starter, signal.SIGSTOP)
    started = time.monotonic()
    _, err = running.communicate(timeout=60)
    assert time.monotonic() - started < LIMIT_S + 20
    lines = [line for line in without_dead_runs(err).splitlines() if not line.startswith("  ")]
    assert running.returncode == 0 or f"process {starter}, which starts them, is stopped" in err
    assert "Traceback" not in err
    assert all(line.startswith("tracekern: ") for line in lines)


@pytest.mark.parametrize("files", [16, 24, 40, 60])
def test_too_few_open_files_are_told_before_anything_starts(tmp_path, files: int):
    ended = subprocess.run(
        command(tmp_path / "capture"),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    wanted = f"needs 64 open files a rank, {files} are allowed; raise the limit (`ulimit -n 64`)"
    assert (ended.returncode, without_dead_runs(ended.stderr)) == (2, f"tracekern: run moe {wanted}\n")
    assert not (tmp_path / "capture").exists()


def test_no_room_for_a_thread_is_one_line(tmp_path):
    """Whether the launcher lacks it first, or the import of torch the room for its libraries."""
    limit = 300 << 20
    ended = subprocess.run(
        command(tmp_path / "capture"),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert ended.returncode == 2
    assert re.fullmatch(
        r"tracekern: .*(new thread|map segment|allocate|out of memory).*\n", without_dead_runs(ended.stderr)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_once_for_all_ranks(tmp_path):
    words = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec "$@"', "-"]
    ended = subprocess.run([*words, *command(tmp_path)], capture_output=True, text=True, timeout=60)
    last = ended.stderr.splitlines()[-1]
    run_id = re.search(r"`tracekern salvage (\S+) -o DIR` saves it", last)[1]
    saved = subprocess.run(
        [sys.executable, "-m", "tracekern", "salvage", run_id, "--discard"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "No space left on device" in last
    assert len(without_dead_runs(ended.stderr).splitlines()) <= 3
    assert saved.returncode == 0

"""`run moe` when a rank, or the process that starts the ranks, hangs, ends or lacks something: one line, in time."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_run import SMALL

from tests.conftest import without_dead_runs
from tests.paths import ROOT
from tests.warm_command import command
from tracekern.errors import BadInput, TracekernError
from tracekern.launcher import start
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.spawner import Spawner
from tracekern.launcher.watch import PHASES, Limits, Watch
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.reports import RunReport
from tracekern.moe.workload.run import _limits, run
from tracekern.record.session import CLOSE_TIMEOUT_S

LIMIT_S = 3
NOBODY = "none none none"
WITHIN_S = {"start": LIMIT_S, "set_up": LIMIT_S, "run": LIMIT_S + 1, "close": LIMIT_S}


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner]:
    """Starts ranks of tests/bad_rank.py. All tests here share it: that imports torch once."""
    with Spawner("tests.bad_rank:main", {**os.environ, "PYTHONPATH": str(ROOT)}) as started:
        yield started


class Badly:
    """Runs with a rank that misbehaves."""

    def __init__(self, spawner: Spawner, directory: Path) -> None:
        self.spawner = spawner
        self.directory = directory

    def warm_up(self) -> None:
        """Lets the process that starts the ranks import their modules, if an earlier test has killed it."""
        # Torch reads at its import what `run moe` says lest it print a stack for a peer that left.
        launch_ranks(1, self.spawner, env={"BAD_RANK": "0 start exit", "TORCH_CPP_LOG_LEVEL": "FATAL"})

    def run(self, how: str, *tight: str, **more: Any) -> RunReport:
        """tight: phases with the limits of WITHIN_S; others have the usual ones."""
        limits = Limits(**{f"{phase}_s": float(WITHIN_S[phase]) for phase in tight}, raised_by="--limit-s")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BAD_RANK", how)
            patch.setattr("tracekern.moe.workload.run._limits", lambda options: limits)
            return run(MoeRun(**SMALL, timeout_ms=6000), self.directory, spawner=self.spawner, **more)


@pytest.fixture
def badly(spawner: Spawner, tmp_path: Path) -> Badly:
    return Badly(spawner, tmp_path)


def told(report: RunReport) -> str:
    with pytest.raises(TracekernError) as caught:
        report.raise_for_error()
    return str(caught.value)


def test_the_limits_of_a_run_follow_its_options():
    assert _limits(MoeRun(**SMALL, limit_s=5, timeout_ms=1000)) == Limits(5, 5, 6, 5 + CLOSE_TIMEOUT_S, "--limit-s")


@pytest.mark.parametrize(
    ("phase", "missed"),
    [
        ("start", "did not start within 3 s"),
        ("set-up", "made no progress for 3 s during set-up"),
        ("run", "made no progress for 4 s during run"),
        ("close", "made no progress for 3 s during close"),
    ],
)
def test_a_rank_that_is_stopped_is_named_within_the_limit(badly, capfd, phase: str, missed: str):
    badly.warm_up()
    report = badly.run(f"2 {phase} STOP", phase.replace("-", "_"))
    assert told(report) == f"rank 2 {missed}: it is stopped; 3 more ranks stopped"
    assert capfd.readouterr().err == ""


def test_a_rank_that_hangs_in_the_set_up_is_named_with_those_that_wait_for_it(badly, capfd):
    wanted = "see what they wait for, or allow more with --limit-s"
    report = badly.run("2 set-up hang", "set_up")
    assert told(report) == f"ranks 0, 1, 2 and 3 made no progress for 3 s during set-up: {wanted}"
    assert capfd.readouterr().err == ""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("act", "how", "phase"),
    [*(("KILL", "killed by signal 9", phase) for phase in PHASES), ("exit", "exit status 7", "run")],
)
def test_a_rank_that_ends_is_one_line(badly, capfd, phase: str, act: str, how: str):
    report = badly.run(f"2 {phase} {act}")
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


def test_garbage_in_the_store_of_the_process_group_is_one_line(badly, capfd):
    report = badly.run("2 set-up garbage")
    assert re.fullmatch(r"rank \d: the process group could not be formed: [^;]+; 3 more ranks stopped", told(report))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("act", "what", "phase"),
    [
        ("MemoryError", "out of memory", "run"),
        ("EMFILE", "Too many open files", "set-up"),
        ("ENOSPC", "No space left on device", "run"),
    ],
)
def test_a_rank_that_lacks_something_is_one_line(badly, capfd, phase: str, act: str, what: str):
    report = badly.run(f"2 {phase} {act}")
    advice = r"raise the limit \(`ulimit -a`\), or ask for less: fewer ranks or tokens, or a smaller hidden"
    assert re.fullmatch(rf"rank 2: .*{what}; {advice}; 3 more ranks stopped", told(report))
    assert capfd.readouterr().err == ""


def test_a_process_that_is_stopped_before_it_starts_the_ranks_is_named(badly):
    badly.warm_up()
    os.kill(badly.spawner.pid, signal.SIGSTOP)
    why = f"process {badly.spawner.pid}, which starts them, is stopped"
    assert told(badly.run(NOBODY, "start")) == f"the ranks did not start within 3 s: {why}"


@pytest.mark.parametrize("after_s", [0, 1], ids=["at once", "later than a limit"])
def test_a_child_that_is_stopped_before_it_is_a_program_is_ended(monkeypatch, after_s: int):
    def stop() -> None:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(start, "_LIMIT_S", 0.3)
    with pytest.raises(BadInput, match=r"process \d+ did not start within 0 s: it was stopped"):
        start.start_process(["true"], os.environ, stop)


def test_ranks_whose_starter_is_stopped_end_in_time(badly):
    """They may all do their work: only nobody tells the launcher that they have ended."""
    badly.warm_up()
    pid = badly.spawner.pid

    def stop(*_: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # ended already, for being stopped
            os.kill(pid, signal.SIGSTOP)

    report = badly.run(NOBODY, *WITHIN_S, on_start=stop)
    assert report.ok or f"process {pid}, which starts them, is stopped" in told(report)


@pytest.mark.parametrize("files", [16, 60])
def test_too_few_open_files_are_told_before_anything_starts(tmp_path, files: int):
    ended = subprocess.run(
        command(tmp_path / "capture"),
        capture_output=True,
        text=True,
        timeout=300,
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
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert ended.returncode == 2
    assert re.fullmatch(
        r"tracekern: .*(new thread|map segment|allocate|out of memory).*\n", without_dead_runs(ended.stderr)
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_once_for_all_ranks(tmp_path):
    words = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec "$@"', "-"]
    ended = subprocess.run([*words, *command(tmp_path)], capture_output=True, text=True, timeout=300)
    last = ended.stderr.splitlines()[-1]
    run_id = re.search(r"`tracekern salvage (\S+) -o DIR` saves it", last)[1]
    saved = subprocess.run(
        [sys.executable, "-m", "tracekern", "salvage", run_id, "--discard"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 2
    assert "No space left on device" in last
    assert len(without_dead_runs(ended.stderr).splitlines()) <= 3
    assert saved.returncode == 0

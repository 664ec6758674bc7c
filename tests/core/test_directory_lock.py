"""One run at a time writes into a directory; its ranks share the lock."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.warm_command import command
from tracekern.cli.commands import run_moe as cli_run
from tracekern.errors import BadInput
from tracekern.launcher.spawner import Spawner
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.reports import RunReport
from tracekern.moe.workload.run import WORKER
from tracekern.segment import directory_lock
from tracekern.segment.directory_lock import LOCK_NAME, DirectoryLock, locked

HOLD = """
import sys, time
from pathlib import Path
from tracekern.segment.directory_lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
lock.release()
"""

TAKE_TURNS = """
import os, random, sys, time
from pathlib import Path
from tracekern.errors import BadInput
from tracekern.segment import directory_lock
directory, own, turns, held = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 0
directory_lock._TRIES_S = 0.2
while held < turns:
    try:
        lock = directory_lock.DirectoryLock(directory, own)
    except BadInput as error:
        assert "is writing its capture there" in str(error), error
        continue
    mark = directory / f"{own}.{os.getpid()}"
    mark.touch()
    time.sleep(random.uniform(0, 0.002))
    others = [path.name for path in directory.iterdir() if path.name[0] != "." and not path.name.startswith(own)]
    mark.unlink()
    lock.release()
    assert not others, others
    held += 1
    time.sleep(random.uniform(0, 0.004))
print(held)
"""


def hold(directory: Path, run_id: str) -> subprocess.Popen[str]:
    """A process that has the lock until its standard input is closed."""
    words = [sys.executable, "-c", HOLD, str(directory), run_id]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_another_run_is_refused_and_told_which_one_writes(tmp_path: Path):
    directory = tmp_path / "new" / "capture"
    with hold(directory, "a-1") as holder:
        with pytest.raises(BadInput) as refused, locked(directory, "b-1"):
            pass
        where = f"(process {holder.pid} on {os.uname().nodename})"
        assert str(refused.value) == (
            f"{directory}: run a-1 {where} is writing its capture there; choose another directory"
        )
        with locked(directory, "a-1.3"):  # a later capture of the same launch
            pass
        assert (directory / LOCK_NAME).exists()  # the other rank still writes
    with locked(directory, "b-1"):
        assert json.loads((directory / LOCK_NAME).read_text())["run_id"] == "b-1"
    assert not any(directory.iterdir())


def is_refused(directory: Path, run_id: str) -> bool:
    """Whether another process is told that another run writes there."""
    words = [sys.executable, "-c", HOLD, str(directory), run_id]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return bool(done.returncode) and "is writing its capture there" in done.stderr


def test_each_rank_of_a_process_has_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory_lock, "_TRIES_S", 0.05)
    ranks = [DirectoryLock(tmp_path, "a-1"), DirectoryLock(tmp_path, "a-1")]
    for rank in ranks:
        with pytest.raises(BadInput, match="run a-1 .* is writing its capture there"):
            DirectoryLock(tmp_path, "b-1")
        assert is_refused(tmp_path, "b-1")
        rank.release()
    assert not any(tmp_path.iterdir())
    with locked(tmp_path, "b-1"):
        assert is_refused(tmp_path, "a-1")


def test_a_thread_that_is_slow_to_write_the_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory_lock, "_TRIES_S", 0.0)
    monkeypatch.setattr(directory_lock, "_MOST_POLL_S", 0.05)
    first_lock, slow, locks = DirectoryLock._lock, threading.Event(), []

    def lock_slowly(lock: DirectoryLock, kind: int) -> bool:
        has_it = first_lock(lock, kind)
        if has_it and kind == fcntl.F_WRLCK and not slow.is_set():
            slow.set()
            time.sleep(0.1)
        return has_it

    monkeypatch.setattr(DirectoryLock, "_lock", lock_slowly)
    thread = threading.Thread(target=lambda: locks.append(DirectoryLock(tmp_path, "a-1")))
    thread.start()
    assert slow.wait(10)
    locks.append(DirectoryLock(tmp_path, "a-1"))
    thread.join()
    for lock in locks:
        lock.release()
    assert len(locks) == 2


def test_ranks_that_release_at_once_leave_no_file(tmp_path: Path):
    together = threading.Barrier(8)

    def release(rank: DirectoryLock) -> None:
        together.wait()
        rank.release()

    for _ in range(100):
        ranks = [DirectoryLock(tmp_path, "a-1") for _ in range(8)]
        threads = [threading.Thread(target=release, args=[rank]) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(tmp_path.iterdir())


def test_the_lock_holds_while_the_launcher_writes_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = []

    def try_to_hold(report: RunReport, directory: Path, _dumps: list[Path]) -> cli_run._Result:
        words = [sys.executable, "-c", HOLD, str(directory), "b-1"]
        other = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        told.append(other.stderr.splitlines()[-1] if other.returncode else "held")
        return cli_run._Result(report)

    monkeypatch.setattr(cli_run, "_write_trace", try_to_hold)
    with Spawner(WORKER, os.environ) as spawner:
        plan = MoeRun(ranks=2, tokens=8, hidden=64, experts=4, topk=2, iterations=1)
        assert cli_run._run(plan, tmp_path, spawner, []).report.ok
    assert re.search(rf"run {os.getpid()}-.* is writing its capture there", told[0])
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_killed_run_locks_nobody_out(tmp_path: Path):
    holder = hold(tmp_path, "a-1")
    holder.kill()
    holder.communicate()
    assert (tmp_path / LOCK_NAME).exists()
    with locked(tmp_path, "b-1"):
        pass
    assert not (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("turns", [10, pytest.param(1000, marks=pytest.mark.soak)])
def test_two_runs_never_hold_a_directory_at_once(tmp_path: Path, turns: int):
    words = [sys.executable, "-c", TAKE_TURNS, str(tmp_path)]
    runs = [
        subprocess.Popen([*words, run_id, str(turns)], stdout=subprocess.PIPE, text=True)
        for run_id in ("a", "b", "a", "b", "a", "b")
    ]
    ends = [(run.communicate(timeout=500)[0], run.returncode) for run in runs]
    assert ends == [(f"{turns}\n", 0)] * 6
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING), locked(tmp_path, "a-1"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: this file system has no locks; let one run at a time write there"
    ]
    assert not any(tmp_path.iterdir())


def test_who_cannot_write_the_file_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not even while the error is kept, as in a notebook."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(BadInput, match="No space left on device") as kept:
            DirectoryLock(tmp_path, "a-1")
    monkeypatch.setattr(directory_lock, "_TRIES_S", 0.05)
    with locked(tmp_path, "b-1"):
        assert kept.value.__traceback__ is not None
    assert not any(tmp_path.iterdir())


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [link, Path.mkdir])
def test_what_cannot_be_a_lock_is_refused(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / LOCK_NAME)
    with pytest.raises(BadInput, match=r"cannot be written \(.*\); choose another directory"):
        DirectoryLock(tmp_path, "a-1")


def test_a_damaged_lock_is_anothers_while_it_is_held(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(directory_lock, "_TRIES_S", 0.05)
    with hold(tmp_path, "a-1"):
        (tmp_path / LOCK_NAME).write_text("[]")
        with pytest.raises(BadInput, match="another run is writing its capture there"):
            DirectoryLock(tmp_path, "b-1")


def test_the_second_of_two_runs_into_one_directory_is_refused_in_one_line(tmp_path: Path, command_line: CommandLine):
    words = command(tmp_path, "--iterations", "20000", "--every", "1000", "--limit-s", "60", "--ranks", "2")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / LOCK_NAME).exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            second = command_line(*command(tmp_path, "--limit-s", "60")[3:])
            assert second.returncode == 2
            assert second.stderr.startswith(f"tracekern: {tmp_path}: run {first.pid}-")
            assert second.stderr.endswith(" is writing its capture there; choose another directory\n")
            assert second.stderr.count("\n") == 1
            first.send_signal(signal.SIGINT)
            first.communicate(timeout=60)
        finally:
            first.kill()  # its ranks die with it
    assert first.returncode == 130
    assert command_line("info", tmp_path, "--json").returncode == 0
    assert not (tmp_path / LOCK_NAME).exists()

"""Locks of segments and directories where ranks share a process, fork, and are killed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.captures import CaptureSpec, metadata
from tests.kept_device import fork
from tests.paths import ROOT
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.segment import directory_lock
from tracekern.segment.directory_lock import LOCK_NAME, DirectoryLock, locked
from tracekern.segment.file_lock import FileLock, is_held
from tracekern.segment.names import has_owner, list_segments, open_segment, remove_segment
from tracekern.segment.writer import SegmentWriter

RUN = f"file-lock-test-{os.getpid()}"

TWO_RANKS = """
import sys
from tests.captures import CaptureSpec, metadata
from tracekern.segment.names import has_owner
from tracekern.segment.writer import SegmentWriter
ranks = [SegmentWriter.create(sys.argv[1], rank, metadata(CaptureSpec(), rank), 1 << 16) for rank in (0, 1)]
for rank in ranks:
    SegmentWriter.attach(rank.name).close()
    assert has_owner(rank.name)
print("attached", flush=True)
sys.stdin.readline()
ranks[0].close()  # it stays mapped
print("closed", flush=True)
sys.stdin.readline()
"""

FORKS = """
import os, signal, sys
from pathlib import Path
from tests.captures import CaptureSpec, metadata
from tracekern.segment.directory_lock import DirectoryLock
from tracekern.segment.writer import SegmentWriter
rank = SegmentWriter.create(sys.argv[1], 0, metadata(CaptureSpec(), 0), 1 << 16)
lock = DirectoryLock(Path(sys.argv[2]), "a-1")
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _segments() -> Iterator[None]:
    yield
    for name in list_segments(RUN):
        remove_segment(name)


def create(rank: int = 0) -> SegmentWriter:
    return SegmentWriter.create(RUN, rank, metadata(CaptureSpec(), rank), 1 << 16)


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def owned() -> list[bool]:
    return [has_owner(fmt.segment_name(RUN, rank)) for rank in (0, 1)]


def test_ranks_of_a_process_own_their_segments_separately():
    with start(TWO_RANKS, RUN) as process:
        try:
            assert process.stdout.readline() == "attached\n"
            assert owned() == [True, True]
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "closed\n"
            assert owned() == [False, True]
        finally:
            process.kill()
            process.wait()
        assert owned() == [False, False]


def test_a_fork_that_outlives_its_rank_holds_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(directory_lock, "_TRIES_S", 0.05)
    name = fmt.segment_name(RUN, 0)
    with start(FORKS, RUN, str(tmp_path)) as rank:
        child = int(rank.stdout.readline())
        try:
            assert has_owner(name)
            with pytest.raises(BadInput, match="is writing its capture there"):
                DirectoryLock(tmp_path, "b-1")
            rank.kill()
            rank.wait()
            assert not has_owner(name)
            with locked(tmp_path, "b-1"):
                pass
        finally:
            rank.kill()
            os.kill(child, signal.SIGKILL)  # it lived until now


def test_a_fork_takes_no_lock_from_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor does it close files of its own, which have the numbers of its parent's locks."""
    monkeypatch.setattr(directory_lock, "_TRIES_S", 0.05)
    segment, lock = create(), DirectoryLock(tmp_path, "a-1")

    def close_all() -> None:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
        segment.close()
        lock.release()
        for file in files:
            os.fstat(file)

    def open_another() -> None:
        own = DirectoryLock(tmp_path, "a-1")  # a fork may take part in the run
        own.release()

    try:
        for act in (lambda: None, close_all, open_another):
            assert os.waitpid(fork(act), 0)[1] == 0
            assert has_owner(segment.name)
            with pytest.raises(BadInput, match="is writing its capture there"):
                DirectoryLock(tmp_path, "b-1")
        assert (tmp_path / LOCK_NAME).exists()
    finally:
        lock.release()
        segment.close()
    assert not has_owner(segment.name)
    assert not any(tmp_path.iterdir())


def test_a_fork_finds_no_lock_open_that_another_thread_opens(tmp_path: Path):
    is_over = threading.Event()

    def open_and_close() -> None:
        while not is_over.is_set():
            lock = FileLock(lambda: os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600))
            lock.take(fcntl.F_RDLCK)
            lock.close()

    def look() -> None:
        kept = FileLock(lambda: os.open(tmp_path / "lock", os.O_RDWR, 0o600))
        own = f"/proc/self/fd/{kept.fileno()}"
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if link != own and os.path.lexists(link)]
        os._exit(any(name.endswith("/lock") for name in found))

    threads = [threading.Thread(target=open_and_close) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        ends = [os.waitpid(fork(look), 0)[1] for _ in range(25)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not any(ends)


def test_who_closes_holds_nothing_whatever_c_code_has_forked():
    segment = create()
    go_on, tell = os.pipe()
    child = ctypes.PyDLL(None).fork()  # without Python's hooks
    if child == 0:
        os.close(tell)
        os.read(go_on, 1)
        os._exit(0)
    try:
        assert has_owner(segment.name)
        segment.close()
        assert not has_owner(segment.name)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.close(tell)
        os.waitpid(child, 0)
        os.close(go_on)


def test_record_locks_of_a_process_conflict():
    """Earlier versions take them."""
    segment = create()
    with open(open_segment(segment.name), "rb") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    segment.close()
    with open(open_segment(segment.name, os.O_RDWR), "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert has_owner(segment.name)


def test_a_kernel_without_such_locks_has_those_of_a_process(monkeypatch: pytest.MonkeyPatch):
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, *arguments: bytes) -> bytes | int:
        if command in (fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    segment = create()
    seen: Callable[[], None] = lambda: os._exit(int(has_owner(segment.name)))  # noqa: E731
    assert os.waitstatus_to_exitcode(os.waitpid(fork(seen), 0)[1]) == 1
    segment.close()
    assert os.waitstatus_to_exitcode(os.waitpid(fork(seen), 0)[1]) == 0


def test_locks_are_converted_and_programs_do_not_inherit_them(tmp_path: Path):
    first, second = (FileLock(lambda: os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)) for _ in range(2))
    with contextlib.closing(first), contextlib.closing(second):
        assert first.take(fcntl.F_WRLCK)
        assert (second.take(fcntl.F_RDLCK), is_held(second.fileno()), is_held(first.fileno())) == (False, True, False)
        assert first.take(fcntl.F_RDLCK)
        assert (second.take(fcntl.F_RDLCK), is_held(second.fileno())) == (True, False)
        assert not second.take(fcntl.F_WRLCK)
        assert first.take(fcntl.F_UNLCK)
        assert second.take(fcntl.F_WRLCK)
        assert not os.get_inheritable(first.fileno())
    assert not os.get_inheritable(create()._owner_lock.fileno())

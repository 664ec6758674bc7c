"""Segments as files in /dev/shm: lists those of a run, removes them, and tracks the processes that use them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tracekern.dump.format import run_name
from tracekern.segment.file_lock import FileLock, is_held

SHM_DIR = Path("/dev/shm")
_POLL_S = 0.01
NO_ROOM = (errno.ENOSPC, errno.ENOMEM)
"""What the system says where SHM_DIR is full."""
MAKE_ROOM = (
    "lower max_bytes or records_per_track, or make it larger (a container's: docker run --shm-size=1g); "
    "`tracekern salvage` lists what dead ranks left there"
)
"""What to do where SHM_DIR has no room for a segment."""


def open_segment(name: str, flags: int = os.O_RDONLY) -> int:
    """Returns a file descriptor of a segment, which no other user made or can write: /dev/shm is open to all of them.

    Raises FileNotFoundError, and PermissionError for what is not a segment of this user.
    """
    try:
        descriptor = os.open(SHM_DIR / name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionError(errno.EPERM, "a link, not a segment", name) from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, f"not only user {os.geteuid()} can write it", name)


def remove_segment(name: str) -> None:
    """Remove a segment's name from /dev/shm, whatever it holds."""
    (SHM_DIR / name).unlink(missing_ok=True)


def list_segments(run_id: str, of_anybody: bool = False) -> list[str]:
    """Returns the names of a run's segments in /dev/shm, with those of its later captures (RUN.1, RUN.2) and of groups
    of its ranks (RUN.g01234567, RUN.g01234567.1).

    An empty run_id selects all runs. of_anybody: also names that other users made, which open_segment() refuses.
    """
    of_run = re.compile((re.escape(f"tracekern-{run_id}") if run_id else "tracekern-.+") + r"(\.\w+)*-\d+")
    with os.scandir(SHM_DIR) as entries:
        return sorted(
            entry.name for entry in entries if of_run.fullmatch(entry.name) and (of_anybody or _is_own(entry))
        )


def find_dead(run_id: str = "") -> dict[str, list[int]]:
    """Returns the ranks of each run whose segments are all that is left: no process records into one. Newest first.

    A run of several captures (RUN, RUN.1) is one. One of a group of its ranks (RUN.g01234567) is another.
    """
    found: dict[str, set[int]] = {}
    alive, age = set[str](), dict[str, float]()
    for name in list_segments(run_id):
        capture, _, rank = name.removeprefix("tracekern-").rpartition("-")
        run = run_name(capture)
        with contextlib.suppress(OSError):  # removed meanwhile, or open to others
            age[run] = max(age.get(run, 0.0), (SHM_DIR / name).stat().st_mtime)
            found.setdefault(run, set()).add(int(rank))
            if has_owner(name):
                alive |= {run, run.partition(".")[0]}  # what is saved of a run takes that of its groups along
    return {run: sorted(found[run]) for run in sorted(found, key=lambda run: -age[run]) if run not in alive}


def _is_own(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        found = entry.stat(follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return False


@contextlib.contextmanager
def hold_segment(name: str) -> Iterator[None]:
    """Makes await_segment() of other processes wait until the block, or this process, ends."""
    with open(open_segment(name), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def await_segment(name: str, timeout_s: float) -> bool:
    """Waits until no process holds the segment. Returns False if one still does after timeout_s."""
    deadline = time.monotonic() + timeout_s
    try:
        file = open(open_segment(name), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:  # another process has saved and removed it
        return True
    with file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)


def own_segment(name: str) -> FileLock:
    """Makes the caller the owner of a segment that it has made, until it closes the lock or its process ends.

    Forks do not own it, and other containers see the lock. A pid could be reused by another process.
    """
    # Opened anew: a mapping holds a copy of its descriptor, and forks inherit it.
    lock = FileLock(lambda: open_segment(name, os.O_RDWR))
    if lock.take(fcntl.F_WRLCK):
        return lock
    lock.close()
    raise BlockingIOError(errno.EAGAIN, "has an owner already", name)


def has_owner(name: str) -> bool:
    """Returns whether the rank that made the segment still records into it. Any process may ask, that rank's too."""
    with open(open_segment(name), "rb") as file:
        return is_held(file.fileno())

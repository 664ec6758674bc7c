"""Segments as files in /dev/shm: which belong to a run, how they go away, who records into one, who still needs it."""

from __future__ import annotations

import contextlib
import fcntl
import re
import time
from collections.abc import Iterator
from pathlib import Path

SHM_DIR = Path("/dev/shm")
_POLL_S = 0.01


def remove_segment(name: str) -> None:
    """Remove a segment's name from /dev/shm, whatever it holds."""
    (SHM_DIR / name).unlink(missing_ok=True)


def list_segments(run_id: str) -> list[str]:
    """Names of the segments in /dev/shm that belong to a run, its second and later captures (RUN.1, RUN.2) included.

    Without a run those of all.
    """
    of_run = re.compile((re.escape(f"tracekern-{run_id}") if run_id else "tracekern-.+") + r"(\.\d+)?-\d+")
    return sorted(path.name for path in SHM_DIR.glob("tracekern-*") if of_run.fullmatch(path.name))


@contextlib.contextmanager
def hold_segment(name: str) -> Iterator[None]:
    """Makes await_segment() of other processes wait until the block, or this process, ends."""
    with open(SHM_DIR / name, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def await_segment(name: str, timeout_s: float) -> bool:
    """Waits until no process holds the segment; False where one still does after timeout_s."""
    deadline = time.monotonic() + timeout_s
    try:
        file = open(SHM_DIR / name, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:  # somebody else has saved and removed it
        return True
    with file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)


def own_segment(file_descriptor: int) -> None:
    """Makes this process the owner of a segment, until it ends or closes a descriptor of it: this one or another.

    A lock of this kind is no fork's, and is seen from other containers: unlike a pid it cannot be taken for another's.
    """
    fcntl.lockf(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def has_owner(name: str) -> bool:
    """Whether the process that made the segment still records into it. Not to be asked by that process."""
    with open(SHM_DIR / name, "rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False

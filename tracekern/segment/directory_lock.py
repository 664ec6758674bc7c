"""Lets one run at a time write its capture into a directory. All ranks of the run, on all hosts, share the lock.

The lock is one of `segment.file_lock` on a file in the directory, which holds until its process ends and which network
file systems pass on to other hosts. The file names the run, and goes with the last rank. A file without a lock is left
of a run that was killed, and harms nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracekern.dump.format import run_name
from tracekern.errors import BadInput
from tracekern.segment.file_lock import FileLock, is_held

LOCK_NAME = ".tracekern-lock"

_log = logging.getLogger(__name__)
_TRIES_S = 1.0
"""Several processes that find a dead run's file at once may take turns at looking into it."""
_LEAST_TRIES = 20
"""Another thread of this process may keep the interpreter while the file has been made and not yet been written."""
_MOST_POLL_S = 0.02
_MAX_BYTES = 4096
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class DirectoryLock:
    """The lock of one rank; ranks that share a process have one each. Forks of the process do not hold it."""

    def __init__(self, directory: Path, run_id: str, advice: str = "choose another directory") -> None:
        """Makes the directory and takes its lock. run_id: of the capture; RUN and RUN.1, of one launch, share it, and
        groups of its ranks do not.

        Raises BadInput, with the other run's name, if another run has it, and if nothing can be written there.
        """
        self._directory, self._path = directory, directory / LOCK_NAME
        self._run = run_name(run_id)
        self._other = "another run"
        give_up = time.monotonic() + _TRIES_S
        for tries in itertools.count(1):
            if self._try_once():
                return
            if tries >= _LEAST_TRIES and time.monotonic() > give_up:
                raise BadInput(f"{directory}: {self._other} is writing its capture there; {advice}")
            time.sleep(random.uniform(0, _MOST_POLL_S))

    def release(self) -> None:
        """Gives the lock up. The last rank of the run removes the file. Does nothing in a fork."""
        if not self._file.is_open:
            return
        with contextlib.suppress(OSError):
            self._lock(fcntl.F_UNLCK)  # first, else the last two would each find the other's lock, and leave the file
            if self._lock(fcntl.F_WRLCK) and self._is_in_place():
                self._path.unlink()
        self._file.close()

    def _try_once(self) -> bool:
        """Returns whether this rank has the lock now."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = FileLock(lambda: os.open(self._path, flags, 0o600))
            with contextlib.ExitStack() as undo:
                undo.callback(self._file.close)
                if is_ours := self._take():
                    undo.pop_all()
                return is_ours
        except OSError as error:
            why = "it is a file" if os.path.isfile(self._directory) else error.strerror
            raise BadInput(f"{self._directory}: cannot be written ({why}); choose another directory") from None

    def _take(self) -> bool:
        if self._lock(fcntl.F_WRLCK):
            if self._is_in_place():
                os.truncate(self._file.fileno(), 0)
                about = {"run_id": self._run, "host": platform.node(), "pid": os.getpid()}
                os.pwrite(self._file.fileno(), json.dumps(about).encode(), 0)
                self._lock(fcntl.F_RDLCK)  # at once: nobody can take it in between
                return True
        elif self._lock(fcntl.F_RDLCK) and self._is_in_place():
            self._other, is_own = self._read()
            return is_own
        return False

    def _lock(self, kind: int) -> bool:
        """Returns whether the lock is of this kind now. Where there are none it says so, and that it is."""
        try:
            return self._file.take(kind)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if kind == fcntl.F_RDLCK:
                _log.warning("%s: this file system has no locks; let one run at a time write there", self._path.parent)
        return True

    def _is_in_place(self) -> bool:
        """Returns whether the file is still the directory's: the last rank of a run may have removed it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self._path))
        return False

    def _read(self) -> tuple[str, bool]:
        """Returns who has the lock, in words, and whether that is this run."""
        about = _about(self._file.fileno())
        if not about:
            return "another run", False
        return f"run {about['run_id']} (process {about['pid']} on {about['host']})", about["run_id"] == self._run


def run_writing_to(directory: Path) -> str:
    """Returns the name of the run that has the lock of a directory; "" if none has."""
    with contextlib.suppress(OSError), open(directory / LOCK_NAME, "rb") as file:
        return str(_about(file.fileno()).get("run_id", "")) if is_held(file.fileno(), fcntl.F_WRLCK) else ""
    return ""


def _about(descriptor: int) -> dict[str, Any]:
    """Returns run_id, host and pid as the lock's file has them; {} while it is not written."""
    try:
        about = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
        return {key: about[key] for key in ("run_id", "host", "pid")}
    except (ValueError, TypeError, KeyError):
        return {}


@contextlib.contextmanager
def locked(directory: Path, run_id: str) -> Iterator[None]:
    """Holds the lock of a directory inside the block. Raises as DirectoryLock."""
    lock = DirectoryLock(directory, run_id)
    try:
        yield
    finally:
        lock.release()

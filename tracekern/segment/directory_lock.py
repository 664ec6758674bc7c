"""Lets one run at a time write its capture into a directory. All ranks of the run, on all hosts, share the lock.

The lock is one of `fcntl` on a file in the directory, which holds until its process ends and which network file systems
pass on to other hosts. The file names the run, and goes with the last rank. A file without a lock is left of a run that
was killed, and harms nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

from tracekern.errors import BadInput

LOCK_NAME = ".tracekern-lock"

_log = logging.getLogger(__name__)
_TRIES_S = 1.0
"""Several processes that find a dead run's file at once may take turns at looking into it."""
_MOST_POLL_S = 0.02
_MAX_BYTES = 4096
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_HELD = (errno.EACCES, errno.EAGAIN)


class DirectoryLock:
    """The lock of one process. It needs one for each capture at most: closing the file gives up all of a process."""

    def __init__(self, directory: Path, run_id: str) -> None:
        """Makes the directory and takes its lock. run_id: of the capture; RUN and RUN.1, of one launch, share it.

        Raises BadInput, with the other run's name, if another run has it, and if nothing can be written there.
        """
        self._directory, self._path = directory, directory / LOCK_NAME
        self._run = run_id.partition(".")[0]
        self._file, self._other = -1, "another run"
        give_up = time.monotonic() + _TRIES_S
        while not self._try_once():
            if time.monotonic() > give_up:
                raise BadInput(f"{directory}: {self._other} is writing its capture there; choose another directory")
            time.sleep(random.uniform(0, _MOST_POLL_S))

    def release(self) -> None:
        """Gives the lock up. The last process of the run removes the file."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if self._lock(fcntl.LOCK_EX):
                self._path.unlink()
        os.close(self._file)
        self._file = -1

    def _try_once(self) -> bool:
        """Returns whether this process has the lock now."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            return self._take()
        except OSError as error:
            why = "it is a file" if os.path.isfile(self._directory) else error.strerror
            raise BadInput(f"{self._directory}: cannot be written ({why}); choose another directory") from None

    def _take(self) -> bool:
        if self._lock(fcntl.LOCK_EX):
            if self._is_in_place():
                os.truncate(self._file, 0)
                about = {"run_id": self._run, "host": platform.node(), "pid": os.getpid()}
                os.pwrite(self._file, json.dumps(about).encode(), 0)
                self._lock(fcntl.LOCK_SH)  # at once: nobody can take it in between
                return True
        elif self._lock(fcntl.LOCK_SH) and self._is_in_place():
            self._other, is_own = self._read()
            if is_own:
                return True
        os.close(self._file)
        self._file = -1
        return False

    def _lock(self, kind: int) -> bool:
        """Returns whether the process has the lock. Where there are none it says so, and that it has."""
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            if kind == fcntl.LOCK_SH:
                _log.warning("%s: this file system has no locks; let one run at a time write there", self._path.parent)
        return True

    def _is_in_place(self) -> bool:
        """Returns whether the file is still the directory's: the last process of a run may have removed it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        return False

    def _read(self) -> tuple[str, bool]:
        """Returns who has the lock, in words, and whether that is this run."""
        try:
            about = json.loads(os.pread(self._file, _MAX_BYTES, 0))
            return f"run {about['run_id']} (process {about['pid']} on {about['host']})", about["run_id"] == self._run
        except (ValueError, TypeError, KeyError):
            return "another run", False


@contextlib.contextmanager
def locked(directory: Path, run_id: str) -> Iterator[None]:
    """Holds the lock of a directory inside the block. Raises as DirectoryLock."""
    lock = DirectoryLock(directory, run_id)
    try:
        yield
    finally:
        lock.release()

"""Locks on whole files that belong to one opened file: ranks that share a process hold theirs separately.

They are open file description locks. Closing another descriptor of the file does not give one up, and two conflict even
inside one process. They conflict with the record locks of a process (`fcntl.lockf`), too, and NFS passes both on alike.

A fork shares the files of its parent, and would prolong their locks, so it closes them at once. A fork that C code
makes, without Python's hooks, shares a lock until it ends, runs another program, or the parent gives the lock up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import struct
import threading
import weakref
from collections.abc import Callable

_OFD_GETLK, _OFD_SETLK = 36, 37
"""fcntl.F_OFD_GETLK and F_OFD_SETLK, which a Python that was built for an old C library lacks."""
_FLOCK = "hhqqi0q"
"""`struct flock`: type, whence, start, length (0: all of the file) and pid, which must be 0."""
_HELD = (errno.EACCES, errno.EAGAIN)

_files: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
_no_fork = threading.RLock()
"""Held while a file is opened or closed, so that a fork either has it and knows it, or has not."""


class FileLock:
    """A file that is open only to be locked. Mapping it would duplicate its descriptor, and with it the lock."""

    def __init__(self, open_file: Callable[[], int]) -> None:
        """open_file: opens the file, for reading and writing, and returns the descriptor."""
        with _no_fork:
            self._file = io.FileIO(open_file(), "r+")
            _files.add(self._file)

    @property
    def is_open(self) -> bool:
        """Whether close() has yet to be called. Never in a fork of the process that opened the file."""
        return not self._file.closed

    def fileno(self) -> int:
        return self._file.fileno()

    def take(self, kind: int) -> bool:
        """Takes, converts or drops the lock without waiting: F_RDLCK shares it, F_WRLCK excludes others, F_UNLCK drops.

        Returns False if another opened file prevents that; what this one holds stays. Raises OSError without locks.
        """
        try:
            _control(self.fileno(), _OFD_SETLK, fcntl.F_SETLK, kind)
        except OSError as error:
            if error.errno in _HELD:
                return False
            raise
        return True

    def close(self) -> None:
        """Gives the lock up, whoever shares the file, and closes the file. Does nothing in a fork."""
        with _no_fork:
            if self.is_open:
                with contextlib.suppress(OSError):
                    self.take(fcntl.F_UNLCK)
                self._file.close()


def is_held(file_descriptor: int, kind: int = fcntl.F_RDLCK) -> bool:
    """Returns whether the file, opened another time in any process, is locked so that this kind cannot be had now."""
    found = _control(file_descriptor, _OFD_GETLK, fcntl.F_GETLK, kind)
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _control(file_descriptor: int, command: int, of_process: int, kind: int) -> bytes:
    """Calls fcntl. Where the kernel has no locks of opened files, as in some sandboxes, takes those of the process."""
    lock = struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
    try:
        return fcntl.fcntl(file_descriptor, command, lock)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return fcntl.fcntl(file_descriptor, of_process, lock)


def _leave_to_parent() -> None:
    """Closes a new fork's copies of the files; close() finds them closed."""
    try:
        for file in list(_files):
            file.close()
    finally:
        _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_leave_to_parent)

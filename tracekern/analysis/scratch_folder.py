"""The folder in which a report in windows works: named by what is asked, so that the next one goes on with it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tracekern.errors import BadInput

_OLD_SECONDS = 24 * 3600


def temporary_folder() -> Path:
    """Raises BadInput where there is none."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise BadInput(f"windows need a folder for files: {error.strerror or error}; set TMPDIR to one") from None


@contextlib.contextmanager
def folder_of(about: object) -> Iterator[Path]:
    """Yields the folder of what is asked, and removes it at the end; a process that is killed leaves it.

    Where a process works on the same already, it is one of its own. What dead processes left a day ago is removed.
    Raises BadInput where none can be made.
    """
    of_user = f"tracekern-windows-{os.geteuid()}-"
    _remove_old(of_user)
    name = of_user + hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    for number in itertools.count():
        folder = temporary_folder() / f"{name}-{number}"
        try:
            lock = _locked(folder)
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"{folder}: cannot be used ({why}); set TMPDIR to a folder with room for windows") from None
        if lock is not None:
            try:
                yield folder
            finally:
                _remove(folder)
                os.close(lock)
            return


def _locked(folder: Path) -> int | None:
    """Makes the folder if it is missing. Returns a descriptor that keeps others out; None where another has it."""
    import fcntl  # which not all systems have

    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        if not _is_ours(folder):
            raise PermissionError("it is not ours")
        try:
            lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another process has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass
        os.close(lock)


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and folder.stat().st_uid == os.geteuid()


def _remove(folder: Path) -> None:
    """Removes a folder that is locked: under another name, which nobody takes for one to go on with."""
    with contextlib.suppress(OSError):
        folder = folder.rename(f"{folder}.{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)


def _remove_old(of_user: str) -> None:
    """of_user: what names begin with."""
    for folder in temporary_folder().glob(f"{of_user}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime < _OLD_SECONDS or not folder.is_dir() or not _is_ours(folder):
                continue
            if (lock := _locked(folder)) is not None:
                _remove(folder)
                os.close(lock)

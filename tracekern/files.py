"""Files that are whole or not there: written to a temporary neighbour, and renamed at the end.

Other users may be able to write to the directory, so a temporary file has a name that nobody can foresee and is made
anew. The name says which process made it: what dead processes left is removed by the next one that writes there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tracekern.errors import BadInput

_TEMPORARY = re.compile(r"\..*\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.tmp")
_SCRATCH = re.compile(r"tracekern-([0-9a-f]{8})-(\d+)-")
_LONGEST_NAME = 150
"""Bytes of a file's own name that its temporary's name repeats: a file system takes 255."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], through_link: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` when the block ends well, and is removed when it does not.

    through_link: a link stays one, and what it names is written; for names that the user chose. Otherwise the link is
    replaced.

    Raises BadInput where the file cannot be written: no space, no such directory, a directory or a device in its place.
    """
    if through_link or not os.path.islink(path):
        require_regular(path)
    target = Path(os.path.realpath(path)) if through_link else Path(path)
    temporary = ""
    try:
        with open(temporary_neighbour(target), "xb") as file:  # "x" is O_EXCL, which follows no link
            temporary = str(file.name)
            yield file
        os.replace(temporary, target)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}; nothing was left there") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):  # it was renamed, or the disk cannot be written and holds none
                os.unlink(temporary)


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raises BadInput for the name of something that is there and no file."""
    target = Path(path)
    # The rename would replace a device or a pipe by a plain file, for the whole machine in case of /dev/null.
    if target.exists() and not target.is_file():
        raise BadInput(f"cannot write {path}: it exists and is not a regular file; name another file")


def write_whole(path: str | os.PathLike[str], text: str | bytes) -> None:
    """The file, in UTF-8, whole or not at all. Raises BadInput as atomic_file() does."""
    with atomic_file(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


@contextlib.contextmanager
def mark_file(directory: Path) -> Iterator[str]:
    """Yields the name of a new, empty file in `directory`, by which other processes can tell that they see the same.

    Raises OSError where none can be made.
    """
    path = temporary_neighbour(directory / "mark")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    with removed_afterwards(path):
        yield path.name


@contextlib.contextmanager
def removed_afterwards(path: Path) -> Iterator[None]:
    """Removes a file when the block ends, if it is still there."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yields a new directory that only this user can enter, and removes it with all that is in it.

    Those that dead processes of this user left are removed first. Raises BadInput where none can be made.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            made_by = _SCRATCH.match(entry.name)
            if made_by and _is_of_dead_process(made_by) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)
    try:
        made = tempfile.TemporaryDirectory(prefix=f"tracekern-{host_of_processes()}-{os.getpid()}-")
    except OSError as error:
        why = error.strerror or error
        raise BadInput(
            f"cannot make a temporary directory: {why}; set TMPDIR to a directory that can be written"
        ) from None
    with made as directory:
        yield Path(directory)


@contextlib.contextmanager
def pinned(directory: Path) -> Iterator[Path]:
    """Yields a second path of a directory, made if it is missing, that leads there whatever is renamed meanwhile.

    No link is followed on the way: for a path that comes from memory or a file, and not from the user. Raises BadInput
    for a link or anything else that is no directory; errors of the block name the directory itself.
    """
    try:
        descriptor = _open_without_links(directory)
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
        why = "a link is in its place or on the way to it, or it is no directory" if is_link else error.strerror
        raise BadInput(f"{directory}: nothing is written there ({why}); choose another directory") from None
    alias = Path(f"/proc/self/fd/{descriptor}")
    try:
        yield alias
    except BadInput as error:
        raise BadInput(str(error).replace(str(alias), str(directory))) from None
    finally:
        os.close(descriptor)


def _open_without_links(directory: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open("/", flags)
    for name in directory.parts[1:]:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=descriptor)
            below = os.open(name, flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def temporary_neighbour(target: Path) -> Path:
    """Returns the path of a file beside `target` that is not there yet. Removes what dead processes left there."""
    _remove_stale(target.parent)
    own_name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])
    return target.parent / f".{own_name}.{host_of_processes()}-{os.getpid()}-{secrets.token_hex(4)}.tmp"


@functools.cache
def _remove_stale(directory: Path) -> None:
    """Removes temporary files of dead processes of this user and host, once for each directory."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            made_by = _TEMPORARY.fullmatch(entry.name)
            if made_by and _is_of_dead_process(made_by):
                with contextlib.suppress(OSError):  # another user's
                    os.unlink(entry.path)


def _is_of_dead_process(made_by: re.Match[str]) -> bool:
    """made_by: host and process of a name."""
    if made_by[1] != host_of_processes() or os.name == "nt":  # Windows takes the signal 0 for Ctrl-C
        return False
    try:
        os.kill(int(made_by[2]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


@functools.cache
def host_of_processes() -> str:
    """Returns a name for the processes whose ids this process can tell apart: of one boot and one container."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")  # on Linux
    read = boot.read_text() if boot.exists() else "", container.stat().st_ino if container.exists() else 0
    parts = (platform.node(), *read)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]

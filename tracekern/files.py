"""Files that are whole or not there: written to a temporary neighbour, and renamed at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tracekern.errors import BadInput


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends well and removed when it does not.

    A link stays one: what it names is written. Raises BadInput where the file cannot be written: no space, no such
    directory, a directory or a device in its place.
    """
    require_regular(path)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}; nothing was left there") from error
    finally:
        with contextlib.suppress(OSError):  # a disk that cannot be written holds none
            temporary.unlink(missing_ok=True)


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raises BadInput for the name of something that is there and no file."""
    target = Path(path)
    # The rename would replace a device or a pipe by a plain file, for the whole machine in case of /dev/null.
    if target.exists() and not target.is_file():
        raise BadInput(f"cannot write {path}: it exists and is not a regular file; name another file")


def write_whole(path: str | os.PathLike[str], text: str | bytes) -> None:
    """The file, in UTF-8, whole or not at all. Raises BadInput as atomic_path() does."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)

"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tracekern.errors import BadInput


def write_whole(path: Path, text: str | bytes) -> None:
    """The file, whole or not at all. Raises BadInput when it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(partial, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    finally:
        with contextlib.suppress(OSError):  # a disk that cannot be written holds none
            partial.unlink(missing_ok=True)

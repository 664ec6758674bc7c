"""Removes what engines on shared memory left that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_MARKER = ".tracekern"
"""The end of a marker's name; before it stands that of the segment (csrc/fabric/segment_marker.hpp)."""


def remove_stale_segments(directory: Path = Path("/dev/shm")) -> None:
    """Removes the segments of this user whose engine is gone, each 13 MB and more, with their markers.

    An engine holds its marker's lock, in whatever namespace its process is. What has no marker stays.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(_MARKER):
                with contextlib.suppress(OSError):
                    _remove_if_stale(directory, entry.name)


def _remove_if_stale(directory: Path, marker: str) -> None:
    file = os.open(directory / marker, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(file).st_uid == os.geteuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (directory / marker.removesuffix(_MARKER)).unlink(missing_ok=True)
            (directory / marker).unlink()
    finally:
        os.close(file)

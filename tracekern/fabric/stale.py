"""Removes what engines on shared memory left that were killed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_SEGMENT = re.compile(r"([1-9]\d*):\d+:\d+")
"""The name that libfabric's provider shm gives the memory of an endpoint: the process first."""


def remove_stale_segments(directory: Path = Path("/dev/shm")) -> None:
    """Removes the segments of this user whose process has ended; each takes 13 MB and more."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            named = _SEGMENT.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                if named and _is_own_file(entry) and not _is_running(int(named[1])):
                    os.unlink(entry.path)


def _is_own_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True

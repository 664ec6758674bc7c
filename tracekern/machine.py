"""What a process may use of its machine: cores, and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def usable_cores() -> int:
    """Returns how many cores this process may run on; where the system does not say, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> tuple[int, str]:
    """Returns the free bytes, and what limits them: the machine or a control group.

    Where the system does not say, they are taken to be enough.
    """
    if not _MEMINFO.exists():
        return 1 << 62, "on this machine"
    values = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    least = (int(values["MemAvailable"].split()[0]) * 1024, "on this machine")
    return min([least, *((free, "in this control group") for free in _free_in_cgroups())])


def _free_in_cgroups() -> Iterator[int]:
    """Yields the bytes left by each limit of this process's control group and of those around it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, used, root = (
            ("memory.max", "memory.current", _CGROUPS)
            if controllers == ""
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", _CGROUPS / "memory")
        )
        folder = root / path.strip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            try:
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                # The kernel reclaims pages of files that were not used recently.
                yield int((group / limit).read_text()) - int((group / used).read_text()) + int(stat["inactive_file"])
            except (OSError, ValueError, KeyError):  # no such group here, or "max"
                continue

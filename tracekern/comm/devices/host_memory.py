"""Checks before anything is allocated whether the host has the memory and the open files that a run needs."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tracekern.formatting import size
from tracekern.machine import free_memory
from tracekern.segment.names import SHM_DIR

_FILES, _FILES_PER_RANK = 32, 8
"""Open files of a rank by itself and for each rank: 22 and 7 were needed."""


def shortage(heap_bytes: int, own_bytes: int, num_ranks: int) -> str:
    """Returns one line that says what memory a run of `num_ranks` ranks lacks on this host; "" if there is room.

    heap_bytes: one rank's part of the symmetric heap, which all ranks map. own_bytes: one rank's other memory.
    """
    shared = num_ranks * heap_bytes
    for needs, what, free, whose in (
        (shared, "shared memory", _free_shared(), f"in {SHM_DIR}"),
        (shared + num_ranks * own_bytes, "memory", *free_memory()),
        (shared + own_bytes, "address space a rank", _free_address_space(), "by `ulimit -v`"),
    ):
        if needs > free:
            told = f"needs {size(needs)} of {what}, {size(max(0, free))} are free {whose}"
            return f"{told}; take fewer ranks or tokens, or a smaller hidden"
    return ""


def too_few_files(num_ranks: int) -> str:
    """Returns one line if a rank may open too few files to connect with `num_ranks` - 1 others; else "".

    gloo ends a process that runs out of them.
    """
    needs = _FILES + _FILES_PER_RANK * num_ranks if num_ranks > 1 else _FILES // 2
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or needs <= allowed:
        return ""
    return f"needs {needs} open files a rank, {allowed} are allowed; raise the limit (`ulimit -n {needs}`)"


def lacking_files(num_ranks: int) -> str:
    """Returns the end of a line if this process cannot open enough files for its peers and a capture; else ""."""
    needs, allowed = _FILES // 2 + num_ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        left = allowed - len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one
        left = 0
    if allowed == resource.RLIM_INFINITY or left >= needs:
        return ""
    return f"needs {needs} more open files and may open {max(0, left)}; raise the limit (`ulimit -n`, now {allowed})"


def _free_shared() -> int:
    shared = os.statvfs(SHM_DIR)
    return shared.f_bavail * shared.f_frsize


def _free_address_space() -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def num_out_of_memory() -> int:
    """Returns how many processes the kernel has killed for lack of memory since this machine started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

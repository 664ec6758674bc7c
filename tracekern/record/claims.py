"""Tells two processes that claim one rank of a directory from a program that is run again, which may replace its dump.

Ranks of one run exist at the same time. A program that is run again starts after the dump was written.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekern.dump import format as fmt
from tracekern.dump.reader import peek_metadata
from tracekern.errors import BadInput
from tracekern.files import host_of_processes
from tracekern.host_clock import Moment, describe_host_clock, host_ns

if TYPE_CHECKING:
    from tracekern.comm.ranks.group import Group

ADVICE = "choose another directory, or set RANK and WORLD_SIZE where both are ranks of one run"
_OVERLAP_NS = 100_000_000
"""The kernel tells the start of a process in ticks of 10 ms, and wall clocks are steered."""
_PARENT, _STARTED = 1, 19


def process_facts() -> dict[str, Any]:
    """Returns what tells this process's relatives, for the metadata of its dump."""
    ancestors, pid = [], os.getpid()
    while pid:
        ancestors.append(pid)
        try:
            pid = int(_stat_of(pid)[_PARENT])
        except OSError:  # another user's processes may be hidden
            break
    return {"host": host_of_processes(), "ancestors": ancestors}


def advice_for(group: Group) -> list[str]:
    """Returns what to do where another run writes to the directory: one rank may know nothing of others."""
    return [ADVICE] if group.num_ranks == 1 and group.is_world else []


def refuse_second_claim(dump: Path) -> None:
    """Raises BadInput if a process that was started beside this one has left this rank's dump already.

    Its children and its parents may replace each other's dumps: they are not ranks of one launcher.
    """
    try:
        metadata = peek_metadata(dump)
    except BadInput:  # there is none, or it cannot be read
        return
    theirs, ours = metadata.get("process"), process_facts()
    if metadata["state"] != fmt.STATE_NAMES[fmt.SegmentState.CLOSED] or not isinstance(theirs, dict):
        return
    ancestors = theirs.get("ancestors")
    if not isinstance(ancestors, list):
        return
    is_related = os.getpid() in ancestors or metadata.get("pid") in ours["ancestors"]
    if theirs.get("host") == ours["host"] and is_related:
        return
    started = Moment.of({"host_time": describe_host_clock()}, _started_ns())
    packed = Moment.of(metadata, metadata["packed_ns"])
    if started.is_before(packed, _OVERLAP_NS):
        raise BadInput(
            f"{dump.parent}: process {metadata.get('pid')} left rank {metadata['rank']} of {metadata['num_ranks']} "
            f"there while this one ran; {ADVICE}"
        )


def _started_ns() -> int:
    """Returns when this process started, in host time."""
    since_boot = int(_stat_of(os.getpid())[_STARTED]) * 10**9 // os.sysconf("SC_CLK_TCK")
    return host_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot)


def _stat_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the program's name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()

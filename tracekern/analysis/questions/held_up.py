"""A run that broke off or hangs: which ranks did not come, and what each rank waited for, by faults and open waits."""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.analysis.questions.hang import Hang, OpenWait
from tracekern.timeline.fault import fault_of
from tracekern.timeline.model import Timeline

_HANGS_NS = 10**9
"""Ranks that run wait for each other all the time, but not as long as this."""


@dataclass(frozen=True)
class LastWait:
    """What a rank waited for when its run broke off, or waits for."""

    rank: int
    peer: int
    """The rank waited for; `rank` itself where for its own warps."""
    phase: str
    """The kernel, and the event where no fault says what was waited for."""
    what: str
    """What was waited for and what was there instead, or the fields of the wait."""
    lasts_ns: int
    at_least: bool


@dataclass(frozen=True)
class HeldUp:
    """Why a run did not end."""

    missing: tuple[int, ...]
    """Ranks that others waited for and that waited for no other rank, or not for what was sent. Empty where all waited
    for each other."""
    waits: tuple[LastWait, ...]
    """One for each rank that waited, by rank: that of its fault, or else its longest."""
    came_after: tuple[int, ...]
    """Ranks that came when another one had given up already."""
    interrupted: int | None
    """The rank that ended the run because it was interrupted, such as by Ctrl-C."""
    is_running: bool
    """The ranks were still there when they were looked at."""


def find_held_up(timeline: Timeline, hang: Hang | None) -> HeldUp | None:
    """hang: find_hang(timeline). Returns None where no wait gave up, and none hangs."""
    is_running = any(rank.state == "running" for rank in timeline.ranks)
    has_fault = any(rank.metadata.get("fault_text") for rank in timeline.ranks)
    if not has_fault and (hang is None or hang.longest.lasts_ns < _HANGS_NS):
        return None
    faults = {rank.rank: fault for rank in timeline.ranks if (fault := fault_of(rank))}
    last = {wait.rank: _of_open(wait, hang) for wait in (hang.longest, *hang.others)} if hang else {}
    for rank, fault in faults.items():
        if not fault.has_waited:
            last.pop(rank, None)
        elif fault.peer != rank or rank not in last:  # an open wait says more than one for the rank itself
            last[rank] = LastWait(rank, fault.peer, fault.kernel, fault.what, fault.waited_ns, at_least=False)
    waiting = {wait.rank for wait in last.values() if wait.peer != wait.rank}
    not_seeing = {holder.rank for holder in hang.holders if holder.rank in waiting} if hang else set[int]()
    missing = {wait.peer for wait in last.values() if wait.peer != wait.rank} - waiting
    interrupted = [fault.aborted_by for fault in faults.values() if fault.was_interrupted]
    return HeldUp(
        missing=tuple(sorted(missing | not_seeing)),
        waits=tuple(last[rank] for rank in sorted(last)),
        came_after=tuple(sorted(rank for rank, fault in faults.items() if not fault.has_waited)),
        interrupted=min(interrupted, default=None),
        is_running=is_running,
    )


def _of_open(wait: OpenWait, hang: Hang) -> LastWait:
    return LastWait(wait.rank, wait.peer, wait.phase, wait.fields, wait.lasts_ns, hang.at_least)

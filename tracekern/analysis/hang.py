"""Who holds up whom where a capture ends in the middle of waits: a job that hung, died, or runs on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.waits.analyze import named_peers
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Timeline, TrackKind, unpack_field


@dataclass(frozen=True)
class Holder:
    """A rank that others wait for and that waits for no other, or whose warps wait for each other."""

    rank: int
    is_known: bool
    """Part of the capture."""
    doing: str
    """The stage and event that most of its warps are in, "" where none of its kernels is under way."""
    num_warps: int
    """That are in it."""
    last_stage: str
    """The kernel that it ran last, "" for none."""
    idle_ns: int
    """Between the end of its last span and the last time on record; 0 while a kernel is under way."""


@dataclass(frozen=True)
class HeldWait:
    rank: int
    peer: int
    """`rank` itself where warps wait for their own rank alone."""
    phase: str
    """Stage and event."""
    fields: str
    """What tells it from others of its phase, the fields of its begin but `peer`, as in "slot=1 call=3"."""
    lasts_ns: int
    """Until the last time on record, of any rank; of its own where the clocks were not aligned."""


@dataclass(frozen=True)
class Hang:
    ranks: tuple[int, ...]
    """That wait for another one; where none does, those whose warps wait."""
    holders: tuple[Holder, ...]
    """Empty: the ranks wait for each other."""
    num_waits: int
    longest: HeldWait
    others: tuple[HeldWait, ...]
    """The longest of each other rank that waits, by rank."""
    at_least: bool
    """A rank died: how much longer its waits lasted than there are times on record is not known."""


def find_hang(timeline: Timeline) -> Hang | None:
    """Waits that did not end: for other ranks, or else within ranks. None where all did. Not those whose end merely
    found no room."""
    spans = timeline.spans
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    lost = np.array([launch.records_lost > 0 for launch in timeline.launches] or [False])
    open_rows = np.flatnonzero((spans.end == OPEN_END) & is_device[spans.track] & ~lost[spans.launch])
    is_wait = timeline.events_of(EventClass.WAIT)[spans.event[open_rows]]
    row = open_rows[is_wait]
    if not len(row):
        return None
    rank, peer = timeline.track_ranks()[spans.track[row]], named_peers(timeline, row)
    between = (peer >= 0) & (peer != rank)
    if between.any():
        row, rank, peer = row[between], rank[between], peer[between]
    else:
        peer, open_rows = rank, open_rows[~is_wait]
    end_ns = timeline.last_times()
    lasts_ns = end_ns[spans.track[row]] - spans.start[row]
    waiting = set(rank.tolist())
    holders = sorted(set(peer.tolist()) - waiting if between.any() else waiting)
    longest_of = {int(rank[at]): at for at in lasts_ns.argsort(kind="stable").tolist()}
    oldest = int(lasts_ns.argmax())
    del longest_of[int(rank[oldest])]

    def held(at: int) -> HeldWait:
        phase, fields = _phase(timeline, int(row[at])), _fields(timeline, int(row[at]))
        return HeldWait(int(rank[at]), int(peer[at]), phase, fields, int(lasts_ns[at]))

    return Hang(
        ranks=tuple(sorted(waiting)),
        holders=tuple(_describe(timeline, holder, open_rows, end_ns) for holder in holders),
        num_waits=len(row),
        longest=held(oldest),
        others=tuple(held(longest_of[other]) for other in sorted(longest_of)),
        at_least=any(known.state == "salvaged" for known in timeline.ranks),
    )


def _fields(timeline: Timeline, row: int) -> str:
    event = timeline.events[timeline.spans.event[row]]
    names = [] if event.is_headless else [field.name for field in event.begin_fields if field.name != "peer"]
    payload = timeline.spans.begin_payload[[row]]
    return " ".join(f"{name}={unpack_field(event.begin_fields, name, payload)[0]}" for name in names)


def _describe(timeline: Timeline, rank: int, open_rows: Int64, end_ns: Int64) -> Holder:
    """end_ns: [num_tracks] the last time on record."""
    spans = timeline.spans
    is_its = (timeline.track_ranks() == rank) & timeline.tracks_of(TrackKind.DEVICE)
    mine = open_rows[is_its[spans.track[open_rows]]]
    # The last open span of a track is its innermost.
    innermost = mine[np.append(np.diff(spans.track[mine]) != 0, True)] if len(mine) else mine
    doing = Counter(_phase(timeline, row) for row in innermost.tolist())
    name, num_warps = doing.most_common(1)[0] if doing else ("", 0)
    rows = np.flatnonzero(is_its[spans.track])
    last = rows[spans.end[rows].argmax()] if len(rows) else -1
    return Holder(
        rank=rank,
        is_known=rank in [known.rank for known in timeline.ranks],
        doing=name,
        num_warps=num_warps,
        last_stage=timeline.launches[spans.launch[last]].name if last >= 0 else "",
        idle_ns=int(end_ns[spans.track[last]] - spans.end[last]) if last >= 0 and not doing else 0,
    )


def _phase(timeline: Timeline, row: int) -> str:
    launch, event = timeline.spans.launch[row], timeline.spans.event[row]
    return f"{timeline.launches[launch].name}.{timeline.events[event].name}"

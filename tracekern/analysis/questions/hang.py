"""Which rank the others wait for, where a capture ends inside waits: the job hung, died, or still runs.

A wait whose signal was sent all the same is held by its own rank, which was stopped or does not run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.facts.last_times import last_times
from tracekern.timeline.facts.open_spans import endless_waits, known_ends
from tracekern.timeline.facts.span_facts import named_peers
from tracekern.timeline.join.flows import sent_signals
from tracekern.timeline.model import OPEN_END, Int64, Timeline, TrackKind, unpack_field

_UNSEEN_NS = 10**6
"""A rank that runs sees a signal within this, and clocks err by less."""


@dataclass(frozen=True)
class Holder:
    """A rank that others wait for while it waits for no other rank, or for what was sent to it, or whose own warps wait
    for each other."""

    rank: int
    is_known: bool
    """Whether the capture has its dump."""
    doing: str
    """The stage and event that most of its warps are in; only the stage where they are in work, whose record comes
    when it ends; "" where it runs no kernel."""
    num_warps: int
    """Number of warps in `doing`; 0 where only the stage is known."""
    last_stage: str
    """The kernel that it ran last; "" for none."""
    idle_ns: int
    """From the end of its last span to the last recorded time; 0 while it runs a kernel."""


@dataclass(frozen=True)
class Death:
    """A rank whose process ended before it closed its capture."""

    killed_by: str
    """The name of a signal, or "the launcher"; "" where nobody saw it end."""
    then: Holder
    """What the rank did then."""


@dataclass(frozen=True)
class OpenWait:
    """A wait that has not ended."""

    rank: int
    peer: int
    """The rank it waits for; `rank` itself where warps wait only for their own rank."""
    phase: str
    """Stage and event."""
    fields: str
    """The fields of its begin except `peer`, as in "slot=1 call=3"."""
    lasts_ns: int
    """Time until the last that is known of the rank (timeline/open_spans.py)."""
    sent_ns: int | None
    """How long before that, or the sender's last time, its signal was sent, which it has not seen; None where no
    signal for it is on record."""


@dataclass(frozen=True)
class Hang:
    """The waits that have not ended, and what the ranks do that they are for."""

    ranks: tuple[int, ...]
    """Ranks that wait for another rank; where none does, ranks whose warps wait for each other."""
    holders: tuple[Holder, ...]
    """Ranks that the others wait for. Empty where the ranks wait for each other."""
    num_waits: int
    longest: OpenWait
    """The wait whose signal was sent longest ago; the longest wait if no signal was sent."""
    others: tuple[OpenWait, ...]
    """The longest wait of each other rank, by rank."""
    at_least: bool
    """A rank died nobody knows when, so that its waits may have lasted longer than was recorded."""


def find_hang(timeline: Timeline) -> Hang | None:
    """Finds waits that never ended: for other ranks, or else within ranks. None where all ended.

    Waits whose end was lost for lack of room do not count.
    """
    spans = timeline.spans
    row = np.flatnonzero(endless_waits(timeline))
    if not len(row):
        return None
    open_rows = _open_rows(timeline)
    rank, peer = timeline.track_ranks()[spans.track[row]], named_peers(timeline, row)
    between = (peer >= 0) & (peer != rank)
    if between.any():
        row, rank, peer = row[between], rank[between], peer[between]
    else:
        peer, open_rows = rank, np.setdiff1d(open_rows, row)
    end_ns = last_times(timeline)
    until_ns = known_ends(timeline)[row]
    lasts_ns = until_ns - spans.start[row]
    sent_ns = _sent_ns(timeline, row, until_ns, end_ns)
    waiting, not_seeing = set(rank.tolist()), set(rank[sent_ns >= 0].tolist())
    held_by = set(peer[sent_ns < 0].tolist()) - waiting if between.any() else waiting
    holders = sorted(held_by | not_seeing)
    in_order = np.lexsort((lasts_ns, sent_ns)).tolist()
    longest_of = {int(rank[at]): at for at in in_order}
    oldest = in_order[-1]
    del longest_of[int(rank[oldest])]

    def held(at: int) -> OpenWait:
        phase, fields = _phase(timeline, int(row[at])), _fields(timeline, int(row[at]))
        sent = int(sent_ns[at]) if sent_ns[at] >= 0 else None
        return OpenWait(int(rank[at]), int(peer[at]), phase, fields, int(lasts_ns[at]), sent)

    return Hang(
        ranks=tuple(sorted(waiting)),
        holders=tuple(_describe(timeline, holder, open_rows, end_ns) for holder in holders),
        num_waits=len(row),
        longest=held(oldest),
        others=tuple(held(longest_of[other]) for other in sorted(longest_of)),
        at_least=any(known.state == "salvaged" and known.died_ns is None for known in timeline.ranks),
    )


def find_deaths(timeline: Timeline) -> tuple[Death, ...]:
    """Finds ranks that died, the first one first as far as that is known."""
    dead = [rank for rank in timeline.ranks if rank.state == "salvaged"]
    dead.sort(key=lambda rank: (rank.died_ns is None, rank.died_ns or 0, rank.rank))
    open_rows, end_ns = _open_rows(timeline), last_times(timeline)
    return tuple(
        Death(rank.metadata.get("killed_by", ""), _describe(timeline, rank.rank, open_rows, end_ns)) for rank in dead
    )


def _open_rows(timeline: Timeline) -> Int64:
    """Spans of devices that never closed, but for those whose end was lost for lack of room."""
    lost = np.array([*(launch.records_lost > 0 for launch in timeline.launches), False])
    spans, is_device = timeline.spans, timeline.tracks_of(TrackKind.DEVICE)
    return np.flatnonzero(spans.is_open & is_device[spans.track] & ~lost[spans.launch])


def _sent_ns(timeline: Timeline, row: Int64, until_ns: Int64, end_ns: Int64) -> Int64:
    """[n] how long ago each open wait was sent what it waits for; -1 where it was not, or a moment ago.

    Also -1 where that was after the wait had been given up, or after a snapshot had begun to copy the waiter's rank,
    which is the last time of that rank. until_ns: [n] when the waits were given up, or known to last. end_ns:
    [num_tracks] the last recorded time.
    """
    spans, signal = timeline.spans, sent_signals(timeline, row)
    ago_ns = end_ns[spans.track[signal]] - spans.end[signal]
    runs = np.isin(timeline.track_ranks()[spans.track[row]], [r.rank for r in timeline.ranks if r.state == "running"])
    copied_ns = last_times(timeline.replace(aligned=False))[spans.track[row]]
    is_later = timeline.has_one_axis & (spans.end[signal] > np.where(runs, copied_ns, until_ns))
    return np.where((signal >= 0) & (ago_ns >= _UNSEEN_NS) & ~is_later, ago_ns, -1)


def _fields(timeline: Timeline, row: int) -> str:
    event = timeline.events[timeline.spans.event[row]]
    names = [] if event.is_headless else [field.name for field in event.begin_fields if field.name != "peer"]
    payload = timeline.spans.begin_payload[[row]]
    return " ".join(f"{name}={unpack_field(event.begin_fields, name, payload)[0]}" for name in names)


def _describe(timeline: Timeline, rank: int, open_rows: Int64, end_ns: Int64) -> Holder:
    """end_ns: [num_tracks] the last recorded time."""
    spans = timeline.spans
    is_its = (timeline.track_ranks() == rank) & timeline.tracks_of(TrackKind.DEVICE)
    mine = open_rows[is_its[spans.track[open_rows]]]
    # The last open span of a track is its innermost.
    innermost = mine[np.append(np.diff(spans.track[mine]) != 0, True)] if len(mine) else mine
    doing = Counter(_phase(timeline, row) for row in innermost.tolist())
    name, num_warps = doing.most_common(1)[0] if doing else (_running_stage(timeline, rank), 0)
    rows = np.flatnonzero(is_its[spans.track])
    last = rows[spans.end[rows].argmax()] if len(rows) else -1
    return Holder(
        rank=rank,
        is_known=rank in [known.rank for known in timeline.ranks],
        doing=name,
        num_warps=num_warps,
        last_stage=timeline.launches[spans.launch[last]].name if last >= 0 else "",
        idle_ns=int(end_ns[spans.track[last]] - spans.end[last]) if last >= 0 and not name else 0,
    )


def _running_stage(timeline: Timeline, rank: int) -> str:
    """Returns the kernel of a rank that started last and has not finished; "" for none."""
    spans = timeline.spans
    is_its = (timeline.track_ranks() == rank) & timeline.tracks_of(TrackKind.LAUNCH)
    rows = np.flatnonzero(is_its[spans.track] & (spans.end == OPEN_END))
    return timeline.launches[spans.launch[rows[spans.start[rows].argmax()]]].name if len(rows) else ""


def _phase(timeline: Timeline, row: int) -> str:
    launch, event = timeline.spans.launch[row], timeline.spans.event[row]
    return f"{timeline.launches[launch].name}.{timeline.events[event].name}"

"""Why waits for immediates lasted: which transfer each was for, and what held that up.

Of the writes that a wait was for, the one that arrived last released it. Until its transfer was submitted the sender
was late; until it was posted it stood in a queue; until it arrived it was under way; what is left the receiver took to
see it. These are times of hosts, as recorded: they say where waiting went, not what a run would save.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.join.immediates import Arrivals, find_arrivals, immediate_waits, releasing
from tracekern.timeline.model import OPEN_END, Float64, Int32, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.table import Table

_TRANSFER, _NUMBER = "transfer", "transfer"


class TransferCause(enum.Enum):
    """What a wait was for at a moment."""

    LATE = "late"
    """The sender had not submitted the transfer."""
    QUEUED = "queued"
    """The write was not posted: others were before it, or the peer was not met yet."""
    UNDER_WAY = "under way"
    """It was posted and had not arrived."""
    NOTICED = "noticed"
    """It had arrived, and the receiver's worker, or the waiter, had not seen it."""


@dataclass(frozen=True, repr=False)
class Writes(Table):
    """[n] columns: writes that waits were for, whether they released them or came before."""

    wait: Int64
    """Row of TransferWaits."""
    source: Int64
    rank: Int64
    """The rank that waited."""
    domain: Int64
    """Index into `TransferWaits.domains`."""
    released: Mask
    late_ns: Float64
    """How long after the wait began its transfer was submitted; ..."""
    queued_ns: Float64
    under_way_ns: Float64
    """... how long it was queued, and how long under way, even if nobody waited then; ..."""
    noticed_ns: Float64
    """... how long it was there before the wait ended; nan unless the wait was for it when it arrived."""

    def of(self, cause: TransferCause) -> Float64:
        """[n] ns of a cause."""
        ns: Float64 = getattr(self, f"{cause.name.lower()}_ns")
        return ns


@dataclass(frozen=True, repr=False)
class TransferWaits(Table):
    """[n] columns: waits for immediates that ended. Their four parts add up to wait_ns."""

    row: Int64
    """Index into Timeline.spans."""
    rank: Int64
    source: Int64
    """The rank that wrote."""
    domain: Int64
    """Index into `domains`: what the write went through."""
    write: Int64
    """Its span."""
    transfer: Int64
    """Its transfer's span; -1 where that is not on record."""
    wait_ns: Int64
    late_ns: Int64
    queued_ns: Int64
    under_way_ns: Int64
    noticed_ns: Int64
    is_sure: Mask
    """Whether no other write can have released it."""
    domains: tuple[str, ...]
    num_unmatched: int
    """Waits that ended and whose write is not on record. They have no row."""
    writes: Writes
    doubt_ns: float
    """By how much times of two hosts may contradict each other."""

    def of(self, cause: TransferCause) -> Int64:
        """[n] ns of a cause."""
        ns: Int64 = getattr(self, f"{cause.name.lower()}_ns")
        return ns


def divide_transfer_waits(timeline: Timeline) -> TransferWaits | None:
    """Divides every wait for immediates; None for a timeline without transfer engines."""
    if not timeline.tracks_of(TrackKind.ENGINE).any():
        return None
    spans, ranks = timeline.spans, timeline.track_ranks().astype(np.int64)
    arrivals = find_arrivals(timeline)
    every = immediate_waits(timeline)
    arrival = releasing(timeline, arrivals, every)
    write = np.where(arrival >= 0, np.append(arrivals.write, -1)[arrival], -1)
    found = write >= 0
    row, arrival, write = every[found], arrival[found], write[found]
    begin, end = spans.start[row], spans.end[row]
    parts, before = [], begin
    transfer, moments = _moments(timeline, arrivals)
    for moment in (*moments[:, arrival], end):
        reached = np.clip(moment, before, end)
        parts.append(reached - before)
        before = reached
    domain, domains = _domains(timeline, write)
    return TransferWaits(
        row=row,
        rank=ranks[spans.track[row]],
        source=ranks[spans.track[write]],
        domain=domain,
        write=write,
        transfer=transfer[arrival],
        wait_ns=end - begin,
        late_ns=parts[0],
        queued_ns=parts[1],
        under_way_ns=parts[2],
        noticed_ns=parts[3],
        is_sure=arrivals.is_sure[arrival],
        domains=domains,
        num_unmatched=int((~found).sum()),
        writes=_writes_waited_for(timeline, arrivals, moments, arrival, begin, end),
        doubt_ns=_doubt_ns(timeline),
    )


def _writes_waited_for(
    timeline: Timeline, arrivals: Arrivals, moments: Int64, released_by: Int64, begin: Int64, end: Int64
) -> Writes:
    """A wait is for what came of its immediate since the one before it was released.

    moments: of _moments(). released_by: [num_waits] the arrival that released each wait, from begin to end.
    """
    order = np.argsort(released_by, kind="stable")
    arrival = np.flatnonzero(arrivals.write >= 0)
    place = np.searchsorted(released_by[order], arrival)
    arrival, place = arrival[place < len(order)], place[place < len(order)]
    wait = order[place]
    same = (arrivals.rank[arrival] == arrivals.rank[released_by[wait]]) & (
        arrivals.imm[arrival] == arrivals.imm[released_by[wait]]
    )
    arrival, wait = arrival[same], wait[same]
    submitted, posted, came = moments[:, arrival]
    released = released_by[wait] == arrival
    noticed = released & (came > begin[wait])  # else it was there before, and nothing was to be noticed
    return Writes(
        wait=wait,
        source=arrivals.source[arrival],
        rank=arrivals.rank[arrival],
        domain=_domains(timeline, arrivals.write[arrival])[0],
        released=released,
        late_ns=np.maximum(submitted - begin[wait], 0).astype(float),
        queued_ns=np.maximum(posted - submitted, 0).astype(float),
        under_way_ns=np.maximum(came - posted, 0).astype(float),
        noticed_ns=np.where(noticed, np.maximum(end[wait] - came, 0), np.nan),
    )


def _moments(timeline: Timeline, arrivals: Arrivals) -> tuple[Int64, Int64]:
    """([num_arrivals] the span of each one's transfer, -1 where it is not on record; [3, num_arrivals] when that was
    submitted, when the write was posted, and when it had arrived; 0 where no write is on record)"""
    spans, known = timeline.spans, np.flatnonzero(arrivals.write >= 0)
    transfer, moments = np.full(len(arrivals), -1), np.zeros((3, len(arrivals)), np.int64)
    write = arrivals.write[known]
    transfer[known] = _transfers_of(timeline, write)
    posted, confirmed, came = spans.start[write], spans.end[write], arrivals.time[known]
    submitted = np.where(transfer[known] >= 0, np.append(spans.start, 0)[transfer[known]], posted)
    # Its worker sees it when it polls; that it was there by the end of the write the sender knows.
    moments[:, known] = submitted, posted, np.where(confirmed == OPEN_END, came, np.minimum(came, confirmed))
    return transfer, moments


def _domains(timeline: Timeline, writes: Int64) -> tuple[Int64, tuple[str, ...]]:
    """([n] index of what each write went through, the names)"""
    roles = [timeline.tracks[track].role for track in timeline.spans.track[writes].tolist()]
    names = tuple(sorted({track.role for track in timeline.tracks if track.kind is TrackKind.ENGINE}))
    return np.array([names.index(role) for role in roles], np.int64), names


def _doubt_ns(timeline: Timeline) -> float:
    """By how much times of two hosts may contradict each other: on one machine by a tick."""
    tick_ns = max(rank.resolution_ns for rank in timeline.ranks)
    if len({rank.machine for rank in timeline.ranks}) < 2:
        return tick_ns
    bounds = sorted(float(rank.clock.host_hard_ns) if rank.clock else np.inf for rank in timeline.ranks)
    return tick_ns + float(np.nan_to_num(sum(bounds[-2:]), nan=np.inf))


def _transfers_of(timeline: Timeline, writes: Int64) -> Int64:
    """[n] the span of the transfer that each write was part of; -1 where it is not on record.

    Of those of its engine with its number, which comes again after 8192 transfers, the last that began before it.
    """
    spans = timeline.spans
    names = np.array([event.name for event in timeline.events] or [""])
    is_engine = timeline.tracks_of(TrackKind.ENGINE)
    transfers = np.flatnonzero((names[spans.event] == _TRANSFER) & is_engine[spans.track])
    key, wanted = (_engine_and_number(timeline, rows) for rows in (transfers, writes))
    order = np.lexsort((spans.start[transfers], key))
    transfers, key = transfers[order], key[order]
    place = np.array(
        [
            first + np.searchsorted(spans.start[transfers[first:stop]], start, "right") - 1
            for first, stop, start in zip(
                np.searchsorted(key, wanted, "left").tolist(),
                np.searchsorted(key, wanted, "right").tolist(),
                spans.start[writes].tolist(),
                strict=True,
            )
        ],
        np.int64,
    )
    is_there = place >= np.searchsorted(key, wanted, "left")
    return np.where(is_there, np.append(transfers, -1)[place], -1)


def _engine_and_number(timeline: Timeline, rows: Int64) -> Int64:
    spans = timeline.spans
    engine = np.array([track.rank << 16 | track.stream for track in timeline.tracks] or [0], np.int64)
    number = np.zeros(len(rows), np.int64)
    events: Int32 = spans.event[rows]
    for idx in np.unique(events).tolist():
        mine = np.flatnonzero(events == idx)
        number[mine] = timeline.field(rows[mine], _NUMBER)
    return engine[spans.track[rows]] << 16 | number

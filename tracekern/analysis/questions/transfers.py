"""Why waits for transfers lasted, those for immediates and those of kernels for messages that proxies carry: which
write each was for, and what held that up.

Of the writes that a wait was for, the one that arrived last released it. Until its transfer was submitted the sender
was late; until the proxy took a kernel's command it lay in a ring; until it was posted it stood in a queue; until it
arrived it was under way; what is left the receiver took to see it. These are times of hosts, as recorded: they say
where waiting went, not what a run would save.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.join.immediates import Arrivals, find_arrivals, immediate_waits, releasing
from tracekern.timeline.join.puts import find_carried
from tracekern.timeline.model import OPEN_END, Float64, Int32, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.table import Table

_TRANSFER, _NUMBER = "transfer", "transfer"


class TransferCause(enum.Enum):
    """What a wait was for at a moment."""

    LATE = "late"
    """The sender had not submitted the transfer, or its kernel not asked for the put."""
    NOT_TAKEN = "not taken"
    """The proxy of its rank had not taken the kernel's command."""
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
    """How long after the wait began its transfer was submitted; nan for a kernel's put, which may have had to wait
    itself: analysis/why says for whom. ..."""
    not_taken_ns: Float64
    queued_ns: Float64
    under_way_ns: Float64
    """... how long it lay in a ring, was queued, and was under way, even if nobody waited then; ..."""
    noticed_ns: Float64
    """... how long it was there before the wait ended; nan unless the wait was for it when it arrived, and for warps
    that a CPU simulates: when they look says nothing of a GPU."""

    def of(self, cause: TransferCause) -> Float64:
        """[n] ns of a cause."""
        ns: Float64 = getattr(self, f"{cause.name.lower()}_ns")
        return ns


@dataclass(frozen=True, repr=False)
class TransferWaits(Table):
    """[n] columns: waits for transfers that ended. Their five parts add up to wait_ns."""

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
    end: Int64
    """When it ended."""
    wait_ns: Int64
    late_ns: Int64
    not_taken_ns: Int64
    queued_ns: Int64
    under_way_ns: Int64
    noticed_ns: Int64
    is_sure: Mask
    """Whether no other write can have released it."""
    domains: tuple[str, ...]
    num_unmatched: int
    """Waits for immediates that ended and whose write is not on record. They have no row."""
    writes: Writes
    doubt_ns: float
    """By how much times of two hosts may contradict each other."""

    def of(self, cause: TransferCause) -> Int64:
        """[n] ns of a cause."""
        ns: Int64 = getattr(self, f"{cause.name.lower()}_ns")
        return ns


@dataclass(frozen=True, repr=False)
class _Held(Table):
    """[n] columns: writes that waits were for, and when what happened to them."""

    wait: Int64
    """Its span."""
    write: Int64
    transfer: Int64
    released: Mask
    """Whether it came last of those that the wait was for."""
    is_sure: Mask
    by_kernel: Mask
    submitted: Int64
    taken: Int64
    posted: Int64
    came: Int64

    def joined(self, other: _Held) -> _Held:
        return _Held(*(np.concatenate([one, vars(other)[name]]) for name, one in vars(self).items()))


def divide_transfer_waits(timeline: Timeline) -> TransferWaits | None:
    """Divides every wait for transfers; None for a timeline without engines and proxies."""
    if not timeline.tracks_of(TrackKind.ENGINE).any():
        return None
    spans, ranks = timeline.spans, timeline.track_ranks().astype(np.int64)
    of_immediates, num_unmatched = _held_immediates(timeline)
    held = of_immediates.joined(_held_puts(timeline))
    last = held.take(held.released)
    begin, end = spans.start[last.wait], spans.end[last.wait]
    parts, before = [], begin
    for moment in (last.submitted, last.taken, last.posted, last.came, end):
        reached = np.clip(moment, before, end)
        parts.append(reached - before)
        before = reached
    domain, domains = _domains(timeline, held.write)
    return TransferWaits(
        row=last.wait,
        rank=ranks[spans.track[last.wait]],
        source=ranks[spans.track[last.write]],
        domain=domain[held.released],
        write=last.write,
        transfer=last.transfer,
        end=end,
        wait_ns=end - begin,
        late_ns=parts[0],
        not_taken_ns=parts[1],
        queued_ns=parts[2],
        under_way_ns=parts[3],
        noticed_ns=parts[4],
        is_sure=last.is_sure,
        domains=domains,
        num_unmatched=num_unmatched,
        writes=_writes_waited_for(timeline, held, domain),
        doubt_ns=_doubt_ns(timeline),
    )


def _writes_waited_for(timeline: Timeline, held: _Held, domain: Int64) -> Writes:
    spans, ranks = timeline.spans, timeline.track_ranks().astype(np.int64)
    begin, end = spans.start[held.wait], spans.end[held.wait]
    noticed = held.released & (held.came > begin)  # else it was there before, and nothing was to be noticed
    noticed &= ~(held.by_kernel & _simulated(timeline)[ranks[spans.track[held.wait]]])
    row_of = np.zeros(len(spans), np.int64)
    row_of[held.wait[held.released]] = np.arange(int(held.released.sum()))
    return Writes(
        wait=row_of[held.wait],
        source=ranks[spans.track[held.write]],
        rank=ranks[spans.track[held.wait]],
        domain=domain,
        released=held.released,
        late_ns=np.where(held.by_kernel, np.nan, np.maximum(held.submitted - begin, 0)),
        not_taken_ns=np.maximum(held.taken - held.submitted, 0).astype(float),
        queued_ns=np.maximum(held.posted - held.taken, 0).astype(float),
        under_way_ns=np.maximum(held.came - held.posted, 0).astype(float),
        noticed_ns=np.where(noticed, np.maximum(end - held.came, 0), np.nan),
    )


def _simulated(timeline: Timeline) -> Mask:
    """[largest rank + 1] whether a rank's kernels ran on the CPU."""
    of_rank = np.zeros(max(rank.rank for rank in timeline.ranks) + 1, bool)
    of_rank[[rank.rank for rank in timeline.ranks if rank.backend == "cpu"]] = True
    return of_rank


def _held_immediates(timeline: Timeline) -> tuple[_Held, int]:
    """(writes that waits for immediates were for, how many waits have none on record)"""
    arrivals, every = find_arrivals(timeline), immediate_waits(timeline)
    released_by = releasing(timeline, arrivals, every)
    found = (released_by >= 0) & (np.append(arrivals.write, -1)[released_by] >= 0)
    waits, released_by = every[found], released_by[found]
    arrival, wait = _came_before(arrivals, released_by)
    arrival, wait = np.concatenate([released_by, arrival]), np.concatenate([np.arange(len(waits)), wait])
    transfer, (submitted, posted, came) = _moments(timeline, arrivals)
    held = _Held(
        wait=waits[wait],
        write=arrivals.write[arrival],
        transfer=transfer[arrival],
        released=np.arange(len(arrival)) < len(waits),
        is_sure=arrivals.is_sure[arrival],
        by_kernel=np.zeros(len(arrival), bool),
        submitted=submitted[arrival],
        taken=submitted[arrival],
        posted=posted[arrival],
        came=came[arrival],
    )
    return held, int((~found).sum())


def _came_before(arrivals: Arrivals, released_by: Int64) -> tuple[Int64, Int64]:
    """([n] arrivals that released nothing, [n] the wait of each): of its immediate the next one that was released.

    released_by: [num_waits] the arrival that released each wait.
    """
    order = np.argsort(released_by, kind="stable")
    arrival = np.setdiff1d(np.flatnonzero(arrivals.write >= 0), released_by)
    place = np.searchsorted(released_by[order], arrival)
    arrival, place = arrival[place < len(order)], place[place < len(order)]
    wait = order[place]
    last = released_by[wait]
    same = (arrivals.rank[arrival] == arrivals.rank[last]) & (arrivals.imm[arrival] == arrivals.imm[last])
    return arrival[same], wait[same]


def _held_puts(timeline: Timeline) -> _Held:
    """Puts that waits of kernels were for. Where its arrival is not on record, a put came when it was complete."""
    spans, carried = timeline.spans, find_carried(timeline)
    signal, wait = timeline.flows.signal[carried.flow], timeline.flows.wait[carried.flow]
    taken, confirmed = spans.start[carried.put], spans.end[carried.put]
    of_command = np.append(spans.end, OPEN_END)[np.where(carried.command >= 0, carried.command, -1)]
    posted = np.where(of_command == OPEN_END, taken, of_command)
    came = np.where(carried.came == OPEN_END, confirmed, carried.came)
    known = (came != OPEN_END) & (spans.end[wait] != OPEN_END)
    order = np.lexsort((came, wait))
    is_last = np.ones(len(order), bool)
    is_last[order[:-1]] = wait[order[:-1]] != wait[order[1:]]
    none = np.full(len(wait), -1)
    held = _Held(
        wait=wait,
        write=carried.put,
        transfer=none,
        released=is_last,
        is_sure=none < 0,
        by_kernel=none < 0,
        submitted=np.minimum(spans.start[signal], taken),
        taken=taken,
        posted=posted,
        came=came,
    )
    return held.take(known)


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
    roles = [track.role if track.kind is TrackKind.ENGINE else "" for track in timeline.tracks]
    names = tuple(sorted({_through(role) for role in roles if role}))
    index = np.array([names.index(_through(role)) if role else -1 for role in roles], np.int64)
    return index[timeline.spans.track[writes]], names


def _through(role: str) -> str:
    return "its proxy" if role.startswith("proxy") else role


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

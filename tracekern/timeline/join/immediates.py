"""Joins writes with an immediate to their arrivals, and these to the waits that they released.

An immediate names no write: who sent it is known, and that it arrived after the write was posted. It is seen when the
receiver's worker comes to it, which may be after the sender was told that the write is complete. Several writes of one
immediate may be under way between two ranks; of these the one that was complete first is taken for the one that arrived
first, and the arrival says that it is not sure.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from tracekern.formatting import count
from tracekern.timeline.model import (
    OPEN_END,
    ChannelKind,
    EventClass,
    EventType,
    Int32,
    Int64,
    Mask,
    Problem,
    Timeline,
    UInt64,
    unpack_field,
)
from tracekern.timeline.table import Table

_NUMBER_BITS = 11
"""Of an arrival's number, counted from 1 for each immediate; waits have more of its bits."""
_IMM_BITS = 32
_TICK_NS, _SECOND = 32, 10**9


@dataclass(frozen=True, repr=False)
class Arrivals(Table):
    """[n] immediates that arrived, by (rank, imm, time)."""

    mark: Int64
    """Index into Timeline.marks."""
    time: Int64
    rank: Int64
    source: Int64
    """The rank that sent it."""
    imm: Int64
    number: Int64
    """Of the immediate, modulo 2^_NUMBER_BITS."""
    write: Int64
    """The write's span; -1 where none on record can be it."""
    is_sure: Mask
    """Whether no other write could be it."""


def find_arrivals(timeline: Timeline) -> Arrivals:
    """The arrivals on record, with their writes."""
    marks, ranks = timeline.marks, timeline.track_ranks().astype(np.int64)
    rows = np.flatnonzero(_of_channel(timeline, EventClass.SYNC)[marks.event])
    source, imm, number = _fields(timeline, marks.event[rows], marks.payload[rows], ("peer", "imm", "number"))
    rank, time = ranks[marks.track[rows]], marks.time[rows]
    order = np.lexsort((time, imm, rank))
    rows, rank, time, source, imm, number = (column[order] for column in (rows, rank, time, source, imm, number))
    write, is_sure = _find_writes(timeline, source, rank, imm, time)
    return Arrivals(rows, time, rank, source, imm, number, write, is_sure)


def join_immediates(timeline: Timeline) -> tuple[Int64, Int64, tuple[Problem, ...]]:
    """([n] writes, [n] the waits they released, problems): of the writes that a wait was for, the last to arrive."""
    waits = immediate_waits(timeline)
    if not len(waits):
        return waits, waits, ()
    arrivals = find_arrivals(timeline)
    released_by = releasing(timeline, arrivals, waits)
    write = np.where(released_by >= 0, np.append(arrivals.write, -1)[released_by], -1)
    found = write >= 0
    return write[found], waits[found], tuple(_unmatched(timeline, waits[~found]))


def immediate_waits(timeline: Timeline) -> Int64:
    """[n] the spans of waits for immediates that ended."""
    waits = np.flatnonzero(_of_channel(timeline, EventClass.WAIT)[timeline.spans.event])
    ended: Int64 = waits[timeline.spans.end[waits] != OPEN_END]
    return ended


def releasing(timeline: Timeline, arrivals: Arrivals, waits: Int64) -> Int64:
    """[n] the arrival that released each of these waits; -1 where it is not on record."""
    spans = timeline.spans
    imm, wanted = _fields(timeline, spans.event[waits], spans.begin_payload[waits], ("imm", "wanted"))
    of_wait = timeline.track_ranks()[spans.track[waits]].astype(np.int64) << _IMM_BITS | imm
    of_arrival = arrivals.rank << _IMM_BITS | arrivals.imm
    # Of each wait the last arrival of its immediate that came before it ended: both in one order, and counted.
    is_wait = np.arange(len(arrivals) + len(waits)) >= len(arrivals)
    time = np.concatenate([arrivals.time, spans.end[waits] + _TICK_NS])
    order = np.lexsort((is_wait, time, np.concatenate([of_arrival, of_wait])))
    number_before = np.empty(len(order), np.int64)
    number_before[order] = np.cumsum(~is_wait[order])
    first, last = np.searchsorted(of_arrival, of_wait), number_before[is_wait] - 1
    back = (np.append(arrivals.number, 0)[last] - wanted) % (1 << _NUMBER_BITS)
    return np.where((last >= first) & (last - back >= first), last - back, -1)


def _of_channel(timeline: Timeline, event_class: EventClass) -> Mask:
    """[num_events] whether it is of that class, on a channel of immediates."""

    def is_so(event: EventType) -> bool:
        channel = event.channel
        return event.event_class is event_class and channel is not None and channel.kind is ChannelKind.IMMEDIATE

    return np.array([is_so(event) for event in timeline.events], bool)


def _fields(timeline: Timeline, event: Int32, payload: UInt64, names: tuple[str, ...]) -> list[Int64]:
    """[n] each of these begin fields, of spans or marks."""
    values = [np.zeros(len(event), np.int64) for _ in names]
    for idx in np.unique(event).tolist():
        mine = event == idx
        for name, of_name in zip(names, values, strict=True):
            of_name[mine] = unpack_field(timeline.events[idx].begin_fields, name, payload[mine])
    return values


def _find_writes(timeline: Timeline, source: Int64, rank: Int64, imm: Int64, time: Int64) -> tuple[Int64, Mask]:
    """([n] the write of each arrival, [n] whether it is sure)."""
    spans = timeline.spans
    rows = np.flatnonzero(_of_channel(timeline, EventClass.SIGNAL)[spans.event])
    rows = rows[np.argsort(spans.start[rows], kind="stable")]
    peer, its_imm = _fields(timeline, spans.event[rows], spans.begin_payload[rows], ("peer", "imm"))
    sent = _by_key(rows, timeline.track_ranks()[spans.track[rows]], peer, its_imm)
    came = _by_key(np.arange(len(time)), source, rank, imm)
    write, is_sure = np.full(len(time), -1, np.int64), np.zeros(len(time), bool)
    for key, places in came.items():
        doubt = _doubt_ns(timeline, key[0], key[1])
        for place, row, sure in _match(timeline, sent.get(key, []), places, time, doubt):
            write[place], is_sure[place] = row, sure
    return write, is_sure


def _by_key(rows: Int64, *columns: Int64 | Int32) -> dict[tuple[int, ...], list[int]]:
    """(sender, receiver, imm) -> its rows, in their order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row, *key in zip(rows.tolist(), *(column.tolist() for column in columns), strict=True):
        found.setdefault(tuple(key), []).append(row)
    return found


def _match(
    timeline: Timeline, writes: list[int], places: list[int], time: Int64, doubt: int
) -> list[tuple[int, int, bool]]:
    """(arrival, write, whether it is sure), of one sender, receiver and immediate; each in the order of time.

    Of those that had been posted when one arrives, the first to be complete. Where some of either are not on record,
    one that was complete before is none of them.
    """
    spans, found = timeline.spans, []
    is_whole = len(writes) == len(places)
    under_way: list[tuple[int, int]] = []  # (end, write)
    next_write = 0
    for place in places:
        at = int(time[place])
        while next_write < len(writes) and spans.start[writes[next_write]] <= at + doubt:
            row = writes[next_write]
            end = int(spans.end[row])
            heapq.heappush(under_way, (np.iinfo(np.int64).max if end == OPEN_END else end, row))
            next_write += 1
        while under_way and not is_whole and under_way[0][0] < at - doubt:
            heapq.heappop(under_way)
        if under_way:
            found.append((place, under_way[0][1], len(under_way) == 1))
            heapq.heappop(under_way)
    return found


def _doubt_ns(timeline: Timeline, source: int, rank: int) -> int:
    """By how much times of these ranks' hosts may contradict each other."""
    pair = [about for about in timeline.ranks if about.rank in (source, rank)]
    if len({about.machine for about in pair}) < 2:
        return _TICK_NS
    hard_ns = sum(about.clock.host_hard_ns for about in pair if about.clock)
    return _TICK_NS + int(min(np.nan_to_num(hard_ns, nan=_SECOND), _SECOND))


def _unmatched(timeline: Timeline, waits: Int64) -> list[Problem]:
    of_rank = timeline.track_ranks()[timeline.spans.track[waits]]
    return [
        Problem(
            "warning",
            "unmatched_wait",
            rank,
            -1,
            f"rank {rank}: no write on record of {count(number, 'wait')} for immediates",
            number,
        )
        for rank, number in zip(*(column.tolist() for column in np.unique(of_rank, return_counts=True)), strict=True)
    ]

"""The points at which runs depend on each other, in an order in which a replay can go through them.

Two kinds: a run *tells* (it begins to send a signal, or arrives at a barrier), and a run *hears* (a wait that ends when
all that it waits for have told). What a wait waits for is its *meeting*: one signal, all arrivals at a barrier of
ranks, or all warps at one of a block or grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.event_graph import EventGraph
from tracekern.analysis.waits import WaitKind, Waits
from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import Int64, Mask, Timeline

_LATE = np.iinfo(np.int64).max
_MAX_SWEEPS = 8


@dataclass(frozen=True)
class Nodes:
    """[n] in the order of a replay: every node behind those that it depends on."""

    run: Int64
    begin: Int64
    """When the run told, or began to wait."""
    end: Int64
    """When it went on: `begin` for one that tells."""
    meeting: Int64
    hears: Mask
    wait: Int64
    """Index into Waits of one that hears; -1."""
    told_before: Int64
    """[num_meetings] when the last one told whose launch is not replayed."""
    latest: Int64
    """[num_meetings] when the last of all told."""

    def __len__(self) -> int:
        return len(self.run)


@dataclass(frozen=True)
class _Pairs:
    """[n] who tells whom."""

    wait: Int64
    span: Int64
    """The span whose begin tells."""
    meeting: Int64


def count_nodes(timeline: Timeline, waits: Waits) -> Int64:
    """[num_launches + 1] about how many nodes each launch would have; the last entry is for spans of no launch."""
    rows = len(timeline.launches) + 1
    hearing = waits.launch[(waits.signal >= 0) | (waits.last_arrival >= 0)]
    telling = timeline.spans.launch[waits.signal[waits.signal >= 0]]
    return np.bincount(hearing % rows, minlength=rows) + np.bincount(telling % rows, minlength=rows)


def find_nodes(timeline: Timeline, graph: EventGraph, waits: Waits, replayed: Mask) -> Nodes | None:
    """replayed: [num_launches of the Schedule]. None where the clocks contradict each other too much for an order."""
    spans = timeline.spans
    of_run = replayed[graph.runs.launch]

    def run_of(span: Int64) -> Int64:
        run = graph.run_of_spans(timeline, span)
        return np.where(of_run[run], run, -1) if len(of_run) else run  # -1 stays, whatever is read for it

    of_launch = np.append(replayed[: len(timeline.launches)], True)  # the last for spans that name no launch
    pairs = _pairs(waits, of_launch[waits.launch])
    hearer = run_of(waits.row[pairs.wait])
    kept = hearer >= 0
    pairs = _Pairs(pairs.wait[kept], pairs.span[kept], pairs.meeting[kept])
    meetings, meeting = np.unique(pairs.meeting, return_inverse=True)
    told = spans.start[pairs.span]
    teller = run_of(pairs.span)
    latest, told_before = np.full(len(meetings), -_LATE), np.full(len(meetings), -_LATE)
    np.maximum.at(latest, meeting, told)
    np.maximum.at(told_before, meeting[teller < 0], told[teller < 0])

    wait, first = np.unique(pairs.wait, return_index=True)
    tells = np.flatnonzero(teller >= 0)
    tells = tells[np.unique(np.stack([pairs.span[tells], meeting[tells]]), axis=1, return_index=True)[1]]
    run = np.concatenate([run_of(waits.row[wait]), teller[tells]])
    begin = np.concatenate([spans.start[waits.row[wait]], told[tells]])
    end = np.concatenate([spans.end[waits.row[wait]], told[tells]])
    hears = np.arange(len(run)) < len(wait)
    meeting = np.concatenate([meeting[first], meeting[tells]])
    order = _order(graph, run, end, meeting, hears)
    if order is None:
        return None
    wait = np.concatenate([wait, np.full(len(tells), -1)])
    return Nodes(run[order], begin[order], end[order], meeting[order], hears[order], wait[order], told_before, latest)


def _pairs(waits: Waits, chosen: Mask) -> _Pairs:
    """Numbers of meetings: the signal's span, the last arrival's, or for a barrier of ranks the wait's."""
    by_signal = np.flatnonzero(chosen & (waits.signal >= 0) & (waits.kind != WaitKind.BARRIER))
    local = np.flatnonzero(chosen & (waits.last_arrival >= 0))
    arrived = np.searchsorted(waits.row, waits.arrivals.wait)
    arrival = np.flatnonzero(chosen[arrived])
    # Each warp of a block tells the others; for the replay it is enough that all meet.
    return _Pairs(
        np.concatenate([by_signal, arrived[arrival], local]),
        np.concatenate([waits.signal[by_signal], waits.arrivals.signal[arrival], waits.row[local]]),
        np.concatenate([waits.signal[by_signal], waits.arrivals.wait[arrival], waits.last_arrival[local]]),
    )


def _order(graph: EventGraph, run: Int64, end: Int64, meeting: Int64, hears: Mask) -> Int64 | None:
    """By time; where clocks contradict a signal, what follows it is moved behind it. None where that does not end."""
    # Doubled, so that at one time a wait ends before its run tells, and hears after another one told.
    key = 2 * end + ~hears
    in_run = np.lexsort((key, run))
    launch = graph.runs.launch[run]
    before = graph.schedule.before[launch]
    for _ in range(_MAX_SWEEPS):
        old = key.copy()
        told = np.full(int(meeting.max(initial=-1)) + 1, -_LATE)
        np.maximum.at(told, meeting[~hears], key[~hears] + 1)
        key[hears] = np.maximum(key[hears], told[meeting[hears]])
        over = np.full(len(graph.schedule.rank) + 1, -_LATE)
        np.maximum.at(over, launch, key)
        key = np.maximum(key, over[before])  # launch -1 is the last entry, which stays early
        of_run = key[in_run]
        shift = one_line(run[in_run], of_run, of_run)
        key[in_run] = np.maximum.accumulate(of_run + shift) - shift
        if (key == old).all():
            place = np.empty(len(run), np.int64)
            place[in_run] = np.arange(len(run))
            return np.lexsort((place, key))
    return None

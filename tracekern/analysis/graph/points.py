"""Nodes inside runs: where a run tells, begins to send a signal or arrives at a barrier, and where it hears."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.arrivals import find_arrivals
from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.columns import order_of
from tracekern.timeline.model import Int32, Int64, Mask, Timeline

RUNS_AT_ONCE = 1 << 14
"""So many runs are worked on at a time: what is worked with stays in the cache."""


@dataclass(frozen=True)
class Points:
    """Nodes inside runs, and which of them wait for which. They are numbered from 1: told, arrived, heard, and then one
    for each meeting."""

    told: Int64
    """[num_told] signal spans."""
    told_run: Int64
    arrived: Int64
    """[num_arrived] waits at barriers of a block or grid, which tell when they begin."""
    arrived_run: Int64
    heard: Int64
    """[num_heard] waits that something on record ended."""
    heard_run: Int64
    node_of_told: Int32
    """[num_spans] node of a signal's span; -1 for one that told nobody."""
    node_of_heard: Int32
    """[num_waits] node of a wait's end; -1 for one that nothing on record ended."""

    @property
    def first_arrived(self) -> int:
        return 1 + len(self.told)

    @property
    def first_heard(self) -> int:
        return self.first_arrived + len(self.arrived)

    @property
    def first_meeting(self) -> int:
        return self.first_heard + len(self.heard)


@dataclass(frozen=True)
class ByRun:
    """The runs of some points, and their order by run."""

    run: Int64
    order: Int64 | None
    """None where they ascend already: all but what a track recorded of two launches in turns."""

    @classmethod
    def of(cls, run: Int64) -> ByRun:
        order = order_of(run) if (run[1:] < run[:-1]).any() else None
        return cls(run if order is None else run[order], order)

    def places(self, first: int, stop: int) -> Int64:
        """[n] of the points in the runs first..stop."""
        places = slice(*np.searchsorted(self.run, (first, stop)).tolist())
        return np.arange(places.start, places.stop) if self.order is None else self.order[places]


def is_message(waits: Waits) -> Mask:
    return np.asarray((waits.signal >= 0) & (waits.kind != WaitKind.BARRIER), bool)


def find_points(timeline: Timeline, graph: EventGraph, waits: Waits) -> Points:
    at_barrier, arrival = find_arrivals(timeline, waits)
    by_message = np.flatnonzero(is_message(waits))
    local = np.flatnonzero(waits.last_arrival >= 0)

    def in_runs(row: Int64, span: Int64) -> tuple[Int64, Int64]:
        run = graph.run_of_spans(timeline, span)
        return row[run >= 0], run[run >= 0]

    heard = _distinct(len(waits), by_message, local, at_barrier)
    told = _distinct(len(timeline.spans), waits.signal[by_message], arrival)
    heard, heard_run = in_runs(heard, waits.row[heard])
    told, told_run = in_runs(told, told)
    arrived, arrived_run = in_runs(local, waits.row[local])
    node_of_told, node_of_heard = (np.full(count, -1, np.int32) for count in (len(timeline.spans), len(waits)))
    found = Points(told, told_run, arrived, arrived_run, heard, heard_run, node_of_told, node_of_heard)
    node_of_told[told] = 1 + np.arange(len(told))
    node_of_heard[heard] = found.first_heard + np.arange(len(heard))
    return found


def _distinct(count: int, *numbers: Int64) -> Int64:
    """Those of 0..count that are among the numbers."""
    is_there = np.zeros(count, bool)
    for some in numbers:
        is_there[some] = True
    return np.flatnonzero(is_there)

"""Imbalance is work, not wait: how much longer than the mean the busiest rank works in a phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits import Phase, PhaseNumbers
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Spans, Timeline


@dataclass(frozen=True)
class Imbalance:
    phase: Phase
    busiest_rank: int
    max_ns: int
    mean_ns: float
    """Over all ranks of the timeline, those that did nothing included."""
    busy_ns: dict[int, int]
    """By rank: sum over its warps of the time in spans of this phase, less the waits inside them."""

    @property
    def imbalance_ns(self) -> float:
        return self.max_ns - self.mean_ns


def work_imbalance(timeline: Timeline) -> tuple[Imbalance, ...]:
    """One row for each phase of work, largest imbalance first."""
    phases, rank_of_track = PhaseNumbers(timeline), timeline.track_ranks()
    is_wait, is_work = (timeline.events_of(wanted) for wanted in (EventClass.WAIT, EventClass.WORK))
    busy: dict[Phase, dict[int, int]] = {}
    for _, spans in parts_by_track(timeline.spans):
        closed = spans.end != OPEN_END
        row, waits = (np.flatnonzero(closed & of_event[spans.event]) for of_event in (is_work, is_wait))
        groups = group_rows(len(row), phases.of(spans, row), rank_of_track[spans.track[row]])
        sums = groups.sum(spans.end[row] - spans.start[row] - _waits_inside(spans, row, waits))
        for number, rank, ns in zip(*(column.tolist() for column in (*groups.columns, sums)), strict=True):
            of_rank = busy.setdefault(phases[number], {})
            of_rank[rank] = of_rank.get(rank, 0) + ns
    found = []
    for about in sorted(busy):
        of_rank = {rank.rank: busy[about].get(rank.rank, 0) for rank in timeline.ranks}
        busiest = max(of_rank, key=lambda rank: (of_rank[rank], -rank))
        mean = sum(of_rank.values()) / len(of_rank)
        found.append(Imbalance(about, busiest, of_rank[busiest], mean, of_rank))
    return tuple(sorted(found, key=lambda one: -one.imbalance_ns))


def _waits_inside(spans: Spans, row: Int64, waits: Int64) -> Int64:
    """[n] ns of the spans `waits` that begin inside the span `row` of the same track, and do not enclose it."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans.end[waits] - spans.start[waits])])
    shift = one_line(spans.track, spans.start, spans.end)
    stop = np.searchsorted((spans.start + shift)[waits], (spans.end + shift)[row], "left")
    start = np.searchsorted(waits, row, "right")
    inside: Int64 = before[np.maximum(stop, start)] - before[start]
    return inside

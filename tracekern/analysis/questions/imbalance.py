"""Imbalance is work, not wait: how much longer than the mean the busiest rank works in a phase."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.partial import Sums
from tracekern.analysis.waits.analyze import Phase, PhaseNumbers
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.facts.stages import stages_of
from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Spans, Timeline


@dataclass(frozen=True)
class Imbalance:
    phase: Phase
    busy_ns: dict[int, int]
    """Rank -> time of its warps in spans of this phase while no wait inside them is open; of all ranks that are
    compared in its stage."""

    @property
    def busiest_rank(self) -> int:
        return max(self.busy_ns, key=lambda rank: (self.busy_ns[rank], -rank))

    @property
    def max_ns(self) -> int:
        return self.busy_ns[self.busiest_rank]

    @property
    def mean_ns(self) -> float:
        return sum(self.busy_ns.values()) / len(self.busy_ns)

    @property
    def imbalance_ns(self) -> float:
        return self.max_ns - self.mean_ns


def work_of_ranks(timeline: Timeline) -> Sums:
    """`ns` by phase, as PhaseNumbers number them, and rank: time of warps in spans of work without waits inside."""
    phases, rank_of_track = PhaseNumbers(timeline), timeline.track_ranks()
    is_wait, is_work = (timeline.events_of(wanted) for wanted in (EventClass.WAIT, EventClass.WORK))
    none = np.empty(0, np.int64)
    found = [Sums.of((none, none), ns=none)]
    for _, spans in parts_by_track(timeline.spans):
        closed = spans.end != OPEN_END
        row, waits = (np.flatnonzero(closed & of_event[spans.event]) for of_event in (is_work, is_wait))
        ns = spans.end[row] - spans.start[row] - _waits_inside(spans, row, waits)
        found.append(Sums.of((phases.of(spans, row), rank_of_track[spans.track[row]]), ns=ns))
    return Sums.total(found)


def work_imbalance(timeline: Timeline, work: Sums | None = None) -> tuple[Imbalance, ...]:
    """One row for each phase of work, largest imbalance first. work: work_of_ranks(), of the timeline by default."""
    phases, stages, busy = PhaseNumbers(timeline), stages_of(timeline), dict[Phase, dict[int, int]]()
    compared = dict(zip(stages.names, stages.has_rank, strict=True))
    for number, rank, ns in (work_of_ranks(timeline) if work is None else work).rows():
        busy.setdefault(phases[number], {})[rank] = ns
    found = []
    for about in sorted(busy):
        is_compared = compared.get(about.stage, np.ones(len(timeline.ranks), bool))
        among = itertools.compress(timeline.ranks, is_compared)
        found.append(Imbalance(about, {rank.rank: busy[about].get(rank.rank, 0) for rank in among}))
    return tuple(sorted(found, key=lambda one: -one.imbalance_ns))


def _waits_inside(spans: Spans, row: Int64, waits: Int64) -> Int64:
    """[n] ns of the span `row` in which some span of `waits` of its track is open that began inside it."""
    shift = one_line(spans.track, spans.start, spans.end)
    start, end = spans.start + shift, spans.end + shift
    inside = np.zeros(len(row), np.int64)
    asked = np.arange(len(row))
    while len(asked):
        outer = _Outermost.of(start, end, waits)
        around = outer.around(row[asked], start[row[asked]])
        free = asked[around < 0]
        inside[free] = outer.covered_ns(end[row[free]]) - outer.covered_ns(start[row[free]])
        # Work inside a wait: that wait is not inside the work, others may be.
        asked = asked[around >= 0]
        waits = waits[~np.isin(waits, around)]
    return inside


@dataclass(frozen=True)
class _Outermost:
    """[n] the stretches of time, all tracks on one line, in which some wait is open; ascending."""

    first: Int64
    """The wait that opened each: index into Spans."""
    start: Int64
    end: Int64

    @classmethod
    def of(cls, start: Int64, end: Int64, waits: Int64) -> _Outermost:
        """start, end: of all spans, on that line."""
        reach = np.maximum.accumulate(end[waits])
        opens = np.flatnonzero(np.append(True, start[waits][1:] >= reach[:-1])[: len(waits)])
        last = np.append(opens[1:], len(waits))[: len(opens)] - 1
        return cls(waits[opens], start[waits[opens]], reach[last])

    def around(self, row: Int64, start: Int64) -> Int64:
        """[n] the wait that opened before the span `row` and is open at its start; -1 where there is none."""
        before = np.searchsorted(self.first, row) - 1
        is_open = before >= 0
        is_open[is_open] = self.end[before[is_open]] > start[is_open]
        return np.where(is_open, np.append(self.first, -1)[before], -1)

    def covered_ns(self, time: Int64) -> Int64:
        """[n] ns of all stretches before each time."""
        before = np.append(0, np.cumsum(self.end - self.start))
        num_begun = np.searchsorted(self.start, time, "right")
        still_open = np.maximum(np.append(0, self.end)[num_begun] - time, 0)
        return before[num_begun] - np.where(num_begun > 0, still_open, 0)

"""How long waits took, apart from being late: what of it is on record, and what flags usually take.

What is usual is told by the waits of all parts of a run. It is worked out in rounds: each part counts what a round asks
for, and goes on from the sum of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tracekern.analysis.graph.arrivals import Arrivals, find_arrivals
from tracekern.analysis.graph.points import RUNS_AT_ONCE, ByRun, Points, is_message
from tracekern.analysis.groups import group_rows, median_of_groups, quantile_of_groups
from tracekern.analysis.partial import Counts
from tracekern.analysis.parts import Parts
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.columns import order_by
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import OPEN_END, Float64, Int32, Int64, Mask, Timeline

NEVER = np.iinfo(np.int64).min
_HELD_UP = 0.5
"""A wait that lasts this part of a flag's way was held up by the flag."""
_POLLS, _PART, _AS_USUAL = 3, 0.2, 2
"""So was one that lasts as many times as long as a poll, and this part of the way, or whose flag took at most as many
times as long as others of its pair. Single polls are slow, too, long after the flag was there."""


@dataclass(eq=False)
class WaitTimes:
    """[num_waits] what each wait of a part took, apart from being late. Final when finish() has done all rounds."""

    points: Points
    over: Int64
    """When it was over, in ns from the timeline's origin."""
    passed: Int64
    """From the last signal's begin, or the last arrival, to the end of the wait; 0 where none is known."""
    lasted: Int64
    drain: Int64
    """How long the signal's stores drained."""
    flag: Int64
    """The rest of `passed`, at most."""
    known: Mask
    was_held_up: Mask
    phase: Int64
    """Its PhaseNumbers."""
    peer: Int32
    rank: Int32
    arrivals: Arrivals
    polled: Float64 = field(default_factory=lambda: np.empty(0))
    """What waits of its phase take that found their signal there."""
    latency: Float64 = field(default_factory=lambda: np.empty(0))
    """As `passed`, without what is not on record: of a message that nothing waited for, how long it took."""
    least: Float64 = field(default_factory=lambda: np.empty(0))
    """What it takes where nothing holds it up."""

    @classmethod
    def of(cls, timeline: Timeline, waits: Waits, points: Points) -> WaitTimes:
        """waits: those that ended."""
        spans, latest = timeline.spans, _latest_told(timeline, waits)
        over = _ends_of_waits(timeline, waits, points, latest)
        known, lasted = latest > NEVER, over - spans.start[waits.row]
        passed = np.where(known, over - np.where(known, latest, 0), 0)
        drain = np.where(is_message(waits), np.maximum(spans.end[waits.signal] - spans.start[waits.signal], 0), 0)
        flag = np.maximum(passed - drain, 0)
        was_late = (latest >= spans.start[waits.row]) | (waits.late_ns + waits.drain_ns > 0)
        held_up = known & (was_late | (lasted >= _HELD_UP * np.maximum(flag, 1)))
        phase = np.array(waits.phase_numbers, np.int64)[waits.phase]
        arrivals = Arrivals.of(timeline, waits, phase, over)
        return cls(points, over, passed, lasted, drain, flag, known, held_up, phase, waits.peer, waits.rank, arrivals)

    def count_polls(self) -> Counts:
        """Counts how long those took that found their signal there: most only polled once."""
        return Counts.of([self.phase], self.lasted, self.known & ~self.was_held_up)

    def learn_polls(self, total: Counts) -> WaitTimes:
        self.polled = total.at_least(0.25)[total.number_of(self.phase)]
        self.was_held_up = self.was_held_up | (self._was_no_poll & (self.lasted >= _PART * self.flag))
        return self

    def count_flags(self) -> Counts:
        return Counts.of([self.phase, self.peer, self.rank], self.flag, self.was_held_up)

    def learn_flags(self, total: Counts, timeline: Timeline) -> WaitTimes:
        """How long a message took that nothing waited for is not on record: its drain, and what flags usually take."""
        usual = _usual_flags(timeline, total)[total.number_of(self.phase, self.peer, self.rank)]
        self.was_held_up = self.was_held_up | (self._was_no_poll & (self.flag <= _AS_USUAL * usual))
        polled = np.minimum(np.nan_to_num(self.polled), self.lasted)
        self.latency = np.where(self.was_held_up, self.passed, np.minimum(self.drain + usual, self.passed)).astype(
            float
        )
        self.least = np.where(self.was_held_up, polled, self.lasted).astype(float)
        self.arrivals.expect(self.latency)
        return self

    def count_last(self) -> Counts:
        return self.arrivals.count_last(self.latency)

    def learn_last(self, total: Counts) -> WaitTimes:
        self.arrivals.learn_last(total, self.latency)
        return self

    def count_slow(self) -> Counts:
        return self.arrivals.count_slow()

    def learn_slow(self, total: Counts) -> WaitTimes:
        self.arrivals.learn_slow(total)
        return self

    def count_variations(self) -> Counts:
        return self.arrivals.count_variations()

    def learn_variations(self, total: Counts) -> WaitTimes:
        self.arrivals.learn_variations(total)
        return self

    @property
    def _was_no_poll(self) -> Mask:
        return np.asarray(self.known & (self.lasted > _POLLS * self.polled), bool)


def finish(times: Parts[WaitTimes], timeline: Timeline) -> Parts[WaitTimes]:
    """Works out all rounds. timeline: for its tables."""
    rounds: list[tuple[Callable[[WaitTimes], Counts], Callable[..., WaitTimes]]] = [
        (WaitTimes.count_polls, WaitTimes.learn_polls),
        (WaitTimes.count_flags, partial(WaitTimes.learn_flags, timeline=timeline)),
        (WaitTimes.count_last, WaitTimes.learn_last),
        (WaitTimes.count_slow, WaitTimes.learn_slow),
        (WaitTimes.count_variations, WaitTimes.learn_variations),
    ]
    for count, learn in rounds:
        times = times.map(partial(learn, total=times.map(count).total()))
    return times


def _latest_told(timeline: Timeline, waits: Waits) -> Int64:
    """[num_waits] when the last of all that each wait was for told, or NEVER."""
    start = timeline.spans.start
    latest = np.full(len(waits), NEVER)
    by_message, local = np.flatnonzero(is_message(waits)), np.flatnonzero(waits.last_arrival >= 0)
    latest[by_message] = start[waits.signal[by_message]]
    latest[local] = start[waits.last_arrival[local]]
    at_barrier, arrival = find_arrivals(timeline, waits)
    np.maximum.at(latest, at_barrier, start[arrival])
    return latest


def _ends_of_waits(timeline: Timeline, waits: Waits, points: Points, latest: Int64) -> Int64:
    """[num_waits] when each was over: at its end, or where its warp sent a signal before that, once all had arrived.

    A warp that acknowledges what it waited for, inside the span of the wait, has waited no longer.
    """
    spans, over = timeline.spans, timeline.spans.end[waits.row]
    told, heard = ByRun.of(points.told_run), ByRun.of(points.heard_run)
    for at in range(0, int(points.heard_run.max(initial=-1)) + 1, RUNS_AT_ONCE):
        some = told.places(at, at + RUNS_AT_ONCE)
        run, sent = points.told_run[some], spans.start[points.told[some]]
        order = order_by(run, sent)
        run, sent = run[order], sent[order]
        some = heard.places(at, at + RUNS_AT_ONCE)
        wait = points.heard[some]
        signal = waits.signal[wait]
        drained = np.where((signal >= 0) & (spans.end[signal] != OPEN_END), spans.end[signal], NEVER)
        there = np.maximum(np.maximum(spans.start[waits.row[wait]], latest[wait]), drained)
        first, stop = (np.searchsorted(run, points.heard_run[some], side) for side in ("left", "right"))
        place = bisect_right(sent, first, stop, there)
        begun = np.append(sent, 0)[place]
        inside = (place < stop) & (begun < over[wait])
        over[wait[inside]] = begun[inside]
    return over


def _usual_flags(timeline: Timeline, flags: Counts) -> Float64:
    """[num_pairs] what flags of each pair of ranks take in a phase, by the median of those that held up a wait.

    Of a pair without any it is what the pair takes in other phases, or else what a quarter of all pairs take at most:
    those that hold up waits may be the slow ones. flags: by phase, peer and rank.
    """
    usual = flags.medians()
    _, peer, rank = flags.groups
    near = timeline.on_same_node(peer.astype(np.int32), rank.astype(np.int32)).astype(np.int64)
    links, known = group_rows(len(peer), peer, rank), np.flatnonzero(np.isfinite(usual))
    of_link = median_of_groups(links.group[known], usual[known], len(links))[links.group]
    usual = np.where(np.isfinite(usual), usual, of_link)
    known = np.flatnonzero(np.isfinite(usual))
    usual = np.where(np.isfinite(usual), usual, quantile_of_groups(near[known], usual[known], 2, 0.25)[near])
    return np.asarray(np.nan_to_num(usual), float)

"""Which arrival ended a wait at a barrier of ranks, and how long each was on its way.

On record is when each rank signalled, and when the wait was over: that the last one's signal ended it is what one
expects. A slow link may have, from a rank that came before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracekern.analysis.partial import Counts
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline

_SLOW = 2
"""An arrival that takes so many times as long as usual is not what ended the wait, if another one may have been."""
_MIN_WAITS = 4
_STEADIER = 3
"""A link that ends waits takes the same time always; of ranks that came before, the time until the end varies."""
_QUARTER = 4
"""Latencies are medians of medians of whole ns: whole numbers in quarters of a ns."""


def find_arrivals(timeline: Timeline, waits: Waits) -> tuple[Int64, Int64]:
    """([n] wait, [n] signal span) of arrivals at barriers of ranks, without a warp's own: it lies before its wait."""
    track, arrivals = timeline.spans.track, waits.arrivals
    others = track[arrivals.signal] != track[arrivals.wait]
    return np.searchsorted(waits.row, arrivals.wait[others]), arrivals.signal[others]


@dataclass(eq=False)
class Arrivals:
    """[n] arrivals of a part. What they took, and which ended their waits, is worked out in rounds: see WaitTimes."""

    wait: Int64
    """Index into Waits."""
    signal: Int64
    """Its span."""
    sender: Int32
    rank: Int32
    """That waited."""
    near: Int64
    """1 where both are on one node."""
    phase: Int64
    """PhaseNumbers of the wait."""
    passed: Int64
    """ns from the arrival until the wait was over."""
    num_waits: int
    ended: Mask = field(default_factory=lambda: np.empty(0, bool))
    """Whether it ended its wait."""
    latency: Float64 = field(default_factory=lambda: np.empty(0))
    """How long it was on its way. Of those that ended no wait it is not on record: what others within, or across, nodes
    take, or less if there was less time."""
    _slow: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    """Those that may have ended a wait in place of a slow one."""
    _middle: Float64 = field(default_factory=lambda: np.empty(0))
    """[num_slow] what its link usually takes."""

    @classmethod
    def of(cls, timeline: Timeline, waits: Waits, phase: Int64, over: Int64) -> Arrivals:
        """phase, over: [num_waits] PhaseNumbers, and when each was over."""
        wait, signal = find_arrivals(timeline, waits)
        sender = timeline.track_ranks()[timeline.spans.track[signal]]
        rank = waits.rank[wait]
        near = timeline.on_same_node(sender, rank).astype(np.int64)
        passed = over[wait] - timeline.spans.start[signal]
        return cls(wait, signal, sender, rank, near, phase[wait], passed, len(waits))

    def expect(self, latency: Float64) -> None:
        """The last one ended its wait. latency: [num_waits] from the last arrival to its end."""
        self.ended = self.passed <= latency[self.wait]

    def count_last(self, latency: Float64) -> Counts:
        quarters = (latency[self.wait] * _QUARTER).astype(np.int64)
        return Counts.of([self.phase, self.near], quarters, self.ended)

    def learn_last(self, total: Counts, latency: Float64) -> None:
        usual = (total.at_least(0.25) / _QUARTER)[total.number_of(self.phase, self.near)]
        is_slow = np.zeros(self.num_waits, bool)
        is_slow[self.wait[self.ended & (self.passed > _SLOW * usual)]] = True
        self._slow = np.flatnonzero(is_slow[self.wait])
        self.latency = np.minimum(np.where(np.isfinite(usual), usual, latency[self.wait]), self.passed)

    def count_slow(self) -> Counts:
        return Counts.of(self._links, self.passed[self._slow], np.ones(len(self._slow), bool))

    def learn_slow(self, total: Counts) -> None:
        self._middle = total.medians()[total.number_of(*self._links)]

    def count_variations(self) -> Counts:
        off = np.abs(self.passed[self._slow] - self._middle)
        return Counts.of(self._links, (2 * off).astype(np.int64), np.ones(len(off), bool))

    def learn_variations(self, total: Counts) -> None:
        by_link = self._slow[_steadiest(total)[total.number_of(*self._links)]]
        is_by_link = np.zeros(self.num_waits, bool)
        is_by_link[self.wait[by_link]] = True
        self.ended = self.ended & ~is_by_link[self.wait]
        self.ended[by_link] = True
        self.latency = np.where(self.ended, self.passed, self.latency)

    @property
    def _links(self) -> tuple[Int64, Int32, Int32]:
        """[num_slow] phase, rank and sender."""
        return self.phase[self._slow], self.rank[self._slow], self.sender[self._slow]


def _steadiest(total: Counts) -> Mask:
    """[num_links] the one link into a rank, in a phase, that takes the same time in all waits while others vary.

    total: how far its times are from their median, by phase, rank and sender.
    """
    varies = total.medians()
    phase, rank, _ = total.groups
    enough = np.flatnonzero(total.count() >= _MIN_WAITS)
    order = enough[np.lexsort((varies[enough], rank[enough], phase[enough]))]
    is_other = (np.diff(phase[order]) != 0) | (np.diff(rank[order]) != 0)
    is_first = np.append(True, is_other)[: len(order)]
    first = np.flatnonzero(is_first)
    second = np.minimum(first + 1, len(order) - 1)
    has_second = ~is_first[second] if len(order) else np.zeros(0, bool)
    is_it = ~has_second | (varies[order[second]] > _STEADIER * varies[order[first]])
    chosen = np.zeros(len(varies), bool)
    chosen[order[first[is_it]]] = True
    return chosen

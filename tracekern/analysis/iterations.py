"""The iterations of a run: the launches of all ranks that belong together, and how long each took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.statistics import LaunchIterations
from tracekern.timeline.model import OPEN_END, EventClass, Int32, Int64, Timeline


@dataclass(frozen=True)
class Iterations:
    """[n] columns, one row an iteration, in their order. Times in ns from the origin of the timeline."""

    number: Int64
    """From 0; one that never ended is missing."""
    start: Int64
    """When the first of its kernels began on any rank."""
    end: Int64
    """When the last of its kernels ended on any rank."""
    of_launch: Int32
    """[num_launches] number of each launch's iteration; -1 for set-up."""

    def __len__(self) -> int:
        return len(self.number)

    @property
    def duration_ns(self) -> Int64:
        return self.end - self.start

    def best_median_worst(self) -> tuple[int, int, int]:
        """Row numbers of the shortest, the (lower) median and the longest iteration. Raises IndexError when empty."""
        order = np.argsort(self.duration_ns, kind="stable")
        return int(order[0]), int(order[(len(order) - 1) // 2]), int(order[-1])


def find_iterations(timeline: Timeline) -> Iterations:
    """The iterations that tracekern.analysis.statistics counts, without those that have a launch which never ended."""
    spans = timeline.spans
    of_launch = LaunchIterations(timeline).of_launch
    is_launch = np.array([event.event_class == EventClass.LAUNCH for event in timeline.events], bool)
    chosen = np.flatnonzero(is_launch[spans.event] & (np.append(of_launch, -1)[spans.launch] >= 0))
    number_of = of_launch[spans.launch[chosen]].astype(np.int64)
    never_ended = np.unique(number_of[spans.end[chosen] == OPEN_END])
    number, row = np.unique(number_of, return_inverse=True)
    start = np.full(len(number), np.iinfo(np.int64).max)
    end = np.full(len(number), np.iinfo(np.int64).min)
    np.minimum.at(start, row, spans.start[chosen])
    np.maximum.at(end, row, spans.end[chosen])
    whole = ~np.isin(number, never_ended)
    return Iterations(number[whole], start[whole], end[whole], of_launch)

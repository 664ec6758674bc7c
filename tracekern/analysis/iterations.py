"""The iterations of a run: the launches of all ranks that belong together, and how long each took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.model import OPEN_END, EventClass, Int64, Timeline


@dataclass(frozen=True)
class Iterations:
    """[n] columns, one row an iteration, in order of `sequence`. Times in ns from the origin of the timeline."""

    sequence: Int64
    start: Int64
    """When the first of its kernels began on any rank."""
    end: Int64
    """When the last of its kernels ended on any rank."""

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def duration_ns(self) -> Int64:
        return self.end - self.start

    def best_median_worst(self) -> tuple[int, int, int]:
        """Row numbers of the shortest, the (lower) median and the longest iteration. Raises IndexError when empty."""
        order = np.argsort(self.duration_ns, kind="stable")
        return int(order[0]), int(order[(len(order) - 1) // 2]), int(order[-1])


def find_iterations(timeline: Timeline) -> Iterations:
    """Launches with equal `sequence` form an iteration, over all kernels that were launched as often as any was.

    `sequence` counts the launches of one kernel on one rank (docs/architecture.md). An iteration with a launch that
    never ended is left out.
    """
    spans = timeline.spans
    is_launch = np.array([event.event_class == EventClass.LAUNCH for event in timeline.events], bool)
    repeats: dict[str, int] = {}
    for launch in timeline.launches:
        repeats[launch.name] = max(repeats.get(launch.name, 0), launch.sequence + 1)
    most = max(repeats.values(), default=0)
    counts = np.array([*(repeats[launch.name] == most for launch in timeline.launches), False])  # index -1: no launch
    sequence_of = np.array([launch.sequence for launch in timeline.launches], np.int64)
    chosen = np.flatnonzero(is_launch[spans.event] & counts[spans.launch])
    never_ended = np.unique(sequence_of[spans.launch[chosen[spans.end[chosen] == OPEN_END]]])
    sequence, row = np.unique(sequence_of[spans.launch[chosen]], return_inverse=True)
    start = np.full(len(sequence), np.iinfo(np.int64).max)
    end = np.full(len(sequence), np.iinfo(np.int64).min)
    np.minimum.at(start, row, spans.start[chosen])
    np.maximum.at(end, row, spans.end[chosen])
    whole = ~np.isin(sequence, never_ended)
    return Iterations(sequence[whole], start[whole], end[whole])

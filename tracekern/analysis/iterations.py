"""The iterations of a run: the launches of all ranks that belong together, and how long each took.

A stage is a launch name. The number of iterations is the commonest number of launches a stage has (the larger one of
equals), a stage launched k times as often belongs to each k times, and a stage launched any other number of times is
set-up and belongs to none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.model import OPEN_END, EventClass, Int32, Int64, Timeline


class LaunchIterations:
    """Which launch belongs to which iteration."""

    def __init__(self, timeline: Timeline) -> None:
        sequences: dict[str, set[int]] = {}
        for launch in timeline.launches:
            sequences.setdefault(launch.name, set()).add(launch.sequence)
        self.stages = tuple(sequences)
        lengths = Counter(len(found) for found in sequences.values())
        self.count = max(lengths, key=lambda length: (lengths[length], length), default=0)
        self.set_up_stages = tuple(name for name, found in sequences.items() if len(found) % self.count)
        self.first_measured = 1 if self.count > 1 else 0
        order = {name: {number: i for i, number in enumerate(sorted(found))} for name, found in sequences.items()}
        self.of_launch = np.array(
            [
                -1
                if launch.name in self.set_up_stages
                else order[launch.name][launch.sequence] * self.count // len(sequences[launch.name])
                for launch in timeline.launches
            ],
            np.int32,
        )
        """[num_launches] its iteration, -1: set-up."""
        number = {name: i for i, name in enumerate(self.stages)}
        self.stage_of_launch = np.array([number[launch.name] for launch in timeline.launches], np.int32)
        self.is_measured = self.of_launch >= self.first_measured


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
    """The iterations without those that have a launch which never ended; none where clocks are not aligned."""
    spans = timeline.spans
    of_launch = LaunchIterations(timeline).of_launch
    is_launch = np.array([event.event_class == EventClass.LAUNCH for event in timeline.events], bool)
    if not timeline.aligned and len(timeline.ranks) > 1:
        is_launch[:] = False
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

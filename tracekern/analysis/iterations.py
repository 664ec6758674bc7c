"""The iterations of a run: the launches of all ranks that belong together, and how long each took.

A stage is a launch name. The number of iterations is the commonest number of launches a stage has (the larger one of
equals), a stage launched k times as often belongs to each k times, and a stage launched any other number of times is
set-up and belongs to none. Launches that a flight recorder did not keep are counted, and where the run did not come to
its end, a stage may lack what it had still to do.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.model import OPEN_END, EventClass, Int32, Int64, Timeline

_CUT_SHORT = ("open_span", "salvaged", "running", "launch_not_recorded", "launch_lost")
"""Problems of a capture whose last launches may be missing."""


class LaunchIterations:
    """Which launch belongs to which iteration."""

    def __init__(self, timeline: Timeline) -> None:
        step = math.gcd(*(launch.sequence for launch in timeline.launches)) or 1  # of a capture of each Nth launch
        place = [launch.sequence // step for launch in timeline.launches]
        of_stage: dict[str, list[int]] = {}
        for launch, number in zip(timeline.launches, place, strict=True):
            of_stage.setdefault(launch.name, []).append(number)
        self.stages = tuple(of_stage)
        is_cut = any(problem.kind in _CUT_SHORT for problem in timeline.problems)
        times = _times_an_iteration({name: max(found) + 1 for name, found in of_stage.items()}, is_cut)
        self.set_up_stages = tuple(name for name in self.stages if not times[name])
        iteration = [
            number // times[launch.name] if times[launch.name] else -1
            for launch, number in zip(timeline.launches, place, strict=True)
        ]
        kept = {number: idx for idx, number in enumerate(sorted({*iteration} - {-1}))}
        self.count = len(kept)
        self.first_measured = 1 if self.count > 1 else 0
        self.of_launch = np.array([kept.get(number, -1) for number in iteration], np.int32)
        """[num_launches] its iteration, -1: set-up."""
        stage = {name: i for i, name in enumerate(self.stages)}
        self.stage_of_launch = np.array([stage[launch.name] for launch in timeline.launches], np.int32)
        self.is_measured = self.of_launch >= self.first_measured
        num_launches = np.bincount(self.of_launch[self.of_launch >= 0], minlength=self.count)
        is_part = is_cut or any(min(found) > 0 for found in of_stage.values())
        self.is_whole = (num_launches == num_launches.max(initial=0)) | (not is_part)
        """[count] False for one that lacks launches: not kept, or never made."""


def _times_an_iteration(launched: dict[str, int], is_cut: bool) -> dict[str, int]:
    """How often each iteration launches a stage, 0: it belongs to none. is_cut: the last one may lack some."""
    lengths = Counter(launched.values())
    count = max(lengths, key=lambda length: (lengths[length], length), default=1)
    if is_cut and count + 1 in lengths:
        count += 1
    times = {name: -(-length // count) for name, length in launched.items()}
    missing = {name: times[name] * count - length for name, length in launched.items()}
    allowed = {name: times[name] if is_cut and times[name] < length else 0 for name, length in launched.items()}
    return {name: times[name] if missing[name] <= allowed[name] else 0 for name in launched}


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
    """The iterations that lack no launch and have none that never ended; none where clocks are not aligned."""
    spans, iterations = timeline.spans, LaunchIterations(timeline)
    of_launch = iterations.of_launch
    is_launch = timeline.events_of(EventClass.LAUNCH)
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
    whole = ~np.isin(number, never_ended) & iterations.is_whole[number]
    return Iterations(number[whole], start[whole], end[whole], of_launch)

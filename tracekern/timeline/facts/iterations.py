"""The iterations of a run: the launches of all ranks that belong together, and how long each took.

A stage is a launch name. The number of iterations is the commonest number of launches a stage has, a stage launched k
times as often belongs to each k times, and a stage launched any other number of times is set-up and belongs to none. Of
equally common numbers it is the largest, or one above 1 that this is a multiple of. Where every stage has several
launches in an epoch, as in calls by partitions, an iteration has as many. Launches that a flight recorder or a capture
of each N-th launch did not keep are counted, and where the run did not come to its end, a stage may lack what it had
still to do. A launch named `align` belongs to none, nor does a single barrier of the ranks ahead of all others.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tracekern.dump.format import RANK_BARRIER
from tracekern.timeline.model import OPEN_END, EventClass, Int32, Int64, Mask, Timeline
from tracekern.timeline.table import Table

_CUT_SHORT = ("open_span", "open_work", "salvaged", "running", "launch_not_recorded", "launch_lost")
"""Problems of a capture whose last launches may be missing."""

_FEW_CALLS = 8
"""At most so many calls come between the barrier ahead and the first that is recorded: one counts records, say."""


class LaunchIterations:
    """Which launch belongs to which iteration."""

    def __init__(self, timeline: Timeline) -> None:
        step = math.gcd(*(launch.sequence for launch in timeline.launches)) or 1  # of a capture of each N-th launch
        of_stage: dict[str, list[int]] = {}
        for launch in timeline.launches:
            of_stage.setdefault(launch.name, []).append(launch.sequence)
        outside = {launch.name for launch in timeline.launches if launch.is_align}
        self.stages = tuple(of_stage)
        if len(self.stages) > 1 and self.stages[0] == RANK_BARRIER and not any(of_stage[RANK_BARRIER]):
            outside.add(RANK_BARRIER)
        is_cut = any(problem.kind in _CUT_SHORT for problem in timeline.problems)
        lengths = {name: max(found) // step + 1 for name, found in of_stage.items() if name not in outside}
        repeats = _launches_an_epoch(timeline, outside)
        common = _of_most_ranks(timeline, outside)
        times = dict.fromkeys(outside, 0) | _times_an_iteration(lengths, common, step, is_cut, repeats)
        self.set_up_stages = tuple(name for name in self.stages if not times[name])
        iteration = [
            launch.sequence // times[launch.name] if times[launch.name] else -1 for launch in timeline.launches
        ]
        kept = {number: idx for idx, number in enumerate(sorted({*iteration} - {-1}))}
        self.count = len(kept)
        self.first_measured = 1 if self.count > 1 else 0
        self.of_launch = np.array([kept.get(number, -1) for number in iteration], np.int32)
        """[num_launches] its iteration, -1: set-up."""
        stage = {name: i for i, name in enumerate(self.stages)}
        self.stage_of_launch = np.array([stage[launch.name] for launch in timeline.launches], np.int32)
        self.is_start_up = _is_start_up(timeline, self.of_launch)
        """[num_launches] Whether it is set-up and its rank had no launch of an iteration yet; or an `align`."""
        self.is_measured = self.of_launch >= self.first_measured
        num_launches = np.bincount(self.of_launch[self.of_launch >= 0], minlength=self.count)
        is_part = is_cut or any(min(found) > 0 for found in of_stage.values())
        is_whole = (num_launches == num_launches.max(initial=0)) | (not is_part)
        self.is_whole = is_whole & (step == 1 or max(times.values(), default=0) <= 1)  # else each lacks some of a stage
        """[count] False for one that lacks launches: not kept, or never made."""


def _is_start_up(timeline: Timeline, of_launch: Int32) -> Mask:
    """A rank without any iteration has no start-up."""
    rank = np.array([launch.rank for launch in timeline.launches], np.int64)
    in_iteration = of_launch >= 0
    first = {
        number: int(np.argmax((rank == number) & in_iteration)) for number in np.unique(rank[in_iteration]).tolist()
    }
    is_align = np.array([launch.is_align for launch in timeline.launches], bool)
    is_ahead = np.arange(len(rank)) < np.array([first.get(number, 0) for number in rank.tolist()], np.int64)
    return np.asarray(is_align | (is_ahead & ~in_iteration), bool)


def _launches_an_epoch(timeline: Timeline, outside: set[str]) -> int:
    """How often every stage is launched in an epoch at least; 1 where epochs tell no calls apart.

    They do where there are several, or where the one there is has just followed that of the barrier ahead.
    """
    launches = [launch for launch in timeline.launches if launch.epoch and launch.name not in outside]
    epochs = {launch.epoch for launch in launches}
    ahead = {launch.epoch for launch in timeline.launches if launch.name in outside}
    if len(epochs) < 2 and not any(0 < (one - before) % 2**32 <= _FEW_CALLS for one in epochs for before in ahead):
        return 1
    return min(Counter((launch.name, launch.rank, launch.epoch) for launch in launches).values())


def _of_most_ranks(timeline: Timeline, outside: set[str]) -> set[str]:
    """The stages that half as many ranks launch as that of most does: what few do tells nothing of all iterations."""
    launched = {(launch.name, launch.rank) for launch in timeline.launches if launch.name not in outside}
    num_ranks = Counter(name for name, _ in launched)
    return {name for name, count in num_ranks.items() if 2 * count >= max(num_ranks.values())}


def _times_an_iteration(
    lengths: dict[str, int], common: set[str], step: int, is_cut: bool, repeats: int
) -> dict[str, int]:
    """How often each iteration launches a stage, 0: it belongs to none. is_cut: the last one may lack some.

    lengths: of each stage the number of its launches of which each `step`-th was kept. common: those that tell how many
    iterations there are. repeats: how often every stage is launched in an iteration.
    """
    stages_of = Counter(-(-length // repeats) for name, length in lengths.items() if name in common)
    most = max(stages_of.values(), default=0)
    count, *shorter = sorted((length for length in stages_of if stages_of[length] == most), reverse=True) or [1]
    for length in shorter:
        if length > 1 and _times(count, length, step, 0):
            count = length
    if is_cut and count + 1 in stages_of:
        count += 1
    return {name: _times(length, count, step, int(is_cut)) for name, length in lengths.items()}


def _times(length: int, count: int, step: int, may_lack: int) -> int:
    """How often each of the iterations of a stage of `count` launches has one of `length`; 0 where it does not fit.

    Of both each `step`-th launch is known: there were up to step - 1 more. may_lack: iterations that are not complete.
    """
    times = -(-length // count)
    lacking = times * may_lack if times < length else 0
    return times if times * ((count - 1) * step + 1) <= length * step + lacking else 0


@dataclass(frozen=True, repr=False)
class Iterations(Table):
    """[n] columns, one row an iteration, in their order. Times in ns from the origin of the timeline."""

    number: Int64
    """From 0; one that never ended is missing."""
    start: Int64
    """When the first of its kernels began on any rank."""
    end: Int64
    """When the last of its kernels ended on any rank."""
    of_launch: Int32
    """[num_launches] number of each launch's iteration; -1 for set-up."""

    @property
    def duration_ns(self) -> Int64:
        return self.end - self.start

    def take(self, which: Mask) -> Iterations:
        """The rows that a mask picks."""
        return Iterations(self.number[which], self.start[which], self.end[which], self.of_launch)

    def best_median_worst(self) -> tuple[int, int, int]:
        """Row numbers of the shortest, the (lower) median and the longest iteration. Raises IndexError when empty."""
        order = np.argsort(self.duration_ns, kind="stable")
        return int(order[0]), int(order[(len(order) - 1) // 2]), int(order[-1])


def find_iterations(timeline: Timeline) -> Iterations:
    """The iterations that lack no launch and have none that never ended; none where clocks are not aligned."""
    spans, iterations = timeline.spans, LaunchIterations(timeline)
    of_launch = iterations.of_launch
    is_launch = timeline.events_of(EventClass.LAUNCH)
    if not timeline.has_one_axis:
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

"""The iterations of a run: the launches of all ranks that belong together, and how long each took.

The number of iterations is the commonest number of launches a stage (stages.py) has, a stage launched k times as often
belongs to each k times, and a stage launched any other number of times is set-up and belongs to none. Of equally common
numbers it is the largest, or one above 1 that this is a multiple of. Where every stage has several launches in an
epoch, as in calls by partitions, an iteration has as many. Launches that a flight recorder or a capture of each N-th
launch did not keep are counted, and where the run did not come to its end, a stage may lack what it had still to do. A
launch named `align` belongs to none, nor does a single barrier of the ranks ahead of all others.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tracekern.dump.format import ALIGN, RANK_BARRIER
from tracekern.timeline.facts.of_launches import once_for_launches
from tracekern.timeline.facts.stages import CUT_SHORT, stages_of
from tracekern.timeline.model import OPEN_END, EventClass, Int32, Int64, Mask, Timeline
from tracekern.timeline.table import Table

_FEW_CALLS = 8
"""At most so many calls come between the barrier ahead and the first that is recorded: one counts records, say."""


class LaunchIterations:
    """Which launch belongs to which iteration. Ranks that no kernels join are counted apart."""

    def __init__(self, timeline: Timeline) -> None:
        launches, stages = timeline.launches, stages_of(timeline)
        step = math.gcd(*(launch.sequence for launch in launches)) or 1  # of a capture of each N-th launch
        is_cut = any(problem.kind in CUT_SHORT for problem in timeline.problems)
        calls = [
            _Call(stage, launch.name, launch.rank, launch.sequence, launch.epoch)
            for stage, launch in zip(stages.of_launch.tolist(), launches, strict=True)
        ]
        place = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
        island = stages.island[[place[launch.rank] for launch in launches]]
        times, is_part = np.zeros(len(launches), np.int64), is_cut
        for number in np.unique(island).tolist():
            mine = np.flatnonzero(island == number)
            own = [calls[idx] for idx in mine.tolist()]
            times[mine] = _times_of_calls(own, step, is_cut)
            is_part = is_part or any(min(found) > 0 for found in _sequences(own).values())
        self.stages = stages.names
        self.stage_of_launch = stages.of_launch
        """[num_launches] index into `stages`."""
        in_iterations = np.bincount(self.stage_of_launch, times > 0, len(self.stages)) > 0
        self.set_up_stages = tuple(name for name, is_in in zip(self.stages, in_iterations, strict=True) if not is_in)
        sequence = np.array([launch.sequence for launch in launches], np.int64)
        iteration = np.where(times > 0, sequence // np.maximum(times, 1), -1)
        kept = np.unique(iteration[iteration >= 0])
        self.count = len(kept)
        self.first_measured = 1 if self.count > 1 else 0
        self.of_launch = np.where(iteration >= 0, np.searchsorted(kept, iteration), -1).astype(np.int32)
        """[num_launches] its iteration, -1: set-up."""
        self.is_start_up = _is_start_up(timeline, self.of_launch)
        """[num_launches] Whether it is set-up and its rank had no launch of an iteration yet; or an `align`."""
        self.is_measured = self.of_launch >= self.first_measured
        is_whole = _are_complete(self.of_launch, island, self.count) | (not is_part)
        self.is_whole = is_whole & (step == 1 or int(times.max(initial=0)) <= 1)  # else each lacks some of a stage
        """[count] False for one that lacks launches: not kept, or never made."""


launch_iterations = once_for_launches(LaunchIterations)
"""Returns the LaunchIterations of a Timeline."""


class _Call(NamedTuple):
    """What is counted of a launch."""

    stage: int
    kernel: str
    rank: int
    sequence: int
    epoch: int


def _are_complete(iteration: Int32, island: Int64, count: int) -> Mask:
    """[count] whether no ranks that kernels join made fewer launches in an iteration than in others, but some."""
    is_complete = np.ones(count, bool)
    for number in np.unique(island).tolist():
        mine = iteration[(island == number) & (iteration >= 0)]
        num_launches = np.bincount(mine, minlength=count)
        is_complete &= (num_launches == num_launches.max(initial=0)) | (num_launches == 0)
    return is_complete


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


def _sequences(calls: list[_Call]) -> dict[int, list[int]]:
    """Numbers of the calls of each stage, by first call."""
    found: dict[int, list[int]] = {}
    for call in calls:
        found.setdefault(call.stage, []).append(call.sequence)
    return found


def _times_of_calls(calls: list[_Call], step: int, is_cut: bool) -> list[int]:
    """[num_calls] how often each iteration has a call of its stage, 0: it belongs to none."""
    sequences = _sequences(calls)
    kernel = {call.stage: call.kernel for call in calls}
    outside = {stage for stage, name in kernel.items() if name == ALIGN}
    first = calls[0].stage
    if len(sequences) > 1 and kernel[first] == RANK_BARRIER and not any(sequences[first]):
        outside.add(first)
    lengths = {stage: max(found) // step + 1 for stage, found in sequences.items() if stage not in outside}
    inside = [call for call in calls if call.stage not in outside]
    repeats = _calls_an_epoch(inside, {call.epoch for call in calls if call.stage in outside})
    times = dict.fromkeys(outside, 0)
    times |= _times_an_iteration(lengths, _of_most_ranks(inside), step, is_cut, repeats)
    return [times[call.stage] for call in calls]


def _calls_an_epoch(calls: list[_Call], ahead: set[int]) -> int:
    """How often every stage is called in an epoch at least; 1 where epochs tell no calls apart.

    They do where there are several, or where the one there is has just followed that of the barrier `ahead`.
    """
    told = [call for call in calls if call.epoch]
    epochs = {call.epoch for call in told}
    if len(epochs) < 2 and not any(0 < (one - before) % 2**32 <= _FEW_CALLS for one in epochs for before in ahead):
        return 1
    return min(Counter((call.stage, call.rank, call.epoch) for call in told).values())


def _of_most_ranks(calls: list[_Call]) -> set[int]:
    """The stages that half as many ranks call as that of most does: what few do tells nothing of all iterations."""
    num_ranks = Counter(stage for stage, _ in {(call.stage, call.rank) for call in calls})
    return {stage for stage, count in num_ranks.items() if 2 * count >= max(num_ranks.values())}


def _times_an_iteration(
    lengths: dict[int, int], common: set[int], step: int, is_cut: bool, repeats: int
) -> dict[int, int]:
    """How often each iteration launches a stage, 0: it belongs to none. is_cut: the last one may lack some.

    lengths: of each stage the number of its launches of which each `step`-th was kept. common: those that tell how many
    iterations there are. repeats: how often every stage is launched in an iteration.
    """
    stages_of = Counter(-(-length // repeats) for stage, length in lengths.items() if stage in common)
    most = max(stages_of.values(), default=0)
    count, *shorter = sorted((length for length in stages_of if stages_of[length] == most), reverse=True) or [1]
    for length in shorter:
        if length > 1 and _times(count, length, step, 0):
            count = length
    if is_cut and count + 1 in stages_of:
        count += 1
    return {stage: _times(length, count, step, int(is_cut)) for stage, length in lengths.items()}


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
    spans, iterations = timeline.spans, launch_iterations(timeline)
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

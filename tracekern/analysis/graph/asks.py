"""What the hosts did before each launch, where it is on record when they asked for it.

How long a kernel's gap would be in another run depends on its host. One that waits for the device asks so long after
the kernel before; the gap stays. One that runs ahead asks at times of its own: where the device is faster, the kernel
begins when its host is there. The program is the same on all ranks, so hosts run ahead before a stage where any did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.host_gaps import MAX_LAUNCH_NS, NEVER
from tracekern.analysis.graph.schedule import Schedule
from tracekern.analysis.groups import group_rows, quantile_of_groups
from tracekern.formatting import brief
from tracekern.timeline.model import Float64, Int64, Mask

_DOUBT_NS = 2_000
"""A host that asked so much before the kernel before had ended did not wait for it."""

KERNEL_BEFORE, RUN_STARTS = -1, -2


@dataclass(frozen=True)
class Asks:
    """[n] launches that their hosts asked for at a known time. Each asking is a node, with two edges."""

    launch: Int64
    before: Int64
    """[n] edge: from the end of the kernel before it, or where hosts run ahead from what its host asked for before."""
    before_ns: Float64
    after: Int64
    """[n] edge: from the asking to the launch's start."""
    after_ns: Float64
    gap: Int64
    """[n] edge: the gap before the launch."""
    gap_ns: Float64
    """At least, on the device's side: what is longer was the host's."""
    is_complete: bool
    """Whether they are all launches but the first of each stream."""

    __repr__ = brief

    def weight(self, weight: Float64) -> Float64:
        """[num_edges] with times of their own for hosts that run ahead. weight: with all gaps as recorded."""
        own: Float64 = weight.copy()
        own[self.before], own[self.after], own[self.gap] = self.before_ns, self.after_ns, self.gap_ns
        return own


@dataclass(frozen=True)
class Asked:
    """[n] launches of Asks, before their edges have numbers."""

    launch: Int64
    previous: Int64
    """What its asking follows: the row of what its host asked for before, or one of the two below."""
    before_ns: Int64
    after_ns: Float64
    gap_ns: Float64


def find_asked(schedule: Schedule, launch: Int64, since: Int64, start_ns: int) -> Asked:
    """launch: [n] of the Schedule. since: [n] from when on the gap before each counts. start_ns: when the run began."""
    known = schedule.asked[launch] > NEVER
    launch, since = launch[known], since[known]
    asked = np.minimum(schedule.asked[launch], schedule.start[launch])
    launch, since, asked = _in_order(schedule, launch, since, asked)
    was_late = schedule.start[launch] - since > MAX_LAUNCH_NS
    asked = _not_before_the_last(schedule, launch, asked, was_late | (asked >= since - _DOUBT_NS))
    is_ahead = (asked < since - _DOUBT_NS) & (schedule.before[launch] >= 0)
    stages_ahead = np.unique(schedule.stage[launch[is_ahead]])
    waits = ~np.isin(schedule.stage[launch], stages_ahead) & (schedule.before[launch] >= 0)
    launch, since, asked = _in_order(schedule, launch, since, np.where(waits, np.maximum(asked, since), asked))

    # In this order nothing leads back in time, whatever the clocks of the hosts say.
    start, is_first = schedule.start[launch], schedule.before[launch] < 0
    runs_ahead = np.isin(schedule.stage[launch], stages_ahead)
    same_rank = np.append(False, np.diff(schedule.rank[launch]) == 0)[: len(launch)]
    previous = np.where(same_rank, np.arange(len(launch)) - 1, RUN_STARTS)
    previous = np.where(runs_ahead, previous, KERNEL_BEFORE)
    from_ns = np.where(previous == RUN_STARTS, start_ns, np.where(previous >= 0, asked[previous], since))

    # Where the stream was busy, how long the launch took is not on record: no longer than any of its stage.
    stages = group_rows(len(launch), schedule.stage[launch])
    takes, gap = (start - asked).astype(float), (start - since).astype(float)
    at_most = quantile_of_groups(stages.group, takes, len(stages), 0.0)[stages.group]
    shortest = quantile_of_groups(stages.group[~is_first], gap[~is_first], len(stages), 0.0)[stages.group]
    by_host = (gap > MAX_LAUNCH_NS) | ~runs_ahead | is_first
    on_device = np.where(runs_ahead & ~is_first, np.minimum(shortest, gap), 0.0)
    after_ns, gap_ns = np.where(by_host, takes, at_most), np.where(by_host, on_device, gap)
    return Asked(launch, previous, asked - from_ns, after_ns, gap_ns)


def _in_order(schedule: Schedule, launch: Int64, since: Int64, asked: Int64) -> tuple[Int64, Int64, Int64]:
    """The same, rank by rank as they were asked for."""
    order = np.lexsort((schedule.start[launch], asked, schedule.rank[launch]))
    return launch[order], since[order], asked[order]


def _not_before_the_last(schedule: Schedule, launch: Int64, asked: Int64, by_host: Mask) -> Int64:
    """[n] when each was asked for, and not before the last kernel began that began when its host launched it (by_host):
    a range may hold several launches, and begins before all of them."""
    begun, rank = np.where(by_host, schedule.start[launch], NEVER), schedule.rank[launch]
    for number in np.unique(rank):
        mine = np.flatnonzero(rank == number)
        begun[mine] = np.append(NEVER, np.maximum.accumulate(begun[mine])[:-1])
    return np.minimum(np.maximum(asked, begun), schedule.start[launch])

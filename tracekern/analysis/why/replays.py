"""The run replayed with something in it shorter: how much earlier it, and each of its iterations, would have ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.timeline.model import Float64, Int64, Mask

_AT_ONCE = 4
"""So many changes are worked out and replayed at a time."""

NOTHING = Change(np.empty(0, np.int64), np.empty(0))


def added(changes: Sequence[Change]) -> Change:
    """Returns all of the changes at once."""
    if len(changes) == 1:
        return changes[0]
    edge, place = np.unique(np.concatenate([NOTHING.edge, *(one.edge for one in changes)]), return_inverse=True)
    ns = np.concatenate([NOTHING.ns, *(one.ns for one in changes)])
    return Change(edge, np.bincount(place, ns, len(edge)).astype(float, copy=False))


@dataclass(frozen=True)
class Saving:
    """ns; below 0 where it would have taken longer."""

    whole_ns: float
    by_iteration: Float64
    """[num_iterations]"""

    @property
    def mean_ns(self) -> float:
        """Mean saving of an iteration; nan without any."""
        return float(self.by_iteration.mean()) if len(self.by_iteration) else float("nan")

    @property
    def error_ns(self) -> float:
        """Standard error of the mean; nan of fewer than two iterations."""
        count = len(self.by_iteration)
        return float(self.by_iteration.std(ddof=1)) / count**0.5 if count > 1 else float("nan")

    @property
    def largest(self) -> int | None:
        """The iteration that more than half of it is of; None where none is, or where there is only one."""
        if len(self.by_iteration) < 2 or 2 * self.by_iteration.max() <= self.whole_ns:
            return None
        return int(self.by_iteration.argmax()) if self.whole_ns > 0 else None


class Replays:
    """The run with changes: how much longer edges take; -inf where nothing waits for one.

    Ranks that no kernel joins are a run of their own. What is saved is that of those who save most.
    """

    def __init__(self, moments: Moments, ends: IterationEnds, of_launches: Float64) -> None:
        """of_launches: [num of the LaunchGraph's edges] ns where nothing changes."""
        self._moments, self._of_launches = moments, of_launches
        of_launch, shown = moments.program.island_of_launch, moments.schedule.order
        last, self._wanted = moments.launches.ends(shown), np.empty(0, np.int64)
        self._islands = []
        for number in np.unique(of_launch[shown]).tolist():
            is_last, is_end = of_launch[shown] == number, of_launch[ends.launch] == number
            self._islands.append(_Island.of(ends, is_end, int(is_last.sum())))
            self._wanted = np.concatenate([self._wanted, last[is_last], ends.node[is_end]])
        self._before = self._when([NOTHING])[0]
        self.makespan_ns = max(end for end, _ in self._before)
        """From the start of the first kernel to the end of the last, without what counts for nothing."""
        self.num_iterations = len(ends)

    @property
    def is_parted(self) -> bool:
        """Whether there are ranks that no kernel joins."""
        return len(self._islands) > 1

    def saved(self, changes: Iterable[Change]) -> list[Saving]:
        """Returns how much earlier all ends with each change. No edge becomes shorter than nothing."""
        rest, found = iter(changes), list[Saving]()
        batches = iter(lambda: list(itertools.islice(rest, _AT_ONCE)), [])
        for some in self._moments.graphs.each(self._when, batches):
            for after in some:
                by_island = [_difference(*ends) for ends in zip(self._before, after, strict=True)]
                found.append(max(by_island, key=lambda saving: saving.whole_ns))
        return found

    def _when(self, changes: Sequence[Change]) -> list[list[_Ends]]:
        """When each island ends, with each change."""
        times = self._moments.replay(self._of_launches, changes, self._wanted)
        sizes = np.cumsum([island.num_nodes for island in self._islands])[:-1]
        return [
            [island.when(own) for island, own in zip(self._islands, np.split(row, sizes), strict=True)] for row in times
        ]


_Ends = tuple[float, Float64]
"""(when all is over, [num_iterations] when each of them is)"""


@dataclass(frozen=True)
class _Island:
    """Ranks that kernels join: nodes that end all they do, and then their iterations."""

    num_last: int
    """So many nodes end all; those that end iterations follow."""
    first: Int64
    """[num of its iterations] place of the first node of each among those that end iterations."""
    number: Int64
    """[num of its iterations]"""
    num_nodes: int
    num_iterations: int
    """How many the whole run has."""

    @classmethod
    def of(cls, ends: IterationEnds, mine: Mask, num_last: int) -> _Island:
        number, first = np.unique(ends.iteration[mine], return_index=True)
        return cls(num_last, first, number, num_last + int(mine.sum()), len(ends))

    def when(self, times: Float64) -> _Ends:
        """times: [num_nodes] of its nodes. An iteration that they have no part in is over with the one before it."""
        last, of_iterations = times[: self.num_last], times[self.num_last :]
        by_iteration = np.zeros(self.num_iterations)
        if len(self.first):
            by_iteration[self.number] = np.maximum.reduceat(of_iterations, self.first)
        return float(last.max()), np.maximum.accumulate(by_iteration)


def _difference(before: _Ends, after: _Ends) -> Saving:
    return Saving(before[0] - after[0], np.diff(before[1] - after[1], prepend=0.0))

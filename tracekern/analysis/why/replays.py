"""The run replayed with something in it shorter: how much earlier it, and each of its iterations, would have ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
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
    """The run with changes: how much longer edges of the run graph take; -inf where nothing waits for one.

    Ranks that no kernel joins are a run of their own. What is saved is that of those who save most.
    """

    def __init__(self, moments: Moments, graph: EventGraph, ends: IterationEnds, weight: Float64) -> None:
        """weight: [num_edges] ns of edges where nothing changes."""
        self._path, self._unchanged = moments.path, weight
        island, shown = graph.island_of_launch, graph.schedule.order
        last, self._wanted = moments.run_graph.end_of_launch[shown], np.empty(0, np.int64)
        self._parts = []
        for number in np.unique(island[shown]).tolist():
            self._parts.append(_Part.of(ends, island[ends.launch] == number, int((island[shown] == number).sum())))
            nodes = last[island[shown] == number], ends.node[island[ends.launch] == number]
            self._wanted = np.concatenate([self._wanted, *nodes])
        self._before = self._when([NOTHING])[0]
        self.makespan_ns = max(end for end, _ in self._before)
        """From the start of the first kernel to the end of the last, without what counts for nothing."""
        self.num_iterations = len(ends)

    @property
    def is_parted(self) -> bool:
        """Whether there are ranks that no kernel joins."""
        return len(self._parts) > 1

    def saved(self, changes: Iterable[Change]) -> list[Saving]:
        """Returns how much earlier all ends with each change. No edge becomes shorter than nothing."""
        rest, found = iter(changes), list[Saving]()
        while some := list(itertools.islice(rest, _AT_ONCE)):
            for after in self._when(some):
                by_part = [_difference(*ends) for ends in zip(self._before, after, strict=True)]
                found.append(max(by_part, key=lambda saving: saving.whole_ns))
        return found

    def _when(self, changes: Sequence[Change]) -> list[list[_Ends]]:
        """When each part of the run ends, with each change."""
        times = self._path.replay(self._unchanged, [self._weights(change) for change in changes], self._wanted)
        sizes = np.cumsum([part.num_nodes for part in self._parts])[:-1]
        return [[part.when(own) for part, own in zip(self._parts, np.split(row, sizes), strict=True)] for row in times]

    def _weights(self, change: Change) -> Change:
        edge, ns = change
        before = self._unchanged[edge]
        at_least = np.where(ns > -np.inf, np.minimum(before, 0), -np.inf)
        return Change(edge, np.maximum(before + ns, at_least))


_Ends = tuple[float, Float64]
"""(when all is over, [num_iterations] when each of them is)"""


@dataclass(frozen=True)
class _Part:
    """Ranks that kernels join: their nodes end the part, and then its iterations."""

    num_last: int
    """So many nodes end the part; those that end iterations follow."""
    first: Int64
    """[num of the part's iterations] place of its first node among those that end iterations."""
    number: Int64
    """[num of the part's iterations]"""
    num_nodes: int
    num_iterations: int
    """How many the whole run has."""

    @classmethod
    def of(cls, ends: IterationEnds, mine: Mask, num_last: int) -> _Part:
        number, first = np.unique(ends.iteration[mine], return_index=True)
        return cls(num_last, first, number, num_last + int(mine.sum()), len(ends))

    def when(self, times: Float64) -> _Ends:
        """times: [num_nodes] of its nodes. An iteration that the part has no part in is over with the one before it."""
        last, of_iterations = times[: self.num_last], times[self.num_last :]
        by_iteration = np.zeros(self.num_iterations)
        if len(self.first):
            by_iteration[self.number] = np.maximum.reduceat(of_iterations, self.first)
        return float(last.max()), np.maximum.accumulate(by_iteration)


def _difference(before: _Ends, after: _Ends) -> Saving:
    return Saving(before[0] - after[0], np.diff(before[1] - after[1], prepend=0.0))

"""The run replayed with something in it shorter: how much earlier it, and each of its iterations, would have ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.moments import Moments
from tracekern.timeline.model import Float64, Int64, Mask


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
    """Takes changes: [num_edges] ns that each edge of the run graph takes longer; -inf where nothing waits for it.

    Ranks that no kernel joins are a run of their own. What is saved is that of those who save most.
    """

    def __init__(self, moments: Moments, graph: EventGraph, ends: IterationEnds, weight: Float64) -> None:
        """weight: [num_edges] ns of edges where nothing changes."""
        self._path, self._unchanged, self._least = moments.path, weight, np.minimum(weight, 0)
        times, _ = self._path.run(weight)
        island, shown = graph.island_of_launch, graph.schedule.order
        self._parts = [
            _Part.of(
                ends, moments.run_graph.end_of_launch[shown[island[shown] == number]], island[ends.launch] == number
            )
            for number in np.unique(island[shown]).tolist()
        ]
        self._before = [part.when(times) for part in self._parts]
        self.makespan_ns = max(end for end, _ in self._before)
        """From the start of the first kernel to the end of the last, without what counts for nothing."""
        self.num_edges, self.num_iterations = len(weight), len(ends)

    @property
    def is_parted(self) -> bool:
        """Whether there are ranks that no kernel joins."""
        return len(self._parts) > 1

    def saved(self, change: Float64) -> Saving:
        """Returns how much earlier all ends with the change. No edge becomes shorter than nothing."""
        weight = self._unchanged + change
        np.maximum(weight, self._least, out=weight, where=change > -np.inf)
        times, _ = self._path.run(weight)
        found = [_difference(before, part.when(times)) for part, before in zip(self._parts, self._before, strict=True)]
        return max(found, key=lambda saving: saving.whole_ns)


_Ends = tuple[float, Float64]
"""(when all is over, [num_iterations] when each of them is)"""


@dataclass(frozen=True)
class _Part:
    """The moments that end ranks that kernels join, and those that end their iterations."""

    last: Int64
    node: Int64
    first: Int64
    """[num of the part's iterations] place of its first node."""
    number: Int64
    """[num of the part's iterations]"""
    num_iterations: int
    """How many the whole run has."""

    @classmethod
    def of(cls, ends: IterationEnds, last: Int64, mine: Mask) -> _Part:
        number, first = np.unique(ends.iteration[mine], return_index=True)
        return cls(last, ends.node[mine], first, number, len(ends))

    def when(self, times: Float64) -> _Ends:
        """times: [num_nodes] of each node. An iteration that the part has no part in is over with the one before it."""
        by_iteration = np.zeros(self.num_iterations)
        if len(self.first):
            by_iteration[self.number] = np.maximum.reduceat(times[self.node], self.first)
        return float(times[self.last].max()), np.maximum.accumulate(by_iteration)


def _difference(before: _Ends, after: _Ends) -> Saving:
    return Saving(before[0] - after[0], np.diff(before[1] - after[1], prepend=0.0))

"""The run replayed with something in it shorter: how much earlier it, and each of its iterations, would have ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.why.graph import RunGraph
from tracekern.analysis.why.longest_path import walk_back
from tracekern.analysis.why.moments import Moments
from tracekern.timeline.model import Float64, Int64, Mask


@dataclass(frozen=True)
class Saving:
    """ns; below 0 where it would have taken longer."""

    whole_ns: float
    by_iteration: Float64
    """[num_iterations]"""

    @property
    def mean_ns(self) -> float:
        """Of an iteration; nan of none."""
        return float(self.by_iteration.mean()) if len(self.by_iteration) else float("nan")

    @property
    def error_ns(self) -> float:
        """Standard error of the mean; nan of fewer than two iterations."""
        count = len(self.by_iteration)
        return float(self.by_iteration.std(ddof=1)) / count**0.5 if count > 1 else float("nan")

    def __sub__(self, other: Saving) -> Saving:
        return Saving(self.whole_ns - other.whole_ns, self.by_iteration - other.by_iteration)


class Replays:
    """Takes changes: [num_edges] ns that each edge of the run graph takes longer."""

    def __init__(self, moments: Moments, shown: Int64, ends: Int64) -> None:
        """shown: the launches that left something. ends: [num_iterations] of ends_of_iterations()."""
        run_graph, times = moments.run_graph, moments.times
        self._run_graph, self._path, self._counted = run_graph, moments.path, run_graph.counted
        self._least = np.minimum(self._counted, 0)
        self._ends = run_graph.end_of_launch[shown]
        counted = moments.path.run(self._counted)[0] if len(run_graph.uncounted) else times
        self.makespan_ns = float(counted[self._ends].max())
        """From the start of the first kernel to the end of the last, without what counts for nothing."""
        self.num_iterations = len(ends)
        ends = np.maximum.accumulate(ends - run_graph.start_ns)
        happened = np.flatnonzero(_last_in_iteration(run_graph, times, ends) & np.isfinite(times))
        self._by_time = happened[np.argsort(times[happened], kind="stable")]
        self._num_by_end = np.searchsorted(times[self._by_time], ends, side="right")
        self._iteration_ends = np.maximum.accumulate(counted[self._by_time])[self._num_by_end - 1]

    def saved(self, change: Float64) -> Saving:
        """Returns how much earlier all ends with the change. No edge becomes shorter than nothing."""
        times, _ = self._path.run(self._weight(change))
        # An iteration has ended when all is over that was over at its end.
        over = np.maximum.accumulate(times[self._by_time])
        earlier = self._iteration_ends - over[self._num_by_end - 1]
        return Saving(self.makespan_ns - float(times[self._ends].max()), np.diff(earlier, prepend=0.0))

    def critical_path(self, change: Float64) -> Int64:
        """Returns the edges of the critical path with the change, last first."""
        times, deciding = self._path.run(self._weight(change))
        return walk_back(self._run_graph.source, deciding, int(self._ends[times[self._ends].argmax()]), times)

    def _weight(self, change: Float64) -> Float64:
        weight = self._counted + change
        return np.maximum(weight, self._least, out=weight)


def _last_in_iteration(run_graph: RunGraph, times: Float64, ends: Int64) -> Mask:
    """[num_nodes] False where a later node of the same run is in the same iteration: it happens later in any replay."""
    segments = run_graph.segments
    node = run_graph.target[segments.edge]
    iteration = np.searchsorted(ends, times[node])
    is_last = np.append((np.diff(segments.run) != 0) | (np.diff(iteration) != 0), True)[: len(node)]
    kept = np.ones(run_graph.num_nodes, bool)
    kept[node[~is_last]] = False
    return kept

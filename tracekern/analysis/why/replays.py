"""The run replayed with something in it shorter: how much earlier it, and each of its iterations, would have ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.moments import Moments
from tracekern.timeline.model import Float64, Int64


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
    """Takes changes: [num_edges] ns that each edge of the run graph takes longer; -inf where nothing waits for it."""

    def __init__(self, moments: Moments, shown: Int64, ends: IterationEnds, weight: Float64) -> None:
        """shown: the launches that left something. weight: [num_edges] ns of edges where nothing changes."""
        self._path, self._iterations = moments.path, ends
        self._unchanged, self._least = weight, np.minimum(weight, 0)
        times, _ = self._path.run(weight)
        self._ends = moments.run_graph.end_of_launch[shown]
        self.makespan_ns = float(times[self._ends].max())
        """From the start of the first kernel to the end of the last, without what counts for nothing."""
        self.num_edges, self.num_iterations = len(weight), len(ends)
        self._iteration_ends = ends.when(times)

    def saved(self, change: Float64) -> Saving:
        """Returns how much earlier all ends with the change. No edge becomes shorter than nothing."""
        weight = self._unchanged + change
        np.maximum(weight, self._least, out=weight, where=change > -np.inf)
        times, _ = self._path.run(weight)
        earlier = self._iteration_ends - self._iterations.when(times)
        return Saving(self.makespan_ns - float(times[self._ends].max()), np.diff(earlier, prepend=0.0))

"""Which moments of a run end an iteration, of a persistent kernel each repetition of what it does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows
from tracekern.timeline.facts.iterations import Iterations
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import Float64, Int64, Timeline

MIN_REPETITIONS = 3


@dataclass(frozen=True)
class IterationEnds:
    """[n] nodes of the run graph by iteration: one is over when all of its nodes have happened."""

    node: Int64
    first: Int64
    """[num_iterations] place of its first node."""

    def __len__(self) -> int:
        return len(self.first)

    def when(self, times: Float64) -> Float64:
        """[num_iterations] times: [num_nodes] of each node."""
        if not len(self):
            return np.zeros(0)
        ends: Float64 = np.maximum.reduceat(times[self.node], self.first)
        return np.maximum.accumulate(ends)


def ends_of_iterations(
    timeline: Timeline, graph: EventGraph, run_graph: RunGraph, iterations: Iterations
) -> IterationEnds:
    """The ends of the launches of each iteration.

    Where launches show a single iteration, its repetitions take their place: of the phase that takes most time of those
    that every run of theirs went through equally often, on all ranks.
    """
    if len(iterations) == 1 and len(graph.runs) and (found := _repetitions(timeline, graph, run_graph)):
        return found
    shown = graph.schedule.order[graph.schedule.order < len(timeline.launches)]
    shown = shown[np.isin(iterations.of_launch[shown], iterations.number)]
    order = np.argsort(iterations.of_launch[shown], kind="stable")
    first = np.searchsorted(iterations.of_launch[shown[order]], iterations.number)
    return IterationEnds(run_graph.end_of_launch[shown[order]], first)


def _repetitions(timeline: Timeline, graph: EventGraph, run_graph: RunGraph) -> IterationEnds | None:
    """Returns for each run the first nodes at or after the phase's ends; for the last repetition the launches' ends."""
    runs, activity = graph.runs, graph.activity
    run_of_piece = np.repeat(np.arange(len(runs)), runs.stop - runs.first)
    kinds = group_rows(len(activity), graph.phase, run_of_piece)
    phase_of_kind, run_of_kind = kinds.columns
    count, rank = kinds.count(), graph.schedule.rank[runs.launch[run_of_kind]]
    time_of_phase = np.bincount(graph.phase, activity.end - activity.start, len(graph.phases))
    for phase in np.argsort(-time_of_phase, kind="stable").tolist():
        of_phase = phase_of_kind == phase
        times = np.unique(count[of_phase])
        if len(times) == 1 and times[0] >= MIN_REPETITIONS and len(np.unique(rank[of_phase])) == len(timeline.ranks):
            piece = np.flatnonzero(graph.phase == phase)
            node = _next_nodes(run_graph, run_of_piece[piece], activity.end[piece]).reshape(-1, int(times[0])).T
            last = run_graph.end_of_launch[graph.schedule.order]
            return IterationEnds(
                np.concatenate([node[:-1].ravel(), last]), np.arange(len(node), dtype=np.int64) * node.shape[1]
            )
    return None


def _next_nodes(run_graph: RunGraph, run: Int64, time: Int64) -> Int64:
    """[n] the first node of the run that happened at this time or later."""
    segments = run_graph.segments
    order = np.lexsort((segments.end, segments.run))
    first, stop = (np.searchsorted(segments.run[order], run, side) for side in ("left", "right"))
    place = np.minimum(bisect_right(segments.end[order], first, stop, time - 1), stop - 1)
    node: Int64 = run_graph.target[segments.edge[order[place]]].astype(np.int64)
    return node

"""Which moments of a run end an iteration, of a persistent kernel each repetition of what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows
from tracekern.formatting import brief
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
    of_launch: Int64
    """[num_launches of the Schedule] iteration that each launch is in, or begins in; -1 for none."""
    at: Callable[[Int64, Int64], Int64]
    """(run, time), both [n] -> the iteration that a run is in at a time; -1 for none."""

    def __len__(self) -> int:
        return len(self.first)

    __repr__ = brief

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
    schedule = graph.schedule
    if len(iterations) == 1 and len(graph.runs) and (found := _repetitions(timeline, graph, run_graph)):
        return found
    row = np.full(1 + int(iterations.of_launch.max(initial=-1)), -1)
    row[iterations.number] = np.arange(len(iterations))
    of_launch = np.full(len(schedule.rank), -1)
    named = np.flatnonzero(iterations.of_launch >= 0)
    of_launch[named] = row[iterations.of_launch[named]]
    shown = schedule.order[of_launch[schedule.order] >= 0]
    order = np.argsort(of_launch[shown], kind="stable")
    first = np.searchsorted(of_launch[shown[order]], np.arange(len(iterations)))
    launch = graph.runs.launch
    return IterationEnds(run_graph.end_of_launch[shown[order]], first, of_launch, lambda run, _: of_launch[launch[run]])


def _repetitions(timeline: Timeline, graph: EventGraph, run_graph: RunGraph) -> IterationEnds | None:
    """Returns for each run the first nodes at or after the phase's ends; for the last repetition the launches' ends."""
    runs, activity, schedule = graph.runs, graph.activity, graph.schedule
    run_of_piece = np.repeat(np.arange(len(runs)), runs.stop - runs.first)
    kinds = group_rows(len(activity), graph.phase, run_of_piece)
    phase_of_kind, run_of_kind = kinds.columns
    count, rank = kinds.count(), schedule.rank[runs.launch[run_of_kind]]
    time_of_phase = np.bincount(graph.phase, activity.end - activity.start, len(graph.phases))
    for phase in np.argsort(-time_of_phase, kind="stable").tolist():
        of_phase = phase_of_kind == phase
        times = np.unique(count[of_phase])
        if len(times) == 1 and times[0] >= MIN_REPETITIONS and len(np.unique(rank[of_phase])) == len(timeline.ranks):
            piece = np.flatnonzero(graph.phase == phase)
            node = _next_nodes(run_graph, run_of_piece[piece], activity.end[piece]).reshape(-1, int(times[0])).T
            last = run_graph.end_of_launch[schedule.order]
            ends = activity.end[piece].reshape(-1, int(times[0]))
            return IterationEnds(
                np.concatenate([node[:-1].ravel(), last]),
                np.arange(len(node), dtype=np.int64) * node.shape[1],
                np.where(np.isin(np.arange(len(schedule.rank)), runs.launch), 0, -1),
                _by_time(run_of_kind[of_phase], ends, schedule.rank[runs.launch].astype(np.int64)),
            )
    return None


def _by_time(run: Int64, ends: Int64, rank_of_run: Int64) -> Callable[[Int64, Int64], Int64]:
    """Tells repetitions by the ends of those of the same run; of a run that has none, by those of its rank.

    ends: [num_runs, num_repetitions], of each `run`.
    """
    own = np.full(len(rank_of_run), -1)
    own[run] = np.arange(len(run))
    for rank in np.unique(rank_of_run).tolist():
        of_rank = np.flatnonzero(rank_of_run == rank)
        own[of_rank[own[of_rank] < 0]] = own[run[rank_of_run[run] == rank][0]]
    count = ends.shape[1]
    flat, first = ends.ravel(), own * count

    def at(run: Int64, time: Int64) -> Int64:
        place = bisect_right(flat, first[run], first[run] + count, time - 1) - first[run]
        return np.asarray(np.minimum(place, count - 1), np.int64)

    return at


def _next_nodes(run_graph: RunGraph, run: Int64, time: Int64) -> Int64:
    """[n] the first node of the run that happened at this time or later."""
    segments = run_graph.segments
    order = np.lexsort((segments.end, segments.run))
    first, stop = (np.searchsorted(segments.run[order], run, side) for side in ("left", "right"))
    place = np.minimum(bisect_right(segments.end[order], first, stop, time - 1), stop - 1)
    node: Int64 = run_graph.target[segments.edge[order[place]]].astype(np.int64)
    return node

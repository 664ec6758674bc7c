"""When each iteration ended, of a persistent kernel each repetition of what it does."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.timeline.iterations import Iterations
from tracekern.timeline.model import Int64, Timeline

MIN_REPETITIONS = 3


def ends_of_iterations(timeline: Timeline, graph: EventGraph, iterations: Iterations) -> Int64:
    """[n] ns from the timeline's origin.

    Where launches show a single iteration, its repetitions take their place: of the phase that takes most time of those
    that every run of theirs went through equally often, on all ranks.
    """
    if len(iterations) != 1 or not len(graph.runs):
        return iterations.end
    runs, activity = graph.runs, graph.activity
    kinds = group_rows(len(activity), graph.phase, np.repeat(np.arange(len(runs)), runs.stop - runs.first))
    phase_of_kind, run_of_kind = kinds.columns
    count, rank = kinds.count(), graph.schedule.rank[runs.launch[run_of_kind]]
    time_of_phase = np.bincount(graph.phase, activity.end - activity.start, len(graph.phases))
    for phase in np.argsort(-time_of_phase, kind="stable").tolist():
        of_phase = phase_of_kind == phase
        times = np.unique(count[of_phase])
        if len(times) == 1 and times[0] >= MIN_REPETITIONS and len(np.unique(rank[of_phase])) == len(timeline.ranks):
            ends: Int64 = activity.end[graph.phase == phase].reshape(-1, int(times[0])).max(axis=0)
            return np.append(ends[:-1], iterations.end)
    return iterations.end

"""Where in a kernel time passes that no span covers: between which two events."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.groups import group_rows
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.model import Float64, Int64, Mask, Timeline


def longest_gap(timeline: Timeline, graph: EventGraph, stage: int, is_of: Mask) -> tuple[str, str] | None:
    """Returns the events that the gap lies between which exceeds that of other ranks most; "" for the kernel's begin.

    stage: index into EventGraph.stages. is_of: [num_runs] whether a run is of those that take longer.
    """
    activity, runs, schedule = graph.activity, graph.runs, graph.schedule
    of_stage = np.flatnonzero(schedule.stage[runs.launch] == stage)
    count = (runs.stop - runs.first)[of_stage]
    piece, run = rows_of_ranges(runs.first[of_stage], count), np.repeat(of_stage, count)
    is_first = np.append(True, run[1:] != run[:-1])[: len(run)]
    event = timeline.spans.event[activity.span[piece]].astype(np.int64)
    before = np.where(is_first, -1, np.append(-1, event[:-1])[: len(event)])
    ended = np.append(0, activity.end[piece][:-1])[: len(piece)]
    since = np.where(is_first, schedule.start[runs.launch[run]], ended)
    gaps = group_rows(len(piece), before, event)
    gap_ns = np.maximum(activity.start[piece] - since, 0).astype(float)
    mine = is_of[run]
    own, theirs = (_mean(gaps.group, gap_ns, which, len(gaps)) for which in (mine, ~mine))
    count = np.bincount(gaps.group[mine], minlength=len(gaps))
    if not len(gaps) or not count.any():
        return None
    longest = int(((own - theirs) * count).argmax())
    names = ["", *(known.name for known in timeline.events)]
    one, other = (int(column[longest]) for column in gaps.columns)
    return names[one + 1], names[other + 1]


def _mean(group: Int64, ns: Float64, which: Mask, count: int) -> Float64:
    """[num_groups] mean of the chosen rows of each group."""
    sums, number = np.bincount(group[which], ns[which], count), np.bincount(group[which], minlength=count)
    return np.asarray(sums / np.maximum(number, 1), float)

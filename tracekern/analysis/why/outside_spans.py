"""Where in a kernel time passes that no span covers: between which two events."""

from __future__ import annotations

from functools import partial

import numpy as np

from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.partial import Sums
from tracekern.analysis.parts import Parts
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.model import Int64


def longest_gap(moments: Moments, stage: int, runs: Parts[Int64]) -> tuple[str, str] | None:
    """Returns the events that the gap lies between which exceeds that of other ranks most; "" for the kernel's begin.

    stage: index into Program.stages. runs: of each part those that take longer.
    """
    gaps: Sums = moments.graphs.map(partial(_gaps_of, schedule_start=moments.schedule.start, stage=stage), runs).total()
    if not gaps["own"].any():
        return None
    own, theirs = (gaps[name + "_ns"] / np.maximum(gaps[name], 1) for name in ("own", "theirs"))
    longest = int(((own - theirs) * gaps["own"]).argmax())
    names = ["", *(known.name for known in moments.graphs[0].timeline.events)]
    one, other = (int(column[longest]) for column in gaps.keys)
    return names[one + 1], names[other + 1]


def _gaps_of(part: PartGraph, own_runs: Int64, schedule_start: Int64, stage: int) -> Sums:
    """Adds up by the events before and after: gaps of these runs and of all others, and how long they are."""
    activity, runs = part.events.activity, part.events.runs
    of_stage = np.flatnonzero(part.events.program.stage_of_launch[runs.launch] == stage)
    count = (runs.stop - runs.first)[of_stage]
    piece, run = rows_of_ranges(runs.first[of_stage], count), np.repeat(of_stage, count)
    is_first = np.append(True, run[1:] != run[:-1])[: len(run)]
    event = part.timeline.spans.event[activity.span[piece]].astype(np.int64)
    before = np.where(is_first, -1, np.append(-1, event[:-1])[: len(event)])
    ended = np.append(0, activity.end[piece][:-1])[: len(piece)]
    since = np.where(is_first, schedule_start[runs.launch[run]], ended)
    gap_ns = np.maximum(activity.start[piece] - since, 0)
    is_own = np.zeros(len(runs), bool)
    is_own[own_runs] = True
    mine = is_own[run]
    return Sums.of(
        (before, event), own=mine, theirs=~mine, own_ns=np.where(mine, gap_ns, 0), theirs_ns=np.where(mine, 0, gap_ns)
    )

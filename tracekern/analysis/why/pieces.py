"""What each rank did by itself, piece by piece, and which pieces of other ranks are the same work.

A *piece* is a span of work, a wait that nothing on record ended, or the time between two nodes of the run graph that no
span covers. A *cell* is one place in the program: stage, call, block, warp, phase, and ordinal within these: pieces of
different ranks in one cell are the same work. A *place* is the same in every iteration: stage, block, warp, phase, and
ordinal within the iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import OPEN_END, EventClass, Float64, Int64, Mask, Timeline
from tracekern.timeline.table import Table


@dataclass(frozen=True, repr=False)
class Pieces(Table):
    """[n] columns, sorted by rank."""

    rank: Int64
    """Index into Timeline.ranks."""
    edge: Int64
    """Edge of the run graph that each piece is a part of."""
    run: Int64
    """Index into EventGraph.runs."""
    iteration: Int64
    """-1: of none."""
    phase: Int64
    """Index into EventGraph.phases."""
    writer: Int64
    """Number of its (block, warp)."""
    cell: Int64
    place: Int64
    ns: Float64


def find_pieces(
    timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph, ends: IterationEnds
) -> Pieces:
    """Returns the pieces of all launches that left something."""
    runs, schedule = graph.runs, graph.schedule
    segment, run, phase, ns = _cut(timeline, graph, waits, run_graph)
    number = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
    rank_of_run = np.array([number[rank] for rank in schedule.rank.tolist()], np.int64)[runs.launch]
    order = np.argsort(rank_of_run[run], kind="stable")
    segment, run, phase, ns = segment[order], run[order], phase[order], ns[order]
    rank, segments = rank_of_run[run], run_graph.segments
    iteration = ends.at(run, (segments.start[segment] + segments.end[segment] + 1) // 2)
    tracks = np.array([(track.block, track.warp) for track in timeline.tracks], np.int64).reshape(-1, 2)
    writer = group_rows(len(runs), *tracks[runs.track].T).group[run]
    call = schedule.sequence[runs.launch[run]]  # a phase is of one stage
    cell = group_rows(len(run), writer, call, phase, _ordinals(rank, writer, call, phase)).group
    place = group_rows(len(run), writer, phase, _ordinals(rank, writer, iteration, phase)).group
    edge = segments.edge[segment]
    return Pieces(rank, edge, run, iteration, phase, writer, cell, place, ns)


def _cut(
    timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph
) -> tuple[Int64, Int64, Int64, Float64]:
    """([n] segment, [n] run, [n] phase, [n] ns) of pieces; those of a run in the order of time."""
    activity, runs, segments = graph.activity, graph.runs, run_graph.segments
    order = np.lexsort((segments.start, segments.run))
    first, stop = (np.searchsorted(segments.run[order], np.arange(len(runs)), side) for side in ("left", "right"))
    is_heard = np.zeros(len(timeline.spans), bool)
    is_heard[waits.row[run_graph.heard]] = True
    piece = np.flatnonzero(~is_heard[activity.span])
    run = np.repeat(np.arange(len(runs)), runs.stop - runs.first)[piece]
    middle = (activity.start[piece] + activity.end[piece]) // 2
    place = bisect_right(segments.start[order], first[run], stop[run], middle) - 1
    segment = order[np.maximum(place, first[run])]
    ns = (activity.end[piece] - activity.start[piece]).astype(float)
    covered = np.bincount(segment, ns, len(segments))
    uncovered = np.maximum(segments.end - segments.start - covered, 0)

    own = ~_is_fixed(timeline, waits)[activity.span[piece]]
    stage = graph.schedule.stage[runs.launch[segments.run]]
    is_first = np.zeros(len(segments), bool)
    is_first[order[first[stop > first]]] = True
    uncovered_phase = np.where(is_first, graph.not_started[stage], graph.between_spans[stage])
    return (
        np.concatenate([segment[own], np.arange(len(segments))]),
        np.concatenate([run[own], segments.run]),
        np.concatenate([graph.phase[piece[own]], uncovered_phase]),
        np.concatenate([ns[own], uncovered]),
    )


def _is_fixed(timeline: Timeline, waits: Waits) -> Mask:
    """[num_spans] what is nobody's own time: sending a signal, and waiting for a rank whose signal is not on record."""
    spans = timeline.spans
    fixed = timeline.events_of(EventClass.SIGNAL)[spans.event]
    fixed |= timeline.events_of(EventClass.WAIT)[spans.event] & (spans.end == OPEN_END)
    fixed[waits.row[waits.kind == WaitKind.UNMATCHED]] = True
    return np.asarray(fixed, bool)


def _ordinals(*columns: npt.NDArray[np.integer]) -> Int64:
    """[n] how many rows before each agree with it in all columns."""
    kind = group_rows(len(columns[0]), *columns).group
    order = np.argsort(kind, kind="stable")
    ordered = kind[order]
    ordinal = np.empty(len(kind), np.int64)
    ordinal[order] = np.arange(len(kind)) - np.searchsorted(ordered, ordered)
    return ordinal

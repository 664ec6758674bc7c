"""What each rank did by itself, piece by piece, and which pieces of other ranks are the same work.

A *piece* is a span of work, a wait that nothing on record ended, or the time between two nodes of the run graph that no
span covers. A *cell* is one place in the program: stage, call, block, warp, phase, and ordinal within these: pieces of
different ranks in one cell are the same work. A *place* is the same in every iteration: stage, block, warp, phase, and
ordinal within the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.graph.points import RUNS_AT_ONCE
from tracekern.analysis.groups import Groups, group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.columns import order_of
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import OPEN_END, EventClass, Float64, Int32, Int64, Mask, Timeline

_NONE = -1
"""Stands in the table of cells for a rank that has no piece there."""


@dataclass(frozen=True)
class Pieces:
    """[n] columns: the pieces of one phase, rank by rank."""

    first: Int64
    """[num_ranks + 1] where those of each rank begin, and where the last ones end."""
    edge: Int32
    """Edge of the run graph that each piece is a part of."""
    iteration: Int32
    """-1: of none."""
    cell: Int32
    place: Int32
    """Number of its (writer, ordinal), see first_place."""
    in_cell: Int32 | Int64
    """[num_cells, num_ranks] ns of the piece in each cell; -1 where a rank has none."""
    writer_of_cell: Int64
    """[num_cells] number of its (block, warp)."""
    call_of_cell: Int64
    """[num_cells] number of its call among those of the phase."""
    first_place: Int64
    """[num_writers + 1 at most] where the places of each writer begin, and where the last ones end."""

    def __len__(self) -> int:
        return len(self.edge)

    @property
    def rank(self) -> Int64:
        """[n] index into Timeline.ranks."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def ns(self, rows: Int64 | slice, rank: Int64) -> Float64:
        """[num_rows] how long these pieces took. rank: of each."""
        return self.in_cell[self.cell[rows], rank].astype(float)

    def writer_and_ordinal(self, place: Int32) -> tuple[Int64, Int64]:
        """What places have in common with those of other parts."""
        writer = np.searchsorted(self.first_place, place, "right") - 1
        return writer, place - self.first_place[writer]

    def rows_of(self, ranks: Int64, hits: Mask, writer: int) -> tuple[Int64, Int64]:
        """([n] row, [n] its rank) of pieces of some ranks, in some iterations, of one writer or of all (-1)."""
        bounds = [(self.first[rank], self.first[rank + 1]) for rank in ranks.tolist()]
        rows = np.concatenate([np.arange(*bound) for bound in bounds])
        rank = np.repeat(ranks, [stop - first for first, stop in bounds])
        chosen = np.append(hits, False)[self.iteration[rows]]
        if writer >= 0:
            chosen &= self.writer_of_cell[self.cell[rows]] == writer
        return rows[chosen], rank[chosen]


def known(in_cell: Int32 | Int64) -> Float64:
    """The same table with nan where a rank has no piece."""
    return np.where(in_cell == _NONE, np.nan, in_cell)


@dataclass(frozen=True)
class Writers:
    """A writer is a (block, warp), on whatever rank."""

    block: Int64
    """[num_writers]"""
    warp: Int64
    of_track: Int64
    """[num_tracks] number of the writer; -1 for tracks without runs."""

    def __len__(self) -> int:
        return len(self.block)

    @classmethod
    def of(cls, timeline: Timeline, moments: Moments) -> Writers:
        has_runs = moments.graphs.map(_has_runs).total()
        tracks = np.array([(track.block, track.warp) for track in timeline.tracks], np.int64).reshape(-1, 2)
        groups = group_rows(int(has_runs.sum()), *tracks[has_runs].T)
        of_track = np.full(len(has_runs), -1)
        of_track[has_runs] = groups.group
        block, warp = groups.columns
        return cls(block, warp, of_track)


def _has_runs(part: PartGraph) -> Mask:
    """[num_tracks]"""
    has_runs = np.zeros(len(part.timeline.tracks), bool)
    has_runs[part.events.runs.track] = True
    return has_runs


def find_pieces(part: PartGraph, writers: Writers, ends: IterationEnds) -> Iterator[tuple[int, Pieces]]:
    """Yields (phase, its pieces) of all launches of a part that left something, for each phase that has any."""
    graph, run_graph = part.events, part.run_graph
    own, uncovered = _cut(part)
    numbers, segments = _RunNumbers(graph, writers), run_graph.segments
    is_first = np.append(True, segments.run[1:] != segments.run[:-1])[: len(segments)]
    program = graph.program
    stage = program.stage_of_launch[graph.runs.launch].astype(np.int16)[segments.run]
    outside = {int(number): (place, True) for place, number in enumerate(program.not_started.tolist())}
    outside |= {int(number): (place, False) for place, number in enumerate(program.between_spans.tolist())}
    present = np.bincount(graph.phase, minlength=len(program.phases)) > 0
    for phase in sorted({*np.flatnonzero(present).tolist(), *outside}):
        if phase in outside:
            of_stage, at_begin = outside[phase]
            edge = np.flatnonzero((stage == of_stage) & (is_first == at_begin))
            ns = uncovered[edge]
        else:
            piece = np.flatnonzero((graph.phase == phase) & (own != _NONE))
            edge, ns = own[piece].astype(np.int64), graph.activity.end[piece] - graph.activity.start[piece]
        if len(edge):
            run = segments.run[edge].astype(np.int64)
            middle = (segments.start[edge] + segments.end[edge] + 1) // 2
            yield phase, numbers.pieces(edge, run, ns, ends.at(graph, run, middle))


def _cut(part: PartGraph) -> tuple[Int32, Int64]:
    """([num_pieces of the activity] its segment, -1 where it is nobody's own time, [num_segments] ns no span covers)"""
    timeline, waits, run_graph = part.timeline, part.waits, part.run_graph
    activity, runs, segments = part.events.activity, part.events.runs, run_graph.segments
    first_segment = np.searchsorted(segments.run, np.arange(len(runs) + 1))
    is_heard = np.zeros(len(timeline.spans), bool)
    is_heard[waits.row[run_graph.heard]] = True
    is_fixed = _is_fixed(timeline, waits)
    own, uncovered = np.full(len(activity), _NONE, np.int32), segments.end - segments.start
    for start in range(0, len(runs), RUNS_AT_ONCE):
        of_runs = slice(start, start + RUNS_AT_ONCE)
        first, stop = runs.first[of_runs], runs.stop[of_runs]
        piece = slice(first[0], stop[-1])
        run = np.repeat(np.arange(start, start + len(first)), stop - first)
        ns = activity.end[piece] - activity.start[piece]
        middle = activity.start[piece] + ns // 2
        segment = bisect_right(segments.start, first_segment[run], first_segment[run + 1], middle) - 1
        segment = np.maximum(segment, first_segment[run])
        span = activity.span[piece]
        low, high = first_segment[start], first_segment[start + len(first)]
        covered = np.bincount(segment - low, np.where(is_heard[span], 0, ns), high - low)
        uncovered[low:high] -= covered.astype(np.int64)
        own[piece] = np.where(is_heard[span] | is_fixed[span], _NONE, segment)
    return own, np.maximum(uncovered, 0)


def _is_fixed(timeline: Timeline, waits: Waits) -> Mask:
    """[num_spans] what is nobody's own time: sending a signal, and waiting for a rank whose signal is not on record."""
    spans = timeline.spans
    fixed = timeline.events_of(EventClass.SIGNAL)[spans.event]
    fixed |= timeline.events_of(EventClass.WAIT)[spans.event] & (spans.end == OPEN_END)
    fixed[waits.row[waits.kind == WaitKind.UNMATCHED]] = True
    return np.asarray(fixed, bool)


class _RunNumbers:
    """What the runs of all ranks have in common: writer, and call of a stage."""

    def __init__(self, events: EventGraph, writers: Writers) -> None:
        runs, program = events.runs, events.program
        self._num_ranks = len(program.island)
        self._rank = program.place_of_launch[runs.launch]
        self._writer = writers.of_track[runs.track]
        self._stage = program.stage_of_launch[runs.launch]
        self._kinds = group_rows(len(runs), self._stage, program.sequence[runs.launch], self._writer)
        """Runs of one call and writer, on whatever rank."""

    def pieces(self, edge: Int64, run: Int64, ns: Int64, iteration: Int64) -> Pieces:
        """edge, run, ns, iteration: [n] of pieces of one phase, those of a run in the order of time."""
        if (np.diff(self._rank[run]) < 0).any():
            order = order_of(self._rank[run])
            edge, run, ns, iteration = (column[order] for column in (edge, run, ns, iteration))
        # What a run, or a run in an iteration, has in common is worked out once for its pieces.
        stretches = _Stretches.of(run)
        own_run = run[stretches.first]
        of_iterations = stretches if stretches.are_alike(iteration) else _Stretches.of(run, iteration)
        run_there, iteration_there = run[of_iterations.first], iteration[of_iterations.first]
        writer = self._writer[run_there]
        ordinal = of_iterations.ordinals(self._rank[run_there], writer, iteration_there)
        place, first_place = _number(ordinal, of_iterations.spread(writer))
        kinds = self._of_stage(own_run)
        ordinal, kind = stretches.ordinals(self._rank[own_run], kinds.group), stretches.spread(kinds.group)
        cell, first_cell = _number(ordinal, kind)
        kind_of_cell = np.zeros(first_cell[-1], np.int64)
        kind_of_cell[cell] = kind
        _, sequence, of_writer = kinds.columns
        rank = stretches.spread(self._rank[own_run])
        fits = ns.max(initial=0) <= np.iinfo(np.int32).max
        in_cell = np.full((len(kind_of_cell), self._num_ranks), _NONE, np.int32 if fits else np.int64)
        in_cell[cell, rank] = ns
        return Pieces(
            np.searchsorted(rank, np.arange(self._num_ranks + 1)),
            edge.astype(np.int32),
            iteration.astype(np.int32),
            cell,
            place,
            in_cell,
            of_writer[kind_of_cell],
            np.unique(sequence[kind_of_cell], return_inverse=True)[1],
            first_place,
        )

    def _of_stage(self, run: Int64) -> Groups:
        """The kinds of these runs, which are of one stage, numbered from 0."""
        if not len(run):
            return Groups(np.empty(0, np.int64), tuple(column[:0] for column in self._kinds.columns))
        first, stop = np.searchsorted(self._kinds.columns[0], self._stage[run[0]] + np.arange(2))
        columns = tuple(column[first:stop] for column in self._kinds.columns)
        return Groups(self._kinds.group[run] - first, columns)


def _number(ordinal: Int64, kind: Int64) -> tuple[Int32, Int64]:
    """([n] the same number for rows of one kind and ordinal, by kind and ordinal; [num_kinds + 1] the first number of
    each kind, and how many there are at most)"""
    most = np.zeros(int(kind.max(initial=-1)) + 1, np.int64)
    np.maximum.at(most, kind, ordinal + 1)
    first = np.append(0, np.cumsum(most))
    return (first[kind] + ordinal).astype(np.int32), first


@dataclass(frozen=True)
class _Stretches:
    """[n] stretches of rows that agree with their neighbours in all columns."""

    first: Int64
    """Row that each begins at."""
    length: Int64

    @classmethod
    def of(cls, *columns: npt.NDArray[np.integer]) -> _Stretches:
        is_new = np.ones(len(columns[0]), bool)
        is_new[1:] = False
        for column in columns:
            is_new[1:] |= column[1:] != column[:-1]
        first = np.flatnonzero(is_new)
        return cls(first, np.diff(first, append=len(is_new)))

    def spread(self, values: Int64) -> Int64:
        """[num_rows] those of each row's stretch. values: [n]"""
        return np.repeat(values, self.length)

    def are_alike(self, values: Int64) -> bool:
        """Whether the rows of each stretch have one value. values: [num_rows]"""
        return bool((self.spread(values[self.first]) == values).all())

    def ordinals(self, *columns: npt.NDArray[np.integer]) -> Int64:
        """[num_rows] how many rows before each are of stretches that agree with its own in all columns. columns: [n]"""
        kind = group_rows(len(self.first), *columns).group
        order = order_of(kind)
        before = np.cumsum(self.length[order]) - self.length[order]
        is_first = np.append(True, kind[order][1:] != kind[order][:-1])[: len(order)]
        earlier = np.empty(len(order), np.int64)
        earlier[order] = before - before[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
        return np.arange(self.length.sum()) - self.spread(self.first - earlier)

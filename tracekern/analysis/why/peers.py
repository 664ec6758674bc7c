"""What each piece of a rank's time takes at the other ranks: the one table that says "longer than at its peers".

A *piece* is a span of work, a wait that nothing on record ended, or the time between two nodes that no span covers. A
*cell* is one place in the program: stage, call, block, warp, phase, and ordinal within these. Pieces of different ranks
in one cell are the same work; each row of the table is a cell, each column a rank.

Two changes come from it: a rank that takes as long *per piece* as a peer, and a rank that has *as many pieces*. Pieces
without a partner in their cell take as much longer as those with one. Phases that a peer never has are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import Groups, group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import OPEN_END, EventClass, Float64, Int32, Int64, Mask, Timeline


@dataclass(frozen=True)
class Pieces:
    """[n] of all ranks."""

    segment: Int64
    """Index into RunGraph.segments."""
    run: Int64
    phase: Int64
    """Index into EventGraph.phases."""
    ns: Float64


class _ByCall:
    """Times of which each launch has one, an edge each, beside those of the same launch on other ranks."""

    def __init__(self, call: Int64, rank: Int64, edge: Int64, ns: Float64 | Int64, shape: tuple[int, int]) -> None:
        """call, rank: [n] row and column of each; of `shape`."""
        self._call, self._rank, self._edge = call, rank, edge
        self.in_call = np.full(shape, np.nan)
        """[num_calls, num_ranks]"""
        self.in_call[call, rank] = ns

    def swap(self, change: Float64, rank: int, peer: int) -> Float64:
        """Adds to a change what makes those of `rank` as long as those of `peer`, where it has them."""
        mine = np.flatnonzero((self._rank == rank) & np.isfinite(self.in_call[self._call, peer]))
        call = self._call[mine]
        change[self._edge[mine]] += self.in_call[call, peer] - self.in_call[call, rank]
        return change

    def even(self, change: Float64) -> Float64:
        """Adds what makes all of them as long as their median."""
        median = _median_of_rows(self.in_call)
        change[self._edge] += median[self._call] - self.in_call[self._call, self._rank]
        return change


class PeerTable:
    """Changes of the run graph's edges, in ns, that make one rank like another. Ranks are columns: indices of
    `ranks`."""

    def __init__(
        self, timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph, of_launch: Int32
    ) -> None:
        """of_launch: [num_launches] iteration of each; -1 for none."""
        schedule, runs = graph.schedule, graph.runs
        self.ranks = [rank.rank for rank in timeline.ranks]
        self._run_graph = run_graph
        column = np.full(max(self.ranks) + 1, -1)
        column[self.ranks] = np.arange(len(self.ranks))
        num_ranks = len(self.ranks)
        pieces, rank = _by_rank(_find_pieces(timeline, graph, waits, run_graph), column[schedule.rank[runs.launch]])
        self._of_rank = [slice(*np.searchsorted(rank, [one, one + 1]).tolist()) for one in range(num_ranks)]
        self._ns, self._edge = pieces.ns, run_graph.segments.edge[pieces.segment].astype(np.int32)
        cells = _number_cells(timeline, graph, pieces, rank)
        self._cell, self._phase = cells.group.astype(np.int32), pieces.phase.astype(np.int32)
        self._in_cell = np.full((num_ranks, len(cells)), np.nan)
        self._in_cell[rank, self._cell] = self._ns
        launch = runs.launch[pieces.run]
        phases = group_rows(len(self._ns), schedule.stage[launch], schedule.sequence[launch], self._phase)
        self._launch_phase = phases.group.astype(np.int32)
        self._count = _table(phases.group, rank, np.ones(len(self._ns)), (len(phases), num_ranks))
        self._has_phase = _table(pieces.phase, rank, self._ns >= 0, (len(graph.phases), num_ranks)) > 0

        gaps, asks = run_graph.gaps, run_graph.asks
        calls = group_rows(len(gaps.launch), schedule.stage[gaps.launch], schedule.sequence[gaps.launch])
        call = np.full(len(schedule.rank), -1)
        call[gaps.launch] = calls.group

        def by_call(launch: Int64, edge: Int64, ns: Float64 | Int64) -> _ByCall:
            return _ByCall(call[launch], column[schedule.rank[launch]], edge, ns, (len(calls), num_ranks))

        self._gaps = by_call(gaps.launch, gaps.edge, run_graph.weight[gaps.edge])
        self._asks = [
            by_call(asks.launch, *column_of)
            for column_of in ((asks.before, asks.before_ns), (asks.after, asks.after_ns), (asks.gap, asks.gap_ns))
        ]
        self._by_host_in_call = by_call(gaps.launch, gaps.edge, schedule.host_gap_ns[gaps.launch]).in_call
        self._iteration_of_call = np.zeros(len(calls), np.int64)
        self._iteration_of_call[call[gaps.launch]] = np.append(of_launch, [-1] * num_ranks)[gaps.launch]

        self.own_ns = np.bincount(rank, self._ns, num_ranks).astype(float)
        """[num_ranks] what each rank did by itself."""
        self.gaps_ns = np.nansum(self._gaps.in_call, axis=0)
        """[num_ranks] before each rank's kernels."""

    def pace(self, rank: int, peer: int) -> Float64:
        """[num_edges] The pieces of `rank` take as long as those of `peer`; it keeps its number of pieces."""
        mine = self._of_rank[rank]
        own, theirs, phase = self._ns[mine], self._in_cell[peer][self._cell[mine]], self._phase[mine]
        both = np.isfinite(theirs)
        num_phases = len(self._has_phase)
        of_own, of_peer = (np.bincount(phase[both], times[both], num_phases) for times in (own, theirs))
        ratio = np.divide(of_peer, of_own, out=np.ones(num_phases), where=of_own > 0)
        return self._of_edges(self._edge[mine], np.where(both, theirs, own * ratio[phase]) - own)

    def amount(self, rank: int, peer: int) -> Float64 | None:
        """[num_edges] `rank` has as many pieces of each phase in each call as `peer`. None where it has."""
        mine, count, of_peer = self._of_rank[rank], self._count[:, rank], self._count[:, peer]
        factor = np.divide(of_peer, count, out=np.ones(len(count)), where=count > 0)
        factor = np.where(self._has_phase[self._phase[mine], peer], factor[self._launch_phase[mine]], 1)
        differs = np.flatnonzero(factor != 1)
        if not len(differs):
            return None
        return self._of_edges(self._edge[mine][differs], self._ns[mine][differs] * (factor[differs] - 1))

    def costliest_phase(self, rank: int, peer: int, edges: Int64, of_amount: bool) -> tuple[int, float]:
        """(index into EventGraph.phases, times as long per piece, or as many pieces, as at `peer`) of the phase that
        has most to gain on these edges; (-1, 1) where nothing has."""
        is_here = np.zeros(len(self._run_graph.weight), bool)
        is_here[edges] = True
        of_rank = self._of_rank[rank]
        mine = of_rank.start + np.flatnonzero(is_here[self._edge[of_rank]])
        theirs = self._in_cell[peer][self._cell[mine]]
        group = self._launch_phase[mine]
        fewer = 1 - self._count[group, peer] / self._count[group, rank]
        gain = self._ns[mine] * fewer if of_amount else np.nan_to_num(self._ns[mine] - theirs)
        by_phase = np.bincount(self._phase[mine], gain, len(self._has_phase))
        phase = int(by_phase.argmax())
        if by_phase[phase] <= 0:
            return -1, 1.0
        same = of_rank.start + np.flatnonzero(self._phase[of_rank] == phase)
        if of_amount:
            num_theirs = int((self._phase[self._of_rank[peer]] == phase).sum())
            return phase, len(same) / max(num_theirs, 1)
        theirs = self._in_cell[peer][self._cell[same]]
        both = np.isfinite(theirs)
        of_peer = float(theirs[both].sum())
        return phase, float(self._ns[same[both]].sum()) / of_peer if of_peer else 1.0

    def longer_gaps_ns(self, rank: int) -> Float64:
        """[num_iterations] How much longer the gaps before kernels of `rank` are than the median of its peers, added up
        over the kernels of each iteration."""
        own, others = self._gaps.in_call[:, rank], np.delete(self._gaps.in_call, rank, axis=1)
        compared = np.isfinite(own) & np.isfinite(others).any(axis=1) & (self._iteration_of_call >= 0)
        numbers, iteration = np.unique(self._iteration_of_call[compared], return_inverse=True)
        longer_ns = own[compared] - _median_of_rows(others[compared])
        return np.bincount(iteration, longer_ns, len(numbers)).astype(float, copy=False)

    def longer_by_host_ns(self, rank: int, peer: int) -> tuple[float, float]:
        """(how much longer the gaps before kernels of `rank` are that are longer than those of `peer`, and how much of
        that is its host's: of a gap of the peer nothing may say what its host took, and then all of it was)"""
        gap, by_host = self._gaps.in_call, self._by_host_in_call
        longer_ns = np.nan_to_num(gap[:, rank] - gap[:, peer])
        of_peer = np.where(by_host[:, peer] > 0, by_host[:, peer], gap[:, peer])
        by_host_ns = np.minimum(np.nan_to_num(by_host[:, rank] - of_peer), longer_ns)
        return float(longer_ns[longer_ns > 0].sum()), float(by_host_ns[longer_ns > 0].sum())

    def gaps(self, rank: int, peer: int) -> Float64:
        """[num_edges] The gaps before kernels of `rank` are as long as those of `peer`."""
        return self._gaps.swap(np.zeros(len(self._run_graph.weight)), rank, peer)

    def asks(self, rank: int, peer: int) -> Float64:
        """[num_edges] The host of `rank` asks for its kernels as that of `peer` does: of Asks.weight()."""
        change = np.zeros(len(self._run_graph.weight))
        for times in self._asks:
            times.swap(change, rank, peer)
        return change

    def even_gaps(self) -> Float64:
        """[num_edges] The gaps before kernels of all ranks are as long as the median of the ranks."""
        return self._gaps.even(np.zeros(len(self._run_graph.weight)))

    def _of_edges(self, edge: Int32, change: Float64) -> Float64:
        sums: Float64 = np.bincount(edge, change, len(self._run_graph.weight)).astype(float, copy=False)
        return sums


def _table(row: Int64, column: Int64, value: npt.ArrayLike, shape: tuple[int, int]) -> Float64:
    sums = np.bincount(row * shape[1] + column, np.asarray(value, float), shape[0] * shape[1]).astype(float, copy=False)
    return sums.reshape(shape)


def _median_of_rows(values: Float64) -> Float64:
    """[n] median of what is known in each row; a sort of all rows at once is faster than nanmedian by rows."""
    ordered = np.sort(values, axis=1)  # nan comes last
    count = np.isfinite(values).sum(axis=1)
    row = np.arange(len(values))
    median: Float64 = (ordered[row, (count - 1) // 2] + ordered[row, count // 2]) / 2
    return median


def _find_pieces(timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph) -> Pieces:
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
    return Pieces(
        np.concatenate([segment[own], np.arange(len(segments))]),
        np.concatenate([run[own], segments.run]),
        np.concatenate([graph.phase[piece[own]], uncovered_phase]),
        np.concatenate([ns[own], uncovered]),
    )


def _by_rank(pieces: Pieces, rank_of_run: Int64) -> tuple[Pieces, Int64]:
    """Sorts pieces by rank, those of a rank in the order that they had. Returns them and [n] rank, all ascending."""
    rank = rank_of_run[pieces.run]
    order = np.argsort(rank, kind="stable")
    return Pieces(pieces.segment[order], pieces.run[order], pieces.phase[order], pieces.ns[order]), rank[order]


def _is_fixed(timeline: Timeline, waits: Waits) -> Mask:
    """[num_spans] what is nobody's own time: sending a signal, and waiting for a rank whose signal is not on record."""
    spans = timeline.spans
    fixed = timeline.events_of(EventClass.SIGNAL)[spans.event]
    fixed |= timeline.events_of(EventClass.WAIT)[spans.event] & (spans.end == OPEN_END)
    fixed[waits.row[waits.kind == WaitKind.UNMATCHED]] = True
    return np.asarray(fixed, bool)


def _number_cells(timeline: Timeline, graph: EventGraph, pieces: Pieces, rank: Int64) -> Groups:
    """Pieces of one cell have a group; of one rank, no two have the same."""
    runs, schedule = graph.runs, graph.schedule
    writer = np.array([(track.block, track.warp) for track in timeline.tracks], np.int64).reshape(-1, 2)[runs.track]
    place = group_rows(len(runs), schedule.stage[runs.launch], schedule.sequence[runs.launch], *writer.T).group
    # Pieces are in the order of time within a run, segments as well.
    kind = group_rows(len(pieces.run), place[pieces.run], pieces.phase, rank).group
    order = np.lexsort((np.arange(len(kind)), kind))
    ordinal = np.empty(len(kind), np.int64)
    ordinal[order] = np.arange(len(kind)) - np.searchsorted(kind[order], kind[order])
    return group_rows(len(kind), place[pieces.run], pieces.phase, ordinal)

"""How much longer ranks take than their peers, iteration by iteration, and what the run would be like if they did not.

The one table that says "longer than at its peers". A rank's time is compared place by place (pieces.py), its number of
pieces phase by phase, its host call by call (hosts.py). Without a cause its ranks take, at each place, as much less as
they exceeded the median of the others there on average: their own variation stays, nobody else's is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.why.hosts import Hosts
from tracekern.analysis.why.members import FAR, Suspects, median_of_members, sums_by
from tracekern.analysis.why.pieces import Pieces, find_pieces, known, writers_of
from tracekern.analysis.why.replays import NOTHING, added
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

_MOST_WARPS = 1 << 23
"""Numbers in the table of single warps; larger runs are judged by whole ranks alone."""


@dataclass(frozen=True)
class _OfPhase:
    """The pieces of one phase, and how many of them each rank has."""

    pieces: Pieces
    count: Float64
    """[num_calls, num_ranks] pieces; nan of ranks that are not compared there."""
    is_extra: bool
    """Whether only one rank has any, of several that are compared."""
    is_common: bool
    """Whether most of the ranks that are compared have some."""

    @classmethod
    def of(cls, pieces: Pieces, has_rank: Mask) -> _OfPhase:
        """has_rank: [num_ranks] Whether the rank is one of those that are compared."""
        first = np.flatnonzero(np.diff(pieces.call_of_cell, prepend=-1))  # they ascend
        count = np.add.reduceat(pieces.in_cell >= 0, first, axis=0, dtype=float) if len(first) else np.empty((0, 1))
        num_with, num_peers = int((np.diff(pieces.first) > 0).sum()), int(has_rank.sum())
        count = np.where(has_rank, count, np.nan)
        return cls(pieces, count, num_with == 1 and num_peers > 1, 2 * num_with > num_peers)


@dataclass(frozen=True)
class _Beside:
    """[n] pieces of suspects in one phase, beside those of other ranks."""

    phase: int
    rows: Int64
    rank: Int64
    own: Float64
    """ns"""
    theirs: Float64
    """The median of the ranks that are no suspects in the same cell; nan where there are none."""
    times_as_many: Float64
    """How many times as many pieces those ranks have in the call, on average."""


class PeerTable:
    def __init__(
        self, timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph, ends: IterationEnds
    ) -> None:
        self._shape = len(timeline.ranks), max(len(ends), 1)
        self._run_of_segment, self._num_writers = run_graph.segments.run, len(writers_of(timeline, graph.runs))
        number = {name: idx for idx, name in enumerate(graph.stages)}
        has_rank = graph.has_rank[[number[phase.stage] for phase in graph.phases]]
        found = find_pieces(timeline, graph, waits, run_graph, ends)
        self._phases = [_OfPhase.of(pieces, of_phase) for pieces, of_phase in zip(found, has_rank, strict=True)]
        self._has_rank = has_rank
        self.hosts = Hosts(timeline, graph, run_graph, ends)

    # ---- excess, [num_ranks, num_iterations] ns ----

    def pace_ns(self) -> tuple[Float64, Float64 | None]:
        """How much longer the pieces of each rank took than the median of all ranks in their cells.

        Returns also [num_ranks, num_writers, num_iterations] of each warp; None where there is one, or too many.
        """
        (num_ranks, num_iterations), num_writers = self._shape, self._num_writers
        shape = num_ranks, num_writers, num_iterations
        of_warps = np.zeros(shape) if num_writers > 1 and np.prod(shape) <= _MOST_WARPS else None
        of_ranks = np.zeros(self._shape)
        for pieces in (of_phase.pieces for of_phase in self._phases):
            rank, cell, iteration = pieces.rank, pieces.cell, pieces.iteration
            excess = pieces.ns(slice(None), rank) - median_of_members(known(pieces.in_cell))[cell]
            if len(outside := np.flatnonzero(iteration < 0)):
                excess[outside], iteration = 0.0, np.maximum(iteration, 0)
            if of_warps is None:
                of_ranks += sums_by((rank, iteration), excess, self._shape)
            else:
                of_warps += sums_by((rank, pieces.writer_of_cell[cell], iteration), excess, shape)
        return (of_ranks, None) if of_warps is None else (of_warps.sum(axis=1), of_warps)

    def amount_ns(self) -> Float64:
        """What the pieces took that a rank had more than the median of all ranks, phase by phase."""
        total = np.zeros(self._shape)
        for of_phase, has_rank in zip(self._phases, self._has_rank, strict=True):
            if not of_phase.is_common:
                continue
            pieces, rank = of_phase.pieces, of_phase.pieces.rank
            inside = np.flatnonzero(pieces.iteration >= 0)
            count = sums_by((rank[inside], pieces.iteration[inside]), np.ones(len(inside)), self._shape)
            each_ns = float(pieces.ns(inside, rank[inside]).sum()) / max(len(inside), 1)
            count[~has_rank] = np.nan
            total += np.nan_to_num((count - median_of_members(count.T)) * each_ns)
        return total

    def extra_ns(self) -> Float64:
        """What a rank did in phases that no other rank has, the gaps before kernels of its own included."""
        total = self.hosts.extra_ns()
        for pieces in (of_phase.pieces for of_phase in self._phases if of_phase.is_extra):
            inside, rank = np.flatnonzero(pieces.iteration >= 0), pieces.rank
            total += sums_by((rank[inside], pieces.iteration[inside]), pieces.ns(inside, rank[inside]), self._shape)
        return total

    # ---- the run without it: how much longer edges take ----

    def without_pace(self, suspects: Suspects) -> Change:
        """Each piece takes as much less as its place exceeds that of ranks that are no suspects, on average."""
        return _of_edges([self._without_pace(one) for one in self._beside(suspects)])

    def _without_pace(self, beside: _Beside) -> Change:
        pieces, rank, own, theirs = self._phases[beside.phase].pieces, beside.rank, beside.own, beside.theirs
        both = np.isfinite(theirs)
        place = rank * pieces.num_places + pieces.place[beside.rows]
        count = np.bincount(place[both], minlength=self._shape[0] * pieces.num_places)
        longer = np.bincount(place[both], (own - theirs)[both], len(count)) / np.maximum(count, 1)
        of_own, of_peer = (np.bincount(rank[both], ns[both], self._shape[0]) for ns in (own, theirs))
        ratio = np.divide(of_peer, of_own, out=np.ones(len(of_own)), where=of_own > 0)
        change = np.where(both, -longer[place], own * (ratio[rank] - 1))
        return Change(pieces.edge[beside.rows].astype(np.int64), change)

    def without_amount(self, suspects: Suspects) -> Change:
        """The ranks have as many pieces of each phase in each call as those that are no suspects, on average."""
        common = (one for one in self._beside(suspects) if self._phases[one.phase].is_common)
        return self._shorter((one, one.own * (one.times_as_many - 1)) for one in common)

    def without_extra(self, suspects: Suspects, own_hosts: bool) -> Change:
        """The ranks do nothing that no other rank does. own_hosts: of Asks.weight()."""
        extra = (one for one in self._beside(suspects) if self._phases[one.phase].is_extra)
        return added([self._shorter((one, -one.own) for one in extra), self.hosts.without_extra(suspects, own_hosts)])

    def _shorter(self, parts: Iterator[tuple[_Beside, Float64]]) -> Change:
        edges = ((self._phases[one.phase].pieces.edge[one.rows], change) for one, change in parts)
        return _of_edges([Change(edge.astype(np.int64), change) for edge, change in edges])

    def runs_of(self, suspects: Suspects) -> Int64:
        """Returns the runs that the pieces of suspects are in."""
        edges = [self._phases[one.phase].pieces.edge[one.rows] for one in self._beside(suspects)]
        return np.unique(self._run_of_segment[np.concatenate([NOTHING.edge, *edges])]).astype(np.int64)

    def longest_phase(self, suspects: Suspects, what: str) -> tuple[int, float]:
        """(index into EventGraph.phases, times as long per piece, or as many pieces, as at peers) of the phase that
        most of the excess is of; (-1, 1) where nothing is longer. what: "pace", "amount" or "extra"."""
        by_phase = [(self._excess(one, what), one) for one in self._beside(suspects)]
        longest_ns, longest = max(by_phase, key=lambda entry: entry[0], default=(0.0, None))
        if longest is None or longest_ns <= 0:
            return -1, 1.0
        if what == "amount":
            return longest.phase, float(len(longest.rows) / max(longest.times_as_many.sum(), 1e-9))
        both = np.isfinite(longest.theirs)
        of_peer = float(longest.theirs[both].sum())
        return longest.phase, float(longest.own[both].sum()) / of_peer if of_peer else 1.0

    def _excess(self, beside: _Beside, what: str) -> float:
        of_phase = self._phases[beside.phase]
        if what == "pace":
            return float(np.nan_to_num(beside.own - beside.theirs).sum())
        if what == "amount":
            return float((beside.own * (1 - beside.times_as_many)).sum()) if of_phase.is_common else 0.0
        return float(beside.own.sum()) if of_phase.is_extra else 0.0

    def only_writer(self, suspects: Suspects) -> int:
        """Returns the one warp of a single suspect that takes far longer than its peers; -1 where several do."""
        excess, is_there = np.zeros(self._num_writers), np.zeros(self._num_writers, bool)
        for one in self._beside(suspects):
            pieces = self._phases[one.phase].pieces
            writer = pieces.writer_of_cell[pieces.cell[one.rows]]
            is_there[writer] = True
            excess += np.bincount(writer, np.nan_to_num(one.own - one.theirs), self._num_writers)
        if is_there.sum() < 2 or len(suspects.ranks) > 1:
            return -1
        second, largest = np.partition(excess, -2)[-2:]
        return int(excess.argmax()) if largest > FAR * max(float(second), 0.0) else -1

    def _beside(self, suspects: Suspects) -> Iterator[_Beside]:
        """Yields the pieces of suspects, phase by phase, where they have any."""
        for phase, of_phase in enumerate(self._phases):
            pieces, count = of_phase.pieces, of_phase.count
            rows, rank = pieces.rows_of(suspects.ranks, suspects.hits, suspects.writer)
            if not len(rows):
                continue
            cells, cell = np.unique(pieces.cell[rows], return_inverse=True)
            theirs = median_of_members(known(np.delete(pieces.in_cell[cells], suspects.ranks, axis=1)))[cell]
            others = np.delete(count, suspects.ranks, axis=1)
            mean = np.nansum(others, axis=1) / np.maximum(np.isfinite(others).sum(axis=1), 1)
            call = pieces.call_of_cell[pieces.cell[rows]]
            yield _Beside(phase, rows, rank, pieces.ns(rows, rank), theirs, mean[call] / count[call, rank])


def _of_edges(changes: Sequence[Change]) -> Change:
    """What the pieces of each edge take longer, added up; of edges that do."""
    edge = np.concatenate([NOTHING.edge, *(one.edge for one in changes)])
    low = int(edge.min(initial=0))
    ns = np.bincount(edge - low, np.concatenate([NOTHING.ns, *(one.ns for one in changes)]))
    changed = np.flatnonzero(ns)
    return Change(changed + low, ns[changed].astype(float, copy=False))

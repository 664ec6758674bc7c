"""How much longer ranks take than their peers, iteration by iteration, and what the run would be like if they did not.

The one table that says "longer than at its peers". A rank's time is compared place by place (pieces.py), its number of
pieces phase by phase, its host call by call (hosts.py). Without a cause its ranks take, at each place, as much less as
they exceeded the median of the others there on average: their own variation stays, nobody else's is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum

import numpy as np

from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.partial import Partial, Sums
from tracekern.analysis.parts import Parts
from tracekern.analysis.why.hosts import Hosts
from tracekern.analysis.why.members import FAR, Suspects, median_of_members, sums_by
from tracekern.analysis.why.pieces import Pieces, Writers, find_pieces, known
from tracekern.analysis.why.replays import NOTHING, added
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline

_MOST_WARPS = 1 << 23
"""Numbers in the table of single warps; larger runs are judged by whole ranks alone."""


@dataclass(frozen=True)
class _OfPhase:
    """The pieces of one phase in a part of the run, and how many of them each rank has."""

    pieces: Pieces
    count: Float64
    """[num_calls, num_ranks] pieces; nan of ranks that are not compared there."""

    @classmethod
    def of(cls, pieces: Pieces, has_rank: Mask) -> _OfPhase:
        """has_rank: [num_ranks] Whether the rank is one of those that are compared."""
        first = np.flatnonzero(np.diff(pieces.call_of_cell, prepend=-1))  # they ascend
        count = np.add.reduceat(pieces.in_cell >= 0, first, axis=0, dtype=float) if len(first) else np.empty((0, 1))
        return cls(pieces, np.where(has_rank, count, np.nan))


@dataclass(frozen=True)
class _Beside:
    """[n] pieces of suspects in one phase of a part, beside those of other ranks."""

    edge: Int64
    """Of the whole run, see Moments."""
    run: Int32
    """Index into the part's runs."""
    rank: Int64
    writer: Int64
    ordinal: Int64
    """Of the piece in its iteration: a place, with phase, rank and writer."""
    own: Float64
    """ns"""
    theirs: Float64
    """The median of the ranks that are no suspects in the same cell; nan where there are none."""
    times_as_many: Float64
    """How many times as many pieces those ranks have in the call, on average."""

    @classmethod
    def join(cls, parts: Sequence[_Beside]) -> _Beside:
        return cls(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))

    @property
    def both(self) -> Mask:
        return np.isfinite(self.theirs)


@dataclass(frozen=True)
class _Excess(Partial):
    """What pieces took beside those of other ranks, in some parts of a run."""

    pace: Float64
    """[num_ranks, num_iterations] ns longer than the median of all ranks in their cells; or with the writer between."""
    count: dict[int, Float64]
    """Phase -> [num_ranks, num_iterations] pieces."""
    ns: dict[int, float]
    """Phase -> what these take together."""
    alone_ns: dict[int, Float64]
    """Phase -> [num_ranks, num_iterations] the same where only one rank has any: nothing else is needed."""
    has_pieces: dict[int, Mask]
    """Phase -> [num_ranks]"""


class _PartPieces:
    """The pieces of one part of a run."""

    def __init__(self, phases: dict[int, _OfPhase], run_of_segment: Int32, first_edge: int) -> None:
        self.phases, self._run_of_segment, self._first_edge = phases, run_of_segment, first_edge

    @classmethod
    def of(cls, part: PartGraph, first_edge: int, writers: Writers, ends: IterationEnds, has_rank: Mask) -> _PartPieces:
        """has_rank: [num_phases, num_ranks]"""
        found = find_pieces(part, writers, ends)
        phases = {phase: _OfPhase.of(pieces, has_rank[phase]) for phase, pieces in found}
        return cls(phases, part.run_graph.segments.run, first_edge)

    def excess(self, shape: tuple[int, int], num_writers: int) -> _Excess:
        """shape: of ranks and iterations. num_writers: 0 for sums over all of them."""
        num_ranks, num_iterations = shape
        found = _Excess(np.zeros((num_ranks, num_writers, num_iterations) if num_writers else shape), {}, {}, {}, {})
        for phase, of_phase in self.phases.items():
            pieces, rank = of_phase.pieces, of_phase.pieces.rank
            inside = np.flatnonzero(pieces.iteration >= 0)
            rank, cell, iteration = rank[inside], pieces.cell[inside], pieces.iteration[inside]
            ns = pieces.ns(inside, rank)
            longer = ns - median_of_members(known(pieces.in_cell))[cell]
            of_writer = [pieces.writer_of_cell[cell]] if num_writers else []
            np.add(found.pace, sums_by((rank, *of_writer, iteration), longer, found.pace.shape), out=found.pace)
            found.count[phase] = sums_by((rank, iteration), np.ones(len(inside)), shape)
            found.ns[phase] = float(ns.sum())
            found.has_pieces[phase] = np.diff(pieces.first) > 0
            if found.has_pieces[phase].sum() == 1:
                found.alone_ns[phase] = sums_by((rank, iteration), ns, shape)
        return found

    def beside(self, suspects: Suspects) -> dict[int, _Beside]:
        """The pieces of suspects by phase, where they have any."""
        found = {}
        for phase, of_phase in self.phases.items():
            pieces, count = of_phase.pieces, of_phase.count
            rows, rank = pieces.rows_of(suspects.ranks, suspects.hits, suspects.writer)
            if not len(rows):
                continue
            cells, cell = np.unique(pieces.cell[rows], return_inverse=True)
            theirs = median_of_members(known(np.delete(pieces.in_cell[cells], suspects.ranks, axis=1)))[cell]
            others = np.delete(count, suspects.ranks, axis=1)
            mean = np.nansum(others, axis=1) / np.maximum(np.isfinite(others).sum(axis=1), 1)
            call, edge = pieces.call_of_cell[pieces.cell[rows]], pieces.edge[rows].astype(np.int64)
            found[phase] = _Beside(
                self._first_edge + edge,
                self._run_of_segment[edge],
                rank,
                *pieces.writer_and_ordinal(pieces.place[rows]),
                pieces.ns(rows, rank),
                theirs,
                mean[call] / count[call, rank],
            )
        return found


@dataclass(frozen=True)
class _Places(Partial):
    """How much longer pieces of suspects are than those of others, of one phase in some parts."""

    longer: Sums
    """By rank, writer and ordinal: how many there are, and twice the ns."""
    own: Float64
    """[num_ranks] ns"""
    theirs: Float64

    @classmethod
    def of(cls, beside: _Beside, num_ranks: int) -> _Places:
        both = np.flatnonzero(beside.both)
        rank, own, theirs = beside.rank[both], beside.own[both], beside.theirs[both]
        twice = (2 * (own - theirs)).astype(np.int64)  # a median is a whole number, or lies between two
        sums = Sums.of((rank, beside.writer[both], beside.ordinal[both]), count=np.ones(len(both)), twice_ns=twice)
        return cls(sums, sums_by([rank], own, (num_ranks,)), sums_by([rank], theirs, (num_ranks,)))

    def shorter(self, beside: _Beside) -> Float64:
        """[n] how much longer each piece takes that is as long as its place's mean, or its rank's, is at others: what
        their place exceeds others by less."""
        both, change = beside.both, np.empty(len(beside.own))
        mean = self.longer["twice_ns"] / 2 / self.longer["count"]
        change[both] = -mean[self.longer.number_of(beside.rank[both], beside.writer[both], beside.ordinal[both])]
        ratio = np.divide(self.theirs, self.own, out=np.ones(len(self.own)), where=self.own > 0)
        change[~both] = (beside.own * (ratio[beside.rank] - 1))[~both]
        return change


class PeerTable:
    def __init__(self, timeline: Timeline, moments: Moments, ends: IterationEnds) -> None:
        program = moments.program
        self._shape = len(timeline.ranks), max(len(ends), 1)
        self.writers = moments.graphs.share(Writers.of(timeline, moments))
        self._has_rank = np.repeat(program.has_rank, program.num_names, axis=0)
        make = partial(_PartPieces.of, writers=self.writers, ends=ends, has_rank=self._has_rank)
        self._parts: Parts[_PartPieces] = moments.graphs.map(make, moments.first_edges)
        size = int(np.prod(self._shape)) * len(self.writers)
        num_writers = len(self.writers) if len(self.writers) > 1 and size <= _MOST_WARPS else 0
        excess = partial(_PartPieces.excess, shape=self._shape, num_writers=num_writers)
        self._excess: _Excess = self._parts.map(excess).total()
        self.hosts = Hosts(timeline, moments, ends)

    def _is_extra(self, phase: int) -> bool:
        """Whether only one rank has pieces of the phase, of several that are compared."""
        return int(self._excess.has_pieces[phase].sum()) == 1 and int(self._has_rank[phase].sum()) > 1

    def _is_common(self, phase: int) -> bool:
        """Whether most of the ranks that are compared have some."""
        return 2 * int(self._excess.has_pieces[phase].sum()) > int(self._has_rank[phase].sum())

    # ---- excess, [num_ranks, num_iterations] ns ----

    def pace_ns(self) -> tuple[Float64, Float64 | None]:
        """How much longer the pieces of each rank took than the median of all ranks in their cells.

        Returns also [num_ranks, num_writers, num_iterations] of each warp; None where there is one, or too many.
        """
        pace = self._excess.pace.copy()  # what is found is taken out of it
        return (pace, None) if pace.ndim == 2 else (pace.sum(axis=1), pace)

    def amount_ns(self) -> Float64:
        """What the pieces took that a rank had more than the median of all ranks, phase by phase."""
        total = np.zeros(self._shape)
        for phase in filter(self._is_common, sorted(self._excess.count)):
            count = self._excess.count[phase]
            each_ns = self._excess.ns[phase] / max(count.sum(), 1)
            count = np.where(self._has_rank[phase][:, None], count, np.nan)
            total += np.nan_to_num((count - median_of_members(count.T)) * each_ns)
        return total

    def extra_ns(self) -> Float64:
        """What a rank did in phases that no other rank has, the gaps before kernels of its own included."""
        of_phases = (self._excess.alone_ns[phase] for phase in self._excess.has_pieces if self._is_extra(phase))
        return sum(of_phases, self.hosts.extra_ns())

    # ---- the run without it: how much longer edges take ----

    def without_pace(self, suspects: Suspects) -> Change:
        """Each piece takes as much less as its place exceeds that of ranks that are no suspects, on average."""
        beside = self._beside(suspects)
        places = beside.map(partial(_places_of, num_ranks=self._shape[0])).total()
        return self._longer(beside, lambda phase, one: places[phase].shorter(one))

    def without_amount(self, suspects: Suspects) -> Change:
        """The ranks have as many pieces of each phase in each call as those that are no suspects, on average."""
        return self._longer(self._beside(suspects), lambda _, one: one.own * (one.times_as_many - 1), self._is_common)

    def without_extra(self, suspects: Suspects, own_hosts: bool) -> Change:
        """The ranks do nothing that no other rank does. own_hosts: of Asks.weight()."""
        pieces = self._longer(self._beside(suspects), lambda _, one: -one.own, self._is_extra)
        return added([pieces, self.hosts.without_extra(suspects, own_hosts)])

    def _longer(
        self,
        beside: Parts[dict[int, _Beside]],
        longer: Callable[[int, _Beside], Float64],
        counts: Callable[[int], bool] = lambda _: True,
    ) -> Change:
        """How much longer edges take whose pieces do. counts: which phases."""
        changes = [NOTHING]
        for part in beside:
            changes.append(_of_edges([(one.edge, longer(phase, one)) for phase, one in part.items() if counts(phase)]))
        return Change(*(np.concatenate(columns) for columns in zip(*changes, strict=True)))

    def runs_of(self, suspects: Suspects) -> Parts[Int64]:
        """Returns the runs of each part that the pieces of suspects are in."""
        return self._beside(suspects).map(_runs_of)

    def longest_phase(self, suspects: Suspects, what: str) -> tuple[int, float]:
        """(index into Program.phases, times as long per piece, or as many pieces, as at peers) of the phase that most
        of the excess is of; (-1, 1) where nothing is longer. what: "pace", "amount" or "extra"."""
        by_phase = [(self._excess_ns(phase, one, what), phase, one) for phase, one in self._by_phase(suspects)]
        longest_ns, phase, longest = max(by_phase, key=lambda entry: entry[0], default=(0.0, -1, None))
        if longest is None or longest_ns <= 0:
            return -1, 1.0
        if what == "amount":
            return phase, float(len(longest.own) / max(fsum(longest.times_as_many), 1e-9))
        of_peer = float(longest.theirs[longest.both].sum())
        return phase, float(longest.own[longest.both].sum()) / of_peer if of_peer else 1.0

    def _excess_ns(self, phase: int, beside: _Beside, what: str) -> float:
        if what == "pace":
            return float(np.nan_to_num(beside.own - beside.theirs).sum())
        if what == "amount":
            return fsum(beside.own * (1 - beside.times_as_many)) if self._is_common(phase) else 0.0
        return float(beside.own.sum()) if self._is_extra(phase) else 0.0

    def only_writer(self, suspects: Suspects) -> int:
        """Returns the one warp of a single suspect that takes far longer than its peers; -1 where several do."""
        excess, is_there = np.zeros(len(self.writers)), np.zeros(len(self.writers), bool)
        for _, one in self._by_phase(suspects):
            is_there[one.writer] = True
            excess += np.bincount(one.writer, np.nan_to_num(one.own - one.theirs), len(self.writers))
        if is_there.sum() < 2 or len(suspects.ranks) > 1:
            return -1
        second, largest = np.partition(excess, -2)[-2:]
        return int(excess.argmax()) if largest > FAR * max(float(second), 0.0) else -1

    def _beside(self, suspects: Suspects) -> Parts[dict[int, _Beside]]:
        """The pieces of suspects in each part by phase, where they have any."""
        return self._parts.map(partial(_PartPieces.beside, suspects=suspects))

    def _by_phase(self, suspects: Suspects) -> list[tuple[int, _Beside]]:
        """The same of all parts."""
        by_phase: dict[int, list[_Beside]] = {}
        for part in self._beside(suspects):
            for phase, one in part.items():
                by_phase.setdefault(phase, []).append(one)
        return [(phase, _Beside.join(by_phase[phase])) for phase in sorted(by_phase)]


def _places_of(beside: dict[int, _Beside], num_ranks: int) -> dict[int, _Places]:
    return {phase: _Places.of(one, num_ranks) for phase, one in beside.items()}


def _runs_of(beside: dict[int, _Beside]) -> Int64:
    return np.unique(np.concatenate([NOTHING.edge, *(one.run for one in beside.values())])).astype(np.int64)


def _of_edges(pieces: Sequence[tuple[Int64, Float64]]) -> Change:
    """What the pieces of each edge take longer, added up; of edges that do."""
    edge = np.concatenate([NOTHING.edge, *(edge for edge, _ in pieces)])
    low = int(edge.min()) if len(edge) else 0
    ns = np.bincount(edge - low, np.concatenate([NOTHING.ns, *(ns for _, ns in pieces)]))
    changed = np.flatnonzero(ns)
    return Change(changed + low, ns[changed].astype(float, copy=False))

"""How much longer ranks take than their peers, iteration by iteration, and what the run would be like if they did not.

The one table that says "longer than at its peers". A rank's time is compared place by place (pieces.py), its number of
pieces phase by phase, its host call by call. Without a cause its ranks take, at each place, as much less as they
exceeded the median of the others there on average: their own variation stays, nobody else's is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.host_gaps import MAX_LAUNCH_NS
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.why.pieces import find_pieces
from tracekern.timeline.model import Float64, Int64, Mask, Timeline, shared_gpus

_FAR = 3.0
"""A warp is slow alone, or a gap on a shared GPU long, if it exceeds its peers by so many times as much as others."""
_MOST_WARPS = 1 << 23
"""Numbers in the table of single warps; larger runs are judged by whole ranks alone."""


@dataclass(frozen=True)
class Part:
    """Ranks, in some iterations; of one warp of theirs, or of all."""

    ranks: Int64
    """Indices into Timeline.ranks."""
    hits: Mask
    """[num_iterations]"""
    writer: int = -1
    """Number of a (block, warp), see Pieces; -1: all."""


class PeerTable:
    def __init__(
        self, timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph, ends: IterationEnds
    ) -> None:
        self.num_ranks, self.num_iterations = len(timeline.ranks), max(len(ends), 1)
        self.pieces = pieces = find_pieces(timeline, graph, waits, run_graph, ends)
        self._num_edges, self._num_phases = len(run_graph.weight), len(graph.phases)
        schedule, runs = graph.schedule, graph.runs
        self._in_cell = np.full((self.num_ranks, int(pieces.cell.max(initial=-1)) + 1), np.nan)
        self._in_cell[pieces.rank, pieces.cell] = pieces.ns
        self._usual = _median(self._in_cell)[pieces.cell]
        """[num_pieces] the median of all ranks in the cell."""
        launch = runs.launch[pieces.run]
        calls = group_rows(len(pieces), schedule.stage[launch], schedule.sequence[launch], pieces.phase)
        self._call = calls.group
        count = _table(self._call, pieces.rank, np.ones(len(pieces)), (len(calls), self.num_ranks))
        self._count = np.where(graph.has_rank[calls.columns[0]], count, np.nan)
        """[num_calls * phases, num_ranks] pieces; nan of ranks that are not compared there."""
        has_phase = _table(pieces.phase, pieces.rank, pieces.ns >= 0, (self._num_phases, self.num_ranks)) > 0
        number = {name: idx for idx, name in enumerate(graph.stages)}
        self._has_rank = graph.has_rank[[number[phase.stage] for phase in graph.phases]]
        num_peers = self._has_rank.sum(axis=1)
        self._is_extra = ((has_phase.sum(axis=1) == 1) & (num_peers > 1))[pieces.phase]
        """[num_pieces] of a phase that no other rank has."""
        self._is_common = (2 * has_phase.sum(axis=1) > num_peers)[pieces.phase]
        self.hosts = _Hosts(timeline, graph, run_graph, ends)

    # ---- excess, [num_ranks, num_iterations] ns ----

    def pace_ns(self) -> Float64:
        """How much longer the pieces of each rank took than the median of all ranks in their cells."""
        return self._of_ranks(np.nan_to_num(self.pieces.ns - self._usual))

    def warps_ns(self) -> Float64 | None:
        """[num_ranks, num_writers, num_iterations] The same of each warp; None where there is one, or too many."""
        pieces, num_writers = self.pieces, int(self.pieces.writer.max(initial=-1)) + 1
        shape = self.num_ranks, num_writers, self.num_iterations
        if num_writers < 2 or np.prod(shape) > _MOST_WARPS:
            return None
        inside = np.flatnonzero(pieces.iteration >= 0)
        row = (pieces.rank * num_writers + pieces.writer)[inside]
        excess = np.nan_to_num(pieces.ns - self._usual)[inside]
        return _table(row, pieces.iteration[inside], excess, (shape[0] * shape[1], shape[2])).reshape(shape)

    def amount_ns(self) -> Float64:
        """What the pieces took that a rank had more than the median of all ranks, phase by phase."""
        pieces, shape = self.pieces, (self.num_ranks, self.num_iterations, self._num_phases)
        inside = np.flatnonzero(self._is_common & (pieces.iteration >= 0))
        row = (pieces.rank * self.num_iterations + pieces.iteration)[inside]
        phase = pieces.phase[inside]
        count = _table(row, phase, np.ones(len(inside)), (shape[0] * shape[1], shape[2])).reshape(shape)
        each_ns = np.bincount(phase, pieces.ns[inside], shape[2]) / np.maximum(
            np.bincount(phase, minlength=shape[2]), 1
        )
        count = np.where(self._has_rank.T[:, None], count, np.nan)
        usual = _median(count.reshape(shape[0], -1)).reshape(shape[1:])
        return np.asarray(np.nansum((count - usual) * each_ns, axis=2), float)

    def extra_ns(self) -> Float64:
        """What a rank did in phases that no other rank has, the gaps before kernels of its own included."""
        return self._of_ranks(np.where(self._is_extra, self.pieces.ns, 0.0)) + self.hosts.extra_ns()

    def _of_ranks(self, ns: Float64) -> Float64:
        pieces = self.pieces
        inside = np.flatnonzero(pieces.iteration >= 0)
        shape = self.num_ranks, self.num_iterations
        return _table(pieces.rank[inside], pieces.iteration[inside], ns[inside], shape)

    # ---- the run without it: [num_edges] ns that each edge takes longer ----

    def without_pace(self, part: Part) -> Float64:
        """Each piece takes as much less as its place exceeds that of ranks outside of the part, on average."""
        rows, theirs = self._beside(part)
        pieces, own = self.pieces, self.pieces.ns[rows]
        both = np.isfinite(theirs)
        matched = rows[both]
        places = group_rows(len(matched), pieces.rank[matched], pieces.place[matched])
        longer = np.bincount(places.group, own[both] - theirs[both], len(places)) / places.count()
        change = np.zeros(len(rows))
        change[both] = -longer[places.group]
        phases = group_rows(len(rows), pieces.rank[rows], pieces.phase[rows])
        of_own, of_peer = (np.bincount(phases.group[both], ns[both], len(phases)) for ns in (own, theirs))
        ratio = np.divide(of_peer, of_own, out=np.ones(len(phases)), where=of_own > 0)
        change[~both] = (own * (ratio[phases.group] - 1))[~both]
        return self._of_edges(rows, change)

    def without_amount(self, part: Part) -> Float64:
        """The ranks have as many pieces of each phase in each call as those outside of the part, on average."""
        rows = self._rows(part)
        rows = rows[self._is_common[rows]]
        return self._of_edges(rows, self.pieces.ns[rows] * (self._times_as_many(part, rows) - 1))

    def without_extra(self, part: Part, own_hosts: bool) -> Float64:
        """The ranks do nothing that no other rank does. own_hosts: of Asks.weight()."""
        rows = self._rows(part)
        rows = rows[self._is_extra[rows]]
        return self._of_edges(rows, -self.pieces.ns[rows]) + self.hosts.without_extra(part, own_hosts)

    def runs_of(self, part: Part) -> Int64:
        """Returns the runs that the pieces of a part are in."""
        return np.unique(self.pieces.run[self._rows(part)])

    def longest_phase(self, part: Part, what: str) -> tuple[int, float]:
        """(index into EventGraph.phases, times as long per piece, or as many pieces, as at peers) of the phase that
        most of the excess is of; (-1, 1) where nothing is longer. what: "pace", "amount" or "extra"."""
        rows, theirs = self._beside(part)
        phase, own = self.pieces.phase[rows], self.pieces.ns[rows]
        count = self._times_as_many(part, rows)
        excess = {
            "pace": np.nan_to_num(own - theirs),
            "amount": np.where(self._is_common[rows], own * (1 - count), 0),
            "extra": np.where(self._is_extra[rows], own, 0),
        }[what]
        by_phase = np.bincount(phase, excess, self._num_phases)
        longest = int(by_phase.argmax())
        if by_phase[longest] <= 0:
            return -1, 1.0
        of_phase = phase == longest
        if what == "amount":
            return longest, float(of_phase.sum() / max(count[of_phase].sum(), 1e-9))
        both = of_phase & np.isfinite(theirs)
        of_peer = float(theirs[both].sum())
        return longest, float(own[both].sum()) / of_peer if of_peer else 1.0

    def only_writer(self, part: Part) -> int:
        """The one warp of the part's one rank that takes far longer than its peers; -1 where several do."""
        rows, theirs = self._beside(part)
        writer = self.pieces.writer[rows]
        if len(np.unique(writer)) < 2 or len(part.ranks) > 1:
            return -1
        excess = np.bincount(writer, np.nan_to_num(self.pieces.ns[rows] - theirs))
        second, largest = np.partition(excess, -2)[-2:]
        return int(excess.argmax()) if largest > _FAR * max(float(second), 0.0) else -1

    def _rows(self, part: Part) -> Int64:
        """The pieces of a part."""
        pieces, hits = self.pieces, np.append(part.hits, False)
        first, stop = (np.searchsorted(pieces.rank, part.ranks, side) for side in ("left", "right"))
        rows = np.concatenate([np.arange(*bounds) for bounds in zip(first, stop, strict=True)])
        rows = rows[hits[pieces.iteration[rows]]]
        return np.asarray(rows if part.writer < 0 else rows[pieces.writer[rows] == part.writer], np.int64)

    def _beside(self, part: Part) -> tuple[Int64, Float64]:
        """([n] pieces of the part, [n] the median of the other ranks in their cells; nan where there are none)"""
        rows = self._rows(part)
        cells, cell = np.unique(self.pieces.cell[rows], return_inverse=True)
        return rows, _median(np.delete(self._in_cell[:, cells], part.ranks, axis=0))[cell]

    def _times_as_many(self, part: Part, rows: Int64) -> Float64:
        """[num_rows] how many times as many pieces the ranks outside of the part have there, on average."""
        call = self._call[rows]
        calls, place = np.unique(call, return_inverse=True)
        others = np.delete(self._count[calls], part.ranks, axis=1)
        mean = np.nansum(others, axis=1) / np.maximum(np.isfinite(others).sum(axis=1), 1)
        return np.asarray(mean[place] / self._count[call, self.pieces.rank[rows]], float)

    def _of_edges(self, rows: Int64, change: Float64) -> Float64:
        return np.bincount(self.pieces.edge[rows], change, self._num_edges).astype(float, copy=False)


class _Hosts:
    """The time before kernels, call by call: gaps as recorded, and what hosts did that ran ahead."""

    def __init__(self, timeline: Timeline, graph: EventGraph, run_graph: RunGraph, ends: IterationEnds) -> None:
        gaps, asks, schedule = run_graph.gaps, run_graph.asks, graph.schedule
        self._num_edges, self._num_iterations = len(run_graph.weight), max(len(ends), 1)
        number = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
        self._num_ranks = len(number)
        self._shared = [np.array([number[rank] for rank in ranks]) for ranks in shared_gpus(timeline.ranks)]
        self._rank = np.array([number[rank] for rank in schedule.rank.tolist()], np.int64)
        # What else joins ranks that no kernel does, such as the layers of a pipeline, is not on record.
        island = graph.island[self._rank[gaps.launch]]
        calls = group_rows(len(gaps.launch), schedule.stage[gaps.launch], schedule.sequence[gaps.launch], island)
        self._call = np.full(len(schedule.rank), -1)
        self._call[gaps.launch] = calls.group
        self._num_calls, self._stage, self._iteration = len(calls), schedule.stage, ends.of_launch
        self._launch, self._edge, self.gap_ns = gaps.launch, gaps.edge, run_graph.weight[gaps.edge]
        self._asks = asks
        doubts = [rank.clock.host_hard_ns for rank in timeline.ranks if rank.clock]
        self._are_hosts_known = all(doubt <= MAX_LAUNCH_NS for doubt in doubts)
        """Whether it is on record to a launch when hosts asked for their kernels."""
        ranks_of_call = _table(calls.group, self._rank[gaps.launch], np.ones(len(gaps)), self._shape) > 0
        stage, _, island = calls.columns
        num_peers = (graph.has_rank[stage] & (graph.island == island[:, None])).sum(axis=1)
        self._is_extra = ((ranks_of_call.sum(axis=1) == 1) & (num_peers > 1))[calls.group]

    @property
    def _shape(self) -> tuple[int, int]:
        return self._num_calls, self._num_ranks

    @property
    def are_in_most_iterations(self) -> bool:
        """Whether kernels begin in most iterations: not where one kernel has all of them."""
        begun = self._iteration[self._launch]
        return 2 * len(np.unique(begun[begun >= 0])) > self._num_iterations

    def excess_ns(self) -> Float64:
        """[num_ranks, num_iterations] How much longer the gaps of each rank are than the median of all; of ranks that
        share a GPU, how much longer than in an order of its own.

        Of hosts that ran ahead what they did is compared: a gap is longer where the kernel before it was shorter, too.
        """
        gaps = self._in_call(self._launch, self.gap_ns)
        asks = self._asks
        if self._are_hosts_known:
            gaps[self._call[asks.launch], self._rank[asks.launch]] = asks.before_ns + asks.after_ns
        longer = gaps - _median(gaps.T)[:, None]
        for ranks in self._shared:
            longer[:, ranks] = _beyond_turns(gaps[:, ranks])
        longer = np.nan_to_num(longer[self._call[self._launch], self._rank[self._launch]])
        return self._of_ranks(np.where(self._is_extra, 0.0, longer))

    def extra_ns(self) -> Float64:
        """[num_ranks, num_iterations] Gaps before kernels that no other rank has."""
        return self._of_ranks(np.where(self._is_extra, self.gap_ns, 0.0))

    def without(self, part: Part) -> Float64:
        """[num_edges] The gaps before kernels are as much shorter as they exceed those of other ranks, on average."""
        change = np.zeros(self._num_edges)
        self._even_out(change, part, self._launch, self._edge, self.gap_ns)
        return change

    def without_asks(self, part: Part) -> Float64:
        """[num_edges] The same of what hosts did that ran ahead: of Asks.weight()."""
        change, asks = np.zeros(self._num_edges), self._asks
        for edge, ns in ((asks.before, asks.before_ns), (asks.after, asks.after_ns), (asks.gap, asks.gap_ns)):
            self._even_out(change, part, asks.launch, edge, ns)
        return change

    def without_extra(self, part: Part, own_hosts: bool) -> Float64:
        """[num_edges] There are no gaps before kernels that no other rank has, nor did hosts ask for them."""
        rows = np.flatnonzero(self._is_extra & self._chosen(part, self._launch))
        change, asks = np.zeros(self._num_edges), self._asks
        if not own_hosts:
            change[self._edge[rows]] = -self.gap_ns[rows]
            return change
        own = np.isin(asks.launch, self._launch[rows])
        for edge, ns in ((asks.before, asks.before_ns), (asks.after, asks.after_ns), (asks.gap, asks.gap_ns)):
            change[edge[own]] = -ns[own]
        return change

    def even(self) -> Float64:
        """[num_edges] All gaps are as long as the median of the ranks, but those of ranks that share a GPU."""
        change = np.zeros(self._num_edges)
        usual = _median(self._in_call(self._launch, self.gap_ns).T)[self._call[self._launch]]
        is_shared = np.isin(self._rank[self._launch], [rank for ranks in self._shared for rank in ranks.tolist()])
        change[self._edge] = np.where(is_shared, 0.0, usual - self.gap_ns)
        return change

    def mean_excess_ns(self, part: Part) -> float:
        """How much longer the gaps of a part are in an iteration than those of other ranks, by the median iteration."""
        rows = np.flatnonzero(self._chosen(part, self._launch))
        longer = self._beside(part, self._launch, self.gap_ns, rows)
        iterations = np.unique(self._iteration[self._launch[rows]], return_inverse=True)
        by_iteration = np.bincount(iterations[1], np.nan_to_num(longer), len(iterations[0])) / len(part.ranks)
        return float(np.median(by_iteration)) if len(by_iteration) else 0.0

    def longest_stage(self, part: Part) -> int:
        """The stage before which most of what the gaps of a part are longer lies: an index into EventGraph.stages."""
        rows = np.flatnonzero(self._chosen(part, self._launch))
        longer = np.nan_to_num(self._beside(part, self._launch, self.gap_ns, rows))
        return int(np.bincount(self._stage[self._launch[rows]], longer).argmax())

    def host_share(self, part: Part, by_host_ns: Int64) -> float:
        """How much of what the gaps of a part are longer is the host's. by_host_ns: see Schedule.host_gap_ns."""
        rows = np.flatnonzero(self._chosen(part, self._launch))
        longer = self._beside(part, self._launch, self.gap_ns, rows)
        by_host = by_host_ns[self._launch].astype(float)
        of_peers = np.where(by_host > 0, by_host, self.gap_ns)  # where nothing says what it took, all of it
        of_host = by_host[rows] - (of_peers[rows] - self._beside(part, self._launch, of_peers, rows))
        is_longer = longer > 0
        total = float(longer[is_longer].sum())
        return float(np.clip(of_host, 0, longer)[is_longer].sum()) / total if total else 0.0

    def _even_out(self, change: Float64, part: Part, launch: Int64, edge: Int64, ns: Float64) -> None:
        rows = np.flatnonzero(self._chosen(part, launch))
        longer = self._beside(part, launch, ns, rows)
        rows, longer = rows[np.isfinite(longer)], longer[np.isfinite(longer)]
        places = group_rows(len(rows), self._rank[launch[rows]], self._stage[launch[rows]])
        mean = np.bincount(places.group, longer, len(places)) / np.maximum(places.count(), 1)
        change[edge[rows]] -= mean[places.group]

    def _beside(self, part: Part, launch: Int64, ns: Float64, rows: Int64) -> Float64:
        """[num_rows] how much longer than the median of the ranks outside of the part; nan where there are none."""
        others = np.delete(self._in_call(launch, ns), part.ranks, axis=1)
        return np.asarray(ns[rows] - _median(others.T)[self._call[launch[rows]]], float)

    def _chosen(self, part: Part, launch: Int64) -> Mask:
        hits = np.append(part.hits, False)
        return np.asarray(np.isin(self._rank[launch], part.ranks) & hits[self._iteration[launch]], bool)

    def _in_call(self, launch: Int64, ns: Float64) -> Float64:
        """[num_calls, num_ranks]"""
        table = np.full(self._shape, np.nan)
        table[self._call[launch], self._rank[launch]] = ns
        return table

    def _of_ranks(self, ns: Float64) -> Float64:
        iteration = self._iteration[self._launch]
        inside = np.flatnonzero(iteration >= 0)
        shape = self._num_ranks, self._num_iterations
        return _table(self._rank[self._launch[inside]], iteration[inside], ns[inside], shape)


def _beyond_turns(gaps: Float64) -> Float64:
    """How much longer each of [num_calls, num_ranks] is than the median of the others, where it is far longer than any.

    A GPU begins the kernels of several ranks in an order of its own, the next some us after the one before. That makes
    the others differ as well; of two ranks nothing says how much.
    """
    ordered = np.sort(gaps, axis=1)  # nan, of ranks without such a call, comes last
    row, count = np.arange(len(gaps)), np.isfinite(gaps).sum(axis=1)
    least, second, longest = (ordered[row, np.maximum(place, 0)] for place in (0 * count, count - 2, count - 1))
    ordered[row, np.maximum(count - 1, 0)] = np.nan
    is_far = (longest - least > _FAR * (second - least)) & (count > 2)
    return np.where(is_far[:, None] & (gaps == longest[:, None]), gaps - _median(ordered.T)[:, None], 0.0)


def _table(row: Int64, column: Int64, value: npt.ArrayLike, shape: tuple[int, int]) -> Float64:
    sums = np.bincount(row * shape[1] + column, np.asarray(value, float), shape[0] * shape[1]).astype(float, copy=False)
    return sums.reshape(shape)


def _median(values: Float64) -> Float64:
    """[n] median of what is known in each column of [m, n]; nan where nothing is. A sort of all columns at once is
    faster than nanmedian."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)  # nan comes last
    count, column = np.isfinite(values).sum(axis=0), np.arange(values.shape[1])
    median: Float64 = (
        ordered[np.maximum(count - 1, 0) // 2, column] + ordered[np.minimum(count // 2, len(values) - 1), column]
    ) / 2
    return median

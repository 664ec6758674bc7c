"""The time before kernels, call by call: gaps as recorded, and what hosts did that ran ahead."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.graph.host_gaps import MAX_LAUNCH_NS
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.groups import group_rows
from tracekern.analysis.why.members import FAR, Suspects, median_of_members, sums_by
from tracekern.analysis.why.replays import added
from tracekern.timeline.model import Float64, Int64, Mask, Timeline, shared_gpus


class Hosts:
    """Compares the gaps before kernels of all ranks, call by call."""

    def __init__(self, timeline: Timeline, moments: Moments, ends: IterationEnds) -> None:
        gaps, asks, program = moments.launches.gaps, moments.launches.asks, moments.program
        self._num_iterations, self._num_ranks = max(len(ends), 1), len(program.island)
        number = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
        self._shared = [np.array([number[rank] for rank in ranks]) for ranks in shared_gpus(timeline.ranks)]
        self._rank, self._stage = program.place_of_launch, program.stage_of_launch
        # What else joins ranks that no kernel does, such as the layers of a pipeline, is not on record.
        island = program.island[self._rank[gaps.launch]]
        calls = group_rows(len(gaps.launch), self._stage[gaps.launch], program.sequence[gaps.launch], island)
        self._call = np.full(program.num_launches, -1)
        self._call[gaps.launch] = calls.group
        self._num_calls, self._iteration = len(calls), ends.of_launch
        self._launch, self._edge, self.gap_ns = gaps.launch, gaps.edge, moments.launches.weight[gaps.edge]
        self._asks = asks
        doubts = [rank.clock.host_hard_ns for rank in timeline.ranks if rank.clock]
        self._are_hosts_known = all(doubt <= MAX_LAUNCH_NS for doubt in doubts)
        """Whether it is on record to a launch when hosts asked for their kernels."""
        ranks_of_call = sums_by((calls.group, self._rank[gaps.launch]), np.ones(len(gaps)), self._shape) > 0
        stage, _, island = calls.columns
        num_peers = (program.has_rank[stage] & (program.island == island[:, None])).sum(axis=1)
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
        longer = gaps - median_of_members(gaps)[:, None]
        for ranks in self._shared:
            longer[:, ranks] = _beyond_turns(gaps[:, ranks])
        longer = np.nan_to_num(longer[self._call[self._launch], self._rank[self._launch]])
        return self._of_ranks(np.where(self._is_extra, 0.0, longer))

    def extra_ns(self) -> Float64:
        """[num_ranks, num_iterations] Gaps before kernels that no other rank has."""
        return self._of_ranks(np.where(self._is_extra, self.gap_ns, 0.0))

    def without(self, suspects: Suspects) -> Change:
        """The gaps before kernels are as much shorter as they exceed those of other ranks, on average."""
        return self._evened_out(suspects, self._launch, self._edge, self.gap_ns)

    def without_asks(self, suspects: Suspects) -> Change:
        """The same of what hosts did that ran ahead: of Asks.weight()."""
        asks = self._asks
        columns = ((asks.before, asks.before_ns), (asks.after, asks.after_ns), (asks.gap, asks.gap_ns))
        return added([self._evened_out(suspects, asks.launch, edge, ns) for edge, ns in columns])

    def without_extra(self, suspects: Suspects, own_hosts: bool) -> Change:
        """There are no gaps before kernels that no other rank has, nor did hosts ask for them."""
        rows, asks = np.flatnonzero(self._is_extra & self._chosen(suspects, self._launch)), self._asks
        if not own_hosts:
            return Change(self._edge[rows], -self.gap_ns[rows])
        own = np.isin(asks.launch, self._launch[rows])
        columns = ((asks.before, asks.before_ns), (asks.after, asks.after_ns), (asks.gap, asks.gap_ns))
        return added([Change(edge[own], -ns[own]) for edge, ns in columns])

    def even(self) -> Change:
        """All gaps are as long as the median of the ranks, but those of ranks that share a GPU."""
        usual = median_of_members(self._in_call(self._launch, self.gap_ns))[self._call[self._launch]]
        is_shared = np.isin(self._rank[self._launch], [rank for ranks in self._shared for rank in ranks.tolist()])
        return Change(self._edge, np.where(is_shared, 0.0, usual - self.gap_ns))

    def mean_excess_ns(self, suspects: Suspects) -> float:
        """How much longer gaps of suspects are in an iteration than those of other ranks, by the median iteration."""
        rows = np.flatnonzero(self._chosen(suspects, self._launch))
        longer = self._beside(suspects, self._launch, self.gap_ns, rows)
        iterations = np.unique(self._iteration[self._launch[rows]], return_inverse=True)
        by_iteration = np.bincount(iterations[1], np.nan_to_num(longer), len(iterations[0])) / len(suspects.ranks)
        return float(np.median(by_iteration)) if len(by_iteration) else 0.0

    def longest_stage(self, suspects: Suspects) -> int:
        """The stage before which most of what the gaps of suspects are longer lies: an index into Program.stages."""
        rows = np.flatnonzero(self._chosen(suspects, self._launch))
        longer = np.nan_to_num(self._beside(suspects, self._launch, self.gap_ns, rows))
        return int(np.bincount(self._stage[self._launch[rows]], longer).argmax())

    def host_share(self, suspects: Suspects, by_host_ns: Int64) -> float:
        """How much of what the gaps of suspects are longer is the host's. by_host_ns: see Schedule.host_gap_ns."""
        rows = np.flatnonzero(self._chosen(suspects, self._launch))
        longer = self._beside(suspects, self._launch, self.gap_ns, rows)
        by_host = by_host_ns[self._launch].astype(float)
        of_peers = np.where(by_host > 0, by_host, self.gap_ns)  # where nothing says what it took, all of it
        of_host = by_host[rows] - (of_peers[rows] - self._beside(suspects, self._launch, of_peers, rows))
        is_longer = longer > 0
        total = float(longer[is_longer].sum())
        return float(np.clip(of_host, 0, longer)[is_longer].sum()) / total if total else 0.0

    def _evened_out(self, suspects: Suspects, launch: Int64, edge: Int64, ns: Float64) -> Change:
        rows = np.flatnonzero(self._chosen(suspects, launch))
        longer = self._beside(suspects, launch, ns, rows)
        rows, longer = rows[np.isfinite(longer)], longer[np.isfinite(longer)]
        places = group_rows(len(rows), self._rank[launch[rows]], self._stage[launch[rows]])
        mean = np.bincount(places.group, longer, len(places)) / np.maximum(places.count(), 1)
        return Change(edge[rows], -mean[places.group])

    def _beside(self, suspects: Suspects, launch: Int64, ns: Float64, rows: Int64) -> Float64:
        """[num_rows] how much longer than the median of the ranks that are no suspects; nan where there are none."""
        others = np.delete(self._in_call(launch, ns), suspects.ranks, axis=1)
        return np.asarray(ns[rows] - median_of_members(others)[self._call[launch[rows]]], float)

    def _chosen(self, suspects: Suspects, launch: Int64) -> Mask:
        hits = np.append(suspects.hits, False)
        return np.asarray(np.isin(self._rank[launch], suspects.ranks) & hits[self._iteration[launch]], bool)

    def _in_call(self, launch: Int64, ns: Float64) -> Float64:
        """[num_calls, num_ranks]"""
        table = np.full(self._shape, np.nan)
        table[self._call[launch], self._rank[launch]] = ns
        return table

    def _of_ranks(self, ns: Float64) -> Float64:
        iteration = self._iteration[self._launch]
        inside = np.flatnonzero(iteration >= 0)
        shape = self._num_ranks, self._num_iterations
        return sums_by((self._rank[self._launch[inside]], iteration[inside]), ns[inside], shape)


def _beyond_turns(gaps: Float64) -> Float64:
    """How much longer each of [num_calls, num_ranks] is than the median of the others, where it is far longer than any.

    A GPU begins the kernels of several ranks in an order of its own, the next some us after the one before. That makes
    the others differ as well; of two ranks nothing says how much.
    """
    ordered = np.sort(gaps, axis=1)  # nan, of ranks without such a call, comes last
    row, count = np.arange(len(gaps)), np.isfinite(gaps).sum(axis=1)
    least, second, longest = (ordered[row, np.maximum(place, 0)] for place in (0 * count, count - 2, count - 1))
    ordered[row, np.maximum(count - 1, 0)] = np.nan
    is_far = (longest - least > FAR * (second - least)) & (count > 2)
    return np.where(is_far[:, None] & (gaps == longest[:, None]), gaps - median_of_members(ordered)[:, None], 0.0)

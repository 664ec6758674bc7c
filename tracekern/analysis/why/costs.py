"""What each cause costs: how much earlier the run, and each iteration, would end without it.

A cause is that a rank works slower than its peers, that it has more work, that its kernels are launched later, or that
messages of a link take longer than those of others. The run is replayed with its times swapped for those of a peer,
and everything that waited for them worked out anew. Of up to three peers the mean counts. Swapping keeps the noise of
the peers' times, so that ranks that are alike save about nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.iterations import Iterations
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.why.graph import RunGraph, build_run_graph
from tracekern.analysis.why.links import Links
from tracekern.analysis.why.longest_path import LongestPath, order_graph, walk_back
from tracekern.analysis.why.peers import PeerTable
from tracekern.timeline.model import Float64, Timeline

MAX_CANDIDATES = 8
"""Ranks, or links, that are replayed of each kind: those with most time on the critical path."""
_MAX_PEERS = 3


class CauseKind(enum.Enum):
    PACE = "pace"
    """Pieces of its work take longer than at its peers."""
    AMOUNT = "amount"
    """It has more pieces of work."""
    HOST = "host"
    """More time passes before its kernels."""
    LINK = "link"
    """Messages take longer than those of other links."""


@dataclass(frozen=True)
class Cost:
    """How much earlier the run would end without one cause."""

    kind: CauseKind
    rank: int
    """Of a link: its source."""
    peer: int
    """Of a link: its destination; else -1."""
    saved_ns: float
    """Of the whole run. Below 0: it would end later."""
    by_iteration: Float64
    """[num_iterations] how much shorter each iteration would be."""


@dataclass(frozen=True)
class Costs:
    makespan_ns: float
    """From the start of the first kernel to the end of the last, of the replay without a change."""
    costs: tuple[Cost, ...]
    """Largest first."""
    even_hosts_ns: float
    """How much shorter the run would be if the gaps before all ranks' kernels were as long as their median."""
    even_work_ns: float
    """The same for the work."""
    note: str
    """Why nothing can be said; "" where something is."""


def cost_causes(timeline: Timeline, graph: EventGraph, waits: Waits, iterations: Iterations) -> Costs:
    """Replays the run without each of its causes.

    graph: build_graph(timeline). waits: all of analyze_waits(timeline). iterations: find_iterations(timeline).
    """
    if not timeline.has_one_axis:
        return _nothing("the ranks' clocks are not aligned: no path leads from one to another")
    if not len(graph.schedule.order):
        return _nothing("no kernel is on record")
    run_graph = build_run_graph(timeline, graph, waits)
    path = order_graph(run_graph.num_nodes, run_graph.source, run_graph.target)
    if path.is_cyclic:
        return _nothing("by the clocks of the ranks, signals were waited for before they were sent")
    table = PeerTable(timeline, graph, waits, run_graph)
    replays = _Replays(graph, run_graph, path, iterations, table)
    costs = []
    if len(table.ranks) > 1:
        costs += replays.of_ranks(CauseKind.PACE, table.pace, table.own_ns)
        costs += replays.of_ranks(CauseKind.AMOUNT, table.amount, table.own_ns)
        costs += replays.of_ranks(CauseKind.HOST, table.gaps, table.gaps_ns)
        links = Links(timeline, waits, run_graph)
        for source, destination in links.longest_of(replays.on_path)[:MAX_CANDIDATES]:
            costs.append(replays.cost(CauseKind.LINK, source, destination, [links.as_others(source, destination)]))
    costs.sort(key=lambda cost: -cost.saved_ns)
    even_hosts, even_work = (replays.saved(change)[0] for change in (table.even_gaps(), table.even_work()))
    return Costs(replays.makespan_ns, tuple(costs), even_hosts, even_work, "")


def _nothing(note: str) -> Costs:
    return Costs(0.0, (), 0.0, 0.0, note)


class _Replays:
    """The run, replayed with one thing changed at a time."""

    def __init__(
        self, graph: EventGraph, run_graph: RunGraph, path: LongestPath, iterations: Iterations, table: PeerTable
    ) -> None:
        self._run_graph, self._path, self._table = run_graph, path, table
        times, deciding = path.run(run_graph.weight)
        self._ends = run_graph.end_of_launch[graph.schedule.order]
        self.makespan_ns = float(times[self._ends].max())
        self.on_path = walk_back(run_graph.source, deciding, int(self._ends[times[self._ends].argmax()]))
        """Edges of the critical path, last first."""
        happened = np.flatnonzero(np.isfinite(times))
        self._by_time = happened[np.argsort(times[happened], kind="stable")]
        self._iteration_ends = np.maximum.accumulate(iterations.end.astype(float) - run_graph.start_ns)
        self._num_by_end = np.searchsorted(times[self._by_time], self._iteration_ends, side="right")

    def saved(self, change: Float64) -> tuple[float, Float64]:
        """Returns (ns of the whole run, [num_iterations] ns of each iteration) that the change saves.

        change: [num_edges] ns that each edge takes longer. No edge becomes shorter than nothing.
        """
        weight = self._run_graph.weight
        times, _ = self._path.run(np.maximum(weight + change, np.minimum(weight, 0)))
        # An iteration has ended when all is over that was over at its end.
        over = np.maximum.accumulate(times[self._by_time])
        earlier = self._iteration_ends - over[self._num_by_end - 1]
        return self.makespan_ns - float(times[self._ends].max()), np.diff(earlier, prepend=0.0)

    def cost(self, kind: CauseKind, rank: int, peer: int, changes: list[Float64]) -> Cost:
        """The mean of what the changes save."""
        saved = [self.saved(change) for change in changes]
        whole, by_iteration = zip(*saved, strict=True)
        return Cost(kind, rank, peer, float(np.mean(whole)), np.mean(by_iteration, axis=0))

    def of_ranks(self, kind: CauseKind, change: Callable[[int, int], Float64 | None], totals: Float64) -> list[Cost]:
        """Costs of the ranks that save most on the critical path as it is."""
        ranks, candidates = self._table.ranks, []
        for column in range(len(ranks)):
            nearest = _peers_of(totals, column)
            first = change(column, nearest[0])
            if first is not None:
                candidates.append((float(first[self.on_path].sum()), column, nearest))
        candidates.sort()
        costs = []
        for _, column, nearest in candidates[:MAX_CANDIDATES]:
            changes = [found for peer in nearest if (found := change(column, peer)) is not None]
            costs.append(self.cost(kind, ranks[column], -1, changes))
        return costs


def _peers_of(totals: Float64, rank: int) -> list[int]:
    """The other ranks whose total is nearest to the median of the others, nearest first; at most _MAX_PEERS."""
    others = [peer for peer in range(len(totals)) if peer != rank]
    median = float(np.median(totals[others]))
    return sorted(others, key=lambda peer: abs(totals[peer] - median))[:_MAX_PEERS]

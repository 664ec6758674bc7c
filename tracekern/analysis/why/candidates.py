"""What could be to blame for the length of a run, and what would change without it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.analysis.why.links import Links
from tracekern.analysis.why.peers import PeerTable
from tracekern.timeline.model import Float64, Int32, Int64, Timeline

MAX_OF_KIND = 8
"""Ranks, or links, of each kind that are looked at: those that have most on the critical path."""
MAX_PEERS = 3


class CauseKind(enum.Enum):
    PACE = "pace"
    """Each piece of a rank's work takes longer than at its peers."""
    AMOUNT = "amount"
    """A rank has more pieces of work."""
    HOST = "host"
    """More time passes before a rank's kernels."""
    LINK = "link"
    """Messages of a link take longer than those of other links."""


@dataclass(frozen=True)
class Candidate:
    kind: CauseKind
    rank: int
    """The rank; the source of a link."""
    peer: int = -1
    """The destination of a link; else -1."""


@dataclass(frozen=True)
class Excess:
    """How far a cause exceeds its peers."""

    ns: float
    """How much later a host is in the median iteration, or in its only one; how much longer a link takes a message."""
    factor: float
    """How many times as long each piece of work takes, or as many pieces there are, ..."""
    phase: Phase | None
    """... in the phase that has most to gain; None where there is none."""


class Candidates:
    """Makes the changes of the run graph's edges, [num_edges] ns, that take a candidate out."""

    def __init__(
        self, timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph, of_launch: Int32
    ) -> None:
        """of_launch: [num_launches] iteration of each; -1 for none."""
        self.table = PeerTable(timeline, graph, waits, run_graph, of_launch)
        self.links = Links(timeline, waits, run_graph)
        self._phases = graph.phases

    def changes(self, candidate: Candidate, most: int = MAX_PEERS, own_hosts: bool = False) -> list[Float64]:
        """One for each of up to `most` peers, those whose sums are nearest to the median first. Empty where nothing
        differs. own_hosts: of Asks.weight()."""
        if candidate.kind is CauseKind.LINK:
            return [self.links.as_others(candidate.rank, candidate.peer)]
        change, totals = self._of_kind(candidate.kind)
        if own_hosts and candidate.kind is CauseKind.HOST:
            change = self.table.asks
        column = self.table.ranks.index(candidate.rank)
        found = (change(column, peer) for peer in _peers_of(totals, column)[:most])
        return [one for one in found if one is not None]

    def on_path(self, kind: CauseKind, path: Int64) -> list[tuple[float, Candidate]]:
        """(how much shorter the path would be without it, candidate), largest first, at most MAX_OF_KIND."""
        if kind is CauseKind.LINK:
            every = [Candidate(kind, *link) for link in self.links.longest_of(path)[:MAX_OF_KIND]]
        else:
            every = [Candidate(kind, rank) for rank in self.table.ranks] if len(self.table.ranks) > 1 else []
        gains = [(-float(found[0][path].sum()), one) for one in every if (found := self.changes(one, most=1))]
        return sorted(gains, key=lambda gain: -gain[0])[:MAX_OF_KIND]

    def describe(self, candidate: Candidate, path: Int64, iteration: int | None) -> Excess:
        """Says by how much a candidate exceeds its peers. path: edges of the critical path. iteration: the only one in
        which it does."""
        if candidate.kind is CauseKind.LINK:
            return Excess(self.links.longer_ns(candidate.rank, candidate.peer), 1.0, None)
        column = self.table.ranks.index(candidate.rank)
        if candidate.kind is CauseKind.HOST:
            longer_ns = self.table.longer_gaps_ns(column)
            return Excess(float(np.median(longer_ns) if iteration is None else longer_ns[iteration]), 1.0, None)
        nearest = _peers_of(self.table.own_ns, column)[0]
        phase, factor = self.table.costliest_phase(column, nearest, path, candidate.kind is CauseKind.AMOUNT)
        return Excess(0.0, factor, self._phases[phase] if phase >= 0 else None)

    def is_host(self, rank: int) -> bool:
        """Whether it was mostly the host that made gaps before kernels of the rank longer than those of its peers."""
        column = self.table.ranks.index(rank)
        peers = _peers_of(self.table.gaps_ns, column)[:MAX_PEERS]
        longer_ns, by_host_ns = np.sum([self.table.longer_by_host_ns(column, peer) for peer in peers], axis=0)
        return bool(2 * by_host_ns > longer_ns)

    def _of_kind(self, kind: CauseKind) -> tuple[Callable[[int, int], Float64 | None], Float64]:
        table = self.table
        if kind is CauseKind.HOST:
            return table.gaps, table.gaps_ns
        return (table.pace if kind is CauseKind.PACE else table.amount), table.own_ns


def _peers_of(totals: Float64, rank: int) -> list[int]:
    """The other ranks, those whose total is nearest to the median of the others first."""
    others = [peer for peer in range(len(totals)) if peer != rank]
    median = float(np.median(totals[others]))
    return sorted(others, key=lambda peer: abs(totals[peer] - median))

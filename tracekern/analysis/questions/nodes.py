"""How much of the waiting is for ranks of the own node, how much for other nodes', and between which nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.doubt import Bound, late_limits
from tracekern.analysis.partial import About, Partial
from tracekern.analysis.waits.analyze import Waits
from tracekern.formatting import brief
from tracekern.timeline.model import Int64, Timeline


@dataclass(frozen=True)
class NodeWaits(Partial):
    """[n, n] over `nodes`: row = the node that waits, column = the node waited for. Waits of all warps are summed.

    A rank's waits for its own warps are in none of the cells, nor are waits for an unknown rank.
    """

    nodes: About[tuple[str, ...]]
    ranks: About[tuple[tuple[int, ...], ...]]
    """[n] the ranks of each node."""
    count: Int64
    wait_ns: Int64
    late_ns: Int64
    """Until the peer was there, at the time stamps as they are."""
    late_lo_ns: Int64
    """The least of it that the clocks leave likely."""
    late_hi_ns: Int64
    drain_ns: Int64
    unknown_count: Int64
    """[n] waits of each node whose peer is not known."""
    unknown_ns: Int64
    own_rank_ns: Int64
    """[n] waits of each node's ranks for their own warps."""

    __repr__ = brief

    @property
    def across_ns(self) -> int:
        """Waits for ranks of other nodes."""
        return int(self.wait_ns.sum() - self.wait_ns.trace())

    def pairs(self) -> list[tuple[int, int]]:
        """(waits, is waited for) of all pairs of nodes with waits, indices into `nodes`, the longest sum first."""
        order = np.argsort(-self.wait_ns, axis=None, kind="stable")[: np.count_nonzero(self.count)]
        rows, columns = np.unravel_index(order, self.wait_ns.shape)
        return list(zip(rows.tolist(), columns.tolist(), strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, a row a pair of nodes."""
        sums = ("count", "wait_ns", "late_ns", "late_lo_ns", "late_hi_ns", "drain_ns")
        of_nodes = ("unknown_count", "unknown_ns", "own_rank_ns")
        return {
            "nodes": [
                {"node": node, "ranks": self.ranks[idx], **{name: int(getattr(self, name)[idx]) for name in of_nodes}}
                for idx, node in enumerate(self.nodes)
            ],
            "waits": [
                {"node": self.nodes[pair[0]], "peer_node": self.nodes[pair[1]]}
                | {name: int(getattr(self, name)[pair]) for name in sums}
                for pair in self.pairs()
            ],
        }


def node_waits(timeline: Timeline, waits: Waits) -> NodeWaits:
    """Sums of waits by the nodes of the waiting rank and of its peer."""
    nodes = tuple(dict.fromkeys(rank.node for rank in timeline.ranks))
    if len(nodes) < 2:  # nothing to compare
        waits = waits.take(np.empty(0, np.int64))
    node_of = np.full(max((rank.rank for rank in timeline.ranks), default=-1) + 1, -1, np.int64)
    for rank in timeline.ranks:
        node_of[rank.rank] = nodes.index(rank.node)
    waiting, number = node_of[waits.rank], len(nodes)
    own, unknown = waits.peer == waits.rank, waits.peer < 0
    between = np.flatnonzero(~own & ~unknown)
    cell = waiting[between] * number + node_of[waits.peer[between]]

    def by_pair(values: Int64) -> Int64:
        return _sums(cell, values[between], number * number).reshape(number, number)

    def by_node(which: Any, values: Int64) -> Int64:
        return _sums(waiting[which], values[which], number)

    late_lo, late_hi = late_limits(timeline, waits, Bound.LIKELY)
    ones = np.ones(len(waits), np.int64)
    return NodeWaits(
        nodes=nodes,
        ranks=tuple(tuple(rank.rank for rank in timeline.ranks if rank.node == node) for node in nodes),
        count=by_pair(ones),
        wait_ns=by_pair(waits.wait_ns),
        late_ns=by_pair(waits.late_ns),
        late_lo_ns=by_pair(late_lo),
        late_hi_ns=by_pair(late_hi),
        drain_ns=by_pair(waits.drain_ns),
        unknown_count=by_node(unknown, ones),
        unknown_ns=by_node(unknown, waits.wait_ns),
        own_rank_ns=by_node(own, waits.wait_ns),
    )


def _sums(group: Int64, values: Int64, num_groups: int) -> Int64:
    sums = np.zeros(num_groups, np.int64)
    np.add.at(sums, group, values)
    return sums

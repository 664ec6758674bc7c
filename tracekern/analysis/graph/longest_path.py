"""The longest path to each node of a directed graph, once for each set of weights, several of them in one pass.

Node 0 happens at time 0. Every other node happens when the last edge that leads to it is through; an edge is through
its weight after its source has happened. Nodes that no path from node 0 leads to never happen (-inf).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tracekern.errors import NotBuilt
from tracekern.timeline.model import Float64, Int32, Int64


class Change(NamedTuple):
    """Edges, each at most once, and a number of each: what it takes, or how much longer it takes."""

    edge: Int64
    ns: Float64


class LongestPath(Protocol):
    """A graph whose edges are in an order in which one pass finds all times."""

    @property
    def is_cyclic(self) -> bool:
        """Whether nodes wait for each other: no order exists, and run() says nothing."""
        ...

    def run(self, weight: Float64) -> tuple[Float64, Int32]:
        """Returns ([num_nodes] time, [num_nodes] the edge that decided it; -1 for none).

        weight: [num_edges] how long each edge takes, in the unit of the times.
        """
        ...

    def replay(self, weight: Float64, changes: Sequence[Change], wanted: Int64) -> Float64:
        """Returns [num_changes, num_wanted] times of the nodes `wanted`, with the weights of each change in place."""
        ...


def order_graph(num_nodes: int, source: Int32, target: Int32) -> LongestPath:
    """Orders the edges source -> target ([num_edges] nodes), in the extension where it is built."""
    try:
        from tracekern._core import LongestPath as Compiled
    except NotBuilt:
        return InterpretedPath(num_nodes, source, target)
    found: LongestPath = Compiled(num_nodes, source, target)
    return found


class InterpretedPath:
    """The same in Python, for machines without the extension: a hundred times slower, the same numbers."""

    def __init__(self, num_nodes: int, source: Int32, target: Int32) -> None:
        self._num_nodes = num_nodes
        outgoing: list[list[int]] = [[] for _ in range(num_nodes)]
        incoming: list[list[int]] = [[] for _ in range(num_nodes)]
        sources, targets = source.tolist(), target.tolist()
        for edge, (begin, end) in enumerate(zip(sources, targets, strict=True)):
            outgoing[begin].append(edge)
            incoming[end].append(edge)
        num_missing = [len(edges) for edges in incoming]
        ready = [node for node, missing in enumerate(num_missing) if not missing]
        self._edges: list[tuple[int, int, int]] = []
        for node in ready:  # grows while it is read
            self._edges.extend((edge, sources[edge], node) for edge in incoming[node])
            for edge in outgoing[node]:
                num_missing[targets[edge]] -= 1
                if not num_missing[targets[edge]]:
                    ready.append(targets[edge])
        self.is_cyclic = len(ready) < num_nodes

    def run(self, weight: Float64) -> tuple[Float64, Int32]:
        times, deciding = [-np.inf] * self._num_nodes, [-1] * self._num_nodes
        times[0] = 0.0
        weights = weight.tolist()
        for edge, source, target in self._edges:
            reached = times[source] + weights[edge]
            if reached > times[target]:
                times[target], deciding[target] = reached, edge
        return np.array(times), np.array(deciding, np.int32)

    def replay(self, weight: Float64, changes: Sequence[Change], wanted: Int64) -> Float64:
        found = np.empty((len(changes), len(wanted)))
        for times, (edge, ns) in zip(found, changes, strict=True):
            changed = weight.copy()
            changed[edge] = ns
            times[:] = self.run(changed)[0][wanted]
        return found


def walk_back(source: Int32, deciding: Int32, node: int, times: Float64, floor: float = -np.inf) -> Int64:
    """Returns the edges of the longest path to `node`, last first, back to the one that began at `floor` or before."""
    path = []
    while times[node] > floor and (edge := int(deciding[node])) >= 0:
        path.append(edge)
        node = int(source[edge])
    return np.array(path, np.int64)

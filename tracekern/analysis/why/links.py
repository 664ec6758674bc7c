"""How much longer messages of one link take than those of the others."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.groups import group_rows, median_of_groups
from tracekern.analysis.iterations import Iterations
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.why.graph import RunGraph
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline


class Links:
    """A link is (source, destination), two ranks. Its messages are compared with those of other links in the same
    phase and iteration, between ranks that are as near to each other."""

    def __init__(self, timeline: Timeline, waits: Waits, run_graph: RunGraph, iterations: Iterations) -> None:
        messages, self._run_graph = run_graph.messages, run_graph
        wait, spans = messages.wait, timeline.spans
        self._edge, self._was_awaited = messages.edge, messages.was_awaited
        self._source, self._destination = waits.peer[wait], waits.rank[wait]
        near = timeline.on_same_node(self._source, self._destination)
        of_launch = np.append(iterations.of_launch, -1)[waits.launch[wait]]
        self._kind = group_rows(len(wait), waits.phase[wait], near, of_launch).group
        self._latency = run_graph.weight[self._edge]
        signal = waits.signal[wait]
        self._drain = np.maximum(spans.end[signal] - spans.start[signal], 0).astype(float)
        self._sending = _edge_after(run_graph)[run_graph.source[self._edge]]

    def longest_of(self, edges: Int64) -> list[tuple[int, int]]:
        """The links whose messages are among the edges, with most time first."""
        place = np.full(len(self._run_graph.weight), -1)
        place[self._edge] = np.arange(len(self._edge))
        message = place[edges][place[edges] >= 0]
        message = message[self._source[message] != self._destination[message]]
        pairs = group_rows(len(message), self._source[message], self._destination[message])
        time = np.bincount(pairs.group, self._latency[message], len(pairs))
        source, destination = pairs.columns
        return [(int(source[at]), int(destination[at])) for at in np.argsort(-time)]

    def as_others(self, source: int, destination: int) -> Float64:
        """[num_edges] The link's messages take what those of other links take, by the median.

        That of a signal which takes long to drain also holds up its sender.
        """
        mine = (self._source == source) & (self._destination == destination)
        others = (self._source != self._destination) & ~mine
        change = np.zeros(len(self._run_graph.weight))
        late = np.flatnonzero(mine & self._was_awaited)
        change[self._edge[late]] = -self._excess(self._latency, mine, others, self._was_awaited)[late]
        drained = np.flatnonzero(mine & (self._sending >= 0))
        drained = drained[np.unique(self._sending[drained], return_index=True)[1]]
        change[self._sending[drained]] -= self._excess(self._drain, mine, others, np.ones_like(mine))[drained]
        return change

    def _excess(self, times: Float64, mine: Mask, others: Mask, chosen: Mask) -> Float64:
        """[num_messages] by how much the median of the link exceeds that of the others; 0 where either is unknown."""
        num_kinds = int(self._kind.max(initial=-1)) + 1
        own, usual = (
            median_of_groups(self._kind[which], times[which], num_kinds)
            for which in (mine & chosen, others & chosen)
        )
        return np.nan_to_num(own - usual)[self._kind]


def _edge_after(run_graph: RunGraph) -> Int32:
    """[num_nodes] the edge of what a run does after each of its nodes; -1 where it has none."""
    edge = run_graph.segments.edge
    after = np.full(run_graph.num_nodes, -1, np.int32)
    after[run_graph.source[edge]] = edge
    return after

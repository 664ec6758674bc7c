"""How much longer messages of one link take than those of the others."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows, quantile_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline


class Links:
    """A link is (source, destination), two ranks. Its messages are compared with those of other links in the same
    phase, between ranks that are as near to each other."""

    def __init__(self, timeline: Timeline, waits: Waits, run_graph: RunGraph) -> None:
        messages, self._run_graph = run_graph.messages, run_graph
        wait, spans = messages.wait, timeline.spans
        self._edge, self._was_awaited = messages.edge, messages.was_awaited
        self._source, self._destination = waits.peer[wait], waits.rank[wait]
        self._near = timeline.on_same_node(self._source, self._destination).astype(np.int64)
        kinds = group_rows(len(wait), waits.phase[wait], self._near)
        self._kind, self._num_kinds, self._near_of_kind = kinds.group, len(kinds), kinds.columns[1]
        links = group_rows(len(wait), self._source, self._destination)
        self.num_links = int((links.columns[0] != links.columns[1]).sum())
        self._latency = run_graph.weight[self._edge]
        signal = waits.signal[wait]
        self._drain = np.maximum(spans.end[signal] - spans.start[signal], 0).astype(float)
        self._flag = np.maximum(messages.passed_ns - self._drain, 0)
        """At most: only an awaited flag had just arrived when it was seen."""
        self._sending = _edge_after(run_graph)[run_graph.source[self._edge]]
        self._found: dict[tuple[int, int], tuple[Float64, Float64]] = {}

    def longest_of(self, edges: Int64) -> list[tuple[int, int]]:
        """The links that most of the time of these edges is of, the first ones first: on their way, or in stores that
        drain at the sender."""
        is_here = np.zeros(len(self._run_graph.weight) + 1, bool)  # the last is edge -1, which is none
        is_here[edges] = True
        time = np.where(is_here[self._edge], self._latency, 0) + np.where(is_here[self._sending], self._drain, 0)
        message = np.flatnonzero((time > 0) & (self._source != self._destination))
        pairs = group_rows(len(message), self._source[message], self._destination[message])
        of_pair = np.bincount(pairs.group, time[message], len(pairs))
        source, destination = pairs.columns
        return [(int(source[at]), int(destination[at])) for at in np.argsort(-of_pair)]

    def as_others(self, source: int, destination: int) -> Float64:
        """[num_edges] The link's messages take what those of other links take, by the median.

        That of a signal which takes long to drain also holds up its sender.
        """
        mine, longer_drain, longer_flag = self._longer(source, destination)
        drain, flag = np.nan_to_num(longer_drain)[self._kind], np.nan_to_num(longer_flag)[self._kind]
        change = np.zeros(len(self._run_graph.weight))
        change[self._edge[mine]] = -(drain + flag)[mine]
        drained = np.flatnonzero(mine & (self._sending >= 0))
        drained = drained[np.unique(self._sending[drained], return_index=True)[1]]
        change[self._sending[drained]] -= drain[drained]
        return change

    def longer_ns(self, source: int, destination: int) -> float:
        """How much longer its messages take than those of other links, by the mean of its awaited ones."""
        mine, longer_drain, longer_flag = self._longer(source, destination)
        longer = np.nan_to_num(longer_drain + longer_flag)
        messages = np.flatnonzero(mine & self._was_awaited)
        return float(longer[self._kind[messages]].mean()) if len(messages) else 0.0

    def _longer(self, source: int, destination: int) -> tuple[Mask, Float64, Float64]:
        """(the link's messages, [num_kinds] how much longer their drain usually is than that of other links', and their
        flags)"""
        mine = (self._source == source) & (self._destination == destination)
        link = source, destination
        if link not in self._found:
            others = (self._source != self._destination) & ~mine
            drain = self._usual_drain(mine) - self._usual_drain(others)
            self._found[link] = drain, self._usual_flag(mine) - self._usual_flag(others)
        return mine, *self._found[link]

    def _usual_drain(self, chosen: Mask) -> Float64:
        """[num_kinds] the median; nan of none."""
        return quantile_of_groups(self._kind[chosen], self._drain[chosen], self._num_kinds, 0.5)

    def _usual_flag(self, chosen: Mask) -> Float64:
        """[num_kinds] the median of those that were awaited, or else of such flags of other phases; nan of none.

        No more than what a quarter of all took at most.
        """
        awaited = chosen & self._was_awaited
        median = quantile_of_groups(self._kind[awaited], self._flag[awaited], self._num_kinds, 0.5)
        of_near = quantile_of_groups(self._near[awaited], self._flag[awaited], 2, 0.5)
        median = np.where(np.isfinite(median), median, of_near[self._near_of_kind])
        at_most = quantile_of_groups(self._kind[chosen], self._flag[chosen], self._num_kinds, 0.25)
        return np.minimum(median, at_most)


def _edge_after(run_graph: RunGraph) -> Int32:
    """[num_nodes] the edge of what a run does after each of its nodes; -1 where it has none."""
    edge = run_graph.segments.edge
    after = np.full(run_graph.num_nodes, -1, np.int32)
    after[run_graph.source[edge]] = edge
    return after

"""How much longer messages of one link take than those of the others: on their way, and in stores that drain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows, median_of_groups, quantile_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline


@dataclass(frozen=True)
class Route:
    """A link (source, destination), two ranks; with -1 for one of them all links out of, or into, the other."""

    source: int
    destination: int


class Links:
    """The messages of all links. Each is compared with those of the same phase between ranks as near to each other."""

    def __init__(
        self, timeline: Timeline, graph: EventGraph, waits: Waits, run_graph: RunGraph, ends: IterationEnds
    ) -> None:
        messages, self._num_edges = run_graph.messages, len(run_graph.weight)
        wait, spans = messages.wait, timeline.spans
        self._edge, self._was_awaited = messages.edge, messages.was_awaited
        signal = messages.signal
        self._source, self._destination = timeline.track_ranks()[spans.track[signal]], waits.rank[wait]
        self._near = timeline.on_same_node(self._source, self._destination).astype(np.int64)
        kinds = group_rows(len(wait), waits.phase[wait], self._near)
        self._kind, self._num_kinds, self._near_of_kind = kinds.group, len(kinds), kinds.columns[1]
        self._drain = np.maximum(spans.end[signal] - spans.start[signal], 0).astype(float)
        self._flag = np.maximum(messages.passed_ns - self._drain, 0).astype(float)
        """At most: only an awaited flag had just arrived when it was seen."""
        self._sending = _edge_after(run_graph)[run_graph.source[self._edge]]
        self._between = self._source != self._destination
        run = graph.run_of_spans(timeline, waits.row[wait])
        self._iteration = ends.at(run, spans.start[waits.row[wait]])
        self._num_iterations = max(len(ends), 1)
        between = np.flatnonzero(self._between)
        links = group_rows(len(between), self._source[between], self._destination[between])
        self._link = np.full(len(wait), -1)
        self._link[between] = links.group
        self.routes = tuple(map(Route, *(column.tolist() for column in links.columns)))
        """By link between two ranks."""

    def excess_ns(self) -> Float64:
        """[num_links, num_iterations] How much longer a message took than is usual, by the mean of the iteration's.

        What a flag took that nothing waited for is not on record.
        """
        rows = np.flatnonzero(self._between & (self._iteration >= 0))
        drain = median_of_groups(self._kind[rows], self._drain[rows], self._num_kinds)[self._kind]
        flag = self._usual_flag(self._between)[self._kind]
        awaited = rows[self._was_awaited[rows]]
        return self._mean(rows, self._drain - drain) + self._mean(awaited, self._flag - flag)

    def _mean(self, rows: Int64, ns: Float64) -> Float64:
        """[num_links, num_iterations] the mean of these messages; 0 of none."""
        shape = len(self.routes), self._num_iterations
        cell = self._link[rows] * shape[1] + self._iteration[rows]
        sums, count = (np.bincount(cell, value, shape[0] * shape[1]) for value in (ns[rows], np.ones(len(rows))))
        return (sums / np.maximum(count, 1)).reshape(shape)

    def without(self, route: Route, hits: Mask) -> Float64:
        """[num_edges] The route's messages take what those of other links take, by the median.

        That of a signal which takes long to drain also holds up its sender. hits: [num_iterations] in which they do.
        """
        mine, longer_drain, longer_flag = self._longer(route, hits)
        drain, flag = np.nan_to_num(longer_drain)[self._kind], np.nan_to_num(longer_flag)[self._kind]
        change = np.zeros(self._num_edges)
        change[self._edge[mine]] = -(drain + flag)[mine]
        drained = np.flatnonzero(mine & (self._sending >= 0))
        drained = drained[np.unique(self._sending[drained], return_index=True)[1]]
        change[self._sending[drained]] -= drain[drained]
        return change

    def longer_ns(self, route: Route, hits: Mask) -> float:
        """How much longer its messages take than those of other links, by the mean of its awaited ones."""
        mine, longer_drain, longer_flag = self._longer(route, hits)
        longer = np.nan_to_num(longer_drain + longer_flag)
        messages = np.flatnonzero(mine & self._was_awaited)
        return float(longer[self._kind[messages]].mean()) if len(messages) else 0.0

    def _longer(self, route: Route, hits: Mask) -> tuple[Mask, Float64, Float64]:
        """(the route's messages, [num_kinds] how much longer their drain usually is than that of other links', and
        their flags)"""
        of_route = self._between.copy()
        if route.source >= 0:
            of_route &= self._source == route.source
        if route.destination >= 0:
            of_route &= self._destination == route.destination
        mine, others = of_route & np.append(hits, False)[self._iteration], self._between & ~of_route
        drain = self._usual_drain(mine) - self._usual_drain(others)
        return mine, drain, self._usual_flag(mine) - self._usual_flag(others)

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

"""How much longer messages of one link take than those of the others: on their way, and in stores that drain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows, median_of_groups, order_within, quantile_of_groups
from tracekern.analysis.parts import Parts
from tracekern.analysis.why.members import sums_by
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.model import Float64, Int32, Int64, Mask
from tracekern.timeline.table import Table


@dataclass(frozen=True)
class Route:
    """A link (source, destination), two ranks; with -1 for one of them all links out of, or into, the other."""

    source: int
    destination: int

    def covers(self, link: Route) -> bool:
        """Whether it means this link."""
        return self.source in (-1, link.source) and self.destination in (-1, link.destination)


@dataclass(frozen=True, repr=False)
class _Messages(Table):
    """[n] messages between two ranks."""

    source: Int32
    destination: Int32
    phase: Int64
    """PhaseNumbers of the wait."""
    near: Int64
    """1 between ranks of one node."""
    drain: Int64
    flag: Int64
    """At most: only an awaited flag had just arrived when it was seen."""
    was_awaited: Mask
    edge: Int64
    """Of the whole run, see Moments."""
    sending: Int64
    """Edge of what its sender did after it had begun to send; -1 where it has none."""
    iteration: Int32

    @classmethod
    def of(cls, part: PartGraph, first_edge: int, ends: IterationEnds) -> _Messages:
        timeline, waits, run_graph = part.timeline, part.waits, part.run_graph
        spans, rank = timeline.spans, timeline.track_ranks()
        every = run_graph.messages
        between = rank[spans.track[every.signal]] != waits.rank[every.wait]
        messages = every.take(np.flatnonzero(between))
        wait, signal = messages.wait, messages.signal
        source, destination = rank[spans.track[signal]], waits.rank[wait]
        drain = np.maximum(spans.end[signal] - spans.start[signal], 0)
        sending = _edge_after(run_graph)[run_graph.source[messages.edge]].astype(np.int64)
        run = part.events.run_of_spans(timeline, waits.row[wait])
        return cls(
            source,
            destination,
            np.array(waits.phase_numbers, np.int64)[waits.phase[wait]],
            timeline.on_same_node(source, destination).astype(np.int64),
            drain,
            np.maximum(messages.passed_ns - drain, 0),
            messages.was_awaited,
            first_edge + messages.edge,
            np.where(sending >= 0, first_edge + sending, -1),
            ends.at(part.events, run, spans.start[waits.row[wait]]).astype(np.int32),
        )

    @classmethod
    def join(cls, parts: Parts[_Messages]) -> _Messages:
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))


class Links:
    """The messages of all links. Each is compared with those of the same phase between ranks as near to each other."""

    def __init__(self, moments: Moments, ends: IterationEnds) -> None:
        messages = _Messages.join(moments.graphs.map(partial(_Messages.of, ends=ends), moments.first_edges))
        links = group_rows(len(messages), messages.source, messages.destination)
        self.routes = tuple(map(Route, *(column.tolist() for column in links.columns)))
        """By link between two ranks."""
        order = np.argsort(links.group, kind="stable")
        self._link, messages = links.group[order].astype(np.int32), messages.take(order)
        self._edge, self._sending, self._was_awaited = messages.edge, messages.sending, messages.was_awaited
        kinds = group_rows(len(messages), messages.phase, messages.near)
        self._kind, self._num_kinds, self._near_of_kind = kinds.group.astype(np.int32), len(kinds), kinds.columns[1]
        self._drain, self._flag, self._iteration = messages.drain, messages.flag, messages.iteration
        self._num_iterations = max(len(ends), 1)
        self._drains = _Ordered.of(self._drain, self._kind, self._num_kinds)
        self._flags = _Ordered.of(self._flag, self._kind, self._num_kinds)
        self._awaited_flags = self._flags.of_rows(self._was_awaited)

    def excess_ns(self) -> Float64:
        """[num_links, num_iterations] How much longer a message took than is usual, by the mean of the iteration's.

        What a flag took that nothing waited for is not on record.
        """
        inside, nothing = np.flatnonzero(self._iteration >= 0), np.empty(0, np.int64)
        drain = median_of_groups(self._kind[inside], self._drain[inside], self._num_kinds)[self._kind]
        flag = self._usual_flag_without(nothing)[self._kind]
        awaited = inside[self._was_awaited[inside]]
        return self._mean(inside, self._drain - drain) + self._mean(awaited, self._flag - flag)

    def _mean(self, rows: Int64, ns: Float64) -> Float64:
        """[num_links, num_iterations] the mean of these messages; 0 of none."""
        shape, columns = (len(self.routes), self._num_iterations), (self._link[rows], self._iteration[rows])
        sums, count = (sums_by(columns, value, shape) for value in (ns[rows], np.ones(len(rows))))
        return sums / np.maximum(count, 1)

    def without(self, route: Route, hits: Mask) -> Change:
        """The route's messages take what those of other links take, by the median.

        That of a signal which takes long to drain also holds up its sender. hits: [num_iterations] in which they do.
        """
        mine, longer_drain, longer_flag = self._longer(route, hits)
        drain, flag = (np.nan_to_num(longer)[self._kind[mine]] for longer in (longer_drain, longer_flag))
        sending = self._sending[mine]
        sent, first = np.unique(sending[sending >= 0], return_index=True)
        edge = np.concatenate([self._edge[mine], sent])
        return Change(edge, -np.concatenate([drain + flag, drain[sending >= 0][first]]))

    def longer_ns(self, route: Route, hits: Mask) -> float:
        """How much longer its messages take than those of other links, by the mean of its awaited ones."""
        mine, longer_drain, longer_flag = self._longer(route, hits)
        longer = np.nan_to_num(longer_drain + longer_flag)
        messages = mine[self._was_awaited[mine]]
        return float(longer[self._kind[messages]].mean()) if len(messages) else 0.0

    def _longer(self, route: Route, hits: Mask) -> tuple[Int64, Float64, Float64]:
        """(the route's messages in these iterations, [num_kinds] how much longer their drain usually is than that of
        other links', and their flags)"""
        links = np.array([number for number, one in enumerate(self.routes) if route.covers(one)], np.int32)
        first, stop = (np.searchsorted(self._link, links, side) for side in ("left", "right"))
        of_route = rows_of_ranges(first, stop - first)
        mine = of_route[np.append(hits, False)[self._iteration[of_route]]]
        own_drain = quantile_of_groups(self._kind[mine], self._drain[mine], self._num_kinds, 0.5)
        longer_drain = own_drain - self._drains.quantile(0.5, of_route)
        return mine, longer_drain, self._usual_flag(mine) - self._usual_flag_without(of_route)

    def _usual_flag(self, rows: Int64) -> Float64:
        """[num_kinds] the median of those that were awaited, or else of such flags of other phases; nan of none.

        No more than what a quarter of all took at most.
        """
        awaited = rows[self._was_awaited[rows]]
        median = quantile_of_groups(self._kind[awaited], self._flag[awaited], self._num_kinds, 0.5)
        at_most = quantile_of_groups(self._kind[rows], self._flag[rows], self._num_kinds, 0.25)
        return np.minimum(self._of_other_phases(median, awaited), at_most)

    def _usual_flag_without(self, rows: Int64) -> Float64:
        """[num_kinds] the same of all messages but these."""
        is_awaited = self._was_awaited.copy()
        is_awaited[rows] = False
        median = self._of_other_phases(self._awaited_flags.quantile(0.5, rows), np.flatnonzero(is_awaited))
        return np.minimum(median, self._flags.quantile(0.25, rows))

    def _of_other_phases(self, median: Float64, awaited: Int64) -> Float64:
        """Fills in the kinds that have no median: that of all these messages between ranks as near."""
        missing = ~np.isfinite(median)
        if missing.any():
            near = self._near_of_kind[self._kind[awaited]]
            median[missing] = quantile_of_groups(near, self._flag[awaited], 2, 0.5)[self._near_of_kind[missing]]
        return median


@dataclass(frozen=True)
class _Ordered:
    """Values in order, group by group: tells quantiles of all but some rows without another look at all of them."""

    first: Int64
    """[num_groups + 1] where those of each group begin."""
    values: Int64
    row: Int32
    place: Int32
    """[num_rows] where each row's value is; -1: not among them."""

    @classmethod
    def of(cls, values: Int64, group: Int32, num_groups: int) -> _Ordered:
        """values, group: [n]."""
        row = order_within(group, values).astype(np.int32)
        return cls._in_order(row, values[row], np.searchsorted(group[row], np.arange(num_groups + 1)), len(values))

    @classmethod
    def _in_order(cls, row: Int32, values: Int64, first: Int64, num_rows: int) -> _Ordered:
        place = np.full(num_rows, -1, np.int32)
        place[row] = np.arange(len(row))
        return cls(first, values, row, place)

    def of_rows(self, chosen: Mask) -> _Ordered:
        """Returns the order of some rows alone."""
        kept = chosen[self.row]
        first = np.append(0, np.cumsum(kept))[self.first]
        return self._in_order(self.row[kept], self.values[kept], first, len(chosen))

    def quantile(self, share: float, without: Int64) -> Float64:
        """[num_groups] as quantile_of_groups(), of all rows but these."""
        place = np.sort(self.place[without])
        quantile = np.full(len(self.first) - 1, np.nan)
        for number, (first, stop) in enumerate(pairwise(self.first.tolist())):
            own = place[slice(*np.searchsorted(place, (first, stop)))] - first
            if count := stop - first - len(own):
                wanted = int(share * (count - 1))
                skipped = np.searchsorted(own - np.arange(len(own)), wanted, "right")
                quantile[number] = self.values[first + wanted + skipped]
        return quantile


def _edge_after(run_graph: RunGraph) -> Int32:
    """[num_nodes] the edge of what a run does after each of its nodes; -1 where it has none."""
    after = np.full(run_graph.num_nodes, -1, np.int32)
    count = len(run_graph.segments)
    after[run_graph.source[:count]] = np.arange(count)
    return after

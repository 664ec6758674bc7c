"""How much longer messages of one link take than those of the others: on their way, and in stores that drain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import Counts, Partial, Sums
from tracekern.analysis.why.members import sums_by
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
    """[n] messages between two ranks in a part of the run, link by link."""

    source: Int32
    destination: Int32
    phase: Int64
    """PhaseNumbers of the wait."""
    near: Int64
    """1 between ranks of one node. Messages of one phase that are as near are of one *kind*."""
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
        spans, rank, every = timeline.spans, timeline.track_ranks(), part.run_graph.messages
        source, destination = rank[spans.track[every.signal]], waits.rank[every.wait]
        between = np.flatnonzero(source != destination)
        between = between[np.lexsort((destination[between], source[between]))]
        messages, source, destination = every.take(between), source[between], destination[between]
        wait, signal = messages.wait, messages.signal
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

    @property
    def kind(self) -> tuple[Int64, Int64]:
        return self.phase, self.near

    def of_route(self, route: Route) -> _Messages:
        chosen = np.ones(len(self), bool)
        for wanted, rank in ((route.source, self.source), (route.destination, self.destination)):
            chosen &= (rank == wanted) | (wanted < 0)
        return self.take(np.flatnonzero(chosen))

    def in_iterations(self, hits: Mask) -> _Messages:
        """hits: [num_iterations]"""
        return self.take(np.flatnonzero(np.append(hits, False)[self.iteration]))


@dataclass(frozen=True)
class _Taken(Partial):
    """What some messages take, by kind."""

    drains: Counts
    drains_inside: Counts
    """Of those in an iteration."""
    flags: Counts
    awaited: Counts
    """Of the flags that were awaited."""

    @classmethod
    def of(cls, messages: _Messages) -> _Taken:
        every = np.ones(len(messages), bool)
        return cls(
            Counts.of(messages.kind, messages.drain, every),
            Counts.of(messages.kind, messages.drain, messages.iteration >= 0),
            Counts.of(messages.kind, messages.flag, every),
            Counts.of(messages.kind, messages.flag, messages.was_awaited),
        )

    @classmethod
    def of_route(cls, messages: _Messages, route: Route, hits: Mask) -> dict[str, _Taken]:
        """Counts all messages of a route, and those in some iterations."""
        own = messages.of_route(route)
        return {"all": cls.of(own), "hits": cls.of(own.in_iterations(hits))}

    def __sub__(self, other: _Taken) -> _Taken:
        return _Taken(*(counts - vars(other)[name] for name, counts in vars(self).items()))

    def usual_drain(self) -> Float64:
        """[num_kinds] nan of none."""
        return self.drains.at_least(0.5)

    def usual_flag(self) -> Float64:
        """[num_kinds] the median of those that were awaited, or else of such flags of other phases; nan of none.

        No more than what a quarter of all took at most.
        """
        median, near = self.awaited.at_least(0.5), self.awaited.groups[1]
        missing = np.flatnonzero(~np.isfinite(median))
        if len(missing):
            by_near = self.awaited.by_key(1)
            median[missing] = by_near.at_least(0.5)[by_near.number_of(near[missing])]
        return np.minimum(median, self.flags.at_least(0.25))


class Links:
    """The messages of all links. Each is compared with those of the same kind."""

    def __init__(self, moments: Moments, ends: IterationEnds) -> None:
        self._parts = moments.graphs.map(partial(_Messages.of, ends=ends), moments.first_edges)
        self._every: _Taken = moments.graphs.share(self._parts.map(_Taken.of).total())
        usual = self._every.drains_inside.medians(), self._every.usual_flag()
        self._sums: Sums = self._parts.map(partial(_sums_by_link, every=self._every, usual=usual)).total()
        links = group_rows(len(self._sums), *self._sums.keys[:2])
        self._link, self._num_iterations = links.group, max(len(ends), 1)
        self.routes = tuple(map(Route, *(column.tolist() for column in links.columns)))
        """By link between two ranks."""

    def excess_ns(self) -> Float64:
        """[num_links, num_iterations] How much longer a message took than is usual, by the mean of the iteration's.

        What a flag took that nothing waited for is not on record.
        """
        iteration = self._sums.keys[2]
        inside = np.flatnonzero(iteration >= 0)
        shape, columns = (len(self.routes), self._num_iterations), (self._link[inside], iteration[inside])

        def mean(count: str, twice_ns: str) -> Float64:
            sums, number = (sums_by(columns, self._sums[name][inside], shape) for name in (twice_ns, count))
            return sums / 2 / np.maximum(number, 1)

        return mean("inside", "twice_drain_ns") + mean("awaited", "twice_flag_ns")

    def without(self, route: Route, hits: Mask) -> Change:
        """The route's messages take what those of other links take, by the median.

        That of a signal which takes long to drain also holds up its sender. hits: [num_iterations] in which they do.
        """
        _, *longer = self._longer(route, hits)
        change = partial(_change_of, route=route, hits=hits, every=self._every, longer=longer)
        return Change(*(np.concatenate(columns) for columns in zip(*self._parts.map(change), strict=True)))

    def longer_ns(self, route: Route, hits: Mask) -> float:
        """How much longer its messages take than those of other links, by the mean of its awaited ones."""
        mine, longer_drain, longer_flag = self._longer(route, hits)
        awaited = mine.awaited.count()
        return float((np.nan_to_num(longer_drain + longer_flag) * awaited).sum()) / max(int(awaited.sum()), 1)

    def _longer(self, route: Route, hits: Mask) -> tuple[_Taken, Float64, Float64]:
        """(what the route's messages in these iterations take, [num_kinds] how much longer their drain usually is than
        that of other links', and their flags)"""
        taken = self._parts.map(partial(_Taken.of_route, route=route, hits=hits)).total()
        mine, others = self._every - self._every + taken["hits"], self._every - taken["all"]  # both know all kinds
        return mine, mine.usual_drain() - others.usual_drain(), mine.usual_flag() - others.usual_flag()


def _sums_by_link(messages: _Messages, every: _Taken, usual: tuple[Float64, Float64]) -> Sums:
    """Adds up by source, destination and iteration: messages in iterations, and how much longer than usual their drains
    are; awaited ones of these, and their flags.

    usual: [num_kinds] drain and flag.
    """
    kind = every.flags.number_of(*messages.kind)
    inside = messages.iteration >= 0
    awaited = inside & messages.was_awaited
    drain, flag = (np.nan_to_num(ns)[kind] for ns in usual)  # nan of kinds without any
    return Sums.of(
        (messages.source, messages.destination, messages.iteration),
        inside=inside,
        awaited=awaited,
        twice_drain_ns=np.where(inside, 2 * (messages.drain - drain), 0),
        twice_flag_ns=np.where(awaited, 2 * (messages.flag - flag), 0),
    )


def _change_of(messages: _Messages, route: Route, hits: Mask, every: _Taken, longer: Sequence[Float64]) -> Change:
    """The edges of a route's messages in a part without what they take longer. longer: [num_kinds] drain and flag."""
    mine = messages.of_route(route).in_iterations(hits)
    drain, flag = (np.nan_to_num(ns)[every.flags.number_of(*mine.kind)] for ns in longer)
    has_sending = np.flatnonzero(mine.sending >= 0)
    sent, first = np.unique(mine.sending[has_sending], return_index=True)
    return Change(np.concatenate([mine.edge, sent]), -np.concatenate([drain + flag, drain[has_sending][first]]))


def _edge_after(run_graph: RunGraph) -> Int32:
    """[num_nodes] the edge of what a run does after each of its nodes; -1 where it has none."""
    after = np.full(run_graph.num_nodes, -1, np.int32)
    count = len(run_graph.segments)
    after[run_graph.source[:count]] = np.arange(count)
    return after

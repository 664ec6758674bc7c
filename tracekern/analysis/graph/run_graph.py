"""The graph of what happened inside launches: what had to happen before what, and how long each step took.

Nodes are those of launches (launch_graph.py), the moment at which a run *tells* (begins to send a signal, or arrives at
a barrier of its block) and the moment at which it *hears* (a wait ends). Edges are what a run did by itself between two
nodes, messages, meetings of warps, and what launches wait for as wholes. The longest path to a node is the time at
which it happened; docs/analysis.md walks through an example.

A part of a run has the launches of some whole calls. What leads into it from earlier ones comes from the nodes of
launches alone: the time of such a node is *carried*, the weight of an edge from the start of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.launch_graph import EdgeKind, LaunchGraph
from tracekern.analysis.graph.points import RUNS_AT_ONCE, ByRun, is_message
from tracekern.analysis.graph.schedule import Schedule
from tracekern.analysis.graph.wait_times import WaitTimes
from tracekern.analysis.waits.analyze import Int8, Waits
from tracekern.formatting import brief
from tracekern.timeline.columns import order_of
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline
from tracekern.timeline.table import Table


@dataclass(frozen=True, repr=False)
class Segments(Table):
    """[n] what a run did by itself between two nodes, run by run in the order of time. Each is an edge: the first n, in
    this order."""

    run: Int32
    start: Int64
    """ns from the timeline's origin, like all times here."""
    end: Int64


@dataclass(frozen=True, repr=False)
class Messages(Table):
    """[n] signals that released a wait, or ended one at a barrier of ranks. Each is an edge, from the signal's begin to
    the wait's end."""

    wait: Int64
    """Index into Waits."""
    signal: Int64
    """Its span."""
    edge: Int64
    passed_ns: Int64
    """From the signal's begin to the end of the wait: no more than this the message took."""
    was_awaited: Mask
    """Whether the wait was held up by it. Of the others it is not on record how long they took."""

    def joined(self, other: Messages) -> Messages:
        if not len(other):
            return self
        return Messages(*(np.concatenate([one, vars(other)[name]]) for name, one in vars(self).items()))


@dataclass(frozen=True)
class RunGraph:
    """The graph of one part. Node 0 is the start of the run; those inside launches follow, and then those of launches.

    The edges inside launches come first, segments ahead of all others; those of launches follow, and then the carried
    ones.
    """

    source: Int32
    """[num_edges] node"""
    target: Int32
    kind: Int8
    """[num_inside] EdgeKind"""
    weight: Float64
    """[num_edges] ns as recorded; of those that do not lie inside launches, what was put in last"""
    segments: Segments
    messages: Messages
    heard: Int64
    """Waits whose ends are nodes: index into Waits."""
    first_heard: int
    """Node of the first of these, which the others follow."""
    outer: Int64
    """[num_outer] nodes of the LaunchGraph that are its last ones, ascending."""
    is_carried: Mask
    """[num_outer] Whether its time comes from an earlier part."""
    edges_of_launches: Int64
    """[num_of_launches] those of the LaunchGraph that are its own."""
    num_nodes: int

    __repr__ = brief

    @property
    def num_inside(self) -> int:
        """How many edges lie inside launches."""
        return len(self.kind)

    @property
    def num_own(self) -> int:
        """How many edges it has but the carried ones."""
        return len(self.kind) + len(self.edges_of_launches)

    @property
    def first_outer(self) -> int:
        return self.num_nodes - len(self.outer)

    def node_of(self, outer: Int64) -> Int64:
        """[n] its nodes that are these of the LaunchGraph; the start of the run is its own node 0."""
        return np.where(outer > 0, self.first_outer + np.searchsorted(self.outer, outer), 0)


class _Edges:
    """Collects edges, kind by kind."""

    def __init__(self) -> None:
        self._columns: list[tuple[Int32, Int32, Float64, Int8]] = []
        self._count = 0

    def add(self, kind: EdgeKind, source: Int64 | Int32, target: Int64 | Int32, weight: Float64 | Int64) -> Int64:
        """Returns the numbers of the edges."""
        source, target = source.astype(np.int32, copy=False), target.astype(np.int32, copy=False)
        kinds = np.full(len(source), int(kind), np.int8)
        self._columns.append((source, target, weight.astype(float, copy=False), kinds))
        first, self._count = self._count, self._count + len(source)
        return np.arange(first, self._count)

    def join(self) -> tuple[Int32, Int32, Float64, Int8]:
        source, target, weight, kind = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return source, target, weight, kind


@dataclass(frozen=True)
class _Outer:
    """The nodes and edges of launches that a part needs."""

    node: Int64
    """Numbers in the LaunchGraph, ascending."""
    is_carried: Mask
    edge: Int64

    @classmethod
    def of(cls, launches: LaunchGraph, is_own: Mask) -> _Outer:
        """is_own: [num_launches] which launches are the part's."""
        edge = np.flatnonzero(is_own[launches.launch])
        own = np.flatnonzero(np.append(is_own, False)[launches.launch_of_node])
        node = np.union1d(own, launches.source[edge])
        node = node[node > 0]
        return cls(node, ~is_own[launches.launch_of_node[node]], edge)


def build_run_graph(
    timeline: Timeline,
    graph: EventGraph,
    waits: Waits,
    times: WaitTimes,
    schedule: Schedule,
    launches: LaunchGraph,
    is_own: Mask,
) -> RunGraph:
    """Builds the graph of a part. The timeline's clocks must be on one axis.

    waits: those of the part that ended. times: of these, with all rounds over. schedule, launches: of the whole run.
    is_own: [num_launches of the Schedule] which launches are the part's.
    """
    outer, edges, points = _Outer.of(launches, is_own), _Edges(), times.points
    meetings, meeting = np.unique(waits.last_arrival[points.arrived], return_inverse=True)
    first_outer = points.first_meeting + len(meetings)
    of_launch = np.zeros((2, len(is_own)), np.int32)  # the nodes of starts and ends
    for nodes, own in zip(of_launch, (launches.starts, launches.ends), strict=True):
        nodes[is_own] = first_outer + np.searchsorted(outer.node, own(np.flatnonzero(is_own)))
    segments = _add_runs(edges, timeline, graph, waits, times, schedule, of_launch)
    messages = _add_messages(edges, waits, times)
    arrivals = _add_meetings(edges, waits, times, meeting)
    source, target, weight, kind = edges.join()
    found = RunGraph(
        source,
        target,
        kind,
        weight,
        segments,
        messages.joined(arrivals),
        points.heard,
        points.first_heard,
        outer.node,
        outer.is_carried,
        outer.edge,
        first_outer + len(outer.node),
    )
    carried = first_outer + np.flatnonzero(outer.is_carried)
    sources = source, found.node_of(launches.source[outer.edge]), np.zeros(len(carried))
    targets = target, found.node_of(launches.target[outer.edge]), carried
    whole_source, whole_target = (np.concatenate(parts).astype(np.int32) for parts in (sources, targets))
    whole_weight = np.concatenate([weight, np.zeros(len(whole_source) - len(weight))])
    return dataclasses.replace(found, source=whole_source, target=whole_target, weight=whole_weight)


def _add_runs(
    edges: _Edges,
    timeline: Timeline,
    graph: EventGraph,
    waits: Waits,
    times: WaitTimes,
    schedule: Schedule,
    of_launch: Int32,
) -> Segments:
    """Each run from its launch's start through its nodes to its launch's end.

    of_launch: [2, num_launches] nodes of the starts and the ends.
    """
    runs, points = graph.runs, times.points
    lists = [ByRun.of(run) for run in (points.told_run, points.arrived_run, points.heard_run)]
    num_nodes = np.sum([np.bincount(own.run, minlength=len(runs)) for own in lists], axis=0)
    # A segment leads to each node, and one more from the last of a run to the launch's end.
    last = np.cumsum(num_nodes + 1) - 1
    first = np.append(0, last + 1)
    start, stop = np.empty((2, first[-1]), np.int64)
    source, target = np.empty((2, first[-1]), np.int32)
    weight = np.empty(first[-1])
    for at in range(0, len(runs), RUNS_AT_ONCE):
        some = slice(at, at + RUNS_AT_ONCE)
        places = [own.places(at, at + RUNS_AT_ONCE) for own in lists]
        run, node, begin, end, least = _nodes_in_order(timeline, waits, times, *places)
        launch, own_first, own_last = runs.launch[some], first[:-1][some], last[some]
        to_node = first[at] + np.arange(len(run)) + run - at
        start[own_first], start[to_node + 1] = schedule.start[launch], end
        stop[to_node], stop[own_last] = np.maximum(begin, start[to_node]), np.maximum(runs.end[some], start[own_last])
        source[own_first], source[to_node + 1] = of_launch[0, launch], node
        target[to_node], target[own_last] = node, of_launch[1, launch]
        weight[to_node] = stop[to_node] - start[to_node] + np.minimum(least, end - stop[to_node])
        weight[own_last] = stop[own_last] - start[own_last] + schedule.end[launch] - schedule.last_run[launch]
    edges.add(EdgeKind.OWN, source, target, weight)
    return Segments(np.repeat(np.arange(len(runs), dtype=np.int32), num_nodes + 1), start, stop)


def _nodes_in_order(
    timeline: Timeline,
    waits: Waits,
    times: WaitTimes,
    told: Int64,
    arrived: Int64,
    heard: Int64,
) -> tuple[Int64, Int64, Int64, Int64, Float64]:
    """([n] run, [n] node, [n] when it begins, [n] when it is over, [n] ns that it takes at least) of some points, run
    by run in the order of time."""
    points = times.points
    waiting = points.heard[heard]
    run = np.concatenate([points.told_run[told], points.arrived_run[arrived], points.heard_run[heard]])
    row = np.concatenate([points.told[told], waits.row[points.arrived[arrived]], waits.row[waiting]])
    node = np.concatenate([1 + told, points.first_arrived + arrived, points.first_heard + heard])
    end, least = timeline.spans.start[row], np.zeros(len(run))
    first_heard = len(run) - len(waiting)
    end[first_heard:], least[first_heard:] = times.over[waiting], times.least[waiting]
    # A warp arrives at a barrier before it hears, and hears before it sends at that time.
    kind = np.repeat([2, 0, 1], [len(told), len(arrived), len(heard)])
    order = order_of(row * 4 + kind)
    begin = timeline.spans.start[row]
    columns = run, end, begin, kind
    if len(_out_of_order([column[order] for column in columns])):
        order = np.lexsort(columns[::-1])
    return run[order], node[order], begin[order], end[order], least[order]


def _out_of_order(columns: Sequence[Int64]) -> Int64:
    """[n] rows that come behind a larger one, by the first column in which the two differ."""
    is_smaller, is_same = np.zeros(max(len(columns[0]) - 1, 0), bool), True
    for column in columns:
        is_smaller |= is_same & (column[1:] < column[:-1])
        is_same = is_same & (column[1:] == column[:-1])
    return np.flatnonzero(is_smaller) + 1


def _add_messages(edges: _Edges, waits: Waits, times: WaitTimes) -> Messages:
    points = times.points
    wait = np.flatnonzero(is_message(waits))
    source, target = points.node_of_told[waits.signal[wait]], points.node_of_heard[wait]
    kept = (source >= 0) & (target >= 0)
    wait = wait[kept]
    edge = edges.add(EdgeKind.MESSAGE, source[kept], target[kept], times.latency[wait])
    return Messages(wait, waits.signal[wait], edge, times.passed[wait], times.was_held_up[wait])


def _add_meetings(edges: _Edges, waits: Waits, times: WaitTimes, meeting: Int64) -> Messages:
    """Barriers of a block or grid have a node where all meet; of barriers of ranks each arrival is an edge.

    meeting: [num_arrived] number of the meeting that each local arrival is at. Returns the arrivals that ended a wait.
    """
    points, heard = times.points, times.points.node_of_heard
    arrived = points.first_arrived + np.arange(len(points.arrived))
    met = points.first_meeting + meeting
    edges.add(EdgeKind.MEETING, arrived, met, np.zeros(len(met)))
    edges.add(EdgeKind.MEETING, met, heard[points.arrived], times.latency[points.arrived])
    arrivals = times.arrivals
    source, target = points.node_of_told[arrivals.signal], heard[arrivals.wait]
    kept = np.flatnonzero((source >= 0) & (target >= 0))
    edge = edges.add(EdgeKind.MEETING, source[kept], target[kept], arrivals.latency[kept])
    last = np.flatnonzero(arrivals.ended[kept])
    wait, signal = arrivals.wait[kept[last]], arrivals.signal[kept[last]]
    passed = arrivals.latency[kept[last]].astype(np.int64)
    return Messages(wait, signal, edge[last], passed, times.was_held_up[wait])

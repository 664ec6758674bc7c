"""The graph of a run: what had to happen before what, and how long each step took.

Nodes are the start and end of each launch, the moment at which a run *tells* (begins to send a signal, or arrives at a
barrier of its block) and the moment at which it *hears* (a wait ends). Edges are what a run did by itself between two
nodes, messages, meetings of warps, and the gaps before kernels. The longest path to a node is the time at which it
happened; docs/analysis.md walks through an example.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.arrivals import find_arrivals, time_arrivals
from tracekern.analysis.graph.asks import RUN_STARTS, Asks, find_asked
from tracekern.analysis.graph.events import EventGraph, Schedule
from tracekern.analysis.graph.host_gaps import MAX_LAUNCH_NS
from tracekern.analysis.graph.points import RUNS_AT_ONCE, ByRun, Points, find_points, is_message
from tracekern.analysis.graph.wait_times import NEVER, WaitTimes, ends_of_waits, latest_told, time_waits
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Int8, Waits
from tracekern.formatting import brief
from tracekern.timeline.columns import order_of
from tracekern.timeline.join.members import number_members
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline
from tracekern.timeline.table import Table


class EdgeKind(enum.IntEnum):
    OWN = 0
    """What a run does between two nodes."""
    MESSAGE = 1
    MEETING = 2
    """At a barrier of a block, a grid, or all ranks."""
    GAP = 3
    """Before a kernel: from the end of the one before it on its stream, or from the start of the run."""
    HOST = 4
    """To the moment at which a host asked for a kernel, or from there to the kernel's start."""


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


@dataclass(frozen=True, repr=False)
class Gaps(Table):
    """[n] what comes before a launch. Each is an edge."""

    launch: Int64
    edge: Int64
    source: Int64
    """[n] node that each begins at, ..."""
    since: Int64
    """... and when that was."""


@dataclass(frozen=True)
class RunGraph:
    """Nodes are numbered: 0 is the start of the run, then the starts of all launches, their ends, and the others."""

    num_nodes: int
    source: Int32
    """[num_edges] node"""
    target: Int32
    kind: Int8
    """[num_edges] EdgeKind"""
    weight: Float64
    """[num_edges] ns as recorded; -inf for edges of hosts, which only Asks.weight() puts in"""
    segments: Segments
    messages: Messages
    gaps: Gaps
    uncounted: Int64
    """Edges that lead to where all ranks are aligned. Their time counts for nothing."""
    asks: Asks
    heard: Int64
    """Waits whose ends are nodes: index into Waits."""
    first_heard: int
    """Node of the first of these, which the others follow."""
    end_of_launch: Int64
    """[num_launches of the Schedule] node"""
    start_ns: int
    """When the first launch began."""

    @property
    def counted(self) -> Float64:
        """[num_edges] ns as recorded, 0 of edges whose time counts for nothing."""
        if not len(self.uncounted):
            return self.weight
        counted: Float64 = self.weight.copy()
        counted[self.uncounted] = 0
        return counted

    __repr__ = brief


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


def build_run_graph(timeline: Timeline, graph: EventGraph, waits: Waits) -> RunGraph:
    """Builds the graph of all launches that left something. The timeline's clocks must be on one axis.

    graph: build_graph(timeline). waits: all of analyze_waits(timeline).
    """
    schedule = graph.schedule
    num_launches = len(schedule.rank)
    points = find_points(timeline, graph, waits, first=1 + 2 * num_launches)
    latest = latest_told(timeline, waits)
    over = ends_of_waits(timeline, waits, points, latest)
    times = time_waits(timeline, waits, latest, over)
    edges = _Edges()
    meetings, meeting = np.unique(waits.last_arrival[points.arrived], return_inverse=True)
    segments = _add_runs(edges, timeline, graph, waits, points, times)
    messages = _add_messages(edges, waits, points, times)
    arrivals = _add_meetings(edges, timeline, waits, points, times, meeting)
    is_align = np.array([*(launch.is_align for launch in timeline.launches), *[False] * len(timeline.ranks)])
    every_gap, start_ns = _add_launches(edges, graph, is_align)
    gaps = every_gap.take(~is_align[every_gap.launch])
    first_align = points.first_meeting + len(meetings)
    met, num_aligns = _add_alignments(edges, schedule, number_members(timeline), is_align, first_align)
    # Where ranks are aligned, hosts ask for all calls ahead.
    asked_for = gaps.take(np.full(len(gaps.launch), not is_align.any()))
    first_ask = first_align + num_aligns
    asks = _add_asks(edges, schedule, asked_for, first_ask, start_ns)
    source, target, weight, kind = edges.join()
    return RunGraph(
        num_nodes=first_ask + len(asks.launch),
        source=source,
        target=target,
        kind=kind,
        weight=weight,
        segments=segments,
        messages=messages.joined(arrivals),
        gaps=gaps,
        uncounted=np.append(met, every_gap.edge[is_align[every_gap.launch]]),
        asks=asks,
        heard=points.heard,
        first_heard=points.first_heard,
        end_of_launch=1 + num_launches + np.arange(num_launches),
        start_ns=start_ns,
    )


def _add_runs(
    edges: _Edges, timeline: Timeline, graph: EventGraph, waits: Waits, points: Points, times: WaitTimes
) -> Segments:
    """Each run from its launch's start through its nodes to its launch's end."""
    runs, schedule, num_launches = graph.runs, graph.schedule, len(graph.schedule.rank)
    ends = _ends_of_runs(graph)
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
        run, node, begin, end, least = _nodes_in_order(timeline, waits, points, times, *places)
        launch, own_first, own_last = runs.launch[some], first[:-1][some], last[some]
        to_node = first[at] + np.arange(len(run)) + run - at
        start[own_first], start[to_node + 1] = schedule.start[launch], end
        stop[to_node], stop[own_last] = np.maximum(begin, start[to_node]), np.maximum(runs.end[some], start[own_last])
        source[own_first], source[to_node + 1] = 1 + launch, node
        target[to_node], target[own_last] = node, 1 + num_launches + launch
        weight[to_node] = stop[to_node] - start[to_node] + np.minimum(least, end - stop[to_node])
        weight[own_last] = stop[own_last] - start[own_last] + schedule.end[launch] - ends[launch]
    edges.add(EdgeKind.OWN, source, target, weight)
    return Segments(np.repeat(np.arange(len(runs), dtype=np.int32), num_nodes + 1), start, stop)


def _nodes_in_order(
    timeline: Timeline,
    waits: Waits,
    points: Points,
    times: WaitTimes,
    told: Int64,
    arrived: Int64,
    heard: Int64,
) -> tuple[Int64, Int64, Int64, Int64, Float64]:
    """([n] run, [n] node, [n] when it begins, [n] when it is over, [n] ns that it takes at least) of some points, run
    by run in the order of time."""
    waiting = points.heard[heard]
    run = np.concatenate([points.told_run[told], points.arrived_run[arrived], points.heard_run[heard]])
    row = np.concatenate([points.told[told], waits.row[points.arrived[arrived]], waits.row[waiting]])
    first_arrived = points.first + len(points.told)
    node = np.concatenate([points.first + told, first_arrived + arrived, points.first_heard + heard])
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


def _ends_of_runs(graph: EventGraph) -> Int64:
    """[num_launches] when the last run of each ended; NEVER where it has none."""
    ends = np.full(len(graph.schedule.rank), NEVER)
    np.maximum.at(ends, graph.runs.launch, graph.runs.end)
    return ends


def _add_messages(edges: _Edges, waits: Waits, points: Points, times: WaitTimes) -> Messages:
    wait = np.flatnonzero(is_message(waits))
    source, target = points.node_of_told[waits.signal[wait]], points.node_of_heard[wait]
    kept = (source >= 0) & (target >= 0)
    wait = wait[kept]
    edge = edges.add(EdgeKind.MESSAGE, source[kept], target[kept], times.latency[wait])
    return Messages(wait, waits.signal[wait], edge, times.passed[wait], times.was_held_up[wait])


def _add_meetings(
    edges: _Edges, timeline: Timeline, waits: Waits, points: Points, times: WaitTimes, meeting: Int64
) -> Messages:
    """Barriers of a block or grid have a node where all meet; of barriers of ranks each arrival is an edge.

    meeting: [num_arrived] number of the meeting that each local arrival is at. Returns the arrivals that ended a wait.
    """
    heard = points.node_of_heard
    arrived = points.first + len(points.told) + np.arange(len(points.arrived))
    met = points.first_meeting + meeting
    edges.add(EdgeKind.MEETING, arrived, met, np.zeros(len(met)))
    edges.add(EdgeKind.MEETING, met, heard[points.arrived], times.latency[points.arrived])
    wait, signal = find_arrivals(timeline, waits)
    source, target = points.node_of_told[signal], heard[wait]
    latency, ended = time_arrivals(timeline, waits, wait, signal, times.latency, times.over)
    kept = np.flatnonzero((source >= 0) & (target >= 0))
    edge = edges.add(EdgeKind.MEETING, source[kept], target[kept], latency[kept])
    last = ended[kept]
    wait, signal = wait[kept[last]], signal[kept[last]]
    return Messages(wait, signal, edge[last], latency[kept[last]].astype(np.int64), times.was_held_up[wait])


def _add_launches(edges: _Edges, graph: EventGraph, is_align: Mask) -> tuple[Gaps, int]:
    """The gaps before launches, and launches without any run. Returns the gaps and when the first launch began."""
    schedule = graph.schedule
    shown, count = schedule.order, len(schedule.rank)
    ends = _ends_of_runs(graph)
    bare = shown[(ends[shown] == NEVER) & ~is_align[shown]]
    edges.add(EdgeKind.OWN, 1 + bare, 1 + count + bare, schedule.end[bare] - schedule.start[bare])
    ahead = launches_ahead(schedule)
    following = shown[ahead[shown] >= 0]
    before = ahead[following]
    overlaps = schedule.start[following] < schedule.end[before]
    since = np.where(overlaps, schedule.start[before], schedule.end[before])
    node = np.where(overlaps, 1 + before, 1 + count + before)
    gap = edges.add(EdgeKind.GAP, node, 1 + following, schedule.start[following] - since)
    joined, joining, least_ns = _joins(schedule, ahead)
    edges.add(EdgeKind.GAP, 1 + count + joined, 1 + joining, least_ns)
    first = shown[ahead[shown] < 0]
    start_ns = int(schedule.start[shown].min())
    begun = edges.add(EdgeKind.GAP, np.zeros(len(first), np.int64), 1 + first, schedule.start[first] - start_ns)
    at_start = np.zeros(len(first), np.int64)
    return Gaps(
        np.concatenate([following, first]),
        np.concatenate([gap, begun]),
        np.concatenate([node, at_start]),
        np.concatenate([since, at_start + start_ns]),
    ), start_ns


def launches_ahead(schedule: Schedule) -> Int64:
    """[n] the launch that each may have had to wait for: the one before it on its stream, or one of the rank's other
    streams that ended later and still before it began, as where an event orders streams. -1 for none.
    """
    ahead: Int64 = schedule.before.copy()
    for launch, before in _ended_before(schedule):
        until = np.where(ahead[launch] >= 0, schedule.end[ahead[launch]], NEVER)
        later = before[schedule.end[before] > until]
        ahead[launch[schedule.end[before] > until]] = later
    return ahead


def _ended_before(schedule: Schedule) -> Iterator[tuple[Int64, Int64]]:
    """Yields, by pairs of streams of a rank, launches of one and the last of the other that ended before each began."""
    shown = schedule.order
    for rank in np.unique(schedule.rank[shown]).tolist():
        own = shown[schedule.rank[shown] == rank]
        streams = [own[schedule.stream[own] == stream] for stream in np.unique(schedule.stream[own])]
        for one, other in itertools.permutations(streams, 2):
            ended = other[np.argsort(schedule.end[other], kind="stable")]
            place = np.searchsorted(schedule.end[ended], schedule.start[one], side="right") - 1
            yield one[place >= 0], ended[place[place >= 0]]


def _joins(schedule: Schedule, ahead: Int64) -> tuple[Int64, Int64, Float64]:
    """([n] launch, [n] a later one that may wait for it as well, [n] ns from the end of one to the start of the other).

    They are the other launches that had ended on each stream, its own included. It begins as soon after them as its
    stage ever began after another kernel. Which events a stream waits for is not on record: a stage counts as waiting
    for one of another stream if it begins soon after it at least once.
    """
    pairs = [(launch, before) for launch, before in _ended_before(schedule)]
    if not pairs:
        none = np.empty(0, np.int64)
        return none, none, none.astype(float)
    follows = schedule.order[schedule.before[schedule.order] >= 0]
    pairs.append((follows, schedule.before[follows]))
    launch, before = (np.concatenate(column) for column in zip(*pairs, strict=True))
    is_behind = schedule.start[launch] >= schedule.end[before]
    launch, before = launch[is_behind], before[is_behind]
    gap = schedule.start[launch] - schedule.end[before]
    stages = group_rows(len(gap), schedule.stage[launch])
    kinds = group_rows(len(gap), schedule.stage[before], schedule.stage[launch])
    soonest = -stages.largest(-gap)[stages.group]
    is_own = schedule.stream[launch] == schedule.stream[before]
    kept = (is_own | (-kinds.largest(-gap)[kinds.group] <= MAX_LAUNCH_NS)) & (before != ahead[launch])
    return before[kept], launch[kept], soonest[kept].astype(float)


def _add_alignments(
    edges: _Edges, schedule: Schedule, members: Int64, is_align: Mask, first_node: int
) -> tuple[Int64, int]:
    """A node for each, where all ranks of a communicator meet; from there each needs what it took to see that.

    members: of each launch, see number_members(). Returns the edges that lead to these nodes, and how many there are.
    """
    count = len(schedule.rank)
    launch = schedule.order[is_align[schedule.order]]
    meetings = group_rows(len(launch), members[launch], schedule.sequence[launch])
    meeting, latest = meetings.group, np.full(len(meetings), NEVER)
    np.maximum.at(latest, meeting, schedule.start[launch])
    met = edges.add(EdgeKind.MEETING, 1 + launch, first_node + meeting, np.zeros(len(launch)))
    seen = schedule.end[launch] - latest[meeting]  # below 0 by clocks that contradict the barrier
    edges.add(EdgeKind.MEETING, first_node + meeting, 1 + count + launch, seen)
    return met, len(meetings)


def _add_asks(edges: _Edges, schedule: Schedule, gaps: Gaps, first: int, start_ns: int) -> Asks:
    """first: number of the first of these nodes."""
    asked = find_asked(schedule, gaps.launch, gaps.since, start_ns)
    order = np.argsort(gaps.launch)
    gap = order[np.searchsorted(gaps.launch[order], asked.launch)]
    node, never = first + np.arange(len(gap)), np.full(len(gap), -np.inf)
    source = np.where(asked.previous >= 0, first + asked.previous, gaps.source[gap])
    source[asked.previous == RUN_STARTS] = 0
    before = edges.add(EdgeKind.HOST, source, node, never)
    after = edges.add(EdgeKind.HOST, node, 1 + asked.launch, never)
    follows = gaps.launch[schedule.before[gaps.launch] >= 0]
    return Asks(
        launch=asked.launch,
        before=before,
        before_ns=asked.before_ns.astype(float),
        after=after,
        after_ns=asked.after_ns,
        gap=gaps.edge[gap],
        gap_ns=asked.gap_ns,
        is_complete=bool(np.isin(follows, asked.launch).all()),
    )

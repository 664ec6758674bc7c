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
from tracekern.analysis.groups import group_rows, median_of_groups, quantile_of_groups
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.formatting import brief
from tracekern.timeline.columns import order_of
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.join.members import number_members
from tracekern.timeline.model import OPEN_END, Float64, Int32, Int64, Mask, Timeline
from tracekern.timeline.table import Table

_NEVER = np.iinfo(np.int64).min
_HELD_UP = 0.5
"""A wait that lasts this part of a flag's way was held up by the flag."""
_POLLS, _PART, _AS_USUAL = 3, 0.2, 2
"""So was one that lasts as many times as long as a poll, and this part of the way, or whose flag took at most as many
times as long as others of its pair. Single polls are slow, too, long after the flag was there."""


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
    kind: Int32
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
        counted: Float64 = self.weight.copy()
        counted[self.uncounted] = 0
        return counted

    __repr__ = brief


@dataclass(frozen=True)
class _WaitTimes:
    """[num_waits] what each wait took, apart from being late."""

    latency: Float64
    """From the last signal's begin, or the last arrival, to the end of the wait."""
    least: Float64
    """What it takes where nothing holds it up."""
    passed: Int64
    """The same, as recorded."""
    over: Int64
    """When it was over, in ns from the timeline's origin."""
    was_held_up: Mask


@dataclass(frozen=True)
class _Points:
    """Nodes inside runs, and which of them wait for which."""

    told: Int64
    """[num_told] signal spans."""
    told_run: Int64
    arrived: Int64
    """[num_arrived] waits at barriers of a block or grid, which tell when they begin."""
    arrived_run: Int64
    heard: Int64
    """[num_heard] waits that something on record ended."""
    heard_run: Int64
    first: int
    """Number of the first of these nodes: told, arrived, heard, and then one for each meeting."""

    @property
    def first_heard(self) -> int:
        return self.first + len(self.told) + len(self.arrived)

    @property
    def first_meeting(self) -> int:
        return self.first_heard + len(self.heard)

    def node_of_told(self, num_spans: int) -> Int32:
        """[num_spans] node of a signal's span; -1 for one that told nobody."""
        node = np.full(num_spans, -1, np.int32)
        node[self.told] = self.first + np.arange(len(self.told))
        return node

    def node_of_heard(self, num_waits: int) -> Int32:
        """[num_waits] node of a wait's end; -1 for one that nothing on record ended."""
        node = np.full(num_waits, -1, np.int32)
        node[self.heard] = self.first_heard + np.arange(len(self.heard))
        return node


class _Edges:
    """Collects edges, kind by kind."""

    def __init__(self) -> None:
        self._columns: list[tuple[Int32, Int32, Float64, Int32]] = []
        self._count = 0

    def add(self, kind: EdgeKind, source: Int64 | Int32, target: Int64 | Int32, weight: Float64 | Int64) -> Int64:
        """Returns the numbers of the edges."""
        source, target = source.astype(np.int32, copy=False), target.astype(np.int32, copy=False)
        kinds = np.full(len(source), int(kind), np.int32)
        self._columns.append((source, target, weight.astype(float, copy=False), kinds))
        first, self._count = self._count, self._count + len(source)
        return np.arange(first, self._count)

    def join(self) -> tuple[Int32, Int32, Float64, Int32]:
        source, target, weight, kind = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return source, target, weight, kind


def build_run_graph(timeline: Timeline, graph: EventGraph, waits: Waits) -> RunGraph:
    """Builds the graph of all launches that left something. The timeline's clocks must be on one axis.

    graph: build_graph(timeline). waits: all of analyze_waits(timeline).
    """
    schedule = graph.schedule
    num_launches = len(schedule.rank)
    points = _find_points(timeline, graph, waits, first=1 + 2 * num_launches)
    latest = _latest(timeline, waits)
    over = _ends_of_waits(timeline, waits, points, latest)
    times = _time_waits(timeline, waits, latest, over)
    edges = _Edges()
    meetings, meeting = np.unique(waits.last_arrival[points.arrived], return_inverse=True)
    segments = _add_runs(edges, timeline, graph, waits, points, times)
    messages = _add_messages(edges, timeline, waits, points, times)
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


def _is_message(waits: Waits) -> Mask:
    return np.asarray((waits.signal >= 0) & (waits.kind != WaitKind.BARRIER), bool)


def _find_points(timeline: Timeline, graph: EventGraph, waits: Waits, first: int) -> _Points:
    at_barrier, arrival = find_arrivals(timeline, waits)
    by_message = np.flatnonzero(_is_message(waits))
    local = np.flatnonzero(waits.last_arrival >= 0)

    def in_runs(row: Int64, span: Int64) -> tuple[Int64, Int64]:
        run = graph.run_of_spans(timeline, span)
        return row[run >= 0], run[run >= 0]

    heard = _distinct(len(waits), by_message, local, at_barrier)
    told = _distinct(len(timeline.spans), waits.signal[by_message], arrival)
    heard, heard_run = in_runs(heard, waits.row[heard])
    told, told_run = in_runs(told, told)
    arrived, arrived_run = in_runs(local, waits.row[local])
    return _Points(told, told_run, arrived, arrived_run, heard, heard_run, first)


def _distinct(count: int, *numbers: Int64) -> Int64:
    """Those of 0..count that are among the numbers."""
    is_there = np.zeros(count, bool)
    for some in numbers:
        is_there[some] = True
    return np.flatnonzero(is_there)


def _latest(timeline: Timeline, waits: Waits) -> Int64:
    """[num_waits] when the last of all that each wait was for told, or _NEVER."""
    start = timeline.spans.start
    latest = np.full(len(waits), _NEVER)
    by_message, local = np.flatnonzero(_is_message(waits)), np.flatnonzero(waits.last_arrival >= 0)
    latest[by_message] = start[waits.signal[by_message]]
    latest[local] = start[waits.last_arrival[local]]
    at_barrier, arrival = find_arrivals(timeline, waits)
    np.maximum.at(latest, at_barrier, start[arrival])
    return latest


def _ends_of_waits(timeline: Timeline, waits: Waits, points: _Points, latest: Int64) -> Int64:
    """[num_waits] when each was over: at its end, or where its warp sent a signal before that, once all had arrived.

    A warp that acknowledges what it waited for, inside the span of the wait, has waited no longer.
    """
    spans, over = timeline.spans, timeline.spans.end[waits.row]
    order = np.lexsort((spans.start[points.told], points.told_run))
    told_run, told = points.told_run[order], spans.start[points.told[order]]
    heard, run = points.heard, points.heard_run
    signal = waits.signal[heard]
    drained = np.where((signal >= 0) & (spans.end[signal] != OPEN_END), spans.end[signal], _NEVER)
    there = np.maximum(np.maximum(spans.start[waits.row[heard]], latest[heard]), drained)
    first, stop = (np.searchsorted(told_run, run, side) for side in ("left", "right"))
    place = bisect_right(told, first, stop, there)
    sent = np.append(told, 0)[place]
    inside = (place < stop) & (sent < over[heard])
    over[heard[inside]] = sent[inside]
    return over


def _time_waits(timeline: Timeline, waits: Waits, latest: Int64, over: Int64) -> _WaitTimes:
    """How long a message took that nothing waited for is not on record: its drain, and what flags usually take."""
    spans = timeline.spans
    known, lasted = latest > _NEVER, over - timeline.spans.start[waits.row]
    passed = np.where(known, over - np.where(known, latest, 0), 0)
    message = _is_message(waits)
    drain = np.where(message, np.maximum(spans.end[waits.signal] - spans.start[waits.signal], 0), 0)
    flag = np.maximum(passed - drain, 0)
    by_phase = group_rows(len(waits), waits.phase)
    was_late = (latest >= spans.start[waits.row]) | (waits.late_ns + waits.drain_ns > 0)
    held_up = known & (was_late | (lasted >= _HELD_UP * np.maximum(flag, 1)))
    # Of those that found their signal there most only polled once.
    there = known & ~held_up
    polled = quantile_of_groups(by_phase.group[there], lasted[there], len(by_phase), 0.25)[by_phase.group]
    held_up |= known & (lasted > _POLLS * polled) & (lasted >= _PART * flag)
    usual = _usual_flags(timeline, waits, flag, held_up)
    held_up |= known & (lasted > _POLLS * polled) & (flag <= _AS_USUAL * usual)
    return _WaitTimes(
        latency=np.where(held_up, passed, np.minimum(drain + usual, passed)).astype(float),
        least=np.where(held_up, np.minimum(np.nan_to_num(polled), lasted), lasted).astype(float),
        passed=passed,
        over=over,
        was_held_up=held_up,
    )


def _usual_flags(timeline: Timeline, waits: Waits, flag: Int64, held_up: Mask) -> Float64:
    """[num_waits] what flags of each pair of ranks take in a phase, by the median of those that held up a wait.

    Of a pair without any it is what the pair takes in other phases, or else what a quarter of all pairs take at most:
    those that hold up waits may be the slow ones.
    """
    pairs = group_rows(len(waits), waits.phase, waits.peer, waits.rank)
    usual = median_of_groups(pairs.group[held_up], flag[held_up], len(pairs))
    _, peer, rank = pairs.columns
    near = timeline.on_same_node(peer.astype(np.int32), rank.astype(np.int32)).astype(np.int64)
    links, known = group_rows(len(pairs), peer, rank), np.flatnonzero(np.isfinite(usual))
    of_link = median_of_groups(links.group[known], usual[known], len(links))[links.group]
    usual = np.where(np.isfinite(usual), usual, of_link)
    known = np.flatnonzero(np.isfinite(usual))
    usual = np.where(np.isfinite(usual), usual, quantile_of_groups(near[known], usual[known], 2, 0.25)[near])
    return np.asarray(np.nan_to_num(usual)[pairs.group], float)


def _add_runs(
    edges: _Edges, timeline: Timeline, graph: EventGraph, waits: Waits, points: _Points, times: _WaitTimes
) -> Segments:
    """Each run from its launch's start through its nodes to its launch's end."""
    runs, schedule, count = graph.runs, graph.schedule, len(graph.schedule.rank)
    run, node, begin, end, least = _nodes_in_order(timeline, waits, points, times)
    # A segment leads to each node, and one more from the last of a run to the launch's end.
    to_node = np.arange(len(run)) + run
    last = np.cumsum(np.bincount(run, minlength=len(runs)) + 1) - 1
    first = np.append(0, last + 1)[: len(runs)]
    start, stop = np.empty((2, len(run) + len(runs)), np.int64)
    source, target = np.empty((2, len(start)), np.int32)
    start[first], start[to_node + 1] = schedule.start[runs.launch], end
    stop[to_node], stop[last] = np.maximum(begin, start[to_node]), np.maximum(runs.end, start[last])
    source[first], source[to_node + 1] = 1 + runs.launch, node
    target[to_node], target[last] = node, 1 + count + runs.launch
    weight = (stop - start).astype(float)
    weight[to_node] += np.minimum(least, end - stop[to_node])
    weight[last] += schedule.end[runs.launch] - _ends_of_runs(graph)[runs.launch]
    edges.add(EdgeKind.OWN, source, target, weight)
    return Segments(np.repeat(np.arange(len(runs), dtype=np.int32), np.diff(last, prepend=-1)), start, stop)


def _nodes_in_order(
    timeline: Timeline, waits: Waits, points: _Points, times: _WaitTimes
) -> tuple[Int64, Int64, Int64, Int64, Float64]:
    """([n] run, [n] node, [n] when it begins, [n] when it is over, [n] ns that it takes at least) of all nodes in runs,
    run by run in the order of time."""
    run = np.concatenate([points.told_run, points.arrived_run, points.heard_run])
    row = np.concatenate([points.told, waits.row[points.arrived], waits.row[points.heard]])
    end, least = timeline.spans.start[row], np.zeros(len(run))
    first_heard = len(run) - len(points.heard)
    end[first_heard:], least[first_heard:] = times.over[points.heard], times.least[points.heard]
    # A warp arrives at a barrier before it hears, and hears before it sends at that time.
    kind = np.repeat([2, 0, 1], [len(points.told), len(points.arrived), len(points.heard)])
    order = np.argsort(row * 4 + kind, kind="stable")  # three parts in order already: merged in no time
    begin = timeline.spans.start[row]
    if (np.diff(run[order]) < 0).any():  # what a track recorded of two launches in turns
        order = order[order_of(run[order])]
    columns = run, end, begin, kind
    if len(wrong := _out_of_order([column[order] for column in columns])):
        in_wrong = np.flatnonzero(np.isin(run[order], run[order[wrong]]))
        rows = order[in_wrong]
        order[in_wrong] = rows[np.lexsort([column[rows] for column in reversed(columns)])]
    return run[order], points.first + order, begin[order], end[order], least[order]


def _out_of_order(columns: Sequence[Int64]) -> Int64:
    """[n] rows that come behind a larger one, by the first column in which the two differ."""
    is_smaller, is_same = np.zeros(max(len(columns[0]) - 1, 0), bool), True
    for column in columns:
        is_smaller |= is_same & (column[1:] < column[:-1])
        is_same = is_same & (column[1:] == column[:-1])
    return np.flatnonzero(is_smaller) + 1


def _ends_of_runs(graph: EventGraph) -> Int64:
    """[num_launches] when the last run of each ended; _NEVER where it has none."""
    ends = np.full(len(graph.schedule.rank), _NEVER)
    np.maximum.at(ends, graph.runs.launch, graph.runs.end)
    return ends


def _add_messages(edges: _Edges, timeline: Timeline, waits: Waits, points: _Points, times: _WaitTimes) -> Messages:
    wait = np.flatnonzero(_is_message(waits))
    source = points.node_of_told(len(timeline.spans))[waits.signal[wait]]
    target = points.node_of_heard(len(waits))[wait]
    kept = (source >= 0) & (target >= 0)
    wait = wait[kept]
    edge = edges.add(EdgeKind.MESSAGE, source[kept], target[kept], times.latency[wait])
    return Messages(wait, waits.signal[wait], edge, times.passed[wait], times.was_held_up[wait])


def _add_meetings(
    edges: _Edges, timeline: Timeline, waits: Waits, points: _Points, times: _WaitTimes, meeting: Int64
) -> Messages:
    """Barriers of a block or grid have a node where all meet; of barriers of ranks each arrival is an edge.

    meeting: [num_arrived] number of the meeting that each local arrival is at. Returns the arrivals that ended a wait.
    """
    heard = points.node_of_heard(len(waits))
    arrived = points.first + len(points.told) + np.arange(len(points.arrived))
    met = points.first_meeting + meeting
    edges.add(EdgeKind.MEETING, arrived, met, np.zeros(len(met)))
    edges.add(EdgeKind.MEETING, met, heard[points.arrived], times.latency[points.arrived])
    wait, signal = find_arrivals(timeline, waits)
    source, target = points.node_of_told(len(timeline.spans))[signal], heard[wait]
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
    bare = shown[(ends[shown] == _NEVER) & ~is_align[shown]]
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
        until = np.where(ahead[launch] >= 0, schedule.end[ahead[launch]], _NEVER)
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
    meeting, latest = meetings.group, np.full(len(meetings), _NEVER)
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

"""What launches wait for as wholes: gaps before kernels, what hosts asked for, and where all ranks are aligned.

Nodes are numbered: 0 is the start of the run, then the starts of all launches, their ends, a node for each alignment,
and one for each asking. What happens inside launches is in run_graph.py, which joins a part of these edges to it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.asks import RUN_STARTS, Asks, find_asked
from tracekern.analysis.graph.host_gaps import MAX_LAUNCH_NS, NEVER
from tracekern.analysis.graph.schedule import Schedule
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Int8
from tracekern.formatting import brief
from tracekern.timeline.join.members import number_members
from tracekern.timeline.model import Float64, Int64, Mask, Timeline
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
class Gaps(Table):
    """[n] what comes before a launch. Each is an edge."""

    launch: Int64
    edge: Int64
    source: Int64
    """[n] node that each begins at, ..."""
    since: Int64
    """... and when that was."""


@dataclass(frozen=True)
class LaunchGraph:
    """What all launches of a run that left something waited for as wholes."""

    source: Int64
    """[num_edges] node"""
    target: Int64
    kind: Int8
    """[num_edges] EdgeKind"""
    weight: Float64
    """[num_edges] ns as recorded; -inf for edges of hosts, which only Asks.weight() puts in"""
    launch: Int64
    """[num_edges] the launch that waits."""
    launch_of_node: Int64
    """[num_nodes] a launch that each belongs to; -1 for the start of the run."""
    gaps: Gaps
    uncounted: Int64
    """Edges that lead to where all ranks are aligned. Their time counts for nothing."""
    asks: Asks
    start_ns: int
    """When the first launch began."""
    num_launches: int

    __repr__ = brief

    @property
    def num_nodes(self) -> int:
        return len(self.launch_of_node)

    def starts(self, launch: Int64) -> Int64:
        """[n] node of the start of each of these launches."""
        return np.asarray(1 + launch, np.int64)

    def ends(self, launch: Int64) -> Int64:
        return 1 + self.num_launches + launch

    @property
    def counted(self) -> Float64:
        """[num_edges] ns as recorded, 0 of edges whose time counts for nothing."""
        counted: Float64 = self.weight.copy()
        counted[self.uncounted] = 0
        return counted


class _Edges:
    """Collects edges, kind by kind."""

    def __init__(self) -> None:
        self._columns: list[tuple[Int64, Int64, Int8, Float64, Int64]] = []
        self._count = 0

    def add(self, kind: EdgeKind, source: Int64, target: Int64, weight: Float64 | Int64, launch: Int64) -> Int64:
        """Returns the numbers of the edges."""
        self._columns.append((source, target, np.full(len(source), int(kind), np.int8), weight.astype(float), launch))
        first, self._count = self._count, self._count + len(source)
        return np.arange(first, self._count)

    def join(self) -> tuple[Int64, Int64, Int8, Float64, Int64]:
        source, target, kind, weight, launch = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return source, target, kind, weight, launch


def build_launch_graph(timeline: Timeline, schedule: Schedule) -> LaunchGraph:
    """The graph of all launches that left something. The timeline's clocks must be on one axis."""
    num_launches, edges = len(schedule.rank), _Edges()
    is_align = np.array([*(launch.is_align for launch in timeline.launches), *[False] * len(timeline.ranks)])
    every_gap, start_ns = _add_gaps(edges, schedule, is_align)
    gaps = every_gap.take(~is_align[every_gap.launch])
    first_align = 1 + 2 * num_launches
    met, of_aligns = _add_alignments(edges, schedule, number_members(timeline), is_align, first_align)
    # Where ranks are aligned, hosts ask for all calls ahead.
    asked_for = gaps.take(np.full(len(gaps.launch), not is_align.any()))
    asks = _add_asks(edges, schedule, asked_for, first_align + len(of_aligns), start_ns)
    launches = np.arange(num_launches)
    source, target, kind, weight, launch = edges.join()
    return LaunchGraph(
        source=source,
        target=target,
        kind=kind,
        weight=weight,
        launch=launch,
        launch_of_node=np.concatenate([[-1], launches, launches, of_aligns, asks.launch]),
        gaps=gaps,
        uncounted=np.append(met, every_gap.edge[is_align[every_gap.launch]]),
        asks=asks,
        start_ns=start_ns,
        num_launches=num_launches,
    )


def _add_gaps(edges: _Edges, schedule: Schedule, is_align: Mask) -> tuple[Gaps, int]:
    """The gaps before launches, and launches without any run. Returns the gaps and when the first launch began."""
    shown, count = schedule.order, len(schedule.rank)
    bare = shown[(schedule.last_run[shown] == NEVER) & ~is_align[shown]]
    edges.add(EdgeKind.OWN, 1 + bare, 1 + count + bare, schedule.end[bare] - schedule.start[bare], bare)
    ahead = launches_ahead(schedule)
    following = shown[ahead[shown] >= 0]
    before = ahead[following]
    overlaps = schedule.start[following] < schedule.end[before]
    since = np.where(overlaps, schedule.start[before], schedule.end[before])
    node = np.where(overlaps, 1 + before, 1 + count + before)
    gap = edges.add(EdgeKind.GAP, node, 1 + following, schedule.start[following] - since, following)
    joined, joining, least_ns = _joins(schedule, ahead)
    edges.add(EdgeKind.GAP, 1 + count + joined, 1 + joining, least_ns, joining)
    first = shown[ahead[shown] < 0]
    start_ns = int(schedule.start[shown].min())
    begun = edges.add(EdgeKind.GAP, np.zeros(len(first), np.int64), 1 + first, schedule.start[first] - start_ns, first)
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
) -> tuple[Int64, Int64]:
    """A node for each, where all ranks of a communicator meet; from there each needs what it took to see that.

    members: of each launch, see number_members(). Returns the edges that lead to these nodes, and a launch of each.
    """
    count = len(schedule.rank)
    launch = schedule.order[is_align[schedule.order]]
    meetings = group_rows(len(launch), members[launch], schedule.sequence[launch])
    meeting, latest = meetings.group, np.full(len(meetings), NEVER)
    np.maximum.at(latest, meeting, schedule.start[launch])
    met = edges.add(EdgeKind.MEETING, 1 + launch, first_node + meeting, np.zeros(len(launch)), launch)
    seen = schedule.end[launch] - latest[meeting]  # below 0 by clocks that contradict the barrier
    edges.add(EdgeKind.MEETING, first_node + meeting, 1 + count + launch, seen, launch)
    return met, launch[np.unique(meeting, return_index=True)[1]]


def _add_asks(edges: _Edges, schedule: Schedule, gaps: Gaps, first: int, start_ns: int) -> Asks:
    """first: number of the first of these nodes."""
    asked = find_asked(schedule, gaps.launch, gaps.since, start_ns)
    order = np.argsort(gaps.launch)
    gap = order[np.searchsorted(gaps.launch[order], asked.launch)]
    node, never = first + np.arange(len(gap)), np.full(len(gap), -np.inf)
    source = np.where(asked.previous >= 0, first + asked.previous, gaps.source[gap])
    source[asked.previous == RUN_STARTS] = 0
    before = edges.add(EdgeKind.HOST, source, node, never, asked.launch)
    after = edges.add(EdgeKind.HOST, node, 1 + asked.launch, never, asked.launch)
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

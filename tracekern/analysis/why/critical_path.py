"""What bounds the time of a run: the longest path through its graph, and what ran on it.

Nothing on the path can be shortened without the end coming earlier, until another path is the longest.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.longest_path import walk_back
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.run_graph import EdgeKind
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Int8, Phase, Waits
from tracekern.formatting import brief
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import Int32, Int64, Timeline
from tracekern.timeline.select import Window, reaches_into
from tracekern.timeline.table import Table

_LATE = np.iinfo(np.int64).max


class PathKind(enum.IntEnum):
    PHASE = 0
    LINK = 1
    """From the signal's begin until the wait had seen it."""
    HOST = 2
    """Between a kernel's start and the end of the one before it on its stream, while its host had not launched it."""
    GAP = 3
    """The rest of that time: the host or an unrecorded kernel."""


@dataclass(frozen=True)
class PathPart:
    """All of a path's time in one phase of a rank, on one link, or in one host's gaps."""

    rank: int
    """The rank; the sender for kind LINK."""
    kind: PathKind
    phase: Phase
    """The phase for kind PHASE; else empty."""
    peer: int
    """The receiver for kind LINK; else -1."""
    time_ns: int


@dataclass(frozen=True, repr=False)
class Stretches(Table):
    """[n] stretches of a path, earliest first, each beginning where the one before ends, or behind what counts for
    nothing."""

    kind: Int8
    """An EdgeKind: one edge of the run graph."""
    rank: Int32
    sender: Int32
    """The sender for kind MESSAGE; else -1."""
    launch: Int64
    """Index into Schedule; of kind GAP the launch that follows."""
    run: Int64
    """Index into EventGraph.runs; -1 for the host, and for a launch that left no span."""
    track: Int32
    """Index into Timeline.tracks; -1 likewise."""
    start: Int64
    end: Int64

    def at_most(self, limit: int) -> Stretches:
        """For a picture, no more than `limit`: of a rank or its host, those nearest to each other as one."""
        if len(self) <= limit:
            return self
        on_host = self.kind == EdgeKind.GAP
        order = np.lexsort((self.start, on_host, self.rank))
        ordered, on_host = self.take(order), on_host[order]
        is_other = (ordered.rank[1:] != ordered.rank[:-1]) | (on_host[1:] != on_host[:-1])
        gap = np.where(is_other, _LATE, ordered.start[1:] - ordered.end[:-1])
        shortest = np.partition(gap, -limit)[-limit]  # equal gaps are all kept, or none: a picture has no seams
        first = np.flatnonzero(np.append(True, is_other | (gap > shortest)))
        last = np.append(first[1:], len(self)) - 1
        return dataclasses.replace(ordered.take(first), end=ordered.end[last])


@dataclass(frozen=True)
class IterationPath:
    """`parts` sum to the lengths of `stretches`, and these to end_ns - start_ns less what counts for nothing."""

    iteration: int
    """Its number (timeline/iterations.py); -1 for the whole capture, or window of it."""
    start_ns: int
    end_ns: int
    _walk: Callable[[], tuple[tuple[PathPart, ...], Stretches]] = dataclasses.field(repr=False, compare=False)

    @cached_property
    def _found(self) -> tuple[tuple[PathPart, ...], Stretches]:
        """Walked on first use: a capture has thousands of iterations, and a report shows the path of none."""
        return self._walk()

    @property
    def parts(self) -> tuple[PathPart, ...]:
        """Largest first."""
        return self._found[0]

    @property
    def stretches(self) -> Stretches:
        return self._found[1]

    @property
    def makespan_ns(self) -> int:
        return self.length_until(self.end_ns)

    def length_until(self, time_ns: int) -> int:
        """How much of the path lies before a moment."""
        return int((np.minimum(self.stretches.end, time_ns) - np.minimum(self.stretches.start, time_ns)).sum())


@dataclass(frozen=True)
class CriticalPath:
    whole: IterationPath | None
    """None where there is nothing on record, or nothing to compare; `note` says so."""
    iterations: tuple[IterationPath, ...]
    """From the end of the iteration before to its own end; the first from the start of its first kernel: what lies
    before is start-up. Empty where the capture has no launches that repeat."""
    note: str

    __repr__ = brief


def critical_path(
    timeline: Timeline, graph: EventGraph, waits: Waits, moments: Moments | str, window: Window | None = None
) -> CriticalPath:
    """The path of the whole capture and of each iteration.

    graph, waits, moments: all of the same Timeline. window: of the launches that reach into it, as one whole, and of
    the iterations.
    """
    if isinstance(moments, str):
        return CriticalPath(None, (), moments)
    schedule = graph.schedule
    shown = schedule.order[reaches_into(window, schedule.start[schedule.order], schedule.end[schedule.order])]
    if not len(shown):
        return CriticalPath(None, (), "no kernel is on record")
    walker, run_graph = PathWalker(timeline, graph, waits, moments), moments.run_graph

    def path_of(iteration: int, launch: int, floor: int) -> IterationPath:
        node = int(run_graph.end_of_launch[launch])
        end_ns = run_graph.start_ns + int(moments.times[node])
        return IterationPath(iteration, floor, max(end_ns, floor), partial(walker.parts_and_stretches, node, floor))

    whole = path_of(-1, int(shown[schedule.end[shown].argmax()]), int(schedule.start[shown].min()))
    iterations = []
    floor, ends = _iteration_ends(timeline, graph)
    for iteration, launch in ends:
        path = path_of(iteration, launch, floor)
        if path.end_ns > floor and reaches_into(window, np.array([floor]), np.array([path.end_ns])).all():
            iterations.append(path)
        floor = path.end_ns
    return CriticalPath(whole, tuple(iterations), "")


class PathWalker:
    """Walks back from moments of a run along the edges that decided when they came."""

    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits, moments: Moments) -> None:
        self._timeline, self._graph, self._waits, self._moments = timeline, graph, waits, moments

    def parts_and_stretches(self, node: int, floor: int) -> tuple[tuple[PathPart, ...], Stretches]:
        stretches = self.stretches(node, floor)
        return self.parts(stretches), stretches

    def stretches(self, node: int, floor: int) -> Stretches:
        """From `floor`, in ns from the timeline's origin, to the moment `node`."""
        run_graph, times, graph = self._moments.run_graph, self._moments.times, self._graph
        edge = walk_back(run_graph.source, self._moments.deciding, node, times, floor - run_graph.start_ns)
        came = run_graph.start_ns + times[np.append(node, run_graph.source[edge])]
        # By clocks that contradict the messages, an edge may lead from later to earlier.
        bound = np.maximum(np.minimum.accumulate(came), floor).astype(np.int64)
        lasts = np.flatnonzero(bound[:-1] > bound[1:])[::-1]
        lasts = lasts[~np.isin(edge[lasts], run_graph.uncounted)]
        edge, start, end = edge[lasts], bound[1:][lasts], bound[:-1][lasts]
        kind, target = run_graph.kind[edge], run_graph.target[edge].astype(np.int64)
        run = np.full(len(edge), -1)
        own = np.flatnonzero(edge < len(run_graph.segments))
        run[own] = run_graph.segments.run[edge[own]]
        is_wait = (target >= run_graph.first_heard) & (target < run_graph.first_heard + len(run_graph.heard))
        heard = np.flatnonzero(((kind == EdgeKind.MESSAGE) | (kind == EdgeKind.MEETING)) & is_wait)
        wait = run_graph.heard[target[heard] - run_graph.first_heard]
        run[heard] = graph.run_of_spans(self._timeline, self._waits.row[wait])
        sender = np.where(kind == EdgeKind.MESSAGE, 0, -1).astype(np.int32)
        sender[heard] = np.where(kind[heard] == EdgeKind.MESSAGE, self._waits.peer[wait], -1)
        launch = (target - 1) % len(graph.schedule.rank)  # of the nodes of launches
        launch[run >= 0] = graph.runs.launch[run[run >= 0]]
        track = np.full(len(edge), -1, np.int32)
        track[run >= 0] = graph.runs.track[run[run >= 0]]
        return Stretches(kind, graph.schedule.rank[launch], sender, launch, run, track, start, end)

    def parts(self, path: Stretches) -> tuple[PathPart, ...]:
        """Largest first. They sum to the length of the stretches."""
        schedule, length = self._graph.schedule, path.end - path.start
        gap, link = (np.flatnonzero(path.kind == kind) for kind in (EdgeKind.GAP, EdgeKind.MESSAGE))
        host_ns = schedule.host_gap_ns[path.launch[gap]]
        launched = schedule.gap_start[path.launch[gap]] + host_ns
        host_ns = np.where(host_ns > 0, np.clip(launched - path.start[gap], 0, length[gap]), 0)
        stretch, phase, phase_ns = self._phases(path)
        kind = np.repeat(
            [PathKind.HOST, PathKind.GAP, PathKind.LINK, PathKind.PHASE], [len(gap), len(gap), len(link), len(phase)]
        )
        stretch = np.concatenate([gap, gap, link, stretch])
        phase = np.append(np.full(len(stretch) - len(phase), -1), phase)
        ns = np.concatenate([host_ns, length[gap] - host_ns, length[link], phase_ns])
        is_link = kind == PathKind.LINK
        rank = np.where(is_link, path.sender[stretch], path.rank[stretch])
        groups = group_rows(len(ns), kind, rank, phase, np.where(is_link, path.rank[stretch], -1))
        table = zip(*(column.tolist() for column in (*groups.columns, groups.sum(ns))), strict=True)
        phases = (*self._graph.phases, Phase("", ""))
        found = [PathPart(rank, PathKind(kind), phases[phase], peer, ns) for kind, rank, phase, peer, ns in table if ns]
        return tuple(sorted(found, key=lambda part: -part.time_ns))

    def _phases(self, path: Stretches) -> tuple[Int64, Int64, Int64]:
        """([n] index of a stretch in a kernel, [n] phase, [n] ns) of all that these consist of."""
        graph, activity, runs = self._graph, self._graph.activity, self._graph.runs
        is_device = (path.kind == EdgeKind.OWN) | (path.kind == EdgeKind.MEETING)
        device, in_run = np.flatnonzero(is_device), np.flatnonzero(is_device & (path.run >= 0))
        run = path.run[in_run]
        first, stop = runs.first[run], runs.stop[run]
        first = np.maximum(bisect_right(activity.start, first, stop, path.start[in_run]) - 1, first)
        count = bisect_right(activity.start, first, stop, path.end[in_run] - 1) - first
        piece, stretch = rows_of_ranges(first, count), np.repeat(in_run, count)
        start = np.maximum(activity.start[piece], path.start[stretch])
        ns = np.maximum(np.minimum(activity.end[piece], path.end[stretch]) - start, 0)
        length = path.end - path.start
        ahead_ns, covered_ns = np.zeros((2, len(path)), np.int64)
        np.add.at(covered_ns, stretch, ns)
        ahead_ns[in_run] = np.clip(runs.start[run] - path.start[in_run], 0, length[in_run])
        stage = graph.schedule.stage[path.launch[device]]
        return (
            np.concatenate([stretch, device, device]),
            np.concatenate([graph.phase[piece], graph.not_started[stage], graph.between_spans[stage]]),
            np.concatenate([ns, ahead_ns[device], (length - covered_ns - ahead_ns)[device]]),
        )


def _iteration_ends(timeline: Timeline, graph: EventGraph) -> tuple[int, list[tuple[int, int]]]:
    """When the first iteration began, and (number, launch that ended last) of each; none where nothing repeats."""
    schedule, iterations = graph.schedule, launch_iterations(timeline)
    if iterations.count < 2:
        return 0, []
    launch = schedule.order[schedule.order < len(timeline.launches)]
    launch = launch[iterations.of_launch[launch] >= 0]
    launch = launch[np.lexsort((schedule.end[launch], iterations.of_launch[launch]))]
    number = iterations.of_launch[launch]
    is_last = np.append(number[1:] != number[:-1], True)[: len(number)]  # none where no such launch left anything
    begun_ns = int(schedule.start[launch[number == number[:1]]].min(initial=_LATE))
    return begun_ns, list(zip(number[is_last].tolist(), launch[is_last].tolist(), strict=True))

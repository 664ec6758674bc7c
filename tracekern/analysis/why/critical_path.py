"""What bounds the time of a run: the longest path through its graph, and what ran on it.

Nothing on the path can be shortened without the end coming earlier, until another path is the longest.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from tracekern.analysis.graph.launch_graph import EdgeKind
from tracekern.analysis.graph.longest_path import walk_back
from tracekern.analysis.graph.moments import Moments, Place
from tracekern.analysis.graph.schedule import Schedule
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Int8, Phase
from tracekern.formatting import brief
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import Float64, Int32, Int64, Timeline
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
    part: Int32
    """The part of the run that the launch is in."""
    run: Int64
    """Index into the part's runs; -1 for the host, and for a launch that left no span."""
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


def critical_path(timeline: Timeline, moments: Moments | str, window: Window | None = None) -> CriticalPath:
    """The path of the whole capture and of each iteration.

    timeline: of the whole run, for its tables. window: of the launches that reach into it, as one whole, and of the
    iterations.
    """
    if isinstance(moments, str):
        return CriticalPath(None, (), moments)
    schedule, launches = moments.schedule, moments.launches
    shown = schedule.order[reaches_into(window, schedule.start[schedule.order], schedule.end[schedule.order])]
    if not len(shown):
        return CriticalPath(None, (), "no kernel is on record")
    walker = PathWalker(moments)

    def path_of(iteration: int, launch: int, floor: int) -> IterationPath:
        node = int(launches.ends(np.int64(launch)))
        end_ns = launches.start_ns + int(moments.times[node])
        walk = partial(walker.parts_and_stretches, moments.place_of(node), floor)
        return IterationPath(iteration, floor, max(end_ns, floor), walk)

    whole = path_of(-1, int(shown[schedule.end[shown].argmax()]), int(schedule.start[shown].min()))
    iterations = []
    floor, ends = _iteration_ends(timeline, schedule)
    for iteration, launch in ends:
        path = path_of(iteration, launch, floor)
        if path.end_ns > floor and reaches_into(window, np.array([floor]), np.array([path.end_ns])).all():
            iterations.append(path)
        floor = path.end_ns
    return CriticalPath(whole, tuple(iterations), "")


class PathWalker:
    """Walks back from moments of a run along the edges that decided when they came."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def parts_and_stretches(self, place: Place, floor: int) -> tuple[tuple[PathPart, ...], Stretches]:
        stretches = self.stretches(place, floor)
        return self.parts(stretches), stretches

    def stretches(self, place: Place, floor: int) -> Stretches:
        """From `floor`, in ns from the timeline's origin, to a moment."""
        moments, start_ns = self._moments, self._moments.launches.start_ns
        legs = list(self._legs(place, floor - start_ns))
        last_first = [float(moments.timed[place.part].times[place.node])]
        came = start_ns + np.concatenate([last_first, *(times for _, _, times in legs)])
        # By clocks that contradict the messages, an edge may lead from later to earlier.
        bound = np.maximum(np.minimum.accumulate(came), floor).astype(np.int64)
        found, first = list[Stretches](), len(bound) - 1
        for part, edge, _ in reversed(legs):
            first -= len(edge)
            found.append(self._of_part(part, edge, bound[first : first + len(edge) + 1]))
        return Stretches(*(np.concatenate([vars(part)[name] for part in found]) for name in vars(found[0])))

    def _legs(self, place: Place, floor_ns: float) -> Iterator[tuple[int, Int64, Float64]]:
        """Yields (part, [n] its edges, [n] when each began) of the path to a moment, the last one first.

        floor_ns: when it is to begin, from the start of the run.
        """
        while True:
            graph, timed = self._moments.graphs[place.part].run_graph, self._moments.timed[place.part]
            edge = walk_back(graph.source, timed.deciding, place.node, timed.times, floor_ns)
            is_carried = len(edge) > 0 and int(edge[-1]) >= graph.num_own
            own = edge[:-1] if is_carried else edge
            yield place.part, own, timed.times[graph.source[own]]
            if not is_carried:
                return
            place = self._moments.place_of(int(graph.outer[graph.target[edge[-1]] - graph.first_outer]))

    def _of_part(self, part: int, edge: Int64, bound: Int64) -> Stretches:
        """The stretches of a leg. bound: [n + 1] when each edge ended, and the last one began."""
        launches, graph = self._moments.launches, self._moments.graphs[part]
        run_graph, runs = graph.run_graph, graph.events.runs
        lasts = np.flatnonzero(bound[:-1] > bound[1:])[::-1]
        edge, start, end = edge[lasts], bound[1:][lasts], bound[:-1][lasts]
        outside = np.flatnonzero(edge >= run_graph.num_inside)
        of_launches = run_graph.edges_of_launches[edge[outside] - run_graph.num_inside]
        kind = np.append(run_graph.kind, 0)[np.minimum(edge, run_graph.num_inside)].astype(np.int8)
        kind[outside] = launches.kind[of_launches]
        counts = np.ones(len(edge), bool)
        counts[outside] = ~np.isin(of_launches, launches.uncounted)
        edge, start, end, kind = edge[counts], start[counts], end[counts], kind[counts]
        target = run_graph.target[edge].astype(np.int64)
        run = np.full(len(edge), -1)
        own = np.flatnonzero(edge < len(run_graph.segments))
        run[own] = run_graph.segments.run[edge[own]]
        is_wait = (target >= run_graph.first_heard) & (target < run_graph.first_heard + len(run_graph.heard))
        heard = np.flatnonzero(((kind == EdgeKind.MESSAGE) | (kind == EdgeKind.MEETING)) & is_wait)
        wait = run_graph.heard[target[heard] - run_graph.first_heard]
        run[heard] = graph.events.run_of_spans(graph.timeline, graph.waits.row[wait])
        sender = np.where(kind == EdgeKind.MESSAGE, 0, -1).astype(np.int32)
        sender[heard] = np.where(kind[heard] == EdgeKind.MESSAGE, graph.waits.peer[wait], -1)
        outer = np.append(run_graph.outer, 0)[np.maximum(target - run_graph.first_outer, -1)]
        launch = launches.launch_of_node[outer]
        launch[run >= 0] = runs.launch[run[run >= 0]]
        track = np.full(len(edge), -1, np.int32)
        track[run >= 0] = runs.track[run[run >= 0]]
        rank, parts = self._moments.schedule.rank[launch], np.full(len(edge), part, np.int32)
        return Stretches(kind, rank, sender, launch, parts, run, track, start, end)

    def parts(self, path: Stretches) -> tuple[PathPart, ...]:
        """Largest first. They sum to the length of the stretches."""
        schedule, length = self._moments.schedule, path.end - path.start
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
        phases = (*self._moments.program.phases, Phase("", ""))
        found = [PathPart(rank, PathKind(kind), phases[phase], peer, ns) for kind, rank, phase, peer, ns in table if ns]
        return tuple(sorted(found, key=lambda part: -part.time_ns))

    def _phases(self, path: Stretches) -> tuple[Int64, Int64, Int64]:
        """([n] index of a stretch in a kernel, [n] phase, [n] ns) of all that these consist of."""
        program = self._moments.program
        is_device = (path.kind == EdgeKind.OWN) | (path.kind == EdgeKind.MEETING)
        device, length = np.flatnonzero(is_device), path.end - path.start
        ahead_ns, covered_ns = np.zeros((2, len(path)), np.int64)
        found = [(np.empty(0, np.int64),) * 3]
        for number in np.unique(path.part[device]).tolist():
            events = self._moments.graphs[number].events
            activity, runs = events.activity, events.runs
            in_run = np.flatnonzero(is_device & (path.run >= 0) & (path.part == number))
            run = path.run[in_run]
            first, stop = runs.first[run], runs.stop[run]
            first = np.maximum(bisect_right(activity.start, first, stop, path.start[in_run]) - 1, first)
            count = bisect_right(activity.start, first, stop, path.end[in_run] - 1) - first
            piece, stretch = rows_of_ranges(first, count), np.repeat(in_run, count)
            start = np.maximum(activity.start[piece], path.start[stretch])
            ns = np.maximum(np.minimum(activity.end[piece], path.end[stretch]) - start, 0)
            np.add.at(covered_ns, stretch, ns)
            ahead_ns[in_run] = np.clip(runs.start[run] - path.start[in_run], 0, length[in_run])
            found.append((stretch, events.phase[piece], ns))
        stage = self._moments.schedule.stage[path.launch[device]]
        stretch, phase, ns = (np.concatenate(column) for column in zip(*found, strict=True))
        return (
            np.concatenate([stretch, device, device]),
            np.concatenate([phase, program.not_started[stage], program.between_spans[stage]]),
            np.concatenate([ns, ahead_ns[device], (length - covered_ns - ahead_ns)[device]]),
        )


def _iteration_ends(timeline: Timeline, schedule: Schedule) -> tuple[int, list[tuple[int, int]]]:
    """When the first iteration began, and (number, launch that ended last) of each; none where nothing repeats."""
    iterations = launch_iterations(timeline)
    if iterations.count < 2:
        return 0, []
    launch = schedule.order[schedule.order < len(timeline.launches)]
    launch = launch[iterations.of_launch[launch] >= 0]
    launch = launch[np.lexsort((schedule.end[launch], iterations.of_launch[launch]))]
    number = iterations.of_launch[launch]
    is_last = np.append(number[1:] != number[:-1], True)[: len(number)]  # none where no such launch left anything
    begun_ns = int(schedule.start[launch[number == number[:1]]].min(initial=_LATE))
    return begun_ns, list(zip(number[is_last].tolist(), launch[is_last].tolist(), strict=True))

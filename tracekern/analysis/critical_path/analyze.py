"""What bounds the time of a run: the chain of work, messages and gaps that leads back from its last event to its first.

Nothing on the path can be shortened without the end coming earlier, until another chain is the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from tracekern.analysis.critical_path.path import PartFinder, PathPart, Walker, find_edges
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph, build_graph
from tracekern.analysis.waits.pieces import is_message
from tracekern.formatting import brief
from tracekern.timeline.iterations import LaunchIterations
from tracekern.timeline.model import Int32, Int64, Timeline
from tracekern.timeline.select import Window, reaches_into

_LATE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Segments:
    """[n] stretches of the path, earliest first, each beginning where the one before ends."""

    rank: Int32
    track: Int32
    """Index into Timeline.tracks; -1 for the host."""
    start: Int64
    end: Int64

    __repr__ = brief

    def __len__(self) -> int:
        return len(self.start)

    def at_most(self, limit: int) -> Segments:
        """For a picture, no more than `limit`: of a rank or its host, those nearest to each other as one."""
        if len(self) <= limit:
            return self
        host = self.track < 0
        order = np.lexsort((self.start, host, self.rank))
        rank, track, start, end = (getattr(self, name)[order] for name in ("rank", "track", "start", "end"))
        is_other = (rank[1:] != rank[:-1]) | (host[order][1:] != host[order][:-1])
        gap = np.where(is_other, _LATE, start[1:] - end[:-1])
        shortest = np.partition(gap, -limit)[-limit]  # equal gaps are all kept, or none: a picture has no seams
        is_new = np.append(True, is_other | (gap > shortest))
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(is_new)) - 1
        return Segments(rank[first], track[first], start[first], end[last])


@dataclass(frozen=True)
class IterationPath:
    """`parts`, and the lengths of `segments`, sum to end_ns - start_ns to the tick."""

    iteration: int
    """Its number (timeline/iterations.py); -1 for the whole capture, or window of it."""
    start_ns: int
    end_ns: int
    _walk: Callable[[], tuple[tuple[PathPart, ...], Segments]] = dataclasses.field(repr=False, compare=False)

    @cached_property
    def _found(self) -> tuple[tuple[PathPart, ...], Segments]:
        """Walked on first use: a capture has thousands of iterations, and a report shows the path of none."""
        return self._walk()

    @property
    def parts(self) -> tuple[PathPart, ...]:
        """Largest first."""
        return self._found[0]

    @property
    def segments(self) -> Segments:
        return self._found[1]

    @property
    def makespan_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class CriticalPath:
    whole: IterationPath | None
    """None where there is nothing on record, or nothing to compare; `note` says so."""
    iterations: tuple[IterationPath, ...]
    """From the end of the iteration before to its own end; the first from the first event. Empty where the capture has
    no launches that repeat."""
    note: str

    __repr__ = brief


def critical_path(
    timeline: Timeline, waits: Waits, graph: EventGraph | None = None, window: Window | None = None
) -> CriticalPath:
    """The path of the whole capture and of each iteration, from all `waits` of the same Timeline in ns.

    `graph`: build_graph(timeline). window: of the launches that reach into it, as one whole, and of the iterations.
    """
    if not timeline.has_one_axis:
        return CriticalPath(None, (), "the ranks' clocks are not aligned: no path leads from one to another")
    graph = graph or build_graph(timeline)
    schedule = graph.schedule
    shown = schedule.order[reaches_into(window, schedule.start[schedule.order], schedule.end[schedule.order])]
    if not len(shown):
        return CriticalPath(None, (), "no kernel is on record")
    paths = _Paths(timeline, graph, waits)
    last = int(shown[schedule.end[shown].argmax()])
    whole = paths.find(-1, last, int(schedule.start[shown].min()))
    iterations = []
    floor = int(schedule.start[schedule.order].min())
    for iteration, launch in _iteration_ends(timeline, graph):
        end = int(schedule.end[launch])
        if end > floor:
            if reaches_into(window, np.array([floor]), np.array([end])).all():
                iterations.append(paths.find(iteration, launch, floor))
            floor = end
    return CriticalPath(whole, tuple(iterations), "")


class _Paths:
    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits) -> None:
        # Late, or still draining: when such a wait ended did not depend on when it began.
        decided = find_edges(timeline, graph, waits, waits.late_ns + waits.drain_ns > 0)
        signal = waits.signal[decided.wait]
        start = np.where(signal >= 0, timeline.spans.start[signal], _LATE)
        decided = dataclasses.replace(decided, release=np.minimum(decided.release, start))
        self._graph = graph
        self._walker = Walker(graph, decided, is_message(waits, decided.wait))
        self._finder = PartFinder(timeline, graph, waits)
        self._waits = waits

    def find(self, iteration: int, launch: int, floor: int) -> IterationPath:
        """From the end of `launch` back to `floor`."""
        return IterationPath(
            iteration, floor, int(self._graph.schedule.end[launch]), partial(self._walk, launch, floor)
        )

    def _walk(self, launch: int, floor: int) -> tuple[tuple[PathPart, ...], Segments]:
        graph = self._graph
        hops = self._walker.walk(launch, floor)
        wait = self._walker.edges.wait[hops.edge[hops.edge >= 0]]
        parts = self._finder.find(hops, self._waits.peer[wait], self._waits.rank[wait])
        track = np.where(hops.run >= 0, graph.runs.track[hops.run] if len(graph.runs) else -1, -1)
        segments = Segments(
            graph.schedule.rank[hops.launch][::-1], track.astype(np.int32)[::-1], hops.start[::-1], hops.end[::-1]
        )
        return parts, segments


def _iteration_ends(timeline: Timeline, graph: EventGraph) -> list[tuple[int, int]]:
    """(number, launch that ended last) of each iteration; none where nothing repeats."""
    schedule, iterations = graph.schedule, LaunchIterations(timeline)
    if iterations.count < 2:
        return []
    launch = schedule.order[schedule.order < len(timeline.launches)]
    launch = launch[iterations.of_launch[launch] >= 0]
    launch = launch[np.lexsort((schedule.end[launch], iterations.of_launch[launch]))]
    number = iterations.of_launch[launch]
    is_last = np.append(number[1:] != number[:-1], True)[: len(number)]  # none where no such launch left anything
    return list(zip(number[is_last].tolist(), launch[is_last].tolist(), strict=True))

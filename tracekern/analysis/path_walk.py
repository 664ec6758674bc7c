"""The walk back along the critical path: hop by hop to what each moment had to wait for."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.cause_order import Edges, is_sorted
from tracekern.analysis.event_graph import EventGraph
from tracekern.timeline.model import Int64, Mask


class HopKind(enum.IntEnum):
    RUN = 0
    LINK = 1
    HOST = 2


@dataclass(frozen=True)
class Hops:
    """[n] stretches of one path, latest first; each ends where the one before it begins."""

    kind: Int64
    """A HopKind."""
    run: Int64
    """Of kind RUN; -1 for a launch that left no span."""
    launch: Int64
    """Of kind HOST: the one that the host had not started yet."""
    edge: Int64
    """Of kind LINK: index into the walker's edges; -1 for all others."""
    start: Int64
    end: Int64


class Walker:
    """Walks any number of paths through one graph."""

    def __init__(self, graph: EventGraph, edges: Edges, is_message: Mask) -> None:
        """edges: waits whose end was decided by the other side; is_message: [num_edges] by a signal."""
        order = slice(None) if is_sorted(edges.waiter, edges.end) else np.lexsort((edges.end, edges.waiter))
        self.edges = edges.take(order)
        self._is_message = is_message[order]
        self._launch_of_run = graph.runs.launch
        schedule = graph.schedule
        self._start, self._end = schedule.start.tolist(), schedule.end.tolist()
        self._before, self._last_run = schedule.before.tolist(), schedule.last_run.tolist()

    def walk(self, launch: int, floor: int) -> Hops:
        """From the end of `launch` back to the time `floor`."""
        run, time = self._last_run[launch], self._end[launch]
        hops: list[tuple[int, int, int, int, int, int]] = []

        def hop(kind: HopKind, begin: int, edge: int = -1) -> None:
            nonlocal time
            if begin < time and time > floor:
                hops.append((kind, run if kind is HopKind.RUN else -1, launch, edge, max(begin, floor), time))
                time = begin

        while time > floor:
            edge = self._last_wait(run, time)
            if edge >= 0:
                if self._is_message[edge]:
                    hop(HopKind.RUN, int(self.edges.end[edge]))
                    hop(HopKind.LINK, int(self.edges.release[edge]), edge)
                else:
                    hop(HopKind.RUN, int(self.edges.release[edge]))
                run = int(self.edges.source[edge])
                launch = int(self._launch_of_run[run])
                continue
            hop(HopKind.RUN, self._start[launch])
            before = self._before[launch]
            hop(HopKind.HOST, self._end[before] if before >= 0 else floor)
            if before < 0:
                break
            launch, run = before, self._last_run[before]
        columns = list(zip(*hops, strict=True)) or [()] * 6
        return Hops(*(np.array(column, np.int64) for column in columns))

    def _last_wait(self, run: int, time: int) -> int:
        """The last edge of the run that ended by `time` and was decided before it; -1 for none."""
        first, stop = np.searchsorted(self.edges.waiter, (run, run + 1)).tolist()
        found = first + int(np.searchsorted(self.edges.end[first:stop], time, "right")) - 1
        while found >= first and self.edges.release[found] >= time:
            found -= 1
        return found if found >= first else -1

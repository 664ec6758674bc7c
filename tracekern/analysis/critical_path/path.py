"""The critical path: the walk back over the waits that decided when a run went on, and what the path consists of.

The walk goes hop by hop to what each moment had to wait for; the hops are divided into phases, links and gaps before
kernels.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import parts_of_pieces
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import Int32, Int64, Mask, Timeline


@dataclass(frozen=True)
class Edges:
    """[n] waits of which both ends are known, in the order of Waits."""

    wait: Int64
    """Index into Waits."""
    waiter: Int64
    """Run that waited."""
    source: Int64
    """Run that it waited for."""
    release: Int64
    """When the lateness was over."""
    end: Int64

    def __len__(self) -> int:
        return len(self.wait)

    def take(self, which: Int64 | slice) -> Edges:
        columns = (self.wait, self.waiter, self.source, self.release, self.end)
        return Edges(*(column[which] for column in columns))


def find_edges(timeline: Timeline, graph: EventGraph, waits: Waits, chosen: Mask) -> Edges:
    """The waits (of the mask `chosen`, [num_waits]) whose releaser is on record, on another track."""
    releaser = np.where(waits.signal >= 0, waits.signal, waits.last_arrival)
    wait = np.flatnonzero((releaser >= 0) & chosen)
    waiter = graph.run_of_spans(timeline, waits.row[wait])
    source = graph.run_of_spans(timeline, releaser[wait])
    known = (waiter >= 0) & (source >= 0) & (waiter != source)
    if not known.all():
        wait, waiter, source = wait[known], waiter[known], source[known]
    row = waits.row[wait]
    release = timeline.spans.start[row] + waits.late_ns[wait]
    return Edges(wait, waiter, source, release, timeline.spans.end[row])


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
        order = np.lexsort((edges.end, edges.waiter))
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
    """Of kind LINK: the rank that sent."""
    kind: PathKind
    phase: Phase
    """Of kind PHASE; empty for all others."""
    peer: int
    """Of kind LINK: the rank that received. -1 for all others."""
    time_ns: int


@dataclass(frozen=True)
class Pieces:
    """[n] pieces of a path, in no order."""

    kind: Int64
    rank: Int32
    phase: Int32
    """Index into EventGraph.phases; -1."""
    peer: Int32
    time_ns: Int64


class PartFinder:
    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits) -> None:
        self._timeline, self._graph, self._waits = timeline, graph, waits

    def find(self, hops: Hops, link_source: Int32, link_destination: Int32) -> tuple[PathPart, ...]:
        """Largest first. They sum to the length of the path. link_source, link_destination: ranks of the hops
        that are links."""
        host, link, device = (np.flatnonzero(hops.kind == kind) for kind in (HopKind.HOST, HopKind.LINK, HopKind.RUN))
        sent = self._whole(hops, link, PathKind.LINK)
        parts = [*self._gaps(hops, host), dataclasses.replace(sent, rank=link_source, peer=link_destination)]
        inside, covered = self._inside_runs(hops, device)
        parts += inside
        bare = self._whole(hops, device, PathKind.PHASE)
        stage = self._graph.schedule.stage[hops.launch[device]]
        ahead_ns = self._before_first_record(hops, device)
        for phase, ns in (
            (self._graph.not_started, ahead_ns),
            (self._graph.between_spans, bare.time_ns - covered - ahead_ns),
        ):
            parts.append(dataclasses.replace(bare, phase=phase[stage], time_ns=ns))
        columns = [
            np.concatenate([getattr(part, name) for part in parts]) for name in ("kind", "rank", "phase", "peer")
        ]
        time_ns = np.concatenate([part.time_ns for part in parts])
        groups = group_rows(len(time_ns), *columns)
        table = zip(*(column.tolist() for column in (*groups.columns, groups.sum(time_ns))), strict=True)
        phases = (*self._graph.phases, Phase("", ""))
        found = [PathPart(rank, PathKind(kind), phases[phase], peer, ns) for kind, rank, phase, peer, ns in table if ns]
        return tuple(sorted(found, key=lambda part: -part.time_ns))

    def _whole(self, hops: Hops, which: Int64, kind: PathKind) -> Pieces:
        rank = self._graph.schedule.rank[hops.launch[which]]
        none = np.full(len(which), -1, np.int32)
        return Pieces(np.full(len(which), int(kind)), rank, none, none, (hops.end - hops.start)[which])

    def _gaps(self, hops: Hops, which: Int64) -> list[Pieces]:
        """The gaps before kernels: what was their host's, and the rest."""
        schedule, launch = self._graph.schedule, hops.launch[which]
        gaps = self._whole(hops, which, PathKind.HOST)
        launched = schedule.gap_start[launch] + schedule.host_gap_ns[launch]
        host_ns = np.clip(launched - hops.start[which], 0, gaps.time_ns)
        rest = dataclasses.replace(gaps, kind=np.full(len(which), int(PathKind.GAP)), time_ns=gaps.time_ns - host_ns)
        return [dataclasses.replace(gaps, time_ns=host_ns), rest]

    def _before_first_record(self, hops: Hops, device: Int64) -> Int64:
        """[len(device)] ns of each hop before the first record of its run; 0 of a launch without any."""
        run, start, end = hops.run[device], hops.start[device], hops.end[device]
        if not len(self._graph.runs):
            return np.zeros(len(device), np.int64)
        return np.where(run >= 0, np.clip(self._graph.runs.start[run] - start, 0, end - start), 0)

    def _inside_runs(self, hops: Hops, device: Int64) -> tuple[list[Pieces], Int64]:
        """(what the hops `device` found in spans, [len(device)] ns of each hop that this covers)"""
        graph, activity = self._graph, self._graph.activity
        hop = device[hops.run[device] >= 0]
        covered = np.zeros(len(hops.run), np.int64)
        if not len(hop):
            return [], covered[device]
        run = hops.run[hop]
        first, stop = graph.runs.first[run], graph.runs.stop[run]
        first = np.maximum(bisect_right(activity.start, first, stop, hops.start[hop]) - 1, first)
        stop = bisect_right(activity.start, first, stop, hops.end[hop] - 1)
        count = stop - first
        hop = np.repeat(hop, count)
        piece = rows_of_ranges(first, count)
        start = np.maximum(activity.start[piece], hops.start[hop])
        end = np.minimum(activity.end[piece], hops.end[hop])
        ns = np.maximum(end - start, 0)
        np.add.at(covered, hop, ns)
        # The link's part of a wait is its end.
        _, link_ns = parts_of_pieces(self._timeline, graph, self._waits, piece)
        link = np.clip(end - np.maximum(start, activity.end[piece] - link_ns), 0, None)
        rank = graph.schedule.rank[hops.launch[hop]]
        none = np.full(len(hop), -1, np.int32)
        work = Pieces(np.full(len(hop), int(PathKind.PHASE)), rank, graph.phase[piece], none, ns - link)
        link_of = np.flatnonzero(link > 0)
        peer = self._waits.peer[np.searchsorted(self._waits.row, activity.span[piece[link_of]])]
        sent = Pieces(np.full(len(link_of), int(PathKind.LINK)), peer, none[link_of], rank[link_of], link[link_of])
        return [work, sent], covered[device]

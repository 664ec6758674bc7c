"""What a path consists of: its hops divided into phases, links and gaps of the host."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.cause_history import bisect_right
from tracekern.analysis.event_graph import EventGraph
from tracekern.analysis.groups import group_rows
from tracekern.analysis.path_walk import HopKind, Hops
from tracekern.analysis.wait_pieces import parts_of_pieces
from tracekern.analysis.waits import Phase, Waits
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.model import Int32, Int64, Timeline


class PathKind(enum.IntEnum):
    PHASE = 0
    LINK = 1
    """From the signal's begin until the wait had seen it."""
    HOST = 2
    """Between a kernel's start and the end of the one before it on its stream."""


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
        parts = [
            self._whole(hops, host, PathKind.HOST),
            dataclasses.replace(sent, rank=link_source, peer=link_destination),
        ]
        inside, covered = self._inside_runs(hops, device)
        parts += inside
        bare = self._whole(hops, device, PathKind.PHASE)
        stage = self._graph.schedule.stage[hops.launch[device]]
        parts.append(Pieces(bare.kind, bare.rank, self._graph.between_spans[stage], bare.peer, bare.time_ns - covered))
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

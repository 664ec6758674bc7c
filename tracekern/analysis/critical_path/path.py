"""The critical path: points at which runs depend on each other, the walk back over them, and what the path consists of.

The points have an order in which a replay can go through them, and are of two kinds: a run *tells* (it begins to send a
signal, or arrives at a barrier), and a run *hears* (a wait that ends when all that it waits for have told). What a wait
waits for is its *meeting*: one signal, all arrivals at a barrier of ranks, or all warps at one of a block or grid. The
walk goes hop by hop to what each moment had to wait for; the hops are divided into phases, links and gaps of the host.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.history import bisect_right
from tracekern.analysis.causes.order import Edges, is_sorted
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Phase, WaitKind, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import parts_of_pieces
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import Int32, Int64, Mask, Timeline

_LATE = np.iinfo(np.int64).max
_MAX_SWEEPS = 8


@dataclass(frozen=True)
class Nodes:
    """[n] in the order of a replay: every node behind those that it depends on."""

    run: Int64
    begin: Int64
    """When the run told, or began to wait."""
    end: Int64
    """When it went on: `begin` for one that tells."""
    meeting: Int64
    hears: Mask
    wait: Int64
    """Index into Waits of one that hears; -1."""
    told_before: Int64
    """[num_meetings] when the last one told whose launch is not replayed."""
    latest: Int64
    """[num_meetings] when the last of all told."""

    def __len__(self) -> int:
        return len(self.run)

    @property
    def latency(self) -> Int64:
        """[n] ns of those that hear: from the last one's telling to the end of the wait."""
        return self.end - self.latest[self.meeting]


@dataclass(frozen=True)
class _Pairs:
    """[n] who tells whom."""

    wait: Int64
    span: Int64
    """The span whose begin tells."""
    meeting: Int64


def count_nodes(timeline: Timeline, waits: Waits) -> Int64:
    """[num_launches + 1] about how many nodes each launch would have; the last entry is for spans of no launch."""
    rows = len(timeline.launches) + 1
    hearing = waits.launch[(waits.signal >= 0) | (waits.last_arrival >= 0)]
    of_messages = waits.signal[(waits.signal >= 0) & (waits.kind != WaitKind.BARRIER)]
    telling = timeline.spans.launch[np.concatenate([of_messages, waits.arrivals.signal])]
    return np.bincount(hearing % rows, minlength=rows) + np.bincount(telling % rows, minlength=rows)


def find_nodes(timeline: Timeline, graph: EventGraph, waits: Waits, replayed: Mask) -> Nodes | None:
    """replayed: [num_launches of the Schedule]. None where the clocks contradict each other too much for an order."""
    spans = timeline.spans
    of_run = replayed[graph.runs.launch]

    def run_of(span: Int64) -> Int64:
        run = graph.run_of_spans(timeline, span)
        return np.where(of_run[run], run, -1) if len(of_run) else run  # -1 stays, whatever is read for it

    of_launch = np.append(replayed[: len(timeline.launches)], True)  # the last for spans that name no launch
    pairs = _pairs(timeline, waits, of_launch[waits.launch])
    hearer = run_of(waits.row[pairs.wait])
    kept = hearer >= 0
    pairs = _Pairs(pairs.wait[kept], pairs.span[kept], pairs.meeting[kept])
    meetings, meeting = np.unique(pairs.meeting, return_inverse=True)
    told = spans.start[pairs.span]
    teller = run_of(pairs.span)
    latest, told_before = np.full(len(meetings), -_LATE), np.full(len(meetings), -_LATE)
    np.maximum.at(latest, meeting, told)
    np.maximum.at(told_before, meeting[teller < 0], told[teller < 0])

    wait, first = np.unique(pairs.wait, return_index=True)
    tells = np.flatnonzero(teller >= 0)
    tells = tells[np.unique(np.stack([pairs.span[tells], meeting[tells]]), axis=1, return_index=True)[1]]
    run = np.concatenate([run_of(waits.row[wait]), teller[tells]])
    begin = np.concatenate([spans.start[waits.row[wait]], told[tells]])
    end = np.concatenate([spans.end[waits.row[wait]], told[tells]])
    hears = np.arange(len(run)) < len(wait)
    meeting = np.concatenate([meeting[first], meeting[tells]])
    order = _order(graph, run, end, meeting, hears)
    if order is None:
        return None
    wait = np.concatenate([wait, np.full(len(tells), -1)])
    return Nodes(run[order], begin[order], end[order], meeting[order], hears[order], wait[order], told_before, latest)


def _pairs(timeline: Timeline, waits: Waits, chosen: Mask) -> _Pairs:
    """Numbers of meetings: the signal's span, the last arrival's, or for a barrier of ranks the wait's.

    A warp's own arrival at such a barrier lies before its wait anyway, and its flag has no way to go.
    """
    by_signal = np.flatnonzero(chosen & (waits.signal >= 0) & (waits.kind != WaitKind.BARRIER))
    local = np.flatnonzero(chosen & (waits.last_arrival >= 0))
    arrived = np.searchsorted(waits.row, waits.arrivals.wait)
    track = timeline.spans.track
    is_own = track[waits.arrivals.signal] == track[waits.arrivals.wait]
    arrival = np.flatnonzero(chosen[arrived] & ~is_own)
    # Each warp of a block tells the others; for the replay it is enough that all meet.
    return _Pairs(
        np.concatenate([by_signal, arrived[arrival], local]),
        np.concatenate([waits.signal[by_signal], waits.arrivals.signal[arrival], waits.row[local]]),
        np.concatenate([waits.signal[by_signal], waits.arrivals.wait[arrival], waits.last_arrival[local]]),
    )


def _order(graph: EventGraph, run: Int64, end: Int64, meeting: Int64, hears: Mask) -> Int64 | None:
    """By time; where clocks contradict a signal, what follows it is moved behind it. None where that does not end."""
    # Doubled, so that at one time a wait ends before its run tells, and hears after another one told.
    key = 2 * end + ~hears
    in_run = np.lexsort((key, run))
    launch = graph.runs.launch[run]
    before = graph.schedule.before[launch]
    for _ in range(_MAX_SWEEPS):
        old = key.copy()
        told = np.full(int(meeting.max(initial=-1)) + 1, -_LATE)
        np.maximum.at(told, meeting[~hears], key[~hears] + 1)
        key[hears] = np.maximum(key[hears], told[meeting[hears]])
        over = np.full(len(graph.schedule.rank) + 1, -_LATE)
        np.maximum.at(over, launch, key)
        key = np.maximum(key, over[before])  # launch -1 is the last entry, which stays early
        of_run = key[in_run]
        shift = one_line(run[in_run], of_run, of_run)
        key[in_run] = np.maximum.accumulate(of_run + shift) - shift
        if (key == old).all():
            place = np.empty(len(run), np.int64)
            place[in_run] = np.arange(len(run))
            return np.lexsort((place, key))
    return None


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

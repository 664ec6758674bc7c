"""How much time a rank had spent in each phase by a given moment.

Before its launch a run has no history of its own: the kernel began when all runs of the launch before had ended. So
the past of a run is that of its *stream*: in each earlier launch what the run did that ended last, and the gaps of the
host between launches.

Sums over pieces of activity are taken slot by slot. A *slot* is the place of a phase among those of its stage; behind
these there is one each for waits without a cause on record, for lateness and for the link. Pieces are gone through some
runs at a time, so that what is summed up stays in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import WaitPieces
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

_PIECES_AT_ONCE = 1 << 15


def slots_of_phases(graph: EventGraph) -> Int64:
    """[num_phases] the slot of each."""
    first_phase = np.searchsorted(graph.stage_of_phase, np.arange(len(graph.stages)))
    return np.arange(len(graph.phases)) - first_phase[graph.stage_of_phase]


def time_by_slot(
    graph: EventGraph, waits: WaitPieces, run: Int64, piece: Int64, in_piece_ns: Int64
) -> tuple[Int64, Float64]:
    """([num_slots, n] ns that each run spent in each slot until `in_piece_ns` after the start of its `piece`,
    [num_slots - 3, n] in how many pieces, by the slots of phases).

    A piece that is a wait counts with what is neither lateness nor link. 0 where the run is -1.
    """
    num_slots = int(slots_of_phases(graph).max(initial=-1)) + 4
    spent = np.zeros((num_slots, len(run)), np.int64)
    begun = np.zeros((num_slots - 3, len(run)))
    runs = graph.runs
    cuts = np.unique(np.searchsorted(runs.first, np.arange(0, len(graph.activity), _PIECES_AT_ONCE)))
    cuts = np.append(cuts[cuts < len(runs)], len(runs))
    part_of_run = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    if len(cuts) <= 1 << 16:
        part_of_run = part_of_run.astype(np.uint16)  # sorted by radix, in linear time
    known = np.flatnonzero(run >= 0)
    part = part_of_run[run[known]]
    known = known[np.argsort(part, kind="stable")]
    stops = np.cumsum(np.bincount(part, minlength=len(cuts) - 1))
    for number, asked in enumerate(np.split(known, stops[:-1])):
        if len(asked):
            pieces = slice(int(runs.first[cuts[number]]), int(runs.stop[cuts[number + 1] - 1]))
            first = runs.first[run[asked]] - pieces.start
            found = _spent(graph, waits, pieces, first, piece[asked] - pieces.start, in_piece_ns[asked])
            for slot, values in zip((*spent, *begun), found, strict=True):
                slot[asked] = values
    return spent, begun


def _spent(
    graph: EventGraph, waits: WaitPieces, pieces: slice, first: Int64, last: Int64, in_last_ns: Int64
) -> list[Int64 | Float64]:
    """By slot: [n] ns in the pieces first..last, of the last one the first `in_last_ns`. Both count in `pieces`. Then
    by slot of a phase: [n] how many of them, the last one in part."""
    own = graph.activity.end[pieces] - graph.activity.start[pieces]
    here = slice(*np.searchsorted(waits.piece, (pieces.start, pieces.stop)))
    late, link = np.zeros_like(own), np.zeros_like(own)
    late[waits.piece[here] - pieces.start] = waits.late_ns[here]
    link[waits.piece[here] - pieces.start] = waits.link_ns[here]
    own -= late
    own -= link
    slot_of_phase = slots_of_phases(graph).astype(np.int16)
    unknown = int(slot_of_phase.max(initial=-1)) + 1
    slot = slot_of_phase[graph.phase[pieces]]
    slot[waits.unknown[slice(*np.searchsorted(waits.unknown, (pieces.start, pieces.stop)))] - pieces.start] = unknown
    sums = np.zeros(len(own) + 1, np.int64)

    def before_last(values: Int64) -> Int64:
        np.cumsum(values, out=sums[1:])
        return sums[last] - sums[first]

    in_late = np.minimum(in_last_ns, late[last])
    in_link = np.minimum(in_last_ns - in_late, link[last])
    in_own = in_last_ns - in_late - in_link
    rows: list[Int64 | Float64] = []
    counts: list[Int64 | Float64] = []
    part_of_last = in_own / np.maximum(own[last], 1)
    for number in range(unknown + 1):
        mine = slot == number
        rows.append(before_last(np.where(mine, own, 0)) + np.where(mine[last], in_own, 0))
        if number < unknown:
            counts.append(before_last(mine & (own > 0)) + np.where(mine[last], part_of_last, 0))
    return [*rows, before_last(late) + in_late, before_last(link) + in_link, *counts]


_BLOCK = 1 << 14
"""So many at a time: what is worked with stays in the cache."""


@dataclass(frozen=True)
class Moments:
    """[n] moments in the history of a stream."""

    launch: Int64
    run: Int64
    """Whose time inside the launch counts; -1: the launch left no span."""
    piece: Int64
    """The last piece of the run that began by then."""
    in_piece_ns: Int64
    in_launch_ns: Int64
    after_ns: Int64
    """Beyond the end of the launch; negative before the first launch of the stream."""

    def __len__(self) -> int:
        return len(self.launch)

    def take(self, which: slice) -> Moments:
        columns = (self.launch, self.run, self.piece, self.in_piece_ns, self.in_launch_ns, self.after_ns)
        return Moments(*(column[which] for column in columns))


def bisect_right(values: Int64, first: Int64, stop: Int64, wanted: Int64) -> Int64:
    """[n] where `wanted` would go behind its equals in values[first:stop], which is sorted."""
    found: Int64 = first.copy()
    for start in range(0, len(found), _BLOCK):
        part = slice(start, start + _BLOCK)
        low, end, sought = found[part], stop[part], wanted[part]
        for bit in reversed(range(int((end - low).max(initial=0)).bit_length())):
            beyond = low + (1 << bit)
            right = values.take(beyond - 1, mode="clip") <= sought
            right &= beyond <= end
            low += right.astype(np.int64) << bit
    return found


class History:
    """Time spent by category: all phases of the graph, then `gap`, `unknown`, `late` and `link`."""

    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits) -> None:
        self.graph = graph
        self.gap = len(graph.phases)
        self.unknown, self.late, self.link = self.gap + 1, self.gap + 2, self.gap + 3
        self.num_categories = self.gap + 4
        self._first_phase = np.searchsorted(graph.stage_of_phase, np.arange(len(graph.stages)))
        self._waits = WaitPieces.of(timeline, graph, waits)
        self._headless_ns, self._is_cut = _before_first_record(timeline, graph)
        self._base, self._base_begun = self._launch_bases()
        schedule = graph.schedule
        self._host_gaps = tuple(map(self._gaps_of_hosts, (schedule.host_gap_ns, schedule.host_gap_most_ns)))

    def of_runs(self, run: Int64, time: Int64) -> Moments:
        """[n] moments in the histories of runs; before the start of its launch, the run's is its stream's."""
        schedule = self.graph.schedule
        launch = self.graph.runs.launch[run].astype(np.int64)
        after = np.maximum(time - schedule.end[launch], 0)
        outside = np.flatnonzero(time < schedule.start[launch])
        past = self.of_streams(schedule.stream[launch[outside]].astype(np.int64), time[outside])
        run = run.copy()
        run[outside], launch[outside], after[outside] = past.run, past.launch, past.after_ns
        return self._moments(launch, run, time, after)

    def of_streams(self, stream: Int64, time: Int64) -> Moments:
        schedule = self.graph.schedule
        first, stop = schedule.first_of_stream[stream], schedule.first_of_stream[stream + 1]
        found = bisect_right(schedule.start[schedule.order], first, stop, time) - 1
        launch = schedule.order[np.maximum(found, first)]
        after = np.where(found < first, time - schedule.start[launch], np.maximum(time - schedule.end[launch], 0))
        return self._moments(launch, schedule.last_run[launch], time, after)

    def _moments(self, launch: Int64, run: Int64, time: Int64, after: Int64) -> Moments:
        graph = self.graph
        runs, activity = graph.runs, graph.activity
        time = np.clip(time, graph.schedule.start[launch], graph.schedule.end[launch])
        known = np.maximum(run, 0)
        piece = bisect_right(activity.start, runs.first[known], runs.stop[known], time) - 1
        piece = np.maximum(piece, runs.first[known])
        in_piece = np.clip(time - activity.start[piece], 0, activity.end[piece] - activity.start[piece])
        in_piece = np.where(run < 0, 0, in_piece)
        return Moments(launch, run, piece, in_piece, time - graph.schedule.start[launch], after)

    def slots(self, moments: Moments) -> tuple[Int64, Float64]:
        """What `spent` and `begun` need of each moment: time inside the launch by slot, and pieces of phases."""
        return time_by_slot(self.graph, self._waits, moments.run, moments.piece, moments.in_piece_ns)

    def spent(self, moments: Moments, slots: Int64) -> Int64:
        """[n, num_categories] ns by each moment, since a time that is the same for all moments of a stream."""
        spent = self._base[moments.launch]
        self._add_inside(spent, moments, slots)
        spent[:, self.gap] += moments.after_ns
        return spent

    def in_gaps(self, moments: Moments) -> tuple[Int64, Int64, Int64]:
        """([n] ns that `spent` has for `gap`, [n] what of it was the host's at least, [n] at most)"""
        schedule, launch, after = self.graph.schedule, moments.launch, moments.after_ns
        passed = schedule.start[launch] - schedule.gap_start[launch] + after  # of the gap before the first launch
        of_host = []
        for before, following, base in self._host_gaps:
            ahead = np.maximum(before[launch] - np.maximum(passed, 0), 0)
            of_host.append(base[launch] + np.where(after < 0, -ahead, np.minimum(after, following[launch])))
        least, most = of_host
        return self._base[launch, self.gap] + after, least, most

    def begun(self, moments: Moments, slots: Float64) -> Float64:
        """[n, num_phases] how many pieces of each phase by each moment, since that same time."""
        begun = self._base_begun[moments.launch]
        self._add_begun(begun, moments, slots)
        return begun

    def typical_ns(self) -> Float64:
        """[largest rank + 1, num_phases] how long a piece of each phase usually takes: the median over the means of
        ranks, of two the lower; the rank's own mean, where that is less. 0 of time outside of all spans."""
        graph, waits = self.graph, self._waits
        own = graph.activity.end - graph.activity.start
        own[waits.piece] -= waits.late_ns + waits.link_ns
        own[waits.unknown] = 0
        num_phases = len(graph.phases)
        rank = np.repeat(graph.schedule.rank[graph.runs.launch], graph.runs.stop - graph.runs.first)
        code = rank * np.int32(num_phases) + graph.phase
        size = num_phases * (int(graph.schedule.rank.max(initial=0)) + 1)
        total, count = np.bincount(code, own, size), np.bincount(code, own > 0, size)
        with np.errstate(invalid="ignore"):
            means = (total / count).reshape(-1, num_phases)
        in_order = np.sort(means, axis=0)  # nan, of ranks without, goes last
        known = np.isfinite(means).sum(axis=0)
        median = in_order[np.maximum(known - 1, 0) // 2, np.arange(num_phases)]
        typical: Float64 = np.nan_to_num(np.fmin(median, means))
        return typical

    def _add_inside(self, spent: Int64, moments: Moments, slots: Int64) -> None:
        """Adds to `spent`, [n, num_categories], what passed since the start of the launch of each moment."""
        graph = self.graph
        stage = graph.schedule.stage[moments.launch]
        by_place, row = spent.reshape(-1), np.arange(len(moments)) * self.num_categories
        *own, unknown, late, link = slots
        headless = np.minimum(self._headless_ns[moments.run], moments.in_launch_ns)
        is_cut = self._is_cut[moments.run]
        unknown = unknown + np.where(is_cut, headless, 0)
        not_started = np.where(is_cut, 0, headless)
        rest = moments.in_launch_ns - unknown - not_started - late - link
        first_phase, last_phase = self._first_phase[stage], len(graph.phases) - 1
        for slot, values in enumerate(own):
            # A stage with fewer phases has nothing in this slot: adding it to some phase changes nothing.
            by_place[row + np.minimum(first_phase + slot, last_phase)] += values
            rest -= values
        by_place[row + graph.not_started[stage]] += not_started
        by_place[row + graph.between_spans[stage]] += np.maximum(rest, 0)
        spent[:, self.unknown] += unknown
        spent[:, self.late] += late
        spent[:, self.link] += link

    def _add_begun(self, begun: Float64, moments: Moments, slots: Float64) -> None:
        first_phase, last_phase = self._first_phase[self.graph.schedule.stage[moments.launch]], begun.shape[1] - 1
        by_place, row = begun.reshape(-1), np.arange(len(moments)) * begun.shape[1]
        for slot, values in enumerate(slots):
            by_place[row + np.minimum(first_phase + slot, last_phase)] += values

    def _launch_bases(self) -> tuple[Int64, Float64]:
        """([num_launches, num_categories] ns, [num_launches, num_phases] pieces) on the stream of each launch by its
        start."""
        schedule = self.graph.schedule
        later = schedule.order[schedule.before[schedule.order] >= 0]
        before = schedule.before[later]
        # Kernels may overlap: of the one before, only what it had done by then is the past of the next one.
        until = np.minimum(schedule.start[later], schedule.end[before])
        moments = self._moments(before, schedule.last_run[before], until, np.zeros_like(until))
        between = np.zeros((len(later), self.num_categories), np.int64)
        begun = np.zeros((len(later), len(self.graph.phases)))
        spent_slots, begun_slots = self.slots(moments)
        self._add_inside(between, moments, spent_slots)
        self._add_begun(begun, moments, begun_slots)
        between[:, self.gap] += schedule.gap_ns[later]
        base = np.zeros((len(schedule.rank), between.shape[1]), np.int64)
        base_begun = np.zeros((len(schedule.rank), begun.shape[1]))
        for launch, earlier, ns, pieces in zip(later.tolist(), before.tolist(), between, begun, strict=True):
            base[launch] = base[earlier] + ns
            base_begun[launch] = base_begun[earlier] + pieces
        return base, base_begun

    def _gaps_of_hosts(self, of_host: Int64) -> tuple[Int64, Int64, Int64]:
        """([num_launches] the host's part of the gap before each launch, of the gap behind it, and of all before it)"""
        schedule = self.graph.schedule
        later = schedule.order[schedule.before[schedule.order] >= 0]
        behind, base = np.zeros_like(of_host), np.zeros_like(of_host)
        for launch, earlier, ns in zip(
            later.tolist(), schedule.before[later].tolist(), of_host[later].tolist(), strict=True
        ):
            behind[earlier] = ns
            base[launch] = base[earlier] + ns
        return of_host, behind, base


def _before_first_record(timeline: Timeline, graph: EventGraph) -> tuple[Int64, Mask]:
    """([num_runs + 1] ns from the start of its launch to the oldest record of each run, [num_runs + 1] whether a flight
    recorder overwrote older ones of that launch, so that what it did is unknown). The last is that of run -1: none."""
    is_cut = np.zeros(len(graph.schedule.rank), bool)
    is_cut[: len(timeline.launches)] = [launch.records_overwritten > 0 for launch in timeline.launches]
    launch = graph.runs.launch
    return np.append(graph.runs.start - graph.schedule.start[launch], 0), np.append(is_cut[launch], False)

"""How much time a rank had spent in each phase by a given moment.

Before its launch a run has no history of its own: the kernel began when all runs of the launch before had ended. So
the past of a run is that of its *stream*: in each earlier launch what the run did that ended last, and the gaps of the
host between launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.event_graph import EventGraph
from tracekern.analysis.waits import WaitKind, Waits
from tracekern.timeline.model import Int64, Timeline


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
    low: Int64 = first.copy()
    high: Int64 = stop.copy()
    while True:
        busy = low < high
        if not busy.any():
            return low
        middle = (low + high) >> 1
        right = busy & (values[np.minimum(middle, len(values) - 1)] <= wanted)
        low = np.where(right, middle + 1, low)
        high = np.where(busy & ~right, middle, high)


class History:
    """Time spent by category: all phases of the graph, then `host`, `late` and `link`."""

    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits) -> None:
        self.graph = graph
        self.host = len(graph.phases)
        self.late, self.link = self.host + 1, self.host + 2
        self.num_categories = self.host + 3
        first_phase = np.searchsorted(graph.stage_of_phase, np.arange(len(graph.stages)))
        self._slot_of_phase = (np.arange(len(graph.phases)) - first_phase[graph.stage_of_phase]).astype(np.int8)
        self._first_phase = first_phase
        self._waits = WaitPieces.of(timeline, graph, waits)
        self._own_ns = graph.activity.end - graph.activity.start
        self._own_ns[self._waits.piece] -= self._waits.late_ns + self._waits.link_ns
        self._base = self._launch_bases()

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

    def slots(self, moments: Moments) -> list[Int64]:
        """What `spent` needs of each moment, in one pass over all pieces for each slot: [n] ns of the own time of each
        phase of the stage, then late and link, inside the launch."""
        graph = self.graph
        known = np.maximum(moments.run, 0)
        first, piece = graph.runs.first[known], moments.piece
        waits = self._waits.around(len(graph.activity), first, piece)
        late = np.minimum(moments.in_piece_ns, waits.late_ns)
        link = np.minimum(moments.in_piece_ns - late, waits.link_ns)
        partial = moments.in_piece_ns - late - link
        slot_of_piece = self._slot_of_phase[graph.phase]
        in_slot, own_ns = slot_of_piece[piece], self._own_ns[piece]
        sums = np.empty_like(self._own_ns)
        found = []
        for slot in range(int(self._slot_of_phase.max(initial=-1)) + 1):
            np.cumsum(np.multiply(self._own_ns, slot_of_piece == slot, out=sums), out=sums)
            since = np.where(first > 0, sums[first - 1], 0)
            found.append(sums[piece] - since + np.where(in_slot == slot, partial - own_ns, 0))
        found.append(waits.late_before_ns + late)
        found.append(waits.link_before_ns + link)
        for values in found:
            values[moments.run < 0] = 0
        return found

    def spent(self, moments: Moments, slots: list[Int64]) -> Int64:
        """[n, num_categories] ns by each moment, since a time that is the same for all moments of a stream."""
        graph = self.graph
        rows = np.arange(len(moments))
        stage = graph.schedule.stage[moments.launch]
        spent = self._base[moments.launch]
        *own, late, link = slots
        rest = moments.in_launch_ns - late - link
        last = len(graph.phases) - 1
        for slot, values in enumerate(own):
            # A stage with fewer phases has nothing in this slot: adding it to some phase changes nothing.
            spent[rows, np.minimum(self._first_phase[stage] + slot, last)] += values
            rest -= values
        spent[rows, graph.unrecorded[stage]] += np.maximum(rest, 0)
        spent[:, self.host] += moments.after_ns
        spent[:, self.late] += late
        spent[:, self.link] += link
        return spent

    def _launch_bases(self) -> Int64:
        """[num_launches, num_categories] ns spent on the stream of each launch by its start."""
        graph, schedule = self.graph, self.graph.schedule
        inside = np.zeros((len(schedule.rank), self.num_categories), np.int64)
        shown = schedule.order
        deciding = shown[schedule.last_run[shown] >= 0]
        launch, piece = expand_runs(graph, deciding, schedule.last_run[deciding])
        np.add.at(inside, (launch, graph.phase[piece]), self._own_ns[piece])
        np.add.at(inside[:, self.late], launch, self._waits.at(self._waits.late_ns, piece))
        np.add.at(inside[:, self.link], launch, self._waits.at(self._waits.link_ns, piece))
        rest = (schedule.end - schedule.start)[shown] - inside[shown].sum(axis=1)
        inside[shown, graph.unrecorded[schedule.stage[shown]]] += np.maximum(rest, 0)
        base = np.zeros_like(inside)
        for launch, before in zip(shown.tolist(), schedule.before[shown].tolist(), strict=True):
            if before >= 0:
                base[launch] = base[before] + inside[before]
                base[launch, self.host] += schedule.gap_ns[launch]
        return base


def expand_runs(graph: EventGraph, owner: Int64, run: Int64) -> tuple[Int64, Int64]:
    """(owner, piece) of all pieces of some runs."""
    first, count = graph.runs.first[run], graph.runs.stop[run] - graph.runs.first[run]
    piece = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
    return np.repeat(owner, count), piece


@dataclass(frozen=True)
class WaitPieces:
    """[n] the pieces of activity that are waits."""

    piece: Int64
    """Ascending."""
    late_ns: Int64
    """Until the other side was there."""
    link_ns: Int64
    """From then to the end, where the wait was for a message."""

    @classmethod
    def of(cls, timeline: Timeline, graph: EventGraph, waits: Waits) -> WaitPieces:
        activity = graph.activity
        if activity.is_flat:
            piece, wait = np.searchsorted(activity.span, waits.row), np.arange(len(waits))
        else:
            wait_of_span = np.full(len(timeline.spans), -1, np.int64)
            wait_of_span[waits.row] = np.arange(len(waits))
            piece = np.flatnonzero(wait_of_span[activity.span] >= 0)
            wait = wait_of_span[activity.span[piece]]
        start, length = activity.start[piece], activity.end[piece] - activity.start[piece]
        until = timeline.spans.start[waits.row[wait]] + waits.late_ns[wait]
        late = np.clip(until - start, 0, length)
        return cls(piece, late, np.where(is_message(waits)[wait], length - late, 0))

    def at(self, values: Int64, piece: Int64) -> Int64:
        """[m] what `values` (a column) says of each piece; 0 for one that is no wait."""
        if not len(self.piece):
            return np.zeros(len(piece), np.int64)
        found = np.minimum(np.searchsorted(self.piece, piece), len(self.piece) - 1)
        return np.where(self.piece[found] == piece, values[found], 0)

    def around(self, num_pieces: int, first: Int64, piece: Int64) -> WaitsAround:
        """For many pieces at once."""
        is_wait = np.zeros(num_pieces, bool)
        is_wait[self.piece] = True
        count = np.cumsum(is_wait, dtype=np.int32)
        is_here, place, since = is_wait[piece], count[piece] - is_wait[piece], count[first] - is_wait[first]
        columns = []
        for values in (self.late_ns, self.link_ns):
            sums = np.append(0, np.cumsum(values))
            columns += [np.where(is_here, np.append(values, 0)[place], 0), sums[place] - sums[since]]
        return WaitsAround(*columns)


@dataclass(frozen=True)
class WaitsAround:
    """[m] for each piece what it waits itself, and all pieces from a first one up to it."""

    late_ns: Int64
    late_before_ns: Int64
    link_ns: Int64
    link_before_ns: Int64


def is_message(waits: Waits) -> npt.NDArray[np.bool_]:
    """[n] whether the wait was for one signal on record: what is not lateness is then the link's."""
    of_kind = (waits.kind == WaitKind.DATA) | (waits.kind == WaitKind.CREDIT)
    return np.asarray(of_kind & (waits.signal >= 0), bool)

"""The numbers of one run that a gate can hold: durations of phases, shares of waiting, time of an iteration.

A phase is an event in a stage, a stage is a launch name: `dispatch_recv.wait_token`. Measured are the iterations of the
run (timeline/iterations.py) but the first, which warms up, unless it is the only one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.partial import Partial
from tracekern.errors import BadInput
from tracekern.formatting import brief
from tracekern.timeline.facts.iterations import LaunchIterations, launch_iterations
from tracekern.timeline.intervals import unions
from tracekern.timeline.model import (
    CONTRADICTION_KINDS,
    LOSS_KINDS,
    OPEN_END,
    EventClass,
    Int32,
    Int64,
    Timeline,
    TrackKind,
    clocks_of_ranks,
)

END_TO_END = "end_to_end"
ENGINES, ROUND_TRIP = "transfers", "round_trip"
WAIT_PER_ITERATION = "wait_per_iteration"
STATISTICS = ("p50", "p99", "wait_share", WAIT_PER_ITERATION)

_LOSSES = {
    *LOSS_KINDS,
    *(
        "open_span",
        "open_work",
        "ambiguous_time",
        "salvaged",
        "running",
        "overwritten_records",
        "fault",
        "cycle_rate_unknown",
    ),
    *CONTRADICTION_KINDS,
} - {"lost_host_spans"}  # no number is made of host ranges


@dataclass(frozen=True)
class PhaseStatistics:
    """The closed spans of one phase on the device tracks of all ranks, in the measured iterations, but for those whose
    begin a flight recorder overwrote: how long they took is unknown. Of stage `transfers` those of all engines."""

    stage: str
    event: str
    """With its class, as in "step (wait)", where events of several classes share the name in this stage."""
    event_class: str
    num_spans: int
    total_ns: int
    p50_ns: float
    p99_ns: float
    wait_share: float
    """Waits only, else nan: their part, nested ones counted once, of the stage's time, which is its launches' durations
    times their writers; nan where that is 0, or a flight recorder overwrote some of it."""
    wait_per_iteration_ns: float
    """How long all writers of all ranks together were in these waits in a measured iteration, on average; nan where
    wait_share is."""

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.event}"


@dataclass(frozen=True)
class RunStatistics:
    phases: tuple[PhaseStatistics, ...]
    end_to_end_ns: tuple[int, ...]
    """Length of each measured iteration, from the first record of its first stage to the last record of its last, over
    all ranks. Empty if ranks are unaligned."""
    num_iterations: int
    num_measured: int
    set_up_stages: tuple[str, ...]
    resolution_ns: float
    """The coarsest tick of all ranks."""
    probe_cost_ns: float
    """What recording one span adds, as the capture measured it; 0 where it did not."""
    clock_hard_ns: float
    """How far the clocks of two ranks may be apart: the sum of the two widest bounds. 0 for one rank, inf for unaligned
    ranks."""
    losses: tuple[str, ...]
    """What is missing from the capture, has no known duration or cannot have been so, a line each; its numbers then
    prove nothing."""

    __repr__ = brief

    def metrics(self) -> dict[str, float]:
        """Name -> value, `dispatch_recv.wait_token.p50` -> ns. A wait_share lies in 0..1."""
        values = {}
        for phase in self.phases:
            values[f"{phase.name}.p50"] = phase.p50_ns
            values[f"{phase.name}.p99"] = phase.p99_ns
            if not math.isnan(phase.wait_share):
                values[f"{phase.name}.wait_share"] = phase.wait_share
                values[f"{phase.name}.{WAIT_PER_ITERATION}"] = phase.wait_per_iteration_ns
        if self.end_to_end_ns:
            values[f"{END_TO_END}.p50"] = float(np.median(self.end_to_end_ns))
        return values


@dataclass(frozen=True)
class Lengths:
    """How long spans took. Adds up over the parts of a run."""

    values: Int64
    """[n] ns"""
    counts: Int64 | None = None
    """[n] how often each value was met, which then are all different and ascend. None: once each, in any order."""

    def __add__(self, other: Lengths) -> Lengths:
        both = [
            np.unique(own.values, return_counts=True) if own.counts is None else (own.values, own.counts)
            for own in (self, other)
        ]
        values, place = np.unique(np.concatenate([values for values, _ in both]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, place, np.concatenate([counts for _, counts in both]))
        return Lengths(values, counts)

    @property
    def num_spans(self) -> int:
        return len(self.values) if self.counts is None else int(self.counts.sum())

    @property
    def total_ns(self) -> int:
        return int((self.values if self.counts is None else self.values * self.counts).sum(dtype=np.int64))

    def quantiles(self, shares: tuple[float, ...]) -> list[float]:
        """Those of all values, to the last bit."""
        if self.counts is None:
            return [float(value) for value in np.quantile(self.values, shares)]
        until, last = np.cumsum(self.counts), self.num_spans - 1
        found = []
        for share in shares:
            below = int(share * last)
            near = self.values[np.searchsorted(until, [below, min(below + 1, last)], "right")]
            found.append(float(np.quantile(near, share * last - below)))
        return found


@dataclass(frozen=True)
class _PhaseSums(Partial):
    lengths: Lengths
    waited_ns: int
    """How long writers were in these spans, 0 if they are no waits."""


@dataclass(frozen=True)
class SpanSums(Partial):
    """What statistics need of the spans of some whole calls. Adds up over the parts of a run."""

    phases: dict[int, _PhaseSums]
    """By stage * number of names + name."""
    engines: dict[int, Lengths]
    """By event, whatever transfer engines did: nothing says which iteration a transfer was of."""

    @classmethod
    def of(cls, timeline: Timeline) -> SpanSums:
        """Raises BadInput where it is in ticks."""
        if timeline.unit != "ns":
            raise BadInput(f"statistics of a timeline in {timeline.unit}; align it to ns first (tracekern.load)")
        spans, (names, name_of_event) = timeline.spans, _unique_names(timeline)
        phases = {}
        for key, rows in _rows(timeline, launch_iterations(timeline), name_of_event, len(names)):
            start, end = spans.start[rows], spans.end[rows]
            is_wait = names[key % len(names)][1] is EventClass.WAIT
            phases[key] = _PhaseSums(Lengths(end - start), _waited_ns(spans.track[rows], start, end) if is_wait else 0)
        of_engine = np.flatnonzero(timeline.tracks_of(TrackKind.ENGINE)[spans.track] & ~spans.is_open)
        engines = {}
        for number in np.unique(spans.event[of_engine]).tolist():
            rows = of_engine[spans.event[of_engine] == number]
            engines[number] = Lengths(spans.end[rows] - spans.start[rows])
        return cls(phases, engines)


def phase_statistics(timeline: Timeline) -> RunStatistics:
    """Statistics of a Timeline in ns. Raises BadInput when it is in ticks."""
    return statistics_of(timeline, SpanSums.of(timeline))


def statistics_of(lanes: Timeline, sums: SpanSums) -> RunStatistics:
    """Statistics of a run. lanes: those of its launches at least. sums: of all parts."""
    iterations = launch_iterations(lanes)
    return RunStatistics(
        phases=(*_phases(lanes, iterations, sums), *_phases_of_engines(lanes, sums)),
        end_to_end_ns=_end_to_end(lanes, iterations),
        num_iterations=iterations.count,
        num_measured=iterations.count - iterations.first_measured,
        set_up_stages=iterations.set_up_stages,
        resolution_ns=max((rank.resolution_ns for rank in lanes.ranks), default=0),
        probe_cost_ns=probe_cost_ns(lanes),
        clock_hard_ns=_clock_hard_ns(lanes),
        losses=_losses(lanes),
    )


def _phases(lanes: Timeline, iterations: LaunchIterations, sums: SpanSums) -> Iterator[PhaseStatistics]:
    names, _ = _unique_names(lanes)
    stage_time = _stage_time(lanes, iterations)
    found = [(*divmod(key, len(names)), own) for key, own in sorted(sums.phases.items())]
    times_named = Counter((stage, names[name][0]) for stage, name, _ in found)
    for stage, name, own in found:
        event, event_class = names[name]
        p50, p99 = own.lengths.quantiles((0.5, 0.99))
        has_share = event_class is EventClass.WAIT and stage_time[stage] > 0
        waited_ns = own.waited_ns if has_share else float("nan")
        yield PhaseStatistics(
            stage=iterations.stages[stage],
            event=event if times_named[stage, event] == 1 else f"{event} ({event_class.value})",
            event_class=event_class.value,
            num_spans=own.lengths.num_spans,
            total_ns=own.lengths.total_ns,
            p50_ns=p50,
            p99_ns=p99,
            wait_share=waited_ns / stage_time[stage] if has_share else float("nan"),
            wait_per_iteration_ns=waited_ns / _num_iterations(iterations, stage),
        )


def _phases_of_engines(lanes: Timeline, sums: SpanSums) -> Iterator[PhaseStatistics]:
    for number, lengths in sorted(sums.engines.items()):
        event = lanes.events[number]
        if event.name == ROUND_TRIP:  # of the recorder's own
            continue
        p50, p99 = lengths.quantiles((0.5, 0.99))
        yield PhaseStatistics(
            stage=ENGINES,
            event=event.name,
            event_class=event.event_class.value,
            num_spans=lengths.num_spans,
            total_ns=lengths.total_ns,
            p50_ns=p50,
            p99_ns=p99,
            wait_share=float("nan"),
            wait_per_iteration_ns=float("nan"),
        )


def _num_iterations(iterations: LaunchIterations, stage: int) -> int:
    """How many measured iterations have a launch of the stage on record."""
    is_of_stage = iterations.is_measured & (iterations.stage_of_launch == stage)
    return len(np.unique(iterations.of_launch[is_of_stage]))


def _waited_ns(track: Int32, start: Int64, end: Int64) -> int:
    """ns in which writers were in some of the waits, [n] sorted by (track, start): in nested ones they wait once."""
    first, reach = unions(track, start, end)
    return int((reach - start[first]).sum())


def _unique_names(timeline: Timeline) -> tuple[list[tuple[str, EventClass]], Int32]:
    """Different tables may hold the same event: (name, class) once each, and [num_events] which of them an event is."""
    known: dict[tuple[str, EventClass], int] = {}
    number = [known.setdefault((event.name, event.event_class), len(known)) for event in timeline.events]
    return list(known), np.array(number, np.int32)


def _rows(
    timeline: Timeline, iterations: LaunchIterations, name_of_event: Int32, num_names: int
) -> Iterator[tuple[int, Int64]]:
    """(stage * num_names + name, its rows of Timeline.spans in their order) of each phase that has closed spans."""
    spans = timeline.spans
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    # One look-up a launch instead of two: -1 means everything that is not measured, index -1 for "no launch".
    stage = np.append(np.where(iterations.is_measured, iterations.stage_of_launch, -1), np.int32(-1))[spans.launch]
    is_known = (spans.end != OPEN_END) & ~timeline.headless_spans()
    chosen = np.flatnonzero(is_device[spans.track] & (stage >= 0) & is_known)
    key = stage[chosen] * np.int32(num_names) + name_of_event[spans.event[chosen]]
    if len(iterations.stages) * num_names <= np.iinfo(np.int16).max:
        key = key.astype(np.int16)  # sorted by radix, in linear time
    order = np.argsort(key, kind="stable")
    key, chosen = key[order], chosen[order]
    firsts = np.flatnonzero(np.diff(key, prepend=key[:1] - 1))
    if len(key):
        yield from zip(key[firsts].tolist(), np.split(chosen, firsts[1:]), strict=True)


def _stage_time(timeline: Timeline, iterations: LaunchIterations) -> npt.NDArray[np.float64]:
    """[num_stages] ns that all writers of a stage's measured launches had together; 0 where not all is on record."""
    which, duration = _launch_spans(timeline, iterations)
    writers = np.array([launch.num_tracks for launch in timeline.launches], np.float64)
    stages = iterations.stage_of_launch[timeline.spans.launch[which]]
    weights = duration * writers[timeline.spans.launch[which]]
    time: npt.NDArray[np.float64] = np.bincount(stages, weights, minlength=len(iterations.stages)).astype(np.float64)
    is_cut = np.array([launch.records_overwritten > 0 for launch in timeline.launches], bool)
    time[iterations.stage_of_launch[is_cut & iterations.is_measured]] = 0
    return time


def _launch_spans(timeline: Timeline, iterations: LaunchIterations) -> tuple[Int64, Int64]:
    """Indices and durations of the spans of measured launches that ended."""
    is_lane = timeline.tracks_of(TrackKind.LAUNCH)
    spans = timeline.spans
    which = np.flatnonzero(is_lane[spans.track]) if len(is_lane) else np.empty(0, np.int64)
    which = which[(spans.end[which] != OPEN_END) & (spans.launch[which] >= 0)]
    which = which[iterations.is_measured[spans.launch[which]]]
    return which, spans.end[which] - spans.start[which]


def _end_to_end(timeline: Timeline, iterations: LaunchIterations) -> tuple[int, ...]:
    if not timeline.has_one_axis:
        return ()
    which, _ = _launch_spans(timeline, iterations)
    of_span = iterations.of_launch[timeline.spans.launch[which]]
    times = []
    for iteration in range(iterations.first_measured, iterations.count):
        members = which[of_span == iteration]
        if len(members) and iterations.is_whole[iteration]:
            times.append(int(timeline.spans.end[members].max() - timeline.spans.start[members].min()))
    return tuple(times)


def probe_cost_ns(timeline: Timeline) -> float:
    """What recording one span adds, as the capture measured it; 0 where it did not.

    At the next measured number of warps per SM from that of the largest block on, one block an SM.
    """
    warps = max((launch.warps_per_block for launch in timeline.launches), default=0)
    costs = [0.0]
    for rank in timeline.ranks:
        measured = sorted((int(density), float(cost)) for density, cost in rank.metadata.get("overhead_ns", {}).items())
        costs += [next((cost for most, cost in measured if warps <= most), measured[-1][1])] if measured else []
    return max(costs)


def _clock_hard_ns(timeline: Timeline) -> float:
    clock_of = clocks_of_ranks(timeline.ranks).tolist()
    of_clock = {clock_of[rank.rank]: rank.clock.hard_ns if rank.clock else float("inf") for rank in timeline.ranks}
    return sum(sorted(of_clock.values())[-2:]) if len(of_clock) > 1 else 0.0


def _losses(timeline: Timeline) -> tuple[str, ...]:
    return tuple(problem.text for problem in timeline.problems if problem.kind in _LOSSES)

"""How the device tracks hang together: runs of a kernel's writers, the kernels of each stream in their order, phases.

A *run* is what one track recorded in one launch. Launches of one stream follow each other: a launch begins after all
runs of the one before it have ended, so the run that ended last decides when the next launch can begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.activity import Activity, flatten
from tracekern.analysis.graph.host_gaps import NEVER, asked_times, host_gaps
from tracekern.analysis.waits.analyze import Phase
from tracekern.formatting import brief
from tracekern.timeline.facts.stages import Stages, stages_of
from tracekern.timeline.model import OPEN_END, Int32, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.table import Table

BETWEEN_SPANS = "(between spans)"
"""Event name of the phase that holds what a run did between its spans, and after the last."""
NOT_STARTED = "(not started)"
"""Event name of the phase that holds the time of a launch before a run's first record."""

_LATE = np.iinfo(np.int64).max
_EARLY = np.iinfo(np.int64).min


@dataclass(frozen=True, repr=False)
class ActivityRuns(Table):
    """[n] columns; a run's pieces of activity are first..stop."""

    track: Int32
    launch: Int32
    """Index into Schedule."""
    first: Int64
    stop: Int64
    start: Int64
    end: Int64


@dataclass(frozen=True)
class Schedule:
    """[n] columns, one row a launch: those of the Timeline, then one a rank for device spans that name no launch."""

    rank: Int32
    stage: Int32
    """Index into EventGraph.stages."""
    sequence: Int64
    stream: Int32
    """Number of its (rank, stream); -1 for a launch that left nothing."""
    start: Int64
    end: Int64
    before: Int64
    """The launch of its stream that ended last before it: -1 for the first."""
    gap_start: Int64
    """When the launch before it had ended; for the first of a stream: when the first launch of all began."""
    asked: Int64
    """When its host asked for it, by asked_times; NEVER where that is not on record."""
    host_gap_ns: Int64
    """At least so much of [gap_start, start) its host had not launched it yet (host_gaps)."""
    order: Int64
    """[num_shown] launches that left something, by (stream, start)."""

    __repr__ = brief


@dataclass(frozen=True)
class EventGraph:
    activity: Activity
    phase: Int32
    """[num_pieces] phase of each piece."""
    runs: ActivityRuns
    schedule: Schedule
    stages: tuple[str, ...]
    has_rank: Mask
    """[num_stages, num_ranks] Whether the rank is one of those that are compared with each other in the stage."""
    island: Int64
    """[num_ranks] see Stages."""
    island_of_launch: Int64
    """[num_launches of the Schedule] that of its rank."""
    phases: tuple[Phase, ...]
    """Phases of all pieces, and one BETWEEN_SPANS and one NOT_STARTED for each stage."""
    between_spans: Int32
    """[num_stages] the BETWEEN_SPANS phase of each stage."""
    not_started: Int32
    """[num_stages] the NOT_STARTED phase of each stage."""

    run_of_span: Int32
    """[num_spans] of those that are pieces of activity; -1 for all others."""

    __repr__ = brief

    def run_of_spans(self, timeline: Timeline, span: Int64) -> Int64:
        """[n] the run that each span is in; -1 where its track left nothing of any length in that launch."""
        run = self.run_of_span[span].astype(np.int64)
        if len(other := np.flatnonzero(run < 0)):
            run[other] = self._run_of_launch(timeline, span[other])
        return run

    def _run_of_launch(self, timeline: Timeline, span: Int64) -> Int64:
        """The same for spans that never ended, or that take no time of their own."""
        if not len(self.runs):
            return np.full(len(span), -1)
        spans, runs, num_launches = timeline.spans, self.runs, len(self.schedule.rank)
        launch = spans.launch[span].astype(np.int64)
        launch = np.where(launch < 0, nameless_launches(timeline)[spans.track[span]], launch)
        key = runs.track.astype(np.int64) * num_launches + runs.launch
        wanted = spans.track[span].astype(np.int64) * num_launches + launch
        order = np.argsort(key, kind="stable")
        found = order[np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)]
        return np.where(key[found] == wanted, found, -1)


def nameless_launches(timeline: Timeline) -> Int32:
    """[num_tracks] the row of the Schedule for spans of the track that name no launch."""
    ranks = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
    return np.array([len(timeline.launches) + ranks[track.rank] for track in timeline.tracks], np.int32)


def build_graph(timeline: Timeline) -> EventGraph:
    activity = flatten(timeline)
    of_run = stages_of(timeline)
    stages = *of_run.names, ""
    launch = _launch_of_pieces(timeline, activity)
    runs = _find_runs(activity, launch)
    del launch  # as large as the activity
    schedule = _schedule(timeline, runs, of_run)
    phase, phases = _number_phases(timeline, activity, runs, schedule.stage[runs.launch], stages)
    between_spans, not_started = (
        np.array([phases.index(Phase(stage, name)) for stage in stages], np.int32)
        for name in (BETWEEN_SPANS, NOT_STARTED)
    )
    run_of_span = np.full(len(timeline.spans), -1, np.int32)
    run_of_span[activity.span] = np.repeat(_first_of_kind(runs), runs.stop - runs.first)
    place = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
    has_rank = np.append(of_run.has_rank, np.ones((1, len(timeline.ranks)), bool), axis=0)
    return EventGraph(
        activity,
        phase,
        runs,
        schedule,
        stages,
        has_rank,
        of_run.island,
        of_run.island[[place[rank] for rank in schedule.rank.tolist()]],
        phases,
        between_spans,
        not_started,
        run_of_span,
    )


def _launch_of_pieces(timeline: Timeline, activity: Activity) -> Int32:
    launch = timeline.spans.launch[activity.span]
    if len(launch) and launch.min() < 0:
        launch = np.where(launch < 0, nameless_launches(timeline)[activity.track], launch)
    return launch


def _find_runs(activity: Activity, launch: Int32) -> ActivityRuns:
    track = activity.track
    is_first = np.ones(len(track), bool)
    is_first[1:] = (track[1:] != track[:-1]) | (launch[1:] != launch[:-1])
    first = np.flatnonzero(is_first)
    stop = np.append(first, len(track))[1:]
    return ActivityRuns(track[first], launch[first], first, stop, activity.start[first], activity.end[stop - 1])


def _first_of_kind(runs: ActivityRuns) -> Int32:
    """[n] itself; for what a track recorded in a launch after another one had begun there, the first of that launch."""
    number = np.arange(len(runs), dtype=np.int32)
    key = runs.track.astype(np.int64) << 32 | runs.launch
    if np.all(key[1:] > key[:-1]):
        return number
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    return number[first][kind]


def _schedule(timeline: Timeline, runs: ActivityRuns, stages: Stages) -> Schedule:
    launches = timeline.launches
    count = len(launches) + len(timeline.ranks)
    start, end = _launch_times(timeline, runs, count)
    rank = np.array([*(entry.rank for entry in launches), *(entry.rank for entry in timeline.ranks)], np.int32)
    stage = np.append(stages.of_launch, np.full(len(timeline.ranks), len(stages.names), np.int32))
    sequence = np.array([*(launch.sequence for launch in launches), *[0] * len(timeline.ranks)], np.int64)
    owners = [(launch.rank, launch.stream) for launch in launches] + [(entry.rank, -1) for entry in timeline.ranks]
    keys = {key: idx for idx, key in enumerate(sorted(set(owners)))}
    stream = np.array([keys[key] for key in owners], np.int32)
    shown = np.flatnonzero(start != _LATE)
    order = shown[np.lexsort((start[shown], stream[shown]))]
    stream[start == _LATE] = -1
    before, gap_ns = _predecessors(order, stream, start, end)
    gap_start = np.where(before >= 0, start - gap_ns, start[order].min(initial=_LATE))
    gap_start[start == _LATE] = _LATE
    named = slice(len(launches))
    asked, host_gap_ns = np.full(count, NEVER), np.zeros(count, np.int64)
    asked[named] = asked_times(timeline, start[named])
    host_gap_ns[named] = host_gaps(timeline, gap_start[named], start[named], asked[named])
    return Schedule(rank, stage, sequence, stream, start, end, before, gap_start, asked, host_gap_ns, order)


def _launch_times(timeline: Timeline, runs: ActivityRuns, count: int) -> tuple[Int64, Int64]:
    """From the launch lanes and the runs; a launch that left nothing starts at _LATE."""
    spans = timeline.spans
    start, end = np.full(count, _LATE), np.full(count, _EARLY)
    is_lane = timeline.tracks_of(TrackKind.LAUNCH)
    lanes = np.flatnonzero(is_lane[spans.track] & (spans.launch >= 0))
    np.minimum.at(start, spans.launch[lanes], spans.start[lanes])
    np.maximum.at(
        end, spans.launch[lanes], np.where(spans.end[lanes] == OPEN_END, spans.start[lanes], spans.end[lanes])
    )
    np.minimum.at(start, runs.launch, runs.start)
    np.maximum.at(end, runs.launch, runs.end)
    return start, end


def _predecessors(order: Int64, stream: Int32, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """[num_launches] the launch before each on its stream, and the gap between them."""
    before, gap_ns = np.full(len(stream), -1, np.int64), np.zeros(len(stream), np.int64)
    latest = -1
    for launch in order.tolist():
        if latest >= 0 and stream[latest] == stream[launch]:
            before[launch] = latest
            gap_ns[launch] = max(0, int(start[launch] - end[latest]))
        if latest < 0 or stream[latest] != stream[launch] or end[launch] >= end[latest]:
            latest = launch
    return before, gap_ns


def _number_phases(
    timeline: Timeline, activity: Activity, runs: ActivityRuns, stage_of_run: Int32, stages: tuple[str, ...]
) -> tuple[Int32, tuple[Phase, ...]]:
    """([num_pieces] phase, the phases by stage)"""
    names = tuple(dict.fromkeys([*(event.name for event in timeline.events), BETWEEN_SPANS, NOT_STARTED]))
    name_of_event = np.array([names.index(event.name) for event in timeline.events] or [0], np.int32)
    code = name_of_event[timeline.spans.event[activity.span]]
    code += np.repeat(stage_of_run * np.int32(len(names)), runs.stop - runs.first)
    present = np.bincount(code, minlength=len(stages) * len(names)) > 0
    for name in (BETWEEN_SPANS, NOT_STARTED):
        present[np.arange(len(stages)) * len(names) + names.index(name)] = True
    codes = np.flatnonzero(present)
    number = (np.cumsum(present) - 1).astype(np.int32)
    phases = tuple(Phase(stages[c // len(names)], names[c % len(names)]) for c in codes.tolist())
    return number[code], phases

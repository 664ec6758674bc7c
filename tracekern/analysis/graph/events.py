"""What each device track did, run by run: of some launches of a run, or of all.

A *run* is what one track recorded in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.activity import Activity, flatten
from tracekern.analysis.graph.program import Program
from tracekern.formatting import brief
from tracekern.timeline.model import Int32, Int64, Timeline
from tracekern.timeline.table import Table


@dataclass(frozen=True, repr=False)
class ActivityRuns(Table):
    """[n] columns; a run's pieces of activity are first..stop."""

    track: Int32
    launch: Int32
    """Index into Program's launches."""
    first: Int64
    stop: Int64
    start: Int64
    end: Int64


@dataclass(frozen=True)
class EventGraph:
    """The launches of one part of a run."""

    program: Program
    activity: Activity
    phase: Int32
    """[num_pieces] phase of each piece: index into Program.phases."""
    runs: ActivityRuns
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
        spans, runs, num_launches = timeline.spans, self.runs, self.program.num_launches
        launch = spans.launch[span].astype(np.int64)
        launch = np.where(launch < 0, self.program.nameless[spans.track[span]], launch)
        key = runs.track.astype(np.int64) * num_launches + runs.launch
        wanted = spans.track[span].astype(np.int64) * num_launches + launch
        order = np.argsort(key, kind="stable")
        found = order[np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)]
        return np.where(key[found] == wanted, found, -1)


def build_graph(timeline: Timeline, program: Program) -> EventGraph:
    activity = flatten(timeline)
    launch = _launch_of_pieces(timeline, activity, program)
    runs = _find_runs(activity, launch)
    del launch  # as large as the activity
    phase = program.number_of_event[timeline.spans.event[activity.span]]
    phase += np.repeat(program.stage_of_launch[runs.launch] * np.int32(program.num_names), runs.stop - runs.first)
    run_of_span = np.full(len(timeline.spans), -1, np.int32)
    run_of_span[activity.span] = np.repeat(_first_of_kind(runs), runs.stop - runs.first)
    return EventGraph(program, activity, phase, runs, run_of_span)


def _launch_of_pieces(timeline: Timeline, activity: Activity, program: Program) -> Int32:
    launch = timeline.spans.launch[activity.span]
    if len(launch) and launch.min() < 0:
        launch = np.where(launch < 0, program.nameless[activity.track], launch)
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

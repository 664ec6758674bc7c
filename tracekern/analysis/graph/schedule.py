"""When each launch of a run began and ended, and what came before it on its stream.

Launches of one stream follow each other: a launch begins after all runs of the one before it have ended, so the run
that ended last decides when the next launch can begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import ActivityRuns
from tracekern.analysis.graph.host_gaps import NEVER, asked_times, host_gaps
from tracekern.analysis.graph.program import Program
from tracekern.formatting import brief
from tracekern.timeline.model import OPEN_END, Int32, Int64, Timeline, TrackKind

_LATE = np.iinfo(np.int64).max
_EARLY = np.iinfo(np.int64).min


@dataclass(frozen=True)
class LaunchTimes:
    """[num_launches] columns, of the launches of some parts; those of all parts add up."""

    start: Int64
    """_LATE for one that left nothing."""
    end: Int64
    last_run: Int64
    """When the last of its runs ended; NEVER where it has none."""

    @classmethod
    def of(cls, timeline: Timeline, program: Program, runs: ActivityRuns) -> LaunchTimes:
        """Takes them from the launch lanes and the runs of a part."""
        spans, count = timeline.spans, program.num_launches
        start, end, last_run = np.full(count, _LATE), np.full(count, _EARLY), np.full(count, NEVER)
        is_lane = timeline.tracks_of(TrackKind.LAUNCH)
        lanes = np.flatnonzero(is_lane[spans.track] & (spans.launch >= 0))
        np.minimum.at(start, spans.launch[lanes], spans.start[lanes])
        np.maximum.at(
            end, spans.launch[lanes], np.where(spans.end[lanes] == OPEN_END, spans.start[lanes], spans.end[lanes])
        )
        np.minimum.at(start, runs.launch, runs.start)
        np.maximum.at(end, runs.launch, runs.end)
        np.maximum.at(last_run, runs.launch, runs.end)
        return cls(start, end, last_run)

    def __add__(self, other: LaunchTimes) -> LaunchTimes:
        return LaunchTimes(
            np.minimum(self.start, other.start),
            np.maximum(self.end, other.end),
            np.maximum(self.last_run, other.last_run),
        )


@dataclass(frozen=True)
class Schedule:
    """[num_launches] columns, one row for each launch of the Program."""

    rank: Int32
    stage: Int32
    """Index into Program.stages."""
    sequence: Int64
    stream: Int32
    """Number of its (rank, stream); -1 for a launch that left nothing."""
    start: Int64
    end: Int64
    last_run: Int64
    """See LaunchTimes."""
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

    @classmethod
    def of(cls, timeline: Timeline, program: Program, times: LaunchTimes) -> Schedule:
        """timeline: with the lanes of hosts, at least. times: of all launches."""
        start, end, stream = times.start, times.end, program.stream.copy()
        shown = np.flatnonzero(start != _LATE)
        order = shown[np.lexsort((start[shown], stream[shown]))]
        stream[start == _LATE] = -1
        before, gap_ns = _predecessors(order, stream, start, end)
        gap_start = np.where(before >= 0, start - gap_ns, start[order].min(initial=_LATE))
        gap_start[start == _LATE] = _LATE
        named = slice(len(timeline.launches))
        asked, host_gap_ns = np.full(len(start), NEVER), np.zeros(len(start), np.int64)
        asked[named] = asked_times(timeline, start[named])
        host_gap_ns[named] = host_gaps(timeline, gap_start[named], start[named], asked[named])
        return cls(
            program.rank_of_launch,
            program.stage_of_launch,
            program.sequence,
            stream,
            start,
            end,
            times.last_run,
            before,
            gap_start,
            asked,
            host_gap_ns,
            order,
        )


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

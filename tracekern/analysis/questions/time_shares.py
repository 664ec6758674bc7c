"""Where the warps' time went: work, wait, signal, sync, or no span at all. The parts sum to the whole, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.partial import About, Partial
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.facts.open_spans import end_waits
from tracekern.timeline.intervals import exposed
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Mask, Spans, Timeline, TrackKind

Int8 = npt.NDArray[np.int8]


@dataclass(frozen=True)
class TimeShares(Partial):
    """ns of warp time, `[num_ranks]` each: over all warps of the rank, from the first record of a launch to its last.

    `work` is time inside some span but in no wait, signal or sync. A wait inside a signal counts as signal: the outer
    one opened first. The time of a launch before a warp's first record is no part of its time: it is `not_started`.
    """

    ranks: About[tuple[int, ...]]
    work: Int64
    wait: Int64
    signal: Int64
    sync: Int64
    between_spans: Int64
    not_started: Int64
    """Between the start of a launch, on its lane or at its first record, and the first record of each of its warps."""

    @property
    def total(self) -> Int64:
        return self.work + self.wait + self.signal + self.sync + self.between_spans


_STALLS = (EventClass.WAIT, EventClass.SIGNAL, EventClass.SYNC)


def share_time(timeline: Timeline) -> TimeShares:
    """Splits the warp time of every rank by what the warp did. Of spans that never closed only waits count.

    Launches of start-up do not count.
    """
    timeline = end_waits(timeline)
    is_counted = np.append(~launch_iterations(timeline).is_start_up, True)
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    class_idx = [_STALLS.index(event.event_class) if event.event_class in _STALLS else -1 for event in timeline.events]
    stall_of_event = np.array(class_idx, np.int8)
    of_tracks = np.zeros((len(timeline.tracks), len(_STALLS) + 3), np.int64)
    launch_start = _launch_starts(timeline, is_device)
    for _, spans in parts_by_track(timeline.spans):
        closed = np.asarray((spans.end != OPEN_END) & is_device[spans.track] & is_counted[spans.launch], bool)
        _add_times(of_tracks, spans.take(closed), stall_of_event, launch_start)
    of_track = timeline.track_ranks()
    ranks = tuple(rank.rank for rank in timeline.ranks)
    sums = np.array([of_tracks[of_track == rank].sum(axis=0) for rank in ranks], np.int64)
    wait, signal, sync, covered, lifetime, not_started = sums.reshape(-1, len(_STALLS) + 3).T
    return TimeShares(ranks, covered - wait - signal - sync, wait, signal, sync, lifetime - covered, not_started)


def _launch_starts(timeline: Timeline, is_device: Mask) -> Int64:
    """[num_launches + 1]; the last, of spans that name no launch, and one of which records were overwritten, is so late
    that nothing comes before it: what a warp did before its oldest record is not known there."""
    spans, is_lane = timeline.spans, timeline.tracks_of(TrackKind.LAUNCH)
    start = np.full(len(timeline.launches) + 1, np.iinfo(np.int64).max)
    of_launch = np.flatnonzero((is_device | is_lane)[spans.track])
    np.minimum.at(start, spans.launch[of_launch], spans.start[of_launch])
    is_cut = np.array([*(launch.records_overwritten > 0 for launch in timeline.launches), True])
    start[is_cut] = np.iinfo(np.int64).max
    return start


def _add_times(of_tracks: Int64, spans: Spans, stall_of_event: Int8, launch_start: Int64) -> None:
    """Adds up, for each track: the time in each class of stall, in any span, the lifetimes of launches, each from its
    first start to its last end, and the time of launches before that. A track's launches follow one another."""
    if not len(spans):
        return
    first = np.flatnonzero(np.append(True, spans.track[1:] != spans.track[:-1]))
    track, stall = spans.track[first], stall_of_event[spans.event]
    stalled = exposed(spans, stall >= 0)
    for column in range(len(_STALLS)):
        of_tracks[track, column] += np.add.reduceat(np.where(stall == column, stalled, 0), first)
    of_tracks[track, -3] += np.add.reduceat(exposed(spans, np.ones(len(spans), bool)), first)
    is_first = np.append(True, (np.diff(spans.track) != 0) | (np.diff(spans.launch) != 0))
    begun = np.flatnonzero(is_first)
    lifetime = np.maximum.reduceat(spans.end, begun) - spans.start[begun]
    np.add.at(of_tracks[:, -2], spans.track[begun], lifetime)
    ahead = np.maximum(spans.start[begun] - np.minimum(launch_start[spans.launch[begun]], spans.start[begun]), 0)
    np.add.at(of_tracks[:, -1], spans.track[begun], ahead)

"""Until when spans lasted whose end was never recorded: one definition for sums, hangs, windows and pictures.

A wait that gave up leaves its span open and its kernel ends soon after. A kernel that hangs, or was killed, never ends:
its rank was last heard of later than that, so the span lasted at least until then.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tracekern.timeline.facts.last_times import last_times
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Mask, Timeline, TrackKind


def ends_by_launch(timeline: Timeline) -> Int64:
    """[num_spans] `end`; of a device's span that never closed that of its launch, OPEN_END where that is open too."""
    spans = timeline.spans
    if not spans.is_open.any():
        return spans.end
    is_open = spans.is_open & timeline.tracks_of(TrackKind.DEVICE)[spans.track]
    lanes = np.flatnonzero(timeline.tracks_of(TrackKind.LAUNCH)[spans.track] & (spans.launch >= 0))
    of_launch = np.full(len(timeline.launches) + 1, OPEN_END)  # the last is that of launch -1, which is none
    of_launch[spans.launch[lanes]] = spans.end[lanes]
    ended = of_launch[spans.launch]
    return np.where(is_open & (ended >= spans.start), ended, spans.end)


def known_ends(timeline: Timeline, last_heard: Int64 | None = None) -> Int64:
    """[num_spans] `end`; of a span that never closed the end of its launch, or else when its rank was last heard of.

    No later than the next launch on its track begins, which a launch whose ends were lost must not swallow.

    last_heard: [num_tracks] last times of the run that this is a part of; without, of the timeline itself.
    """
    spans = timeline.spans
    if not spans.is_open.any():
        return spans.end
    ends = ends_by_launch(timeline)
    rows = np.flatnonzero(ends == OPEN_END)
    ends[rows] = (last_times(timeline) if last_heard is None else last_heard)[spans.track[rows]]
    opened = np.flatnonzero(spans.is_open)
    next_run = np.flatnonzero((np.diff(spans.track) != 0) | (np.diff(spans.launch) != 0)) + 1
    place = np.searchsorted(next_run, opened, side="right")
    follows = np.append(next_run, 0)[place]
    has_next = (place < len(next_run)) & (spans.track[follows] == spans.track[opened])
    ends[opened] = np.where(has_next, np.minimum(ends[opened], spans.start[follows]), ends[opened])
    ends[opened] = np.maximum(ends[opened], spans.start[opened])
    return ends


def endless_waits(timeline: Timeline) -> Mask:
    """[num_spans] waits of kernels that never ended. A wait whose end found no room did, nobody knows when."""
    spans = timeline.spans
    has_room = np.array([*(launch.records_lost == 0 for launch in timeline.launches), True], bool)
    is_wait = timeline.events_of(EventClass.WAIT)[spans.event] & timeline.tracks_of(TrackKind.DEVICE)[spans.track]
    mask: Mask = spans.is_open & is_wait & has_room[spans.launch]
    return mask


def end_waits(timeline: Timeline) -> Timeline:
    """The timeline with endless waits ended as far as is known, so that sums count them."""
    rows = np.flatnonzero(endless_waits(timeline))
    if not len(rows):
        return timeline
    end = timeline.spans.end.copy()
    end[rows] = known_ends(timeline)[rows]
    return timeline.replace(spans=dataclasses.replace(timeline.spans, end=end))

"""How many spans there are and how long they last: by track, and for device tracks by rank and event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.intervals import exposed
from tracekern.timeline.model import OPEN_END, EventClass, Spans, Timeline, TrackKind


@dataclass
class EventCount:
    """Spans of one event on the device tracks of one rank; one that never closed lasts 0 ns."""

    count: int
    total_ns: int
    longest_ns: int
    longest: int
    """The first of the longest: index into Timeline.spans."""


class SpanCounts:
    """Arrays are [num_tracks]; times are those of device tracks alone, 0 for others."""

    def __init__(self, timeline: Timeline) -> None:
        num_tracks = len(timeline.tracks)
        self.spans = np.diff(np.searchsorted(timeline.spans.track, np.arange(num_tracks + 1, dtype=np.int32)))
        self.open_spans = np.zeros(num_tracks, np.int64)
        self.busy_ns = np.zeros(num_tracks, np.int64)
        """In closed spans: time in several at once counts once."""
        self.wait_ns = np.zeros(num_tracks, np.int64)
        """In closed waits, likewise."""
        self.events: dict[tuple[int, int], EventCount] = {}
        """(rank, number of the event) -> its spans."""
        self._rank_of_track = timeline.track_ranks()
        self._is_device = timeline.tracks_of(TrackKind.DEVICE)
        self._is_wait = timeline.events_of(EventClass.WAIT)
        for start, spans in parts_by_track(timeline.spans):
            self._add_tracks(spans)
            self._add_events(start, spans)

    def _add_tracks(self, spans: Spans) -> None:
        first = np.flatnonzero(np.append(True, spans.track[1:] != spans.track[:-1]))
        track, closed = spans.track[first], spans.end != OPEN_END
        self.open_spans[track] = np.add.reduceat(~closed, first, dtype=np.int64)
        closed &= self._is_device[spans.track]
        self.busy_ns[track] = np.add.reduceat(exposed(spans, closed), first)
        self.wait_ns[track] = np.add.reduceat(exposed(spans, closed & self._is_wait[spans.event]), first)

    def _add_events(self, start: int, spans: Spans) -> None:
        """start: index of the first of `spans` in the Timeline."""
        row = np.flatnonzero(self._is_device[spans.track])
        groups = group_rows(len(row), self._rank_of_track[spans.track[row]], spans.event[row])
        duration = np.where(spans.end[row] == OPEN_END, 0, spans.end[row] - spans.start[row])
        longest_ns = groups.largest(duration)
        candidates = np.flatnonzero(duration == longest_ns[groups.group])[::-1]
        longest = np.empty(len(groups), np.int64)
        longest[groups.group[candidates]] = row[candidates] + start  # from the back: the first stays
        columns = (*groups.columns, groups.count(), groups.sum(duration), longest_ns, longest)
        for rank, event, *numbers in zip(*(column.tolist() for column in columns), strict=True):
            found = EventCount(*numbers)
            if before := self.events.get((rank, event)):
                found.count += before.count
                found.total_ns += before.total_ns
                if before.longest_ns >= found.longest_ns:
                    found.longest_ns, found.longest = before.longest_ns, before.longest
            self.events[rank, event] = found

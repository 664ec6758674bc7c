"""What the events say of the device spans: whom they sent to or took from, for which expert, wait or work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.event_activity import flatten
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Int32, Int64, Timeline, TrackKind, unpack_field

_RECEIVES = "receive_"


@dataclass(frozen=True)
class EventRows:
    """All closed device spans of one event, and what they do."""

    number: int
    """Index into Timeline.events."""
    about: EventType
    row: Int64
    """[n] index into Timeline.spans."""
    rank: Int32
    """[n]"""
    track: Int64
    """[m] the tracks that have any, ascending, ..."""
    first: Int64
    """... and where the spans of each begin in `row`."""

    @property
    def is_wait(self) -> bool:
        return self.about.event_class is EventClass.WAIT

    @property
    def is_work(self) -> bool:
        return self.about.event_class is EventClass.WORK

    @property
    def is_signal(self) -> bool:
        return self.about.event_class is EventClass.SIGNAL

    @property
    def sends(self) -> bool:
        """Moves a token to the peer."""
        return self.is_work and self.has("peer") and not self.about.name.startswith(_RECEIVES)

    @property
    def takes(self) -> bool:
        """Moves a token that came from the peer."""
        return self.is_work and self.has("peer") and self.about.name.startswith(_RECEIVES)

    @property
    def computes(self) -> bool:
        """Works for an expert."""
        return self.is_work and self.has("expert") and not self.has("peer")

    def has(self, name: str) -> bool:
        return self.about.has(name)

    def field(self, timeline: Timeline, name: str) -> Int64:
        """[n] values of a begin field. Raises KeyError when there is none."""
        return unpack_field(self.about.begin_fields, name, timeline.spans.begin_payload[self.row])


def rows_by_event(timeline: Timeline) -> list[EventRows]:
    """One for each event that has closed spans on device tracks."""
    spans = timeline.spans
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    usable = is_device[spans.track] & (spans.end != OPEN_END)
    event = np.where(usable, spans.event, -1).astype(np.min_scalar_type(-len(timeline.events) - 1))
    ranks = timeline.track_ranks()
    found = []
    for number, about in enumerate(timeline.events):
        row = np.flatnonzero(event == number)
        if len(row):
            track_of_row = spans.track[row]
            first = np.flatnonzero(np.append(True, track_of_row[1:] != track_of_row[:-1]))
            track = track_of_row[first].astype(np.int64)
            rank = np.repeat(ranks[track], np.diff(first, append=len(row)))
            found.append(EventRows(number, about, row, rank, track, first))
    return found


def own_times(timeline: Timeline) -> Int64:
    """[num_spans] ns of each closed device span that lie in no span inside it; of other spans, anything."""
    activity = flatten(timeline)
    if activity.is_flat:
        return timeline.spans.end - timeline.spans.start
    own = np.zeros(len(timeline.spans), np.int64)
    np.add.at(own, activity.span, activity.end - activity.start)
    return own


def join_columns(parts: Iterable[tuple[Any, ...]], count: int) -> list[Any]:
    """The `count` columns of all parts, one after the other."""
    listed = list(parts)
    return [np.concatenate([part[idx] for part in listed] or [np.empty(0, np.int64)]) for idx in range(count)]

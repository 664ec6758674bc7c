"""What the events say of each device span: whom it sent to or took from, for which expert, wait or work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.event_activity import Activity
from tracekern.analysis.wait_edges import of_events
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Int64, Timeline, TrackKind, unpack_field

Mask = npt.NDArray[np.bool_]

_RECEIVES = "receive_"


@dataclass(frozen=True)
class Spans:
    """[n] closed device spans and what their events say of them."""

    row: Int64
    """Index into Timeline.spans."""
    rank: Int64
    track: Int64
    peer: Int64
    """-1 where the event names none."""
    expert: Int64
    is_wait: Mask
    is_work: Mask
    is_signal: Mask
    receives: Mask

    @property
    def sends(self) -> Mask:
        """Moves a token to the peer."""
        return self.is_work & (self.peer >= 0) & ~self.receives

    @property
    def takes(self) -> Mask:
        """Moves a token that came from the peer."""
        return self.is_work & (self.peer >= 0) & self.receives

    @property
    def computes(self) -> Mask:
        return self.is_work & (self.peer < 0) & (self.expert >= 0)


def describe_spans(timeline: Timeline) -> Spans:
    spans, events = timeline.spans, timeline.events
    is_device = np.array([track.kind == TrackKind.DEVICE for track in timeline.tracks] or [False])
    row = np.flatnonzero(is_device[spans.track] & (spans.end != OPEN_END))
    classes = {
        kind: of_events(timeline, [event.event_class is kind for event in events])[row]
        for kind in (EventClass.WAIT, EventClass.WORK, EventClass.SIGNAL)
    }
    return Spans(
        row=row,
        rank=timeline.track_ranks()[spans.track[row]].astype(np.int64),
        track=spans.track[row].astype(np.int64),
        peer=_field(timeline, row, "peer"),
        expert=_field(timeline, row, "expert"),
        is_wait=classes[EventClass.WAIT],
        is_work=classes[EventClass.WORK],
        is_signal=classes[EventClass.SIGNAL],
        receives=of_events(timeline, [event.name.startswith(_RECEIVES) for event in events])[row],
    )


def own_times(timeline: Timeline, activity: Activity, row: Int64) -> Int64:
    """[n] ns of each span `row` that lie in no span inside it."""
    own = np.zeros(len(timeline.spans), np.int64)
    np.add.at(own, activity.span, activity.end - activity.start)
    return own[row]


def _field(timeline: Timeline, row: Int64, name: str) -> Int64:
    """[n] the begin field `name` of the spans; -1 where the event has none."""
    values = np.full(len(row), -1, np.int64)
    event, payload = timeline.spans.event[row], timeline.spans.begin_payload[row]
    for idx, about in enumerate(timeline.events):
        if _has(about, name):
            mine = np.flatnonzero(event == idx)
            values[mine] = unpack_field(about.begin_fields, name, payload[mine])
    return values


def _has(event: EventType, name: str) -> bool:
    return any(field.name == name for field in event.begin_fields)

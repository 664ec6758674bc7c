"""What follows for a span from its launch and its event's table: the bytes, the peer that it names, its warp group."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.model import EventClass, EventType, Int32, Int64, Timeline, field_values


def bytes_of_spans(timeline: Timeline) -> Int64:
    """[num_spans] bytes that each span moved or announced; -1 where its table does not say, or it never closed."""
    spans = timeline.spans
    result = np.full(len(spans), -1, np.int64)
    for idx, event in enumerate(timeline.events):
        if not event.bytes_each:
            continue
        rows = np.flatnonzero((spans.event == idx) & ~spans.is_open)
        times = field_values(event, event.bytes_of, spans, rows) if event.bytes_of else 1
        if times is not None:
            result[rows] = event.bytes_each * times
    return result


def named_peers(timeline: Timeline, row: Int64) -> Int32:
    """[n] the rank that spans name as their peer, of this capture or not; -1 where they name none."""
    spans = timeline.spans
    peer, event = np.full(len(row), -1, np.int32), spans.event[row]
    for idx, about in enumerate(timeline.events):
        mine = np.flatnonzero(event == idx)
        if (named := field_values(about, "peer", spans, row[mine])) is not None:
            peer[mine] = named
    return peer


def has_rate(event: EventType) -> bool:
    """Returns whether a span of this event lasts as long as its bytes move, so that bytes / ns are a rate in GB/s."""
    return event.event_class is EventClass.WORK and not event.is_headless


def groups_of_spans(timeline: Timeline) -> Int64:
    """[num_spans] number in the grid of the warp group that a span is of; -1 where its launch has no name for it."""
    launches, tracks = timeline.launches, timeline.tracks
    # Launch -1 is no launch: the last entry.
    groups = np.array([*(launch.groups if launch.group_field else 0 for launch in launches), 0], np.int64)
    warps = np.array([*(launch.warps_per_block // max(1, launch.groups) for launch in launches), 1], np.int64)
    block, warp = (np.array([getattr(track, name) for track in tracks], np.int64) for name in ("block", "warp"))
    spans = timeline.spans
    is_grouped = groups[spans.launch] > 0
    is_grouped[is_grouped] = block[spans.track[is_grouped]] >= 0
    launch, track = spans.launch[is_grouped], spans.track[is_grouped]
    result = np.full(len(spans), -1, np.int64)
    result[is_grouped] = block[track] * groups[launch] + warp[track] // warps[launch]
    return result

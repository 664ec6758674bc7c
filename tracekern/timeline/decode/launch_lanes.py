"""The kernels of each stream as spans: from the first writer that started to the last that finished."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.decode.record_columns import WriterRuns
from tracekern.timeline.decode.track_merge import assign_lanes
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Field, Spans, Timeline, Track, TrackKind

LAUNCH_FIELDS = (Field("epoch", 32), Field("sequence", 32))


def add_launch_lanes(timeline: Timeline, runs: WriterRuns) -> Timeline:
    """The timeline of one rank (ticks), which has no spans yet, with a LAUNCH track for each stream.

    A launch with a writer that never finished is a span that never closed. Launches that overlap get lanes of their
    own.
    """
    started = np.flatnonzero(runs.started)
    num_launches = len(timeline.launches)
    if not len(started):
        return timeline
    first = np.full(num_launches, np.iinfo(np.int64).max)
    final = np.full(num_launches, -1, np.int64)
    np.minimum.at(first, runs.launch[started], runs.start[started])
    np.maximum.at(final, runs.launch[started], runs.last[started])
    is_open = np.bincount(runs.launch[started[~runs.finished[started]]], minlength=num_launches) > 0

    stream = np.array([launch.stream for launch in timeline.launches], np.int64)
    shown = np.flatnonzero(final >= 0)
    shown = shown[np.lexsort((first[shown], stream[shown]))]
    streams, group = np.unique(stream[shown], return_inverse=True)
    lane = assign_lanes(group, first[shown], final[shown])
    order = np.lexsort((first[shown], lane, group))
    shown, group, lane = shown[order], group[order], lane[order]
    rows, track = np.unique(np.stack([group, lane]), axis=1, return_inverse=True)
    rank = timeline.ranks[0].rank
    names = [f"stream {streams[group]}" + (f" lane {lane + 1}" if lane else "") for group, lane in rows.T.tolist()]
    tracks = [
        Track(rank, TrackKind.LAUNCH, name, int(streams[group]))
        for name, group in zip(names, rows[0].tolist(), strict=True)
    ]
    events, event = _number_names(timeline)
    spans = Spans(
        track=(track.ravel() + len(timeline.tracks)).astype(np.int32),
        event=event[shown],
        launch=shown.astype(np.int32),
        start=first[shown],
        end=np.where(is_open[shown], OPEN_END, final[shown]),
        begin_payload=np.array([_payload(timeline, idx) for idx in shown.tolist()], np.uint64),
        end_payload=np.zeros(len(shown), np.uint64),
    )
    return timeline.replace(tracks=(*timeline.tracks, *tracks), events=events, spans=spans)


def _number_names(timeline: Timeline) -> tuple[tuple[EventType, ...], np.ndarray]:
    """The events with one more for each kernel name, and [num_launches] the event of each launch."""
    known = {event: idx for idx, event in enumerate(timeline.events)}
    kinds = [
        EventType(launch.name, EventClass.LAUNCH, "completion", None, LAUNCH_FIELDS) for launch in timeline.launches
    ]
    number = np.array([known.setdefault(kind, len(known)) for kind in kinds], np.int32)
    return tuple(known), number


def _payload(timeline: Timeline, idx: int) -> int:
    launch = timeline.launches[idx]
    return launch.epoch & 0xFFFFFFFF | (launch.sequence & 0xFFFFFFFF) << 32

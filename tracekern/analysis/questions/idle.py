"""For how much of a kernel's time none of its warps works: all of them wait, have not begun, or have ended.

One warp that waits for a message can hold up a whole kernel, and hardly shows in the warps' time. A warp works from its
first record in the launch to its last, but for its waits and syncs: also between spans, where it may do what has none.
"""

from __future__ import annotations

import numpy as np

from tracekern.analysis.questions.balance import join_columns
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.intervals import union_ns, unions
from tracekern.timeline.model import EventClass, Int64, Mask, Spans, Timeline, TrackKind


def idle_of_launches(timeline: Timeline, launch: Int64, start: Int64, end: Int64) -> Int64:
    """[n] ns in which no warp works, of launches that lost no record; 0 where none has a span. All are [n]."""
    place = np.full(len(timeline.launches) + 1, -1)  # the last is that of launch -1, which is none
    place[launch] = np.arange(len(launch))
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    is_stop = timeline.events_of(EventClass.WAIT) | timeline.events_of(EventClass.SYNC)
    parts = []
    for _, spans in parts_by_track(timeline.spans):
        spans = spans.take(np.flatnonzero(is_device[spans.track] & (place[spans.launch] >= 0)))
        parts.append(_work(spans, place[spans.launch], is_stop[spans.event]))
    owner, begin, finish = join_columns(parts, 3)
    begin, finish = (np.clip(times, start[owner], end[owner]) for times in (begin, finish))
    work = union_ns(Spans(start=begin, end=finish), np.arange(len(owner)), owner, len(launch))
    has_spans = np.bincount(owner, minlength=len(launch)) > 0
    return np.where(has_spans, end - start - work, 0)


def _work(spans: Spans, owner: Int64, is_stop: Mask) -> tuple[Int64, Int64, Int64]:
    """(owner, begin, end) of the pieces in which warps work: of an owner all begins and all ends, each in any order."""
    if not len(spans):
        return owner, spans.start, spans.end
    first = np.flatnonzero(np.append(True, (np.diff(spans.track) != 0) | (np.diff(owner) != 0)))
    run = np.repeat(np.arange(len(first), dtype=np.int32), np.diff(first, append=len(spans)))
    last = np.maximum.reduceat(np.where(spans.is_open, spans.start, spans.end), first)
    stops = np.flatnonzero(is_stop & ~spans.is_open)
    opens, closes = unions(run[stops], spans.start[stops], spans.end[stops])
    stops = stops[opens]
    return (
        np.concatenate([owner[first], owner[stops]]),
        np.concatenate([spans.start[first], closes]),
        np.concatenate([last, spans.start[stops]]),
    )

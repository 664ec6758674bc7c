"""What each device track did at each time: its spans without overlap, a nested one taking its time from the outer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.facts.open_spans import ends_by_launch
from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import OPEN_END, Int32, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.table import Table

_MAX_DEPTH = 64


@dataclass(frozen=True, repr=False)
class Activity(Table):
    """[n] pieces of device spans, sorted by (track, start); no two of a track overlap."""

    span: Int32
    """Index into Timeline.spans: the innermost span open at this time."""
    track: Int32
    start: Int64
    end: Int64


def flatten(timeline: Timeline) -> Activity:
    """The spans of all device tracks that ended, or whose launch did: a wait that was given up is in time of its own.

    Each that lies in no other one is a piece, of no length too.
    """
    spans, ends = timeline.spans, ends_by_launch(timeline)
    span = np.flatnonzero(timeline.tracks_of(TrackKind.DEVICE)[spans.track] & (ends != OPEN_END)).astype(np.int32)
    track, start, end = spans.track[span], spans.start[span], ends[span]
    overlaps = (start[1:] < end[:-1]) & (track[1:] == track[:-1])
    if not overlaps.any():
        return Activity(span, track, start, end)
    is_nested = np.isin(track, track[1:][overlaps])
    flat = [Activity(span[~is_nested], track[~is_nested], start[~is_nested], end[~is_nested])]
    alone = is_nested & (end == start) & outermost(track, start, end)
    flat.append(Activity(span[alone], track[alone], start[alone], end[alone]))
    lasting = is_nested & (end > start)
    flat.append(_cut(Activity(span[lasting], track[lasting], start[lasting], end[lasting])))
    joined_span, joined_track, joined_start, joined_end = (
        np.concatenate([getattr(part, name) for part in flat]) for name in ("span", "track", "start", "end")
    )
    order = np.lexsort((joined_start, joined_track))
    return Activity(joined_span[order], joined_track[order], joined_start[order], joined_end[order])


def own_times(timeline: Timeline) -> Int64:
    """[num_spans] ns of each closed device span that lie in no span inside it; of other spans, anything."""
    spans = timeline.spans
    follows = (spans.track[1:] == spans.track[:-1]) & timeline.tracks_of(TrackKind.DEVICE)[spans.track[1:]]
    if not (follows & ((spans.start[1:] < spans.end[:-1]) | spans.is_open[:-1])).any():
        return spans.end - spans.start
    activity, own = flatten(timeline), np.zeros(len(spans), np.int64)
    np.add.at(own, activity.span, activity.end - activity.start)
    return own


def outermost(track: Int32, start: Int64, end: Int64) -> Mask:
    """[n] whether a span begins when all spans before it on its track are over; sorted by (track, start, -end)."""
    result = np.ones(len(start), bool)
    shift = one_line(track, start, end)
    result[1:] = (start + shift)[1:] >= np.maximum.accumulate(end + shift)[:-1]
    return result


def _cut(nested: Activity) -> Activity:
    """Pieces of nested spans of positive length. A span that outlives the one it began in is cut there."""
    parent, depth, end = _nest(nested)
    inner = np.flatnonzero(parent >= 0)
    # Every begin and every end of an inner span starts a piece: of the span itself, or of the one around it.
    count = len(nested)
    owner = np.concatenate([np.arange(count), parent[inner]])
    time = np.concatenate([nested.start, end[inner]])
    turn = np.concatenate([depth + 1, -depth[inner]])  # at one time: ends before begins, inner ends before outer ones
    order = np.lexsort((turn, time, nested.track[owner]))
    owner, time = owner[order], time[order]
    track = nested.track[owner]
    stop = end[owner]
    same = track[1:] == track[:-1]
    stop[:-1][same] = np.minimum(stop[:-1], time[1:])[same]
    kept = stop > time
    return Activity(nested.span[owner[kept]], track[kept], time[kept], stop[kept])


def _nest(nested: Activity) -> tuple[Int64, Int64, Int64]:
    """([n] index of the span around it or -1, [n] depth, [n] end, cut to that of the span around it)"""
    parent = np.full(len(nested), -1, np.int64)
    depth = np.zeros(len(nested), np.int64)
    end = nested.end.copy()
    rest = np.arange(len(nested))
    for level in range(_MAX_DEPTH):
        outer = outermost(nested.track[rest], nested.start[rest], end[rest])
        around = rest[np.maximum.accumulate(np.where(outer, np.arange(len(rest)), 0))]
        rest, around = rest[~outer], around[~outer]
        if not len(rest):
            break
        parent[rest], depth[rest] = around, level + 1
        end[rest] = np.minimum(end[rest], end[around])
    # A span that outlives the one it began in would seem to hold what comes behind that one.
    for track in np.unique(nested.track[end != nested.end]).tolist():
        rows = slice(*np.searchsorted(nested.track, [track, track + 1]).tolist())
        columns = _nest_with_stack(nested.start[rows].tolist(), nested.end[rows].tolist(), rows.start)
        parent[rows], depth[rows], end[rows] = columns
    return parent, depth, end


def _nest_with_stack(start: list[int], end: list[int], first: int) -> tuple[list[int], list[int], list[int]]:
    """The columns of `_nest` for one track, whose spans are those from `first` on; `end` is cut in place."""
    parent, depth, around = [], [], list[int]()
    for span, begin in enumerate(start):
        while around and end[around[-1]] <= begin:
            around.pop()
        parent.append(first + around[-1] if around else -1)
        depth.append(len(around))
        if around:
            end[span] = min(end[span], end[around[-1]])
        around.append(span)
    return parent, depth, end

"""Spans as intervals of their tracks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Int32, Int64, Spans

Mask = npt.NDArray[np.bool_]


def exposed(spans: Spans, chosen: Mask) -> Int64:
    """[num_spans] ns of each span of the mask `chosen` in which no chosen span of its track is open that opened
    earlier; 0 for all others. The sum is the length of their union."""
    which = np.flatnonzero(chosen)
    result = np.zeros(len(chosen), np.int64)
    if len(which):
        shift = _one_line(spans.track[which], spans.start[which], spans.end[which])
        start, end = spans.start[which] + shift, spans.end[which] + shift
        reach = np.append(start[0], np.maximum.accumulate(end)[:-1])
        result[which] = np.maximum(end - np.maximum(start, reach), 0)
    return result


def unions(track: Int32, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Intervals sorted by (track, start), joined where they overlap on a track: ([m] index of the first, [m] end)."""
    if not len(start):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    shift = _one_line(track, start, end)
    reach = np.maximum.accumulate(end + shift)
    first = np.flatnonzero(np.append(True, (start + shift)[1:] >= reach[:-1]))
    last = np.append(first[1:], len(start)) - 1
    return first, reach[last] - shift[last]


def _one_line(track: Int32, start: Int64, end: Int64) -> Int64:
    """[n] what to add to the times of each interval to have all tracks, one after the other, on one line of numbers:
    there a running maximum of the ends starts anew with each track. Sorted by (track, start). Each track counts from
    its own first start: unaligned clocks may lie years apart."""
    is_first = np.append(True, track[1:] != track[:-1])
    group = np.cumsum(is_first) - 1
    base = start[is_first][group]
    room = int((np.maximum(start, end) - base).max()) + 1
    shift: Int64 = group * room - base
    return shift

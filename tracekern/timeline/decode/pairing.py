"""Joining begins and ends of a track: many tracks at once with numpy, and one at a time where a track is torn.

The rule, as a stack would say it: an end closes the innermost open begin of its event. Begins above that one stay
open; an end whose event is not open is an orphan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Int32

_SCAN_LEVELS = 32


@dataclass(frozen=True)
class Pairs:
    """Positions in the input, sorted by begin."""

    begin: Int32
    end: Int32
    """-1: never closed."""
    orphan: Int32
    """Ends without a begin."""


def pair(is_begin: npt.NDArray[np.bool_], event: npt.NDArray[np.uint8], segment: Int32) -> Pairs:
    """Pair [n] begins and ends; `segment` numbers the tracks, ascending, and nothing is paired across tracks.

    In a sound track the end of a begin is the next record at its nesting depth: a few passes over all tracks at once.
    Tracks where such a pair names two events are decoded again by a stack.
    """
    end_of = np.full(len(is_begin), -1, np.int32)
    order = _by_depth(is_begin)
    left, right = order[:-1], order[1:]
    # Two neighbours of different depth are never a begin and a later end of one track, so depth needs no comparison.
    adjacent = is_begin[left] & ~is_begin[right]
    adjacent &= segment[left] == segment[right]
    adjacent &= left < right
    left, right = left[adjacent], right[adjacent]
    end_of[left] = right
    torn = np.unique(segment[left[event[left] != event[right]]])
    for number in torn.tolist():
        first, stop = np.searchsorted(segment, [number, number + 1]).tolist()
        end_of[first:stop] = _pair_with_stack(is_begin[first:stop].tolist(), event[first:stop].tolist(), first)
    begin = np.flatnonzero(is_begin).astype(np.int32)
    end = end_of[begin]
    is_orphan = ~is_begin
    is_orphan[end[end >= 0]] = False
    return Pairs(begin, end, np.flatnonzero(is_orphan).astype(np.int32))


def _by_depth(is_begin: npt.NDArray[np.bool_]) -> Int32:
    """Positions grouped by nesting depth, in order within a depth; a begin and its end have the same.

    The count runs on over tracks: it has to tell depths apart within a track only.
    """
    depth = np.where(is_begin, np.int8(1), np.int8(-1)).cumsum(dtype=np.int32)
    depth -= is_begin
    if not len(depth):
        return np.empty(0, np.int32)
    low, high = int(depth.min()), int(depth.max())
    if high - low >= _SCAN_LEVELS:
        return np.argsort(depth, kind="stable").astype(np.int32)
    order = np.empty(len(depth), np.int32)
    filled = 0
    for level in range(low, high + 1):
        found = np.flatnonzero(depth == level)
        order[filled : filled + len(found)] = found
        filled += len(found)
    return order


def _pair_with_stack(is_begin: list[bool], event: list[int], first: int) -> Int32:
    """`end_of` for one track. An end that skips begins leaves them open."""
    end_of = np.full(len(is_begin), -1, np.int32)
    stack: list[int] = []
    num_open: dict[int, int] = {}
    for position, (begins, kind) in enumerate(zip(is_begin, event, strict=True)):
        if begins:
            stack.append(position)
            num_open[kind] = num_open.get(kind, 0) + 1
        elif num_open.get(kind):
            while True:
                opened = stack.pop()
                num_open[event[opened]] -= 1
                if event[opened] == kind:
                    break
            end_of[opened] = first + position
    return end_of

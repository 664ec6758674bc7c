"""Waiting for the wrong message first: time in which another one was already there."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.model import Int64


def overtaken(group: Int64, begin: Int64, late_until: Int64, arrived: Int64) -> Int64:
    """[n] ns of [begin, late_until] after the first arrival of a message that a later wait of the same group takes.

    Rows stand in the order in which the track waits, those of a group together or not. `arrived` is when the message of
    the row was there: not before its late_until, or negative where that is not known.
    """
    order = np.argsort(group, kind="stable")
    own_group, start, stop = group[order], begin[order], late_until[order]
    first = np.flatnonzero(np.diff(own_group, prepend=-1))
    if not len(first):
        return np.zeros(0, np.int64)
    # Each group gets a stretch of a number line of its own, so that one running minimum from the back serves all.
    low = np.minimum.reduceat(start, first)
    room = np.maximum.reduceat(stop, first) - low + 1
    base = np.cumsum(room) - room
    size = np.diff(first, append=len(own_group))
    to_line = np.repeat(base - low, size)
    never = np.repeat(base + room - 1, size)
    there = np.where(arrived[order] < 0, never, np.clip(arrived[order] + to_line, np.repeat(base, size), never))
    # The row's own message is in this minimum too; it came too late to make a difference.
    earliest = np.minimum.accumulate(there[::-1])[::-1]
    result = np.empty(len(group), np.int64)
    result[order] = np.maximum(stop + to_line - np.maximum(start + to_line, earliest), 0)
    return result

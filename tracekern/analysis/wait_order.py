"""Waiting for the wrong message first: time in which another one was already there."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import Int64


def overtaken(group: Int64, begin: Int64, late_until: Int64, arrived: Int64) -> Int64:
    """[n] ns of [begin, late_until] after the first arrival of a message that a later wait of the same group takes.

    Rows stand in the order in which the track waits, those of a group together or not. `arrived` is when the message of
    the row was there.
    """
    if np.all(group[1:] >= group[:-1]):
        return _overtaken(group, begin, late_until, arrived)
    order = np.argsort(group, kind="stable")
    result = np.empty(len(group), np.int64)
    result[order] = _overtaken(group[order], begin[order], late_until[order], arrived[order])
    return result


def _overtaken(group: Int64, begin: Int64, late_until: Int64, arrived: Int64) -> Int64:
    """The same where each group stands together."""
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])
    if not len(first):
        return np.zeros(0, np.int64)
    to_line = one_line(group, begin, late_until)  # there one running minimum from the back serves all groups
    low = np.minimum.reduceat(begin, first)
    there = np.maximum(arrived, np.repeat(low, np.diff(first, append=len(group))))
    there += to_line
    # The row's own message is in this minimum too; it came too late to make a difference. So did those of later groups.
    earliest = np.minimum.accumulate(there[::-1])[::-1]
    np.maximum(earliest, begin + to_line, out=earliest)
    result: Int64 = np.maximum(late_until + to_line - earliest, 0)
    return result

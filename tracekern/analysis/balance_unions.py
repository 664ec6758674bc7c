"""Time in which at least one of many intervals was open, by owner."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.model import Int64


def union_ns(owner: Int64, start: Int64, end: Int64, num_owners: int) -> Int64:
    """[num_owners] ns covered by at least one interval [start, end) of each owner; end >= start."""
    covered = np.zeros(num_owners, np.int64)
    if not len(owner):
        return covered
    # One number line for all owners. Each counts from its own first interval: unaligned clocks may lie years apart.
    first = np.full(num_owners, np.iinfo(np.int64).max)
    np.minimum.at(first, owner, start)
    begin = start - first[owner]
    finish = end - first[owner]
    room = int(finish.max()) + 1
    begin += owner * room
    finish += owner * room
    begin.sort()
    finish.sort()
    # Nothing is open after the i-th end exactly if the next begin comes behind it: all that began before has ended.
    gaps = np.maximum(begin[1:] - finish[:-1], 0)
    bounds = np.searchsorted(begin, np.arange(num_owners + 1) * room)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        low, high = bounds[number], bounds[number + 1]
        covered[number] = finish[high - 1] - begin[low] - gaps[low : high - 1].sum()
    return covered

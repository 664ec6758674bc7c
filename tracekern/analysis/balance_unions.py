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
    length = end - start
    begin += owner * (int((begin + length).max()) + 1)
    order = np.argsort(begin, kind="stable")
    begin = begin[order]
    reach = np.maximum.accumulate(begin + length[order])
    # Each interval adds what it covers beyond all that began before it.
    gain = reach - np.maximum(np.append(begin[:1], reach[:-1]), begin)
    np.add.at(covered, owner[order], gain)
    return covered

"""Time in which at least one of many spans was open, by owner."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.model import Int32, Int64, Spans


def union_ns(spans: Spans, row: Int64, owner: Int64 | Int32, num_owners: int) -> Int64:
    """[num_owners] ns covered by at least one of the closed spans `row` of each owner; row, owner: [n]."""
    key = owner.astype(np.uint16) if num_owners <= 1 << 16 else owner  # of 16 bits: sorted in linear time
    row = row[np.argsort(key, kind="stable")]
    stops = np.cumsum(np.bincount(owner, minlength=num_owners))
    rows = np.split(row, stops)[:num_owners]
    return np.array([_union_ns(spans.start[mine], spans.end[mine]) for mine in rows], np.int64)


def _union_ns(start: Int64, end: Int64) -> int:
    if not len(start):
        return 0
    first, last = start.min(), end.max()
    begin, finish = start - first, end - first
    if last - first <= np.iinfo(np.int32).max:  # numbers of half the size are sorted in a quarter of the time
        begin, finish = begin.astype(np.int32), finish.astype(np.int32)
    begin.sort()
    finish.sort()
    # Nothing is open after the i-th end exactly if the next begin comes behind it: all that began before has ended.
    gaps = np.maximum(begin[1:] - finish[:-1], 0)
    return int(last - first) - int(gaps.sum(dtype=np.int64))

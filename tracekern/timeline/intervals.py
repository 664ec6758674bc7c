"""Spans as intervals of their tracks."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.model import Int32, Int64, Mask, Spans

_BLOCK = 1 << 14
"""So many are sought at a time: what is worked with stays in the cache."""


def exposed(spans: Spans, chosen: Mask) -> Int64:
    """[num_spans] ns of each span of the mask `chosen` in which no chosen span of its track is open that opened
    earlier; 0 for all others. The sum is the length of their union."""
    which = np.flatnonzero(chosen)
    result = np.zeros(len(chosen), np.int64)
    if len(which):
        shift = one_line(spans.track[which], spans.start[which], spans.end[which])
        start, end = spans.start[which] + shift, spans.end[which] + shift
        reach = np.append(start[0], np.maximum.accumulate(end)[:-1])
        result[which] = np.maximum(end - np.maximum(start, reach), 0)
    return result


def unions(track: Int32 | Int64, start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Intervals sorted by (track, start), joined where they overlap on a track: ([m] index of the first, [m] end)."""
    if not len(start):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    shift = one_line(track, start, end)
    reach = np.maximum.accumulate(end + shift)
    first = np.flatnonzero(np.append(True, (start + shift)[1:] >= reach[:-1]))
    last = np.append(first[1:], len(start)) - 1
    return first, reach[last] - shift[last]


def union_ns(spans: Spans, row: Int64, owner: Int64 | Int32, num_owners: int) -> Int64:
    """[num_owners] ns covered by at least one of the closed spans `row` of each owner; row, owner: [n]."""
    begin, finish = spans.start[row], spans.end[row]
    base, reach = np.full(num_owners, np.iinfo(np.int64).max), np.full(num_owners, np.iinfo(np.int64).min)
    np.minimum.at(base, owner, np.minimum(begin, finish))  # begins and ends of an owner may come in any order
    np.maximum.at(reach, owner, np.maximum(begin, finish))
    seen = np.flatnonzero(base <= reach)
    covered = np.zeros(num_owners, np.int64)
    if len(seen):
        room = reach[seen] - base[seen] + 1  # one after the other on one line, as in one_line()
        shift = np.zeros(num_owners, np.int64)
        shift[seen] = np.cumsum(room) - room - base[seen]
        begin, finish = np.sort(begin + shift[owner]), np.sort(finish + shift[owner])
        count = np.bincount(owner, minlength=num_owners)
        first = (np.cumsum(count) - count)[seen]
        last = np.append(first[1:], len(row)) - 1
        # Nothing is open after the i-th end exactly if the next begin comes behind it: all that began before has ended.
        gaps = np.maximum(begin - np.append(begin[0], finish[:-1]), 0)
        gaps[first] = 0
        covered[seen] = finish[last] - begin[first] - np.add.reduceat(gaps, first)
    return covered


def one_line(group: Int32 | Int64, low: Int64, high: Int64) -> Int64:
    """[n] what to add to the times of each row to have all groups, one after the other, on one line of numbers: there
    one running maximum or one search serves all. The rows of a group are adjacent and within low..high.

    Each group takes the room from its own lowest to its own highest: unaligned clocks may lie years apart.
    """
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])
    if not len(first):
        return np.zeros(0, np.int64)
    base = np.minimum.reduceat(low, first)
    room = np.maximum.reduceat(np.maximum(low, high), first) - base + 1
    return np.repeat(np.cumsum(room) - room - base, np.diff(first, append=len(group)))


def bisect_right(values: Int64, first: Int64, stop: Int64, wanted: Int64) -> Int64:
    """[n] where `wanted` would go behind its equals in values[first:stop], which is sorted."""
    found: Int64 = first.copy()
    for start in range(0, len(found), _BLOCK):
        part = slice(start, start + _BLOCK)
        low, end, sought = found[part], stop[part], wanted[part]
        for bit in reversed(range(int((end - low).max(initial=0)).bit_length())):
            beyond = low + (1 << bit)
            right = values.take(beyond - 1, mode="clip") <= sought
            right &= beyond <= end
            low += right.astype(np.int64) << bit
    return found

"""The lowest and highest that the parts of groups of waits can be, given what the clocks leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.doubt import Bound, late_limits, pair_doubt
from tracekern.analysis.groups import Groups, group_rows
from tracekern.analysis.wait_edges import signal_ends
from tracekern.analysis.waits import WaitKind, Waits
from tracekern.timeline.model import Int64, Timeline

_STEPS = 4
"""Into how many pieces the offsets that a pair's clocks leave open are cut, to bound what is not monotone in them."""
_CHUNK = 1 << 16
"""Waits that are looked at together: as many as stay in the cache."""


@dataclass(frozen=True)
class ClassLimits:
    """[num_groups, 2] lowest and highest ns."""

    late: Int64
    drain: Int64
    rest: Int64
    """visibility, completion or unmatched."""


def limit_classes(timeline: Timeline, waits: Waits, groups: Groups, bound: Bound) -> ClassLimits:
    """Limits of the late, drain and rest ns of groups of waits (`groups` over the rows of `waits`)."""
    return ClassLimits(
        limit_late(timeline, waits, groups, bound),
        limit_drain(timeline, waits, groups, bound),
        limit_rest(timeline, waits, groups, bound),
    )


def limit_late(timeline: Timeline, waits: Waits, groups: Groups, bound: Bound) -> Int64:
    """[num_groups, 2]. The late part of a wait only grows with the offset of the pair: its two ends give the limits."""
    return np.stack([groups.sum(values) for values in late_limits(timeline, waits, bound)], axis=1)


def limit_rest(timeline: Timeline, waits: Waits, groups: Groups, bound: Bound) -> Int64:
    """[num_groups, 2]. What is neither late nor drain only shrinks with the offset of the pair."""
    late_lo, late_hi = late_limits(timeline, waits, bound)
    doubt = pair_doubt(timeline, waits.rank, waits.peer, bound)
    done = signal_ends(timeline, waits.signal) - timeline.spans.start[waits.row]
    has_drain = _has_drain(waits)
    lo = waits.wait_ns - np.where(has_drain, np.clip(done + doubt, 0, waits.wait_ns), late_hi)
    hi = waits.wait_ns - np.where(has_drain, np.clip(done - doubt, 0, waits.wait_ns), late_lo)
    return np.stack([groups.sum(lo), groups.sum(hi)], axis=1)


def limit_drain(timeline: Timeline, waits: Waits, groups: Groups, bound: Bound) -> Int64:
    """[num_groups, 2]. Drain rises and falls with the offset: the offsets of a pair are looked at piece by piece.

    A pair has one offset, so its sums are bounded before pairs are added up.
    """
    messages = _Messages.near(timeline, waits, bound)
    row = messages.row
    pairs = group_rows(len(row), groups.group[row], waits.rank[row], waits.peer[row])
    lowest, highest = (np.zeros((_STEPS * 2, len(pairs)), np.int64) for _ in range(2))
    for first in range(0, len(row), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        for piece, (lo, hi) in enumerate(messages.pieces(chunk)):
            np.add.at(lowest[piece], pairs.group[chunk], lo)
            np.add.at(highest[piece], pairs.group[chunk], hi)
    limits = np.zeros((len(groups), 2), np.int64)
    np.add.at(limits[:, 0], pairs.columns[0], lowest.min(axis=0))
    np.add.at(limits[:, 1], pairs.columns[0], highest.max(axis=0))
    return limits


def _has_drain(waits: Waits) -> npt.NDArray[np.bool_]:
    return np.asarray((waits.signal >= 0) & (waits.kind != WaitKind.BARRIER), bool)


@dataclass(frozen=True)
class _Messages:
    """[m] columns: waits whose signal span lies near enough for some of it to be drain."""

    row: Int64
    """Index into Waits."""
    first: Int64
    last: Int64
    """Begin and end of the signal span, after the begin of the wait."""
    wait_ns: Int64
    doubt: Int64

    @classmethod
    def near(cls, timeline: Timeline, waits: Waits, bound: Bound) -> _Messages:
        begin = timeline.spans.start[waits.row]
        first = timeline.spans.start[waits.signal] - begin
        last = signal_ends(timeline, waits.signal) - begin
        doubt = pair_doubt(timeline, waits.rank, waits.peer, bound)
        row = np.flatnonzero(_has_drain(waits) & (last + doubt > 0) & (first - doubt < waits.wait_ns))
        return cls(row, first[row], last[row], waits.wait_ns[row], doubt[row])

    def pieces(self, chunk: slice) -> Iterator[tuple[Int64, Int64]]:
        """([m] lowest, [m] highest) drain, for each piece of the offsets.

        With its offset the drain of a wait rises, stays at the shorter of the two spans, and falls: over a piece it is
        lowest at an end, and highest at an end or at that top.
        """
        first, last, wait_ns, doubt = (column[chunk] for column in (self.first, self.last, self.wait_ns, self.doubt))
        top = np.minimum(last - first, wait_ns)
        top_from, top_to = np.minimum(-first, wait_ns - last), np.maximum(-first, wait_ns - last)
        step = doubt // _STEPS
        left, at_left = -doubt, _overlap(first, last, wait_ns, -doubt)
        for number in range(1 - _STEPS, _STEPS + 1):
            right = step * number if number < _STEPS else doubt
            at_right = _overlap(first, last, wait_ns, right)
            reaches_top = (top_to >= left) & (top_from <= right)
            yield np.minimum(at_left, at_right), np.where(reaches_top, top, np.maximum(at_left, at_right))
            left, at_left = right, at_right


def _overlap(first: Int64, last: Int64, wait_ns: Int64, offset: Int64) -> Int64:
    overlap: Int64 = np.clip(last + offset, 0, wait_ns) - np.clip(first + offset, 0, wait_ns)
    return overlap

"""The lowest and highest that the parts of groups of waits can be, given what the clocks leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.doubt import Bound, late_limits, pair_doubt
from tracekern.analysis.groups import Groups, group_rows
from tracekern.analysis.wait_edges import signal_ends
from tracekern.analysis.waits import WaitKind, Waits
from tracekern.timeline.model import Int64, Timeline

_STEPS = 4
"""Into how many pieces the offsets that a pair's clocks leave open are cut, to bound what is not monotone in them."""


@dataclass(frozen=True)
class ClassLimits:
    """[num_groups, 2] lowest and highest ns."""

    late: Int64
    drain: Int64
    rest: Int64
    """visibility, completion or unmatched."""


def limit_classes(timeline: Timeline, waits: Waits, groups: Groups, bound: Bound) -> ClassLimits:
    """Limits of the late, drain and rest ns of groups of waits (`groups` over the rows of `waits`).

    Sums of late and rest only grow or only shrink with the offset of a pair, so its two ends give the limits. Drain
    does not: the offsets between are looked at piece by piece.
    """
    late_lo, late_hi = late_limits(timeline, waits, bound)
    doubt = pair_doubt(timeline, waits.rank, waits.peer, bound)
    drains = (waits.signal >= 0) & (waits.kind != WaitKind.BARRIER)
    done = signal_ends(timeline, waits.signal) - timeline.spans.start[waits.row]
    rest_lo = np.where(drains, waits.wait_ns - np.clip(done + doubt, 0, waits.wait_ns), waits.wait_ns - late_hi)
    rest_hi = np.where(drains, waits.wait_ns - np.clip(done - doubt, 0, waits.wait_ns), waits.wait_ns - late_lo)
    return ClassLimits(
        late=np.stack([groups.sum(late_lo), groups.sum(late_hi)], axis=1),
        drain=_limit_drain(timeline, waits, groups, np.flatnonzero(drains), doubt),
        rest=np.stack([groups.sum(rest_lo), groups.sum(rest_hi)], axis=1),
    )


def _limit_drain(timeline: Timeline, waits: Waits, groups: Groups, which: Int64, doubt: Int64) -> Int64:
    """[num_groups, 2], of the waits `which`. A pair has one offset: its sums are bounded before pairs are added up."""
    pairs = group_rows(len(which), groups.group[which], waits.rank[which], waits.peer[which])
    lowest = np.full(len(pairs), np.iinfo(np.int64).max)
    highest = np.zeros(len(pairs), np.int64)
    for lo, hi in _drain_pieces(timeline, waits, which, doubt[which]):
        lowest, highest = np.minimum(lowest, pairs.sum(lo)), np.maximum(highest, pairs.sum(hi))
    limits = np.zeros((len(groups), 2), np.int64)
    for side, sums in enumerate((lowest, highest)):
        np.add.at(limits[:, side], pairs.columns[0], sums)
    return limits


def _drain_pieces(timeline: Timeline, waits: Waits, which: Int64, doubt: Int64) -> Iterator[tuple[Int64, Int64]]:
    """([m] lowest, [m] highest) drain for each piece of the offsets.

    With its offset the drain of a wait rises, stays at the shorter of the two spans, and falls: over a piece it is
    lowest at an end, and highest at an end or at that top.
    """
    spans = timeline.spans
    signal, begin, wait_ns = waits.signal[which], spans.start[waits.row[which]], waits.wait_ns[which]
    first, last = spans.start[signal] - begin, signal_ends(timeline, signal) - begin
    top = np.minimum(last - first, wait_ns)
    top_from, top_to = np.minimum(-first, wait_ns - last), np.maximum(-first, wait_ns - last)
    ends = [doubt // _STEPS * step for step in range(-_STEPS, _STEPS)] + [doubt]
    ends[0] = -doubt
    drains = [np.clip(last + at, 0, wait_ns) - np.clip(first + at, 0, wait_ns) for at in ends]
    for left, right, at_left, at_right in zip(ends, ends[1:], drains, drains[1:], strict=False):
        reaches_top = (top_to >= left) & (top_from <= right)
        yield np.minimum(at_left, at_right), np.where(reaches_top, top, np.maximum(at_left, at_right))

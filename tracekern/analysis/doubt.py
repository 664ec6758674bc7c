"""How far the clocks let a number be trusted, and whether that is enough to name a rank.

The clocks of two ranks are apart by one unknown offset that all their waits share: errors over many waits add up, they
do not average out. So a sum over the waits of a pair is looked at for every offset that the clocks leave open, all
waits at once. Time stamps are never moved.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import About, Partial
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.clocks.steadiness import COVERED_SIGMAS
from tracekern.timeline.model import Int32, Int64, Mask, Timeline, clocks_of_ranks

_UNKNOWN = 1 << 60
"""Doubt, in ns, about a clock that was not related to the others."""


class Bound(enum.Enum):
    """Which doubt: `PROVEN` for what must be true, `LIKELY` for calling a number inconclusive."""

    PROVEN = "hard_ns"
    """What round trips prove."""
    LIKELY = "sigma_ns"
    """COVERED_SIGMAS times the repeatability, and what contradicts the fit; nowhere more than what is proven."""


@dataclass(frozen=True)
class Interval(Partial):
    lo_ns: int
    hi_ns: int

    @property
    def inconclusive_ns(self) -> int:
        return self.hi_ns - self.lo_ns


@dataclass(frozen=True)
class Blame(Partial):
    """How long the other ranks waited because this rank came late."""

    rank: About[int]
    late_ns: int
    """At the time stamps as they are: late_sender, late_receiver and barrier_late of the others."""
    likely: Interval
    proven: Interval


@dataclass(frozen=True)
class Worst:
    """Who is worst. `rank` is None where the clocks leave it open, or where no rank waited."""

    rank: int | None
    is_proven: bool
    """It holds for all that the clocks leave open (`hard_ns`), not just for what is likely."""
    candidates: tuple[int, ...]
    """The ranks that may be the worst, likeliest first."""


@dataclass(frozen=True)
class Charges:
    """[m] columns: who may have caused the late part of a wait. One row a wait; at barriers one for each candidate."""

    wait: Int64
    """Index into Waits."""
    rank: Int32
    late_ns: Int64
    lo_ns: Int64
    hi_ns: Int64


def clock_doubt(timeline: Timeline, bound: Bound) -> Int64:
    """[largest rank + 2] by how many ns the stamps of a rank may be wrong; the last entry is for rank -1."""
    doubt = np.zeros(max((rank.rank for rank in timeline.ranks), default=-1) + 2, np.int64)
    for rank in timeline.ranks:
        hard = rank.clock.hard_ns if rank.clock else np.nan
        sigma = rank.clock.sigma_ns if rank.clock else np.nan
        doubt_ns = rank.clock.doubt_ns if rank.clock else np.nan
        value = hard if bound is Bound.PROVEN else min(hard, COVERED_SIGMAS * sigma + doubt_ns)
        known = timeline.aligned and np.isfinite(value)
        doubt[rank.rank] = min(_UNKNOWN, int(np.ceil(value))) if known else _UNKNOWN
    return doubt


def pair_doubt(timeline: Timeline, one: Int32, other: Int32, bound: Bound) -> Int64:
    """[n] by how many ns the clocks of two ranks may differ from what the time stamps say; 0 if both read one clock."""
    doubt, clock_of = clock_doubt(timeline, bound), clocks_of_ranks(timeline.ranks)
    is_one = (clock_of[one] == clock_of[other]) | (one < 0) | (other < 0)
    return np.where(is_one, 0, np.minimum(doubt[one] + doubt[other], _UNKNOWN))


def may_be_late(timeline: Timeline, waits: Waits) -> Mask:
    """[n] False for waits whose signal had come so long before that no doubt about the clocks makes it late."""
    largest_doubt = 2 * clock_doubt(timeline, Bound.PROVEN).max()
    return np.asarray((waits.late_ns > 0) | (waits.slack_ns <= largest_doubt), bool)


def late_limits(timeline: Timeline, waits: Waits, bound: Bound) -> tuple[Int64, Int64]:
    """([n] lowest, [n] highest) late_ns of each wait.

    All waits of a pair reach an end at the same offset of its clocks: the limits of a sum are the sums of the limits.
    """
    spans = timeline.spans
    there = np.where(waits.signal >= 0, spans.start[waits.signal], spans.start[waits.last_arrival])
    behind = there - spans.start[waits.row]
    doubt = pair_doubt(timeline, waits.rank, waits.peer, bound)
    released = (waits.signal >= 0) | (waits.last_arrival >= 0)
    # Until when an endless wait lasted may be known by the clock of any rank.
    doubts = clock_doubt(timeline, bound)
    endless_doubt = np.where(waits.endless, np.minimum(doubts[waits.rank] + doubts.max(), _UNKNOWN), 0)
    lo = np.where(released, np.clip(behind - doubt, 0, waits.wait_ns), np.maximum(waits.late_ns - endless_doubt, 0))
    hi = np.where(released, np.clip(behind + doubt, 0, waits.wait_ns), waits.late_ns + endless_doubt)
    arrivals = _Arrivals.of(timeline, waits, bound)
    for limit, behind in ((lo, arrivals.behind_ns - arrivals.doubt_ns), (hi, arrivals.behind_ns + arrivals.doubt_ns)):
        np.maximum.at(limit, arrivals.wait, np.clip(behind, 0, waits.wait_ns[arrivals.wait]))
    return lo, hi


def late_charges(timeline: Timeline, waits: Waits, bound: Bound) -> Charges:
    """Who is charged with the late part of each wait, and within which limits.

    At a barrier of ranks every rank that may have come last is a row, with nothing as its lower limit unless it is
    alone.
    """
    lo, hi = late_limits(timeline, waits, bound)
    arrivals = _Arrivals.of(timeline, waits, bound)
    simple = np.ones(len(waits), bool)
    simple[arrivals.wait] = False
    plain = np.flatnonzero(simple & (waits.kind != WaitKind.UNMATCHED) & (waits.peer >= 0))
    # Which of two arrivals was later is a matter of their two clocks: that of the rank that waits is the same for both.
    doubt = clock_doubt(timeline, bound)[arrivals.rank]
    surely_latest = np.full(len(waits), -2 * _UNKNOWN)
    np.maximum.at(surely_latest, arrivals.wait, arrivals.behind_ns - doubt)
    candidate = arrivals.behind_ns + doubt >= surely_latest[arrivals.wait]
    # Of ranks that read the same clock only the last can have been it.
    of_clock = group_rows(len(arrivals.wait), arrivals.wait, clocks_of_ranks(timeline.ranks)[arrivals.rank])
    candidate &= arrivals.behind_ns == of_clock.largest(arrivals.behind_ns)[of_clock.group]
    wait, rank = arrivals.wait[candidate], arrivals.rank[candidate]
    is_alone = np.bincount(wait, minlength=len(waits))[wait] == 1
    reach = np.clip((arrivals.behind_ns + arrivals.doubt_ns)[candidate], 0, waits.wait_ns[wait])
    return Charges(
        wait=np.concatenate([plain, wait]),
        rank=np.concatenate([waits.peer[plain], rank]),
        late_ns=np.concatenate([waits.late_ns[plain], np.where(rank == waits.peer[wait], waits.late_ns[wait], 0)]),
        lo_ns=np.concatenate([lo[plain], np.where(is_alone, lo[wait], 0)]),
        hi_ns=np.concatenate([hi[plain], reach]),
    )


def most_charged(charged: Mapping[int, Blame]) -> tuple[Blame, ...]:
    """What each rank is charged with by the others, most first. charged: charge_ranks()."""
    return tuple(sorted(charged.values(), key=lambda blame: (-blame.late_ns, -blame.likely.hi_ns, blame.rank)))


def charge_ranks(timeline: Timeline, waits: Waits) -> dict[int, Blame]:
    """What the others charge each rank with. What a rank waits for itself is its own affair."""
    nothing = (0, Interval(0, 0))
    some = waits.take(np.flatnonzero(may_be_late(timeline, waits)))
    likely, proven = (_blame(timeline, some, bound) for bound in (Bound.LIKELY, Bound.PROVEN))
    return {
        rank.rank: Blame(rank.rank, *likely.get(rank.rank, nothing), proven.get(rank.rank, nothing)[1])
        for rank in timeline.ranks
    }


def name_worst(blames: Sequence[Blame]) -> Worst:
    """The rank whose lowest possible blame is above the highest possible one of every other rank, if there is one."""
    likely, is_certain = _candidates([(blame.rank, blame.likely) for blame in blames])
    proven, is_proven = _candidates([(blame.rank, blame.proven) for blame in blames])
    return Worst(likely[0] if is_certain else None, is_certain and is_proven and proven == likely, likely)


@dataclass(frozen=True)
class _Arrivals:
    """[m] columns: every rank's last arrival at every barrier of ranks that another rank waited at."""

    wait: Int64
    """Index into Waits."""
    rank: Int32
    behind_ns: Int64
    """How long after the begin of the wait it came."""
    doubt_ns: Int64

    @classmethod
    def of(cls, timeline: Timeline, waits: Waits, bound: Bound) -> _Arrivals:
        signal = waits.arrivals.signal
        wait = np.searchsorted(waits.row, waits.arrivals.wait)
        behind = timeline.spans.start[signal] - timeline.spans.start[waits.arrivals.wait]
        # A rank may signal with many warps: it has come when the last of them has.
        arrivals = group_rows(len(signal), wait, timeline.track_ranks()[timeline.spans.track[signal]])
        wait, rank = arrivals.columns[0], arrivals.columns[1].astype(np.int32)
        return cls(wait, rank, arrivals.largest(behind), pair_doubt(timeline, waits.rank[wait], rank, bound))


def _blame(timeline: Timeline, waits: Waits, bound: Bound) -> dict[int, tuple[int, Interval]]:
    """Rank -> (late ns, limits)"""
    charges = late_charges(timeline, waits, bound)
    others = np.flatnonzero(charges.rank != waits.rank[charges.wait])
    groups = group_rows(len(others), charges.rank[others])
    columns = [groups.sum(values[others]).tolist() for values in (charges.late_ns, charges.lo_ns, charges.hi_ns)]
    return {
        rank: (late, Interval(lo, hi)) for rank, late, lo, hi in zip(groups.columns[0].tolist(), *columns, strict=True)
    }


def _candidates(limits: Sequence[tuple[int, Interval]]) -> tuple[tuple[int, ...], bool]:
    """(ranks that may be the worst, likeliest first; whether the first one is it for sure)"""
    floor = max((interval.lo_ns for _, interval in limits), default=0)
    rivals = [(rank, interval) for rank, interval in limits if interval.hi_ns >= max(floor, 1)]
    rivals.sort(key=lambda rival: (-rival[1].lo_ns - rival[1].hi_ns, rival[0]))
    return tuple(rank for rank, _ in rivals), floor > 0 and len(rivals) == 1

"""Puts the clocks of all ranks on one axis, and says how far that can be trusted.

The axis is the clock of the reference rank, in ns. It is found from ping-pong samples alone: neither the order of
events nor a flow moves a time stamp. `hard_ns` is what round trips prove, given the two bounds on crystals that
clock_pairs.py states; `sigma_ns` is how well they repeat. docs/clocks.md explains both for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.record.format import SampleKind
from tracekern.timeline.clock_graph import RoundFit, solve_round
from tracekern.timeline.clock_host import relate_hosts
from tracekern.timeline.clock_pairs import (
    MAX_RATE,
    MAX_WANDER_PER_NS,
    Burst,
    LocalClock,
    find_bursts,
)
from tracekern.timeline.model import ClockFit, Int64, Rank

SpansTicks = Mapping[int, tuple[int, int]]
_SECOND = 10**9


def fit_clocks(
    samples: npt.NDArray[Any], ranks: Sequence[Rank], spans_ticks: SpansTicks | None = None
) -> dict[int, ClockFit]:
    """The map from ticks to axis ns of every rank.

    samples: [n] structured array of ClockSample rows of all ranks together, in any order; rows of ranks not given are
    ignored. spans_ticks: rank -> (first, last) tick that will be mapped, over which `hard_ns` has to hold; without it,
    the time between the first and the last round of samples. The reference is the lowest rank among those sampled in
    most rounds.

    Raises BadInput when a rank cannot be related to the others, or when samples contradict each other.
    """
    spans = dict(spans_ticks or {})
    if not ranks:
        return {}
    clocks = {rank.rank: LocalClock.of(rank, _first_tick(samples, rank.rank, spans)) for rank in ranks}
    if len(ranks) == 1:
        fits = {ranks[0].rank: _fit_reference(clocks[ranks[0].rank])}
        return relate_hosts(samples, ranks, fits, apply_clock)
    bursts = find_bursts(samples, clocks)
    reference = _choose_reference(bursts, clocks)
    rounds = [
        solve_round([b for b in bursts if b.round_idx == i], reference) for i in sorted({b.round_idx for b in bursts})
    ]
    _refuse_unrelated(ranks, rounds, reference)
    fits = {reference: _fit_reference(clocks[reference])}
    for rank in sorted(clocks.keys() - {reference}):
        course = _Course.through(rounds, rank)
        spread = [burst.spread for burst in bursts if rank in (burst.low, burst.high)]
        fits[rank] = _fit_rank(course, clocks[rank], clocks[reference], spans.get(rank), float(np.median(spread)))
    return relate_hosts(samples, ranks, fits, apply_clock)


def unaligned_clocks(ranks: Sequence[Rank], spans_ticks: SpansTicks | None = None) -> dict[int, ClockFit]:
    """Every rank on its own clock at its nominal rate, for `--unaligned`. Order between ranks then means nothing."""
    spans = dict(spans_ticks or {})
    fits = {}
    for rank in ranks:
        ticks, ns = _scale_anchors(LocalClock.of(rank, spans.get(rank.rank, (0, 0))[0]))
        fits[rank.rank] = ClockFit("unaligned", float("inf"), float("inf"), ticks, ns)
    return fits


def apply_clock(fit: ClockFit, ticks: Int64) -> Int64:
    """[n] int64 axis ns of [n] int64 ticks, exact to less than 1 ns whatever their size."""
    at = np.array(fit.anchor_ticks, np.int64)
    ns = np.array(fit.anchor_ns, np.int64)
    piece = np.clip(np.searchsorted(at, ticks, side="right") - 1, 0, len(at) - 2)
    slope = np.diff(ns) / np.diff(at)
    mapped: Int64 = ns[piece] + np.rint((ticks - at[piece]) * slope[piece]).astype(np.int64)
    return mapped


def _first_tick(samples: npt.NDArray[Any], rank: int, spans: Mapping[int, tuple[int, int]]) -> int:
    """A tick near all others of the rank, to count from."""
    ping_pong, bracket = samples["kind"] == SampleKind.PING_PONG, samples["kind"] == SampleKind.HOST_BRACKET
    initiated = samples["t0"][ping_pong & (samples["initiator"] == rank)]
    answered = samples["t1"][(ping_pong | bracket) & (samples["responder"] == rank)]
    firsts = [int(stamps.min()) for stamps in (initiated, answered) if len(stamps)]
    return min(firsts, default=spans.get(rank, (0, 0))[0])


def _choose_reference(bursts: Sequence[Burst], clocks: Mapping[int, LocalClock]) -> int:
    """The lowest rank, unless it was sampled less often than others: a rank that died early would be a poor axis."""
    num_rounds = {rank: len({b.round_idx for b in bursts if rank in (b.low, b.high)}) for rank in clocks}
    return max(sorted(num_rounds), key=lambda rank: num_rounds[rank])


def _refuse_unrelated(ranks: Sequence[Rank], rounds: Sequence[RoundFit], reference: int) -> None:
    related = {reference}.union(*(r.offsets for r in rounds))
    for rank in ranks:
        if rank.rank not in related:
            raise BadInput(
                f"rank {rank.rank} (node {rank.node}): no clock samples relate it to rank {reference}; got samples "
                f"that relate ranks {sorted(related)}, wanted all {len(ranks)}; record with clock sampling on, leave "
                "the rank out, or merge with --unaligned"
            )


@dataclass(frozen=True)
class _Course:
    """One rank's clock minus the reference's at the rounds: [k] columns, in ns from the bases of the clocks."""

    time: npt.NDArray[np.float64]
    offset: npt.NDArray[np.float64]
    error: npt.NDArray[np.float64]
    """The truth lies within +-error of offset."""
    closure: float

    @classmethod
    def through(cls, rounds: Sequence[RoundFit], rank: int) -> _Course:
        seen = [(r.time, r.offsets[rank]) for r in rounds if rank in r.offsets]
        return cls(
            np.array([time for time, _ in seen]),
            np.array([offset.value for _, offset in seen]),
            np.array([offset.error for _, offset in seen]),
            float(np.sqrt(np.mean([offset.closure**2 for _, offset in seen]))),
        )

    def outer_slope(self, first: bool) -> tuple[float, float]:
        """(slope, error) to go on with before the first or after the last round."""
        if len(self.time) > 1:
            near, far = (0, 1) if first else (-1, -2)
            distance = abs(self.time[far] - self.time[near])
            slope = (self.offset[far] - self.offset[near]) / (self.time[far] - self.time[near])
            error = (self.error[far] + self.error[near]) / distance + MAX_WANDER_PER_NS * distance / 2
            if abs(slope) <= MAX_RATE:
                return float(slope), float(min(error, MAX_RATE + abs(slope)))
        return 0.0, MAX_RATE

    def error_within(self, first: float, last: float) -> float:
        """Largest error of the piecewise linear map between two times."""
        gaps = np.diff(self.time)
        pieces = np.maximum(self.error[:-1], self.error[1:]) + MAX_WANDER_PER_NS * gaps**2 / 8
        touched = pieces[(self.time[1:] >= first) & (self.time[:-1] <= last)]
        worst = float(touched.max(initial=0.0))
        inside = self.error[(self.time >= first) & (self.time <= last)]
        worst = max(worst, float(inside.max(initial=0.0)))
        for distance, is_first in ((self.time[0] - first, True), (last - self.time[-1], False)):
            if distance > 0:
                _, slope_error = self.outer_slope(is_first)
                near = float(self.error[0 if is_first else -1])
                worst = max(worst, near + slope_error * distance + MAX_WANDER_PER_NS * distance**2 / 2)
        return worst


def _fit_rank(
    course: _Course, clock: LocalClock, reference: LocalClock, span: tuple[int, int] | None, spread: float
) -> ClockFit:
    """One more anchor a second before and after the rounds holds the slope to go on with."""
    before, after = course.time[0] - _SECOND, course.time[-1] + _SECOND
    times = [before, *course.time, after]
    offsets = [
        course.offset[0] - course.outer_slope(first=True)[0] * _SECOND,
        *course.offset,
        course.offset[-1] + course.outer_slope(first=False)[0] * _SECOND,
    ]
    _, (axis_base, _) = _scale_anchors(reference)
    ticks, ns = [], []
    for time, offset in zip(times, offsets, strict=True):
        elapsed_ticks = round((time + offset) / clock.ns_per_tick)
        # At that whole tick, not at the time itself: a tick of 40 ns must not cost 20 ns.
        ticks.append(clock.base_ticks + elapsed_ticks)
        ns.append(axis_base + round(elapsed_ticks * clock.ns_per_tick - offset))
    if span is None:
        first, last = float(course.time[0]), float(course.time[-1])
    else:
        first, last = (float(time) for time in clock.to_ns(np.array(span, np.int64)) - course.offset[[0, -1]])
    # A tick stands for any moment up to the next one, on either clock; 1 ns for the rounding of anchors and results.
    hard_ns = course.error_within(first, last) + clock.resolution_ns + reference.resolution_ns + 1
    return ClockFit("ping-pong", hard_ns, float(np.hypot(spread, course.closure)), tuple(ticks), tuple(ns))


def _fit_reference(clock: LocalClock) -> ClockFit:
    ticks, ns = _scale_anchors(clock)
    return ClockFit("reference", 0.0, 0.0, ticks, ns)


def _scale_anchors(clock: LocalClock) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two anchors of a clock that is its own axis: base ticks and a second later, in exact arithmetic."""
    ticks = (clock.base_ticks, clock.base_ticks + round(clock.ticks_per_second))
    first, second = (round(Fraction(tick * _SECOND) / clock.ticks_per_second) for tick in ticks)
    return ticks, (first, second)

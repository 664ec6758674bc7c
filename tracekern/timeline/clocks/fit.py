"""Puts the clocks of all ranks on one axis, and says how far that can be trusted.

Ranks that read the same clock have one fit: a clock goes by the number of the lowest rank that reads it.
The axis is the clock of the reference rank, in ns. It is found from ping-pong samples alone: neither the order of
events nor a flow moves a time stamp. `hard_ns` is what round trips prove, given the two bounds on crystals that
clock_pairs.py states; `sigma_ns` is how well they repeat. docs/clocks.md explains both for users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import SampleKind
from tracekern.errors import BadInput
from tracekern.timeline.clocks.course import Course, through_anchors
from tracekern.timeline.clocks.host_times import bracket_rows, relate_hosts
from tracekern.timeline.clocks.pairs import (
    MAX_RATE,
    MAX_WANDER_PER_NS,
    Burst,
    LocalClock,
    find_bursts,
)
from tracekern.timeline.clocks.rank_graph import RoundFit, solve_round
from tracekern.timeline.clocks.steadiness import COVERED_SIGMAS, Steadiness, judge_pieces
from tracekern.timeline.model import ClockFit, ClockStep, Int32, Int64, Rank, clocks_of_ranks

SpansTicks = Mapping[int, tuple[int, int]]
_SECOND = 10**9
MAX_SAMPLED_S = 366 * 86_400
"""No capture lasts that long, and what clocks may have drifted meanwhile says nothing."""


class UnrelatedClocks(BadInput):
    """Nothing relates the clocks of two ranks."""


def fit_clocks(
    samples: npt.NDArray[Any], ranks: Sequence[Rank], spans_ticks: SpansTicks | None = None
) -> dict[int, ClockFit]:
    """The map from ticks to axis ns of every rank; ranks that read the same clock have the same.

    samples: [n] structured array of ClockSample rows of all ranks together, in any order; rows of ranks not given are
    ignored. spans_ticks: rank -> (first, last) tick that will be mapped, over which `hard_ns` has to hold; without it,
    the time between the first and the last round of samples. The reference is the lowest rank among those sampled in
    most rounds.

    Raises BadInput when a rank cannot be related to the others, or when samples contradict each other.
    """
    if not ranks:
        return {}
    clock_of, events = clocks_of_ranks(ranks), dict(spans_ticks or {})
    spans, rows = _spans_of_clocks(events, ranks, clock_of), _rows_of_clocks(samples, ranks, clock_of)
    clocks = {rank.rank: _clock_of(rows, rank, spans) for rank in lowest_readers(ranks, clock_of)}
    bursts = find_bursts(rows, clocks)
    reference, relations = _relate_all(bursts, clocks, ranks, clock_of)
    of_clock, bracket_hard_ns = {reference: _fit_reference(clocks[reference])}, {reference: 0.0}
    for clock, relation in relations.items():
        of_clock[clock] = relation.fit(spans.get(clock))
        brackets = bracket_rows(rows, clock)["t1"]
        if len(brackets):
            bracket_hard_ns[clock] = relation.hard_ns(*relation.times((int(brackets.min()), int(brackets.max()))))
    fits = {rank.rank: of_clock[int(clock_of[rank.rank])] for rank in ranks}
    hard_ns = {rank: bracket_hard_ns.get(int(clock_of[rank]), 0.0) for rank in fits}
    return relate_hosts(samples, ranks, fits, hard_ns, _times_on_axis(fits, events))


def unaligned_clocks(ranks: Sequence[Rank], spans_ticks: SpansTicks | None = None) -> dict[int, ClockFit]:
    """Every clock as it is, at its nominal rate, for `--unaligned`. Order between clocks then means nothing."""
    clock_of = clocks_of_ranks(ranks)
    spans = _spans_of_clocks(spans_ticks or {}, ranks, clock_of)
    of_clock = {}
    for rank in lowest_readers(ranks, clock_of):
        ticks, ns = _scale_anchors(LocalClock.of(rank, spans.get(rank.rank, (0, 0))[0]))
        of_clock[rank.rank] = ClockFit("unaligned", float("inf"), float("inf"), ticks, ns)
    return {rank.rank: of_clock[int(clock_of[rank.rank])] for rank in ranks}


def apply_clock(fit: ClockFit, ticks: Int64) -> Int64:
    """[n] int64 axis ns of [n] int64 ticks, exact to less than 1 ns whatever their size."""
    return through_anchors(fit.anchor_ticks, fit.anchor_ns, ticks)


def lowest_readers(ranks: Sequence[Rank], clock_of: Int32) -> list[Rank]:
    """The rank that each clock goes by, with the coarsest ticks of all that read the clock."""
    ticks: dict[int, int] = {}
    for rank in ranks:
        clock = int(clock_of[rank.rank])
        ticks[clock] = max(ticks.get(clock, 1), rank.resolution_ticks)
    return [
        dataclasses.replace(rank, resolution_ticks=ticks[rank.rank])
        for rank in ranks
        if clock_of[rank.rank] == rank.rank
    ]


def _times_on_axis(fits: Mapping[int, ClockFit], spans: SpansTicks) -> dict[int, tuple[int, int]]:
    """rank -> (first, last) axis ns of its events."""
    times = {rank: apply_clock(fits[rank], np.array(span, np.int64)) for rank, span in spans.items() if rank in fits}
    return {rank: (int(first), int(last)) for rank, (first, last) in times.items()}


def _spans_of_clocks(spans: SpansTicks, ranks: Sequence[Rank], clock_of: Int32) -> dict[int, tuple[int, int]]:
    """clock -> (first, last) tick of all its ranks."""
    joined: dict[int, tuple[int, int]] = {}
    for rank in ranks:
        if rank.rank in spans:
            (first, last), clock = spans[rank.rank], int(clock_of[rank.rank])
            known = joined.get(clock, (first, last))
            joined[clock] = min(first, known[0]), max(last, known[1])
    return joined


def _rows_of_clocks(samples: npt.NDArray[Any], ranks: Sequence[Rank], clock_of: Int32) -> npt.NDArray[Any]:
    """The samples of these ranks, by clock instead of rank. Between ranks of one clock ping-pong has nothing to say."""
    known = [rank.rank for rank in ranks]
    rows = samples[np.isin(samples["initiator"], known) & np.isin(samples["responder"], known)]
    is_between = (rows["kind"] == SampleKind.PING_PONG) & (rows["initiator"] != rows["responder"])
    for end in ("initiator", "responder"):
        rows[end] = clock_of[rows[end]]
    kept: npt.NDArray[Any] = rows[~is_between | (rows["initiator"] != rows["responder"])]
    return kept


def _clock_of(samples: npt.NDArray[Any], rank: Rank, spans: Mapping[int, tuple[int, int]]) -> LocalClock:
    """The clock of a rank, counted from a tick near all others. Raises BadInput where its samples lie years apart."""
    ping_pong, bracket = samples["kind"] == SampleKind.PING_PONG, samples["kind"] == SampleKind.HOST_BRACKET
    initiated = samples[ping_pong & (samples["initiator"] == rank.rank)]
    answered = samples[(ping_pong | bracket) & (samples["responder"] == rank.rank)]
    stamps = np.concatenate([initiated["t0"], initiated["t3"], answered["t1"], answered["t2"]])
    if not len(stamps):
        return LocalClock.of(rank, spans.get(rank.rank, (0, 0))[0])
    first, last = int(stamps.min()), int(stamps.max())
    if (last - first) / rank.ticks_per_second > MAX_SAMPLED_S:
        raise BadInput(
            f"clock samples of rank {rank.rank} (node {rank.node}) lie from {first} to {last} ticks, wanted at most a "
            "year: a dump is damaged or the device clock was set: record again, or merge with --unaligned"
        )
    return LocalClock.of(rank, first)


def _relate_all(
    bursts: Sequence[Burst], clocks: Mapping[int, LocalClock], ranks: Sequence[Rank], clock_of: Int32
) -> tuple[int, dict[int, _Relation]]:
    """The reference, and the relation of every other clock to it.

    The reference is the lowest of the clocks that were sampled most often (a rank that died early would be a poor axis)
    unless most others contradict it: then it is the one that jumped, and not they.
    """
    num_rounds = {clock: len({b.round_idx for b in bursts if clock in (b.low, b.high)}) for clock in clocks}
    candidates = [clock for clock in sorted(clocks) if num_rounds[clock] == max(num_rounds.values())]
    found = {}
    for reference in candidates:
        rounds = [solve_round([b for b in bursts if b.round_idx == i], reference) for i in _round_indices(bursts)]
        _refuse_unrelated(ranks, clock_of, rounds, reference)
        relations = {
            clock: _relate(rounds, bursts, clocks[clock], clocks[reference])
            for clock in sorted(clocks.keys() - {reference})
        }
        found[reference] = relations
        if sum(relation.has_stepped for relation in relations.values()) * 2 <= len(relations):
            break
    reference = min(found, key=lambda one: sum(relation.has_stepped for relation in found[one].values()))
    return reference, found[reference]


def _round_indices(bursts: Sequence[Burst]) -> list[int]:
    return sorted({burst.round_idx for burst in bursts})


def _refuse_unrelated(ranks: Sequence[Rank], clock_of: Int32, rounds: Sequence[RoundFit], reference: int) -> None:
    clocks = {reference}.union(*(r.offsets for r in rounds))
    related = {rank.rank for rank in ranks if clock_of[rank.rank] in clocks}
    for rank in ranks:
        if rank.rank not in related:
            raise UnrelatedClocks(
                f"rank {rank.rank} (node {rank.node}): no clock samples relate it to rank {reference}; got samples "
                f"that relate ranks {sorted(related)}, wanted all {len(ranks)}; record with clock sampling on, name "
                "the dumps of the other ranks and --partial, or merge with --unaligned"
            )


def _relate(rounds: Sequence[RoundFit], bursts: Sequence[Burst], clock: LocalClock, reference: LocalClock) -> _Relation:
    seen = [(r.time, r.offsets[clock.rank], r.round_idx) for r in rounds if clock.rank in r.offsets]
    time, offset, error = np.array([(time, offset.value, offset.error) for time, offset, _ in seen]).T
    course = Course(time, offset, error, MAX_RATE, MAX_WANDER_PER_NS)
    _refuse_rounds_out_of_order(course, clock, reference)
    own = [burst for burst in bursts if clock.rank in (burst.low, burst.high)]
    spread = {index: float(np.median([b.spread for b in own if b.round_idx == index])) for _, _, index in seen}
    sigma = np.array([spread[index] for _, _, index in seen])
    steadiness = judge_pieces(time, offset, sigma, error - error.min(), MAX_WANDER_PER_NS)
    closure = float(np.sqrt(np.mean([offset.closure**2 for _, offset, _ in seen])))
    sigma_ns = float(np.hypot(np.median([burst.spread for burst in own]), closure))
    return _Relation(dataclasses.replace(course, doubt_ns=steadiness.doubt_ns), steadiness, sigma_ns, clock, reference)


def _refuse_rounds_out_of_order(course: Course, clock: LocalClock, reference: LocalClock) -> None:
    """On both clocks each is to be some ticks after the one before: their map goes from round to round."""
    gaps = [float(np.diff(times).min(initial=np.inf)) for times in (course.time, course.time + course.offset)]
    if min(gaps) < 2 * max(clock.ns_per_tick, reference.ns_per_tick):
        raise BadInput(
            f"clock samples: a round of ranks {reference.rank} and {clock.rank} is {min(gaps):.0f} ns after the one "
            "before, wanted one well after the other; a dump is damaged: record again, or merge with --unaligned"
        )


@dataclass(frozen=True)
class _Relation:
    """One clock, its course beside the reference's, and what that proves."""

    course: Course
    steadiness: Steadiness
    sigma_ns: float
    """How well round trips repeat, and what the pairs miss the least-squares solution by."""
    clock: LocalClock
    reference: LocalClock

    @property
    def has_stepped(self) -> bool:
        return bool(self.steadiness.is_contradicted.any())

    def times(self, ticks: tuple[int, int]) -> tuple[float, float]:
        """(first, last) tick of the clock as times of the course."""
        first, last = self.clock.to_ns(np.array(ticks, np.int64)) - self.course.offset[[0, -1]]
        return float(first), float(last)

    def hard_ns(self, first: float, last: float) -> float:
        """A tick means any moment up to the next one, on either clock; 1 ns for rounding anchors and results."""
        return self.course.error_within(first, last) + self.clock.resolution_ns + self.reference.resolution_ns + 1

    def fit(self, span: tuple[int, int] | None) -> ClockFit:
        course = self.course
        _, (axis_base, _) = _scale_anchors(self.reference)
        ticks, ns = [], []
        for time, offset in zip(*course.anchors(), strict=True):
            elapsed_ticks = round((time + offset) / self.clock.ns_per_tick)
            # At that whole tick, not at the time itself: a tick of 40 ns must not cost 20 ns.
            ticks.append(self.clock.base_ticks + elapsed_ticks)
            ns.append(axis_base + round(elapsed_ticks * self.clock.ns_per_tick - offset))
        first, last = (float(course.time[0]), float(course.time[-1])) if span is None else self.times(span)
        hard_ns = self.hard_ns(first, last)
        steady = dataclasses.replace(course, doubt_ns=0.0)
        likely_ns = COVERED_SIGMAS * self.sigma_ns
        likely = dataclasses.replace(steady, error=np.full(len(course.time), likely_ns))
        return ClockFit(
            "ping-pong",
            hard_ns,
            self.sigma_ns,
            tuple(ticks),
            tuple(ns),
            rate_error=course.rate_error_within(first, last),
            wander_ns=likely.error_within(first, last) - likely_ns,
            doubt_ns=course.error_within(first, last) - steady.error_within(first, last),
            steps=tuple(self._steps(axis_base)),
            is_checked=self._hidden_ns(first, last) <= hard_ns,
        )

    def _steps(self, axis_base: int) -> Iterator[ClockStep]:
        """One for each run of pieces that contradict the others."""
        time, at_fault = self.course.time, self.steadiness.is_contradicted
        edges = np.flatnonzero(np.diff(at_fault, prepend=False, append=False))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            jump_ns = float(self.steadiness.doubt_ns[begin:end].max())
            yield ClockStep(axis_base + round(time[begin]), axis_base + round(time[end]), jump_ns)

    def _hidden_ns(self, first: float, last: float) -> float:
        """The largest jump that the rounds would not show between two times; inf beyond them."""
        time = self.course.time
        if first < time[0] or last > time[-1]:
            return np.inf
        touched = (time[1:] >= first) & (time[:-1] <= last)
        return float(self.steadiness.hidden_ns[touched].max(initial=0.0))


def _fit_reference(clock: LocalClock) -> ClockFit:
    ticks, ns = _scale_anchors(clock)
    return ClockFit("reference", 0.0, 0.0, ticks, ns)


def _scale_anchors(clock: LocalClock) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two anchors of a clock that is its own axis: base ticks and a second later, in exact arithmetic."""
    ticks = (clock.base_ticks, clock.base_ticks + round(clock.ticks_per_second))
    first, second = (round(Fraction(tick * _SECOND) / clock.ticks_per_second) for tick in ticks)
    return ticks, (first, second)

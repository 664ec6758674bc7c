"""Whether a clock kept its rate: rounds that follow each other, compared piece by piece.

Between two rounds the course of a clock is a straight line, a piece. What happened inside it cannot be seen from its
two ends, but its slope can be held against those of its neighbours: a clock that jumped by J inside a piece of length T
gives it a slope that is wrong by J / T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Float64

COVERED_SIGMAS = 3.0
"""A `sigma` is one standard deviation. In 100 captures on the CPU no error was above 2.8 of them and a tick."""
NOMINAL_WANDER_PER_NS = 0.04e-6 / 1e9
"""The rate between two sound clocks changes by no more than 0.04 ppm in a second: three times what 8 H200 showed."""
_NOMINAL_BEND, _MAX_BEND = 0.25, 0.35
"""Shares of what a rate may change within a time by which it may leave a straight course during it."""
_SHARP_SLOPE = 0.1e-6
"""Pieces over which the noise of two rounds gives no larger error of the slope are long enough to be compared."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Steadiness:
    """[k - 1] columns for the pieces between k rounds."""

    doubt_ns: Float64
    """The clock may have jumped by so much inside the piece; 0 where its slope is that of a sound clock."""
    is_contradicted: Bools
    """Slopes differ by more than any rate is assumed to wander: the clock jumped, or changed its rate at once."""
    hidden_ns: Float64
    """A jump up to this size may not be seen; inf for a piece without a neighbour."""


def judge_pieces(time: Float64, offset: Float64, sigma: Float64, vague: Float64, max_wander: float) -> Steadiness:
    """Compares the slopes of neighbouring pieces.

    time, offset: [k] ns of the rounds. sigma: [k] standard deviation of the offsets. vague: [k] by how many ns the
    bound of a round is wider than that of the best: what its offset may be wrong by on top. max_wander: the rate
    changes by no more, per ns.

    Pieces that differ by up to max_wander and COVERED_SIGMAS of what their rounds repeat by contradict nothing. Where
    they differ by more than sound clocks do, a jump may hide there all the same, and counts as doubt.
    """
    kept = _far_enough(time, sigma)
    if len(kept) < 3 or np.diff(time).min() <= 0:  # rounds out of order are refused elsewhere
        num_pieces = len(time) - 1
        return Steadiness(np.zeros(num_pieces), np.zeros(num_pieces, np.bool_), np.full(num_pieces, np.inf))
    slopes = _Slopes.of(time[kept], offset[kept], sigma[kept], vague[kept])
    is_doubted = slopes.at_fault(NOMINAL_WANDER_PER_NS, bends=True)
    # Beside a course of several pieces a jump shows that could be a rate that wanders beside a single one.
    leaves = [len(slopes) > 2 and not slopes.continues(n, _MAX_BEND * max_wander) for n in range(len(slopes))]
    is_contradicted = slopes.at_fault(max_wander, bends=False) | (is_doubted & np.array(leaves, np.bool_))
    is_doubted |= is_contradicted
    # Where one event is proven there may be two: the next piece may be wrong, too.
    spreads = [slopes.spread(n, 2 if is_contradicted[n] else 1) if is_doubted[n] else 0.0 for n in range(len(slopes))]
    hidden = [slopes.hidden(n) for n in range(len(slopes))]
    gap, pieces = np.diff(time[kept]), np.searchsorted(kept, np.arange(len(time) - 1), side="right") - 1
    doubt_ns, hidden_ns = np.array(spreads) * gap, np.array(hidden) * gap
    return Steadiness(doubt_ns[pieces], is_contradicted[pieces], hidden_ns[pieces])


def _far_enough(time: Float64, sigma: Float64) -> npt.NDArray[np.int64]:
    """Rounds that are far enough from each other for a slope, the first and the last among them; all if too few are."""
    shortest = min(
        COVERED_SIGMAS * np.sqrt(2) * float(np.median(sigma)) / _SHARP_SLOPE, np.diff(time).max(initial=0) / 2
    )
    kept = [0]
    for index in range(1, len(time)):
        if time[index] - time[kept[-1]] >= shortest:
            kept.append(index)
    if kept[-1] != len(time) - 1:
        kept[-1] = len(time) - 1
    return np.array(kept if len(kept) > 2 else range(len(time)), np.int64)


@dataclass(frozen=True)
class _Slopes:
    middle: Float64
    """[k - 1] ns"""
    slope: Float64
    from_offsets: Float64
    """[k - 1, k] slope = from_offsets @ offset"""
    sigma: Float64
    vague: Float64

    @classmethod
    def of(cls, time: Float64, offset: Float64, sigma: Float64, vague: Float64) -> _Slopes:
        from_offsets = np.diff(np.eye(len(time)), axis=0) / np.diff(time)[:, None]
        return cls((time[:-1] + time[1:]) / 2, from_offsets @ offset, from_offsets, sigma, vague)

    def __len__(self) -> int:
        return len(self.slope)

    def noise(self, piece: int, expected: dict[int, float]) -> float:
        """By how much a slope may differ from what others, by weights, let expect, if no rate wandered."""
        of_offsets = self.from_offsets[piece] - sum(weight * self.from_offsets[n] for n, weight in expected.items())
        return float(COVERED_SIGMAS * np.linalg.norm(of_offsets * self.sigma) + np.abs(of_offsets) @ self.vague)

    def tolerance(self, one: int, other: int, wander: float) -> float:
        return wander * abs(float(self.middle[one] - self.middle[other])) + self.noise(one, {other: 1.0})

    def agree(self, one: int, other: int, wander: float) -> bool:
        return bool(abs(self.slope[one] - self.slope[other]) <= self.tolerance(one, other, wander))

    def around(self, piece: int, reach: int) -> list[int]:
        return [n for n in range(piece - reach, piece + reach + 1) if n != piece and 0 <= n < len(self)]

    def spread(self, piece: int, reach: int) -> float:
        """By how much the slope differs from those around, at most."""
        others = self.around(piece, reach)
        return max(abs(float(self.slope[piece] - self.slope[n])) + self.noise(piece, {n: 1.0}) for n in others)

    def hidden(self, piece: int) -> float:
        return min(self.tolerance(piece, n, NOMINAL_WANDER_PER_NS) for n in self.around(piece, 1))

    def at_fault(self, wander: float, bends: bool) -> Bools:
        """[k - 1] pieces in which something happened, if rates wander by no more than that.

        bends: a piece whose slope continues that of two others is sound, as where a rate wanders steadily.
        """
        last = len(self) - 1
        differs = [not self.agree(n, n + 1, wander) for n in range(last)]
        left, right = [False, *differs], [*differs, False]
        # A piece that differs from both its neighbours, which agree with each other, is alone at fault.
        alone = [left[n] and right[n] and self.agree(n - 1, n + 1, wander) for n in range(last + 1)]
        excused = [bends and self.continues(n, _NOMINAL_BEND * wander) for n in range(last + 1)]
        fault = np.array(alone, np.bool_)
        for n in range(last + 1):
            from_left = n == 0 or (left[n] and not alone[n - 1])
            from_right = n == last or (right[n] and not alone[n + 1])
            fault[n] |= from_left and from_right and not excused[n]
        for n in np.flatnonzero(differs).tolist():
            if not fault[n] and not fault[n + 1]:
                fault[n], fault[n + 1] = not excused[n], not excused[n + 1]
        return fault

    def continues(self, n: int, bend: float) -> bool:
        """Whether a slope lies on the line through those of both its neighbours, or of the next two at an end."""
        last = len(self) - 1
        if last < 2:
            return False
        one, other = (n - 1, n + 1) if 0 < n < last else (1, 2) if n == 0 else (last - 1, last - 2)
        share = float((self.middle[other] - self.middle[n]) / (self.middle[other] - self.middle[one]))
        expected = share * self.slope[one] + (1 - share) * self.slope[other]
        farthest = max(abs(float(self.middle[side] - self.middle[n])) for side in (one, other))
        allowed = bend * farthest + self.noise(n, {one: share, other: 1 - share})
        return bool(abs(self.slope[n] - expected) <= allowed)

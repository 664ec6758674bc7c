"""How two clocks run beside each other, from rounds at which their difference was bounded: a piecewise linear map.

What lies between two rounds and beyond them is bounded by two assumptions on the clocks, which the user of a course
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Float64, Int64

_SECOND = 10**9


def through_anchors(at: Sequence[int], to: Sequence[int], times: Int64) -> Int64:
    """[n] int64 times of one clock as times of another, exact to less than 1 ns whatever their size.

    at, to: anchors of the two clocks that belong together, two at least; beyond them the outer slopes go on.
    """
    from_, onto = np.array(at, np.int64), np.array(to, np.int64)
    piece = np.clip(np.searchsorted(from_, times, side="right") - 1, 0, len(from_) - 2)
    slope = np.diff(onto) / np.diff(from_)
    mapped: Int64 = onto[piece] + np.rint((times - from_[piece]) * slope[piece]).astype(np.int64)
    return mapped


@dataclass(frozen=True)
class Course:
    """One clock minus another at the rounds: [k] columns in ns, from bases of their own."""

    time: Float64
    offset: Float64
    error: Float64
    """The truth lies within +-error of offset."""
    max_rate: float
    """Assumed: the two clocks' rates differ by no more."""
    max_wander: float
    """Assumed: that difference changes by no more, per ns, between two rounds."""
    min_baseline: float = 0.0
    """Rounds that are closer together give no slope to extrapolate."""
    doubt_ns: Float64 | float = 0.0
    """[k - 1] by how much the clock may have jumped inside each piece (steadiness.py)."""

    def outer_slope(self, first: bool) -> tuple[float, float]:
        """(slope, error) to go on with before the first or after the last round."""
        near = 0 if first else len(self.time) - 1
        distances = np.abs(self.time - self.time[near])
        others = np.flatnonzero(distances > self.min_baseline)
        if len(others):
            far = others[0 if first else -1]
            distance = distances[far]
            slope = (self.offset[far] - self.offset[near]) / (self.time[far] - self.time[near])
            error = (self.error[far] + self.error[near]) / distance + self.max_wander * distance / 2
            error += (self._doubts() / np.diff(self.time))[min(near, far) : max(near, far)].max()
            if abs(slope) <= self.max_rate:
                return float(slope), float(min(error, self.max_rate + abs(slope)))
        return 0.0, self.max_rate

    def anchors(self) -> tuple[Float64, Float64]:
        """(time, offset) at the rounds and a second before and after them, which holds the slope to go on with."""
        before, after = self.time[0] - _SECOND, self.time[-1] + _SECOND
        first = self.offset[0] - self.outer_slope(first=True)[0] * _SECOND
        last = self.offset[-1] + self.outer_slope(first=False)[0] * _SECOND
        return np.array([before, *self.time, after]), np.array([first, *self.offset, last])

    def error_within(self, first: float, last: float) -> float:
        """Largest error of the piecewise linear map between two times.

        The errors at both ends of a piece bound it in between: their chord, and what a rate that wanders makes of it.
        A jump by J moves what lies after it by J, and the line through both ends by its share of the piece before it.
        """
        begin, end, touched = self._pieces(first, last)
        from_, to = np.maximum(begin, first)[touched], np.minimum(end, last)[touched]
        begin, end, doubt = begin[touched], end[touched], self._doubts()[touched]
        chord = np.maximum(np.interp(from_, self.time, self.error), np.interp(to, self.time, self.error))
        widest = np.clip((begin + end) / 2, from_, to)
        pieces = chord + self.max_wander / 2 * (widest - begin) * (end - widest)
        pieces += doubt * np.maximum(to - begin, end - from_) / (end - begin)
        inside = self.error[(self.time >= first) & (self.time <= last)]
        worst = max(float(pieces.max(initial=0.0)), float(inside.max(initial=0.0)))
        for distance, is_first in self._outside(first, last):
            _, slope_error = self.outer_slope(is_first)
            near = float(self.error[0 if is_first else -1])
            worst = max(worst, near + slope_error * distance + self.max_wander * distance**2 / 2)
        return worst

    def rate_error_within(self, first: float, last: float) -> float:
        """Largest error of the slope of that map between two times."""
        begin, end, touched = self._pieces(first, last)
        gaps = end - begin
        pieces = (self.error[:-1] + self.error[1:] + self._doubts()) / gaps + self.max_wander * gaps / 2
        pieces = np.minimum(pieces, self.max_rate + np.abs(np.diff(self.offset) / gaps))[touched]
        worst = float(pieces.max(initial=0.0))
        for distance, is_first in self._outside(first, last):
            worst = max(worst, self.outer_slope(is_first)[1] + self.max_wander * distance)
        return worst

    def _doubts(self) -> Float64:
        return np.broadcast_to(np.asarray(self.doubt_ns, np.float64), len(self.time) - 1)

    def _pieces(self, first: float, last: float) -> tuple[Float64, Float64, npt.NDArray[np.bool_]]:
        """([k - 1] begin, end of the pieces between rounds, whether [first, last] touches them)"""
        return self.time[:-1], self.time[1:], (self.time[1:] >= first) & (self.time[:-1] <= last)

    def _outside(self, first: float, last: float) -> list[tuple[float, bool]]:
        """(how far, whether before the first round) for what of [first, last] lies beyond the rounds."""
        beyond = ((float(self.time[0] - first), True), (float(last - self.time[-1]), False))
        return [(distance, is_first) for distance, is_first in beyond if distance > 0]

"""Does the machine drift from launch to launch? Where one side was launched after the other, that looks like a change.

Exchangeable launches have no order, so the tests of gate/permutation.py cannot see a drift. Here the order counts: the
slope within the sides, where nothing but a drift can make one, and what it adds from the middle of base to the middle
of head. Launches of both sides that alternate have middles close together, and a drift adds nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.gate.permutation import Floats

ERROR = 0.005
"""Probability that, without a drift, the slope of any metric is called certain; the same again for all together."""
_LIKELY = 0.1  # of either sign: 5 times in 100 of the sign that looks like the change
_NUM_ORDERS = 2000
_SEED = 20_041_117
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trend:
    slope: Floats
    """[m] growth of the logarithm from one launch to the next: the median over all pairs of launches within a side
    (Theil and Sen), which one disturbed launch in five hardly moves."""
    drift: Floats
    """[m] what that slope adds from the middle launch of base to the middle launch of head."""
    is_certain: npt.NDArray[np.bool_]
    """[m] whether chance explains no such slope in any metric: Kendall's tau of both sides together, the largest of all
    metrics and their sum, among other orders of the launches within the sides."""

    is_likely: npt.NDArray[np.bool_]
    """[m] whether chance makes so large a tau of that metric 5 times in 100 at most."""

    def explains(self, change: Floats, floor: Floats, regressed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Returns for which metrics no verdict is possible, [m]: most of what regressed is likely drift, or a certain
        drift is above the floor. change, floor: [m] logarithmic."""
        return (regressed & self.is_likely & (2 * self.drift > change)) | (
            self.is_certain & (np.abs(self.drift) > floor)
        )


def find_trend(base: Floats, head: Floats, places: tuple[Places, Places]) -> Trend:
    """Returns the trend within the sides. base: [num_base, m], head: [num_head, m] logarithms; places: of the launches
    of base and of head in the order of all."""
    slopes, signs = [], []
    for side, place in zip((base, head), places, strict=True):
        in_order, at = side[np.argsort(place)], np.sort(place)
        first, second = np.triu_indices(len(side), 1)
        steps = (in_order[second] - in_order[first]) / (at[second] - at[first])[:, None]
        slopes.append(steps)
        signs.append(np.sign(steps))
    slope = np.median(np.concatenate(slopes), axis=0)
    score = _orders(len(base), len(head)) @ np.concatenate(signs)
    of_any, of_all = np.abs(score).max(axis=1, initial=0), np.abs(score.sum(axis=1))
    is_one = np.mean(of_any[:, None] >= np.abs(score[0]), axis=0) <= ERROR
    is_common = np.mean(of_all >= of_all[0]) <= ERROR
    is_likely = np.mean(np.abs(score) >= np.abs(score[0]), axis=0) <= _LIKELY
    return Trend(slope, slope * (places[1].mean() - places[0].mean()), is_one | is_common, is_likely)


@functools.lru_cache(maxsize=8)
def _orders(num_base: int, num_head: int) -> Floats:
    """Returns for orders of the launches within each side, the observed one first, which of each pair of a side came
    first: [orders, pairs], 1 as observed, -1 the other way round."""
    rng = np.random.default_rng(_SEED)
    sides = []
    for num in (num_base, num_head):
        place = rng.permuted(np.tile(np.arange(num), (_NUM_ORDERS, 1)), axis=1)
        place[0] = np.arange(num)
        first, second = np.triu_indices(num, 1)
        sides.append(np.sign(place[:, second] - place[:, first]))
    return np.concatenate(sides, axis=1).astype(np.float64)

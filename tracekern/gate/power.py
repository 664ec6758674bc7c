"""What a comparison of so many launches can see: the real tests on simulated launches that spread like those at hand.

The launches are normal on a logarithmic scale and the metrics independent. Disturbed launches are left out of the
spread, as they are out of the tests; where there are many of them, less is caught than this says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tracekern.gate.permutation import Floats, labelings, largest_t, num_fast, shift_interval

GROWTH = 0.15
"""The growth whose chance to be caught is printed."""
_NUM_CHECKS = 600
_NUM_LABELINGS = 50_000  # behind the t that a growth has to reach, over all draws
_RATIOS = np.geomspace(0.25, 60, 140)  # growth over spread: below the first none is caught, above the last each
_SEED = 20_251_125
_LEAST_SPREAD = 1e-9


@dataclass(frozen=True)
class Power:
    """What checks of num_base against num_head launches catch, in units of the spread of their logarithms."""

    is_clear: Floats
    """[ratios, checks] probability that a growth of so many spreads has a p of at most the family error."""
    low: Floats
    """[checks] lower end of the interval where nothing grew."""
    spreads: tuple[Floats, Floats]
    """[checks] the spread measured on base alone and on both sides, where it is 1."""

    def caught(self, growth: float, spread: Floats, floor: Floats) -> Floats:
        """Returns the probability, [m], that a logarithmic growth is found to regress. spread, floor: [m]."""
        is_clear = self.is_clear[_place(growth / spread)]
        found: Floats = (is_clear * (growth + spread[:, None] * self.low > floor[:, None])).mean(axis=1)
        return found

    def smallest(self, spread: Floats, floor: Floats) -> Floats:
        """Returns the logarithmic growth, [m], that 95 of 100 checks find to regress."""
        result = []
        for one_spread, one_floor in zip(spread, floor, strict=True):
            is_above = _RATIOS[:, None] + self.low > 0  # the ratios count from the floor
            power = (self.is_clear[_place(_RATIOS + one_floor / one_spread)] * is_above).mean(axis=1)
            beyond = np.interp(0.95, np.maximum.accumulate(power), _RATIOS)
            result.append(one_floor + one_spread * beyond)
        return np.array(result)

    def spread(self, base: Floats, head: Floats | None = None, holds: float = 0.5) -> Floats:
        """Returns the standard deviation, [m], that the true one is below with probability `holds`.

        base, head: [num_runs, m] logarithms. Few launches may underestimate it, so a plan takes a larger `holds`.
        """
        measured = _spread(base) if head is None else _spread(base, head)
        of_noise = self.spreads[head is not None]
        return np.maximum(measured / np.quantile(of_noise, 1 - holds), _LEAST_SPREAD)


@functools.lru_cache(maxsize=16)
def power_of(num_base: int, num_head: int, num_metrics: int, family_error: float) -> Power:
    """Simulates checks of `num_metrics` metrics of which one grew."""
    rng = np.random.default_rng(_SEED)
    heads = labelings(num_base, num_head)
    grain = np.zeros(1)
    needed = []
    for _ in range(max(4, _NUM_LABELINGS // len(heads))):
        t = largest_t(rng.standard_normal((num_base + num_head, num_metrics)), heads, grain).max(axis=1)
        num_above = int(family_error * len(heads))  # labelings that may exceed a t with that p, itself among them
        needed.append(np.sort(t)[-max(num_above, 1)])
    base = rng.standard_normal((num_base, _NUM_CHECKS))
    head = rng.standard_normal((num_head, _NUM_CHECKS))
    clear = []
    for ratio in _RATIOS:
        (t,) = largest_t(np.concatenate([base, head + ratio]), heads[:1], grain)
        clear.append(np.searchsorted(np.sort(needed), t, side="right") / len(needed))
    return Power(np.array(clear), shift_interval(base, head)[0], (_spread(base), _spread(base, head)))


def _place(ratio: Floats) -> Floats:
    return np.clip(np.searchsorted(_RATIOS, ratio, side="right") - 1, 0, len(_RATIOS) - 1)


def _spread(*sides: Floats) -> Floats:
    """Returns the standard deviation within the sides, [m], of all but the slowest quarter of each."""
    fast = [np.sort(side, axis=0)[: num_fast(len(side))] for side in sides]
    squares = sum(((side - side.mean(axis=0)) ** 2).sum(axis=0) for side in fast)
    result: Floats = np.sqrt(squares / sum(len(side) - 1 for side in fast))
    return result

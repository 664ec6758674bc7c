"""One round of clock samples: from differences of pairs to offsets of ranks, and what the whole graph proves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.formatting import duration
from tracekern.timeline.clocks.pairs import Burst
from tracekern.timeline.model import Float64


@dataclass(frozen=True)
class Offset:
    """Clock of a rank minus clock of the reference, each in ns from its base."""

    value: float
    error: float
    """The truth lies within +-error of value."""
    closure: float
    """Weighted root mean square by which the pairs of this rank miss the offsets: 0 if paths are symmetric."""


@dataclass(frozen=True)
class RoundFit:
    round_idx: int
    time: float
    """ns on the reference's clock to which the offsets apply."""
    offsets: dict[int, Offset]
    """Rank -> offset, for ranks that a path of pairs joins to the reference in this round."""


def solve_round(bursts: Sequence[Burst], reference: int) -> RoundFit:
    """Offsets of all ranks at one moment: least squares over the pairs, held inside what the intervals prove together.

    Raises BadInput when the intervals contradict each other around a cycle of ranks.
    """
    coarse = _coarse_offsets(bursts, reference)
    joined = [burst for burst in bursts if burst.low in coarse]
    if not joined:
        return RoundFit(-1, 0.0, {})
    # The bursts of a round are taken one after the other: carry them all to one moment.
    time = float(np.median([burst.at - coarse[burst.low] for burst in joined]))
    intervals = np.array([burst.interval_at(time + coarse[burst.low]) for burst in joined])
    ranks = sorted(coarse)
    place = {rank: index for index, rank in enumerate(ranks)}
    low = np.array([place[burst.low] for burst in joined])
    high = np.array([place[burst.high] for burst in joined])
    at_most = _tightest(low, high, intervals, ranks, joined[0].round_idx)
    origin = place[reference]
    upper, lower = at_most[origin, :], -at_most[:, origin]
    # A pair weighs as much as its interval is narrow: one that was preempted all the time says next to nothing.
    weights = 1.0 / (intervals[:, 1] - intervals[:, 0] + 1.0)
    offsets, residuals = _least_squares(low, high, intervals.mean(axis=1), weights, origin, len(ranks))
    offsets = np.clip(offsets, lower, upper)
    errors = np.maximum(upper - offsets, offsets - lower)
    own = [(low == i) | (high == i) for i in range(len(ranks))]
    closure = [float(np.sqrt(np.average(residuals[pairs] ** 2, weights=weights[pairs] ** 2))) for pairs in own]
    return RoundFit(
        joined[0].round_idx,
        time,
        {
            rank: Offset(float(offsets[i]), float(errors[i]), closure[i])
            for i, rank in enumerate(ranks)
            if rank != reference
        },
    )


def _coarse_offsets(bursts: Sequence[Burst], reference: int) -> dict[int, float]:
    """Offsets along the sharpest tree from the reference: good enough to convert times, and they show who is joined."""
    offsets = {reference: 0.0}
    waiting = sorted(bursts, key=lambda burst: burst.width)
    while True:
        burst = next((b for b in waiting if (b.low in offsets) != (b.high in offsets)), None)
        if burst is None:
            return offsets
        if burst.low in offsets:
            offsets[burst.high] = offsets[burst.low] + burst.middle
        else:
            offsets[burst.low] = offsets[burst.high] - burst.middle


def _tightest(
    low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], intervals: Float64, ranks: Sequence[int], round_idx: int
) -> Float64:
    """[n, n] least upper bound of clock column minus clock row over all paths (Floyd and Warshall)."""
    at_most = np.full((len(ranks), len(ranks)), np.inf)
    np.fill_diagonal(at_most, 0.0)
    at_most[low, high] = intervals[:, 1]
    at_most[high, low] = -intervals[:, 0]
    for via in range(len(ranks)):
        at_most = np.minimum(at_most, at_most[:, via, None] + at_most[None, via, :])
    slack = at_most + at_most.T
    if slack.min() < -1.0:
        worst = np.argmin(slack[low, high])
        one, other = low[worst], high[worst]
        raise BadInput(
            f"clock samples: those of ranks {ranks[one]} and {ranks[other]} in round {round_idx} contradict the way "
            f"round over other ranks by {duration(-slack[one, other])}; a device clock was set while sampling: record "
            "again, or merge with --unaligned"
        )
    return at_most


def _least_squares(
    low: npt.NDArray[np.int64],
    high: npt.NDArray[np.int64],
    middles: Float64,
    weights: Float64,
    origin: int,
    num_ranks: int,
) -> tuple[Float64, Float64]:
    """([n] offsets, [pairs] residuals)"""
    design = np.zeros((len(middles), num_ranks))
    design[np.arange(len(middles)), high] = 1.0
    design[np.arange(len(middles)), low] = -1.0
    free = np.arange(num_ranks) != origin
    offsets = np.zeros(num_ranks)
    offsets[free] = np.linalg.lstsq(design[:, free] * weights[:, None], middles * weights, rcond=None)[0]
    return offsets, middles - design @ offsets

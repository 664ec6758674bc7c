"""What the round trips between two ranks prove about the difference of their clocks, round by round.

Every clock is counted in ns from a base of its own, int64 differences before floats, so that nothing is lost at 1e18.
The `difference` of a pair (low, high) is clock high minus clock low, as a function of time on clock low.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import MAX_NS, SampleKind
from tracekern.errors import BadInput
from tracekern.formatting import duration
from tracekern.timeline.clocks.steadiness import judge_pieces
from tracekern.timeline.model import Float64, Rank

MAX_RATE = 20e-6
"""Assumed: no two device clocks drift apart faster than this (measured on 8 H200: 3.9e-6)."""
MAX_WANDER_PER_NS = 0.1e-6 / 1e9
"""Assumed: the rate between two device clocks changes by at most 0.1 ppm in a second (measured on 8 H200: 0.012)."""

_LEADING_FRACTION = 0.1
_MIN_LEADING = 8


@dataclass(frozen=True)
class LocalClock:
    """Ticks of one rank as ns since its base."""

    rank: int
    base_ticks: int
    ticks_per_second: Fraction
    resolution_ns: float

    @classmethod
    def of(cls, rank: Rank, base_ticks: int) -> LocalClock:
        rate = Fraction(rank.ticks_per_second)
        if abs(base_ticks) * 10**9 > MAX_NS * rate:
            raise BadInput(f"rank {rank.rank}: a clock sample at {base_ticks} ticks is beyond 2^62 ns; damaged")
        return cls(rank.rank, base_ticks, rate, rank.resolution_ns)

    @property
    def ns_per_tick(self) -> float:
        return float(10**9 / self.ticks_per_second)

    def to_ns(self, ticks: Any) -> Float64:
        """[n] float64 ns since the base, of [n] int64 ticks."""
        elapsed_ticks = np.asarray(ticks, np.int64) - self.base_ticks
        return elapsed_ticks.astype(np.float64) * self.ns_per_tick


@dataclass(frozen=True)
class Bounds:
    """One side of every round trip: at `time` on clock low the difference is at most (or at least) `value`."""

    time: Float64
    value: Float64

    def moved(self, to: float, slope: float) -> Float64:
        """[n] values at the time `to` for a difference that changes by `slope`."""
        return self.value - slope * (self.time - to)


@dataclass(frozen=True)
class Burst:
    """All round trips of one pair in one round, and what they prove at the time `at` on clock low."""

    low: int
    high: int
    round_idx: int
    upper: Bounds
    lower: Bounds
    at: float
    at_most: float = np.inf
    at_least: float = -np.inf
    slope: float = 0.0
    slope_error: float = MAX_RATE
    """The true slope near `at` lies within +-slope_error of `slope`."""
    tick_spread: float = 0.0
    """Standard deviation that the resolution of the two clocks alone gives a midpoint, ns."""
    spread: float = 0.0
    """Standard deviation of the midpoints of the fastest round trips, by their median deviation, ns."""

    @property
    def middle(self) -> float:
        return (self.at_most + self.at_least) / 2

    @property
    def width(self) -> float:
        return self.at_most - self.at_least

    def interval_at(self, time: float) -> tuple[float, float]:
        """(at least, at most) at another time on clock low."""
        distance = time - self.at
        doubt = self.slope_error * abs(distance)
        return self.at_least + self.slope * distance - doubt, self.at_most + self.slope * distance + doubt


def find_bursts(samples: npt.NDArray[Any], clocks: Mapping[int, LocalClock]) -> list[Burst]:
    """Ping-pong rows between two of `clocks`, grouped by pair and round, each group with its proven interval.

    Raises BadInput when a row runs backwards or the rows of a pair contradict each other.
    """
    rows = samples[samples["kind"] == SampleKind.PING_PONG]
    rows = rows[np.isin(rows["initiator"], list(clocks)) & np.isin(rows["responder"], list(clocks))]
    _check_rows(rows)
    low = np.minimum(rows["initiator"], rows["responder"])
    high = np.maximum(rows["initiator"], rows["responder"])
    order = np.lexsort((rows["round_idx"], high, low))
    keys = np.stack([low, high, rows["round_idx"].astype(np.int32)], axis=1)[order]
    starts = np.flatnonzero(np.any(np.diff(keys, axis=0, prepend=-1) != 0, axis=1))
    groups = np.split(rows[order], starts[1:]) if len(starts) else []
    bursts = [
        _prove(_collect(group, clocks[int(key[0])], clocks[int(key[1])], int(key[2])))
        for key, group in zip(keys[starts], groups, strict=True)
    ]
    return [
        sharper for _, pair in itertools.groupby(bursts, lambda b: (b.low, b.high)) for sharper in _with_slopes([*pair])
    ]


def _check_rows(rows: npt.NDArray[Any]) -> None:
    wrong = (rows["t3"] < rows["t0"]) | (rows["t2"] < rows["t1"]) | (rows["initiator"] == rows["responder"])
    if wrong.any():
        row = rows[wrong][0]
        raise BadInput(
            f"clock samples: a round trip of ranks {row['initiator']} and {row['responder']} in round "
            f"{row['round_idx']} runs backwards (t0={row['t0']} t1={row['t1']} t2={row['t2']} t3={row['t3']}); the "
            "dump is damaged or a device clock was set: record again, or merge with --unaligned"
        )


def _collect(rows: npt.NDArray[Any], low: LocalClock, high: LocalClock, round_idx: int) -> Burst:
    """The bounds of each round trip. A stamp t means a moment in [t, t + resolution)."""
    ours = rows["initiator"] == low.rank
    low_first, low_last = np.where(ours, rows["t0"], rows["t1"]), np.where(ours, rows["t3"], rows["t2"])
    high_first, high_last = np.where(ours, rows["t1"], rows["t0"]), np.where(ours, rows["t2"], rows["t3"])
    start, stop = low.to_ns(low_first), low.to_ns(low_last)
    first, last = high.to_ns(high_first), high.to_ns(high_last)
    # Low sends before high receives: at low's `start`, high is at most at `first`; likewise for the way back. Where
    # high is the initiator its `first` is a sending and bounds from below at the moment low received it.
    upper = Bounds(np.where(ours, start, stop), np.where(ours, first - start, last - stop) + high.resolution_ns)
    lower = Bounds(np.where(ours, stop, start), np.where(ours, last - stop, first - start) - low.resolution_ns)
    fastest = int(np.argmin(upper.value - lower.value))
    tick_spread = float(np.hypot(low.resolution_ns, high.resolution_ns)) / np.sqrt(24)
    return Burst(low.rank, high.rank, round_idx, upper, lower, at=float(start[fastest]), tick_spread=tick_spread)


def _prove(burst: Burst) -> Burst:
    """Intersects the bounds of all round trips at `at`. Many were preempted; one fast way each way suffices."""
    upper = burst.upper.moved(burst.at, burst.slope)
    lower = burst.lower.moved(burst.at, burst.slope)
    at_most = float(np.min(upper + burst.slope_error * np.abs(burst.upper.time - burst.at)))
    at_least = float(np.max(lower - burst.slope_error * np.abs(burst.lower.time - burst.at)))
    if at_least > at_most:
        raise BadInput(
            f"clock samples: the round trips of ranks {burst.low} and {burst.high} in round {burst.round_idx} "
            f"contradict each other (one proves {duration(at_least - at_most)} more than another allows); a device "
            f"clock was set, or drifts by more than {MAX_RATE * 1e6:.0f} ppm: record again, or merge with --unaligned"
        )
    num_leading = min(len(upper), max(_MIN_LEADING, int(len(upper) * _LEADING_FRACTION)))
    leading = np.argsort(upper - lower, kind="stable")[:num_leading]
    middles = (upper[leading] + lower[leading]) / 2
    deviation = 1.4826 * float(np.median(np.abs(middles - np.median(middles))))
    spread = max(deviation, burst.tick_spread)
    return replace(burst, at_most=at_most, at_least=at_least, spread=spread)


def _with_slopes(bursts: list[Burst]) -> list[Burst]:
    """The rounds of one pair, each proven again with the slope to its neighbouring round, where that is sharper."""
    sharper = []
    time, middle, spread, width = np.array([(b.at, b.middle, b.spread, b.width) for b in bursts]).T
    # A slope across a jump says nothing of the clock on either side.
    doubt_ns = judge_pieces(time, middle, spread, (width - width.min()) / 2, MAX_WANDER_PER_NS).doubt_ns
    for index, burst in enumerate(bursts):
        slope, error = burst.slope, burst.slope_error
        for piece, near in ((index - 1, index - 1), (index, index + 1)):
            if not 0 <= near < len(bursts):
                continue
            found, found_error = slope_between(burst, bursts[near], float(doubt_ns[piece]))
            # The rate may also wander over the burst itself.
            found_error += MAX_WANDER_PER_NS * float(np.ptp(burst.upper.time))
            if found_error < error:
                slope, error = found, found_error
        sharper.append(_prove(replace(burst, slope=slope, slope_error=error)))
    return sharper


def slope_between(one: Burst, other: Burst, doubt_ns: float = 0.0) -> tuple[float, float]:
    """(slope, error) of the difference at `one`, from the interval each of the two proves.

    doubt_ns: a clock may have jumped by so much in between.

    Raises BadInput when no rate below MAX_RATE joins them.
    """
    distance = other.at - one.at
    if distance == 0:
        return 0.0, np.inf
    slope = (other.middle - one.middle) / distance
    mean_error = (one.width + other.width) / 2 / abs(distance)
    if abs(slope) - mean_error > MAX_RATE:
        raise BadInput(
            f"clock samples: ranks {one.low} and {one.high} drifted apart by {slope * 1e6:.1f} ppm between rounds "
            f"{one.round_idx} and {other.round_idx}, wanted at most {MAX_RATE * 1e6:.0f}; a device clock was set, or "
            "ticks_per_second of one of them is wrong: record again, or merge with --unaligned"
        )
    return slope, mean_error + doubt_ns / abs(distance) + MAX_WANDER_PER_NS * abs(distance) / 2

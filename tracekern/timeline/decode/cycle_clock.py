"""Tracks whose records count cycles of the core clock: at which rate, and where they are on the realtime clock.

Such a track reads the realtime clock when it starts and when it ends, and knows how many cycles lay in between. The
core clock has a rate of its own that changes with load and heat, so each track takes the rate that it measured itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.timeline.model import Float64, Int64, Problem
from tracekern.timeline.table import Table

_GOOD_ERROR = 0.02
"""A track that knows its rate as well as this takes its own: on an H200, one of 10 us or more."""


@dataclass(frozen=True, repr=False)
class CycleRates(Table):
    """[num_runs] columns."""

    ticks_per_cycle: Float64
    """0 where records hold ticks of the realtime clock."""
    error: Float64
    """Relative, given that the core clock kept its rate during the track: a reading of the realtime clock stands for
    any moment up to the next, and the two clocks were not read at quite the same one. inf where nothing is known."""
    is_own: npt.NDArray[np.bool_]
    """Measured over the run itself, not over others of the same device."""
    stamp_error: Float64
    """Ticks by which a record may be off the realtime clock, on the same terms; 0 where it holds ticks of that clock,
    inf where the run never ended: then its rate is unknown."""

    @classmethod
    def of(cls, headers: npt.NDArray[Any], resolution_ticks: int) -> CycleRates:
        """Returns the rates of [num_runs] TRACK_HEADER, whose ticks are below 2^62.

        A run that is too short, or never ended, takes the rate of those that are long enough together, or of all that
        measured theirs; one tick a cycle if none did.
        """
        counts = headers["started"] == fmt.STARTED_CYCLES
        ticks = (headers["end_ticks"].astype(np.int64) - headers["start_ticks"].astype(np.int64)).astype(np.float64)
        cycles = headers["elapsed_cycles"].astype(np.float64)
        ended = counts & (headers["finished"] != 0) & (cycles > 0) & (ticks > 0)
        rate, error = np.zeros(len(headers)), np.zeros(len(headers))
        np.divide(ticks, cycles, out=rate, where=ended)
        # Half a MAX_ANCHOR_CYCLES at either end.
        doubt = resolution_ticks + fmt.MAX_ANCHOR_CYCLES * rate
        np.divide(doubt, ticks, out=error, where=ended)
        is_own = ended & (error <= _GOOD_ERROR)
        others = counts & ~is_own
        pool = is_own if is_own.any() else ended
        if pool.any():
            rate[others] = ticks[pool].sum() / cycles[pool].sum()
            error[others] = doubt[pool].sum() / ticks[pool].sum()
        else:
            rate[others], error[others] = 1.0, np.inf
        stamp_error = np.where(counts, np.inf, 0.0)
        # Off by both anchors, and by as much as a borrowed rate misses the end of the run.
        stamp_error[ended] = (2 * doubt + np.abs(cycles * rate - ticks))[ended]
        return cls(rate, error, is_own, stamp_error)

    def any(self) -> bool:
        return bool(self.ticks_per_cycle.any())

    def to_ticks(self, start: Int64, stamp: Int64, max_ticks: int) -> Int64:
        """[n] realtime ticks of [n] stamps of runs that began at `start`; no later than max_ticks."""
        counts = self.ticks_per_cycle > 0
        elapsed = np.minimum(np.rint(stamp * self.ticks_per_cycle), float(max_ticks)).astype(np.int64)
        return np.where(counts, np.minimum(elapsed, max_ticks - start) + start, stamp)

    def describe(self, rank: int, ticks_per_second: float) -> list[Problem]:
        """What a reader should know of the times in such tracks; nothing where there are none."""
        counts = self.ticks_per_cycle > 0
        number = int(counts.sum())
        if not number:
            return []
        tracks = f"{number} track{'s' if number != 1 else ''}"
        if np.isinf(self.error[counts]).any():
            text = (
                f"rank {rank}: the clock of {tracks} counts cycles at an unknown rate, as none of them measured it; "
                "a tick is shown for each cycle"
            )
            return [Problem("error", "cycle_rate_unknown", rank, -1, text, number)]
        mhz = ticks_per_second / self.ticks_per_cycle[counts] / 1e6
        error = f"{1e9 / ticks_per_second:.0f} ns and {self.error[counts].max():.2%}"
        text = (
            f"rank {rank}: the clock of {tracks} counts cycles, {mhz.min():,.1f} to {mhz.max():,.1f} MHz; durations "
            f"there are right to {error}, if it kept its rate"
        )
        borrowed = int((counts & ~self.is_own).sum())
        if borrowed:
            text += f"; {borrowed} of them, too short to measure it or never ended, take that of the others together"
        return [Problem("note", "cycle_clock", rank, -1, text, number)]

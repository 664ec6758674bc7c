"""How the waits of a phase are distributed: their empirical distribution function, at few enough points to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.partial import Counts
from tracekern.analysis.waits.analyze import Phase, PhaseNumbers
from tracekern.timeline.model import Int64


@dataclass(frozen=True)
class Distribution:
    """`share[i]` of the waits took at most `wait_ns[i]`: a step of the empirical distribution function."""

    phase: Phase
    count: int
    wait_ns: Int64
    share: npt.NDArray[np.float64]
    """0..1, rising to 1."""


def distribute(
    durations: Counts, numbers: PhaseNumbers, phases: Sequence[Phase], max_points: int = 160
) -> tuple[Distribution, ...]:
    """One distribution for each of `phases` that has waits. Every point lies on the true function, the last one is the
    maximum.

    durations: of waits that are not headless, by `numbers`.
    """
    number, values = durations.sums.keys
    known = {numbers[one]: one for one in np.unique(number).tolist()}
    found = []
    for phase in phases:
        rows = (number == known.get(phase, -1)) & (durations.sums["count"] > 0)
        until = np.cumsum(durations.sums["count"][rows])  # so many took as long as each value, or less
        if not len(until):
            continue
        count = int(until[-1])
        place = np.unique(np.linspace(0, count - 1, min(max_points, count)).astype(np.int64))
        at = np.searchsorted(until, place, side="right")
        found.append(Distribution(phase, count, values[rows][at], until[at] / count))
    return tuple(found)

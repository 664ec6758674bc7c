"""How the waits of a phase are distributed: their empirical distribution function, at few enough points to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.timeline.model import Int64


@dataclass(frozen=True)
class Distribution:
    """`share[i]` of the waits took at most `wait_ns[i]`: a step of the empirical distribution function."""

    phase: Phase
    count: int
    wait_ns: Int64
    share: npt.NDArray[np.float64]
    """0..1, rising to 1."""


def distribute(waits: Waits, phases: Sequence[Phase], max_points: int = 160) -> tuple[Distribution, ...]:
    """One distribution for each of `phases` that has waits. Every point lies on the true function, the last one is the
    maximum. Waits whose begin was overwritten are left out: how long they took is unknown."""
    found = []
    for phase in phases:
        ordered = np.sort(waits.wait_ns[(waits.phase == waits.phases.index(phase)) & ~waits.headless])
        if not len(ordered):
            continue
        place = np.unique(np.linspace(0, len(ordered) - 1, min(max_points, len(ordered))).astype(np.int64))
        # The last of equal values: the function is right-continuous.
        share = np.searchsorted(ordered, ordered[place], side="right") / len(ordered)
        found.append(Distribution(phase, len(ordered), ordered[place], share))
    return tuple(found)

"""Two captures, number by number. One run a side shows what differs, never why, nor whether it would again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tracekern.analysis.statistics import RunStatistics

CAVEAT = (
    "one run a side proves nothing: runs of one program differ by themselves. tracekern ab launches both in turns and "
    "says what is more than that"
)


@dataclass(frozen=True)
class Difference:
    metric: str
    first: float
    """ns, or a share in 0..1; nan where this side has no such metric."""
    second: float

    @property
    def change(self) -> float:
        """Relative, 0.15 for 15 % more; nan where a side lacks it, inf from nothing to something."""
        if self.first == 0:
            return 0.0 if self.second == 0 else float("nan") if math.isnan(self.second) else float("inf")
        return self.second / self.first - 1


def differences(first: RunStatistics, second: RunStatistics) -> tuple[Difference, ...]:
    """Every metric of either, in the order of `first`, then what only `second` has."""
    ours, theirs = first.metrics(), second.metrics()
    nan = float("nan")
    return tuple(
        Difference(name, ours.get(name, nan), theirs.get(name, nan)) for name in dict.fromkeys([*ours, *theirs])
    )

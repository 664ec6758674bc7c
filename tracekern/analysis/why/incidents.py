"""What happens in a few iterations only: too rarely to be called a habit, and too much to be overlooked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekern.analysis.why.chance import Finding, Measure, Pattern

MIN_FOR_INCIDENTS = 4
"""With fewer iterations nothing can be said about how they follow each other."""
_MOST_HITS = 3
_FAR = 4.0
"""So many times as much as any other excess."""


def find_incident(measures: Sequence[Measure]) -> Finding | None:
    """Returns the one to three excesses of one member that are far above all others of a measure; None where none is.

    Of several measures it is the one with the largest.
    """
    found = [one for measure in measures if len(measure.excess) > 1 and (one := _of_measure(measure))]
    return max(found, key=lambda one: one.excess_ns, default=None)


def _of_measure(measure: Measure) -> Finding | None:
    size = np.maximum(measure.excess, 0).ravel()  # what one of two ranks takes longer, the other takes less
    top = np.argpartition(-size, min(_MOST_HITS + 1, len(size) - 1))[: _MOST_HITS + 1]
    top = top[np.argsort(-size[top])]
    member, iteration = np.unravel_index(top, measure.excess.shape)
    for count in range(min(_MOST_HITS, len(top) - 1), 0, -1):
        own = measure.excess[member[:count], iteration[:count]]
        floor = max(float(size[top[count]]), measure.floor_ns)
        if len(set(member[:count].tolist())) == 1 and own.min() > _FAR * floor:
            hits = np.zeros(measure.excess.shape[1], bool)
            hits[iteration[:count]] = True
            return Finding(measure.name, member[:1], Pattern(hits), float(own.min()), stands_out=True)
    return None

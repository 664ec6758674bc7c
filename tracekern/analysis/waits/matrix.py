"""How long each rank waited for each other: a matrix of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import About, Partial
from tracekern.analysis.waits.analyze import Waits
from tracekern.formatting import brief
from tracekern.timeline.model import Int64, Timeline

_TICKS_IN_DOUBT = 2


@dataclass(frozen=True)
class WaitMatrix(Partial):
    """[n, n] over `ranks`: row = the rank that waits, column = the rank it waits for."""

    ranks: About[tuple[int, ...]]
    tick_ns: About[float]
    """The coarsest of all ranks."""
    sum_ns: Int64
    count: Int64
    """Number of waits; 0: nothing is known about the pair."""

    __repr__ = brief

    @property
    def doubt_ns(self) -> Int64:
        """How wrong a sum may be: two ticks a wait, since one clock times a wait."""
        doubt: Int64 = np.ceil(self.count * _TICKS_IN_DOUBT * self.tick_ns).astype(np.int64)
        return doubt


def wait_matrix(timeline: Timeline, waits: Waits) -> WaitMatrix:
    """Sums of waits by waiting rank and peer. Waits for an unknown rank are left out."""
    ranks = tuple(rank.rank for rank in timeline.ranks)
    index_of = np.full(max(ranks, default=-1) + 2, -1, np.int64)
    index_of[list(ranks)] = np.arange(len(ranks))
    groups = group_rows(len(waits), waits.rank, waits.peer)
    rank, peer = groups.columns
    known = peer >= 0
    cell = (index_of[rank[known]], index_of[peer[known]])
    sums, count = (np.zeros((len(ranks), len(ranks)), np.int64) for _ in range(2))
    sums[cell] = groups.sum(waits.wait_ns)[known]
    count[cell] = groups.count()[known]
    return WaitMatrix(ranks, max((rank.resolution_ns for rank in timeline.ranks), default=0.0), sums, count)

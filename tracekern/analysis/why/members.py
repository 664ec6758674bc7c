"""Ranks in some iterations, and numbers of theirs beside those of others: what peers and hosts are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Float64, Int64, Mask

FAR = 3.0
"""A warp is slow alone, or a gap on a shared GPU long, if it exceeds its peers by so many times as much as others."""


@dataclass(frozen=True)
class Suspects:
    """Ranks that may be to blame, in some iterations; one warp of theirs, or all."""

    ranks: Int64
    """Indices into Timeline.ranks."""
    hits: Mask
    """[num_iterations]"""
    writer: int = -1
    """Number of a (block, warp), see Writers; -1: all."""


def sums_by(
    columns: Sequence[npt.NDArray[np.integer]], values: npt.NDArray[np.number], shape: tuple[int, ...]
) -> Float64:
    """Returns a table of `shape` with the sums of the values whose columns say that they belong there."""
    code = np.ravel_multi_index(tuple(columns), shape)
    return np.bincount(code, values, int(np.prod(shape))).astype(float, copy=False).reshape(shape)


def median_of_members(values: Float64) -> Float64:
    """[n] median of what is known in each row of [n, num_members]; nan where nothing is. A sort of all rows at once is
    faster than nanmedian."""
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)  # nan comes last
    count, row = np.isfinite(values).sum(axis=1), np.arange(len(values))
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, values.shape[1] - 1)
    median: Float64 = (ordered[row, low] + ordered[row, high]) / 2
    return median

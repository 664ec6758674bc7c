"""Who waits for whom: a matrix of ranks, and which rows, columns and points of it stand out.

What stands out is found by median polish of the logarithms: every value is an overall level, times a factor of its row,
times one of its column, times what is left. Medians do not follow the outliers they are to find. (Tukey, Exploratory
Data Analysis, 1977, chapter 11)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Waits
from tracekern.formatting import brief
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

LINE_FACTOR = 1.25
"""A row or column stands out from this factor on."""
POINT_FACTOR = 2.0
MIN_CELLS = 3
"""A row or column needs as many values before its median says anything."""

_MAX_SWEEPS = 20
_TICKS_IN_DOUBT = 2


class Locality(enum.IntEnum):
    """How far apart two ranks are; values are compared within a class only."""

    SELF = 0
    SAME_NODE = 1
    OTHER_NODE = 2


@dataclass(frozen=True)
class WaitMatrix:
    """[n, n] over `ranks`: row = the rank that waits, column = the rank it waits for."""

    ranks: tuple[int, ...]
    sum_ns: Int64
    count: Int64
    """Number of waits; 0: nothing is known about the pair."""
    doubt_ns: Int64
    """How wrong a sum may be: two ticks a wait, since one clock times a wait."""
    locality: npt.NDArray[np.int8]
    """Locality of each pair."""

    __repr__ = brief


@dataclass(frozen=True)
class Abnormal:
    """A row, column or point well above what the others lead to expect, by more than the doubt."""

    locality: Locality
    rank: int | None
    """The rank that waits; None for a column."""
    peer: int | None
    """The rank waited for; None for a row."""
    factor: float
    """How many times the expected value."""
    excess_ns: int
    """Sum above the expected value."""


@dataclass(frozen=True)
class Polish:
    """log(value) = level + row + column + rest, over the cells that are known."""

    level: float
    row: Float64
    column: Float64
    rest: Float64


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
    tick_ns = max((rank.resolution_ns for rank in timeline.ranks), default=0.0)
    doubt = np.ceil(count * _TICKS_IN_DOUBT * tick_ns).astype(np.int64)
    return WaitMatrix(ranks, sums, count, doubt, _localities(timeline))


def find_abnormal(matrix: WaitMatrix) -> tuple[Abnormal, ...]:
    """Rows and columns from LINE_FACTOR, points from POINT_FACTOR on, largest excess first, each class by itself."""
    found: list[Abnormal] = []
    for locality in (Locality.SAME_NODE, Locality.OTHER_NODE):
        cells = (matrix.locality == locality) & (matrix.count > 0)
        # Below its doubt a value is as good as its doubt; a factor over nothing would mean nothing.
        at_least = np.maximum(matrix.sum_ns, np.maximum(matrix.doubt_ns, 1))
        polish = polish_medians(np.where(cells, np.log(at_least), np.nan))
        found += _lines(matrix, locality, cells, polish.row, axis=0)
        found += _lines(matrix, locality, cells, polish.column, axis=1)
        found += _points(matrix, locality, polish.rest)
    return tuple(sorted(found, key=lambda one: -one.excess_ns))


def polish_medians(values: Float64) -> Polish:
    """Median polish of an [n, m] matrix with nan where nothing is known.

    Lines of fewer than MIN_CELLS values are left out: nan in `rest`, 0 in `row` and `column`.
    """
    rest = np.where(_in_long_lines(np.isfinite(values)), values, np.nan)
    row, column = np.zeros(values.shape[0]), np.zeros(values.shape[1])
    for _ in range(_MAX_SWEEPS):
        row_step = median_of_rows(rest)
        rest -= row_step[:, None]
        column_step = median_of_rows(rest.T)
        rest -= column_step[None, :]
        row, column = row + row_step, column + column_step
        if not row_step.any() and not column_step.any():
            break
    level = 0.0
    for effect, used in ((row, np.isfinite(rest).any(axis=1)), (column, np.isfinite(rest).any(axis=0))):
        if used.any():
            middle = float(np.median(effect[used]))
            effect[used] -= middle
            level += middle
    return Polish(level, row, column, rest)


def _in_long_lines(known: Mask) -> Mask:
    """[n, m] the cells whose row and column both hold MIN_CELLS or more of them."""
    while True:
        is_long = known & (known.sum(axis=1) >= MIN_CELLS)[:, None] & (known.sum(axis=0) >= MIN_CELLS)[None, :]
        if np.array_equal(is_long, known):
            return known
        known = is_long


def median_of_rows(values: Float64) -> Float64:
    """[n] median of each row, 0 where nothing in it is known."""
    result = np.zeros(len(values))
    used = np.isfinite(values).any(axis=1)
    if used.any():
        result[used] = np.nanmedian(values[used], axis=1)
    return result


def _localities(timeline: Timeline) -> npt.NDArray[np.int8]:
    ranks = np.array([entry.rank for entry in timeline.ranks], np.int32)
    is_near = timeline.on_same_node(ranks[:, None], ranks[None, :])
    locality = np.where(is_near, Locality.SAME_NODE, Locality.OTHER_NODE).astype(np.int8)
    np.fill_diagonal(locality, Locality.SELF)
    return locality


def _lines(matrix: WaitMatrix, locality: Locality, cells: Mask, effect: Float64, axis: int) -> list[Abnormal]:
    """Rows (axis 0) or columns (axis 1) that stand out."""
    sums, doubt = (np.where(cells, values, 0).sum(axis=1 - axis) for values in (matrix.sum_ns, matrix.doubt_ns))
    factor = np.exp(effect)
    excess = sums * (1 - 1 / factor)
    chosen = np.flatnonzero((factor >= LINE_FACTOR) & (excess > doubt))
    return [
        Abnormal(
            locality,
            matrix.ranks[i] if axis == 0 else None,
            matrix.ranks[i] if axis == 1 else None,
            float(factor[i]),
            round(float(excess[i])),
        )
        for i in chosen.tolist()
    ]


def _points(matrix: WaitMatrix, locality: Locality, rest: Float64) -> list[Abnormal]:
    factor = np.exp(np.nan_to_num(rest))
    excess = matrix.sum_ns * (1 - 1 / factor)
    return [
        Abnormal(locality, matrix.ranks[i], matrix.ranks[j], float(factor[i, j]), round(float(excess[i, j])))
        for i, j in np.argwhere((factor >= POINT_FACTOR) & (excess > matrix.doubt_ns)).tolist()
    ]

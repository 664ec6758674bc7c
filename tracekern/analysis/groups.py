"""Grouping rows by several small numbers at once: what the analyses use in place of a loop over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

_DENSE_CELLS = 1 << 22
_MAX_CODE = 1 << 62


@dataclass(frozen=True)
class Groups:
    """Rows that agree in all columns form a group; groups are numbered in the order of their columns' values."""

    group: Int64
    """[n] group of each row."""
    columns: tuple[Int64, ...]
    """One [num_groups] column for each that was given: the value its rows share."""

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 1

    def sum(self, values: npt.NDArray[Any]) -> Int64:
        """[num_groups] exact int64 sums."""
        sums = np.zeros(len(self), np.int64)
        np.add.at(sums, self.group, values.astype(np.int64, copy=False))
        return sums

    def count(self) -> Int64:
        return np.bincount(self.group, minlength=len(self)).astype(np.int64)

    def largest(self, values: npt.NDArray[Any]) -> Int64:
        """[num_groups] largest value of each group."""
        best = np.full(len(self), np.iinfo(np.int64).min)
        np.maximum.at(best, self.group, values.astype(np.int64, copy=False))
        return best


def group_rows(num_rows: int, *columns: npt.NDArray[Any]) -> Groups:
    """Groups of rows that agree in all `columns` ([num_rows] integers); without columns all rows are one group."""
    code = np.zeros(num_rows, np.int64)
    lows, widths = [], []
    for column in columns:
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        lows.append(low)
        widths.append(high - low + 1)
    num_cells = int(np.prod([float(width) for width in widths])) if widths else 1
    if num_cells >= _MAX_CODE:
        return _group_wide(*columns)
    for column, low, width in zip(columns, lows, widths, strict=True):
        code *= width
        code += column
        code -= low
    if num_cells <= _DENSE_CELLS:
        present = np.flatnonzero(np.bincount(code, minlength=1))
        number = np.zeros(num_cells, np.int64)
        number[present] = np.arange(len(present))
        group = number[code]
    else:
        present, group = np.unique(code, return_inverse=True)
    keys = []
    for low, width in zip(reversed(lows), reversed(widths), strict=True):
        present, digit = np.divmod(present, width)
        keys.append(digit + low)
    return Groups(group, tuple(reversed(keys)))


def _group_wide(*columns: npt.NDArray[Any]) -> Groups:
    """The same where the numbers are too far apart for one code: a column at a time, numbering what is there."""
    group = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        number = np.unique(column, return_inverse=True)[1]
        group = np.unique(group * (int(number.max(initial=0)) + 1) + number, return_inverse=True)[1]
    first = np.unique(group, return_index=True)[1]
    return Groups(group, tuple(column[first] for column in columns))

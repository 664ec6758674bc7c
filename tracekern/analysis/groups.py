"""Grouping rows by several small numbers at once: what the analyses use in place of a loop over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.timeline.columns import order_of
from tracekern.timeline.model import Float64, Int32, Int64

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
    if not columns:
        return Groups(np.zeros(num_rows, np.int64), ())
    is_new = np.ones(num_rows, bool)
    is_new[1:] = False
    for column in columns:
        is_new[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(is_new)
    if 2 * len(first) > num_rows:
        return Groups(*_group(columns))
    # Mostly like its neighbour: one row for each stretch of equal ones is enough.
    group, keys = _group([column[first] for column in columns])
    return Groups(np.repeat(group, np.diff(first, append=num_rows)), keys)


def order_within(group: Int64 | Int32, values: npt.NDArray[Any]) -> Int64:
    """[n] the order of groups, and of values within each."""
    if np.issubdtype(values.dtype, np.integer):
        low = int(values.min(initial=0))
        room = int(values.max(initial=0)) - low + 1
        if (int(group.max(initial=0)) + 1) * room < _MAX_CODE:
            return order_of(group.astype(np.int64, copy=False) * room + (values - low))
    return np.lexsort((values, group))


def median_of_groups(group: Int64 | Int32, values: npt.NDArray[Any], num_groups: int) -> Float64:
    """[num_groups] the median of each group's values; nan of none."""
    order = order_within(group, values)
    count = np.bincount(group, minlength=num_groups)
    first, known = np.cumsum(count) - count, count > 0
    low, high = (order[(first + place)[known]] for place in ((count - 1) // 2, count // 2))
    median = np.full(num_groups, np.nan)
    median[known] = (values[low] + values[high]) / 2
    return median


def quantile_of_groups(group: Int64 | Int32, values: npt.NDArray[Any], num_groups: int, share: float) -> Float64:
    """[num_groups] the value that `share` of each group's values lie below; nan of none. For few groups."""
    quantile = np.full(num_groups, np.nan)
    for number in range(num_groups):
        own = values[group == number]
        if len(own):
            place = int(share * (len(own) - 1))
            quantile[number] = np.partition(own, place)[place]
    return quantile


def _group(columns: Sequence[npt.NDArray[Any]]) -> tuple[Int64, tuple[Int64, ...]]:
    """The two fields of Groups; `columns`: one or more."""
    lows = [int(column.min(initial=0)) for column in columns]
    widths = [int(column.max(initial=0)) - low + 1 for column, low in zip(columns, lows, strict=True)]
    num_cells = math.prod(widths)
    if num_cells >= _MAX_CODE:
        return _group_wide(columns)
    code = np.zeros(len(columns[0]), np.int32 if num_cells <= np.iinfo(np.int32).max else np.int64)
    for column, low, width in zip(columns, lows, widths, strict=True):
        code *= width
        np.add(code, column - low, out=code, casting="unsafe")  # what is added is below the width
    present, group = _number_few(code, num_cells) if num_cells <= _DENSE_CELLS else _number_many(code)
    keys = []
    for low, width in zip(reversed(lows), reversed(widths), strict=True):
        present, digit = np.divmod(present, width)
        keys.append(digit + low)
    return group, tuple(reversed(keys))


def _number_few(code: Int64 | Int32, num_cells: int) -> tuple[Int64, Int64]:
    """(the codes that occur, ascending; [n] number of each row's code among them) by a table of all cells."""
    occurs = np.zeros(num_cells, bool)
    occurs[code] = True
    present = np.flatnonzero(occurs)
    number = np.empty(num_cells, np.int64)  # of those that occur: the rest is never touched
    number[present] = np.arange(len(present))
    return present, number[code]


def _number_many(code: Int64 | Int32) -> tuple[Int64, Int64]:
    """The same by a sort."""
    order = order_of(code)
    is_new = np.ones(len(code), bool)
    is_new[1:] = code[order[1:]] != code[order[:-1]]
    group = np.empty(len(code), np.int64)
    group[order] = np.cumsum(is_new) - 1
    return code[order[is_new]].astype(np.int64), group


def _group_wide(columns: Sequence[npt.NDArray[Any]]) -> tuple[Int64, tuple[Int64, ...]]:
    """The same where the numbers are too far apart for one code: a column at a time, numbering what is there."""
    group = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        number = np.unique(column, return_inverse=True)[1]
        group = np.unique(group * (int(number.max(initial=0)) + 1) + number, return_inverse=True)[1]
    first = np.unique(group, return_index=True)[1]
    return group, tuple(column[first] for column in columns)

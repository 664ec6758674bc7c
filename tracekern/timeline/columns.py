"""Columns of Spans and Marks: many parts made one, some tracks taken at a time, ranges of rows, rows in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from tracekern.timeline.model import Int32, Int64, Marks, Spans

_SPANS_AT_ONCE = 1 << 16

Rows = TypeVar("Rows", Spans, Marks)


def join_rows(parts: list[Rows], empty: Rows) -> Rows:
    """The rows of all parts, one after the other. Empties `parts`, column by column, to keep the peak of memory low."""
    if len(parts) < 2:
        return parts.pop() if parts else empty
    columns: list[dict[str, Any]] = [
        {field.name: getattr(part, field.name) for field in dataclasses.fields(part)} for part in parts
    ]
    kind = type(parts[0])
    parts.clear()
    return kind(**{name: np.concatenate([column.pop(name) for column in columns]) for name in list(columns[0])})


def parts_by_track(spans: Spans) -> Iterator[tuple[int, Spans]]:
    """(index of the first, spans) of parts that hold all spans of their tracks; together they are `spans`, in order.

    What is worked with stays in the cache, and no column is copied whole.
    """
    wanted = spans.track[np.arange(0, len(spans), _SPANS_AT_ONCE)]
    bounds = np.append(np.unique(np.searchsorted(spans.track, wanted)), len(spans)).tolist()
    for start, stop in pairwise(bounds):
        yield start, spans.take(slice(start, stop))


def rows_of_ranges(first: Int64, count: Int64) -> Int64:
    """[sum of count] first[0], first[0] + 1, ... of all ranges, one after the other."""
    rows: Int64 = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
    return rows


def order_of(numbers: Int64 | Int32) -> Int64:
    """[n] the stable order of numbers of 0 and more. Sorting them with their places takes a fifth of an argsort."""
    bits = len(numbers).bit_length()
    if int(numbers.max(initial=0)) >= 1 << (62 - bits):
        return np.argsort(numbers, kind="stable")
    placed = (numbers.astype(np.int64, copy=False) << bits) | np.arange(len(numbers))
    placed.sort()
    placed &= (1 << bits) - 1
    return placed


def order_by(numbers: Int64, then: Int64) -> Int64:
    """[n] the order of numbers, of 0 and more, and of equal ones by another column; fast where that ascends already."""
    order = order_of(numbers)
    numbers_in_order, then_in_order = numbers[order], then[order]
    is_wrong = (numbers_in_order[1:] == numbers_in_order[:-1]) & (then_in_order[1:] < then_in_order[:-1])
    return np.lexsort((then, numbers)) if is_wrong.any() else order

"""Numbers of some whole calls of a run that add up to those of all calls.

What a question finds in the spans is a *partial result*: `one + other` is what it would have found in both at once. A
run in memory has one part, and the sum is that of the part; either way the same code makes the answer of the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tracekern.analysis.groups import group_rows
from tracekern.timeline.model import Float64, Int64, Mask

Value = TypeVar("Value")
About = Annotated[Value, "alike in all parts"]
AnyPartial = TypeVar("AnyPartial", bound="Partial")


@dataclass(frozen=True)
class Partial:
    """A record whose fields add up, one by one, but for those that say what it is about: alike in all parts."""

    def __add__(self: AnyPartial, other: AnyPartial) -> AnyPartial:
        names = [field.name for field in dataclasses.fields(self) if not str(field.type).startswith("About[")]
        return dataclasses.replace(self, **{name: add(getattr(self, name), getattr(other, name)) for name in names})


def add(one: Any, other: Any) -> Any:
    """Adds two numbers, arrays or partial results; of two dicts those that have the same key."""
    if isinstance(one, dict):
        return one | {key: add(one[key], value) if key in one else value for key, value in other.items()}
    return one + other


@dataclass(frozen=True)
class Sums:
    """[n] rows with different keys, in the order of these, and sums of what was added up for each key."""

    keys: tuple[Int64, ...]
    values: dict[str, Int64]
    """Name -> [n]"""

    @classmethod
    def of(cls, keys: Sequence[npt.NDArray[Any]], **values: npt.NDArray[Any]) -> Sums:
        """keys: one or more columns of rows. values: of the same rows."""
        groups = group_rows(len(keys[0]), *keys)
        return cls(groups.columns, {name: groups.sum(value) for name, value in values.items()})

    @classmethod
    def total(cls, parts: Sequence[Sums]) -> Sums:
        """Adds one or more."""
        keys = [np.concatenate(column) for column in zip(*(part.keys for part in parts), strict=True)]
        return cls.of(keys, **{name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values})

    def __add__(self, other: Sums) -> Sums:
        return self.total((self, other))

    def __len__(self) -> int:
        return len(self.keys[0])

    def __getitem__(self, name: str) -> Int64:
        return self.values[name]

    def take(self, which: Mask | Int64) -> Sums:
        """Returns the rows that a mask or an ascending index array picks."""
        return Sums(tuple(key[which] for key in self.keys), {name: own[which] for name, own in self.values.items()})

    def largest(self, name: str) -> Int64:
        """[num_groups] the largest sum of the rows that differ in nothing but their last key."""
        first = np.flatnonzero(_differ(self.keys[:-1]))
        return np.maximum.reduceat(self.values[name], first) if len(first) else np.empty(0, np.int64)

    def rows(self) -> list[tuple[int, ...]]:
        """Returns keys and values of each row."""
        columns = (column.tolist() for column in (*self.keys, *self.values.values()))
        return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class Counts:
    """How often each value was met by each group of rows. Quantiles of all parts follow from it, to the last bit."""

    sums: Sums
    """By the keys of the groups, and the value."""

    @classmethod
    def of(cls, keys: Sequence[npt.NDArray[Any]], values: npt.NDArray[Any], is_counted: Mask) -> Counts:
        """keys: of rows. values, is_counted: [n] of the same rows. Groups without a counted row are known as well."""
        return cls(Sums.of((*keys, np.where(is_counted, values, 0)), count=is_counted))

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.sums + other.sums)

    def quantiles(self, shares: Sequence[float]) -> list[Float64]:
        """[num_groups] by the order of their keys, for each share: linear between the two nearest values; nan where
        none is counted."""
        *keys, values = self.sums.keys
        first = np.flatnonzero(_differ(keys))
        before = np.append(0, np.cumsum(self.sums["count"]))
        count = np.diff(before[np.append(first, len(values))])
        filled = np.flatnonzero(count)
        low, count = before[first][filled], count[filled]
        found = [np.full(len(first), np.nan) for _ in shares]
        for quantile, share in zip(found, shares, strict=True):
            place = share * (count - 1)
            below = np.floor(place).astype(np.int64)
            above = np.minimum(below + 1, count - 1)
            lower, upper = (values[np.searchsorted(before, low + at, "right") - 1] for at in (below, above))
            quantile[filled] = lower + (upper - lower) * (place - below)
        return found


def _differ(columns: Sequence[Int64]) -> Mask:
    """[n] whether each row differs from the one before it in some column; the first does."""
    is_new = np.ones(len(columns[0]), bool)
    is_new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return is_new

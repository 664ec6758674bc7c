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

    def number_of(self, *keys: npt.NDArray[Any]) -> Int64:
        """[n] the row of each of these keys, all of which are there."""
        return _number_of(self.keys, keys)

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

    def __sub__(self, other: Counts) -> Counts:
        """Returns those without some of them. All groups are still known."""
        return Counts(self.sums + Sums(other.sums.keys, {"count": -other.sums["count"]}))

    def by_key(self, number: int) -> Counts:
        """Returns them by one of the keys alone."""
        return Counts(Sums.of((self.sums.keys[number], self.sums.keys[-1]), count=self.sums["count"]))

    @property
    def groups(self) -> tuple[Int64, ...]:
        """The [num_groups] keys of each group, in their order."""
        return tuple(key[self._first] for key in self.sums.keys[:-1])

    def count(self) -> Int64:
        """[num_groups] how many values were counted."""
        return np.add.reduceat(self.sums["count"], self._first) if len(self.sums) else np.empty(0, np.int64)

    def number_of(self, *keys: npt.NDArray[Any]) -> Int64:
        """[n] the group of each of these rows, all of which are known."""
        return _number_of(self.groups, keys)

    def medians(self) -> Float64:
        """[num_groups] nan where nothing is counted."""
        count = self.count()
        return (self._values_at((count - 1) // 2) + self._values_at(count // 2)) / 2

    def at_least(self, share: float) -> Float64:
        """[num_groups] the value that `share` of each group's lie below; nan where nothing is counted."""
        return self._values_at((share * (self.count() - 1)).astype(np.int64))

    def quantiles(self, shares: Sequence[float]) -> list[Float64]:
        """[num_groups] by the order of their keys, for each share: linear between the two nearest values; nan where
        none is counted."""
        found = []
        for share in shares:
            place = share * (self.count() - 1)
            below = np.floor(place).astype(np.int64)
            lower, upper = self._values_at(below), self._values_at(np.minimum(below + 1, self.count() - 1))
            found.append(lower + (upper - lower) * (place - below))
        return found

    @property
    def _first(self) -> Int64:
        """[num_groups] the first row of each."""
        return np.flatnonzero(_differ(self.sums.keys[:-1]))

    def _values_at(self, place: Int64) -> Float64:
        """[num_groups] the value at this place of each group's."""
        values, filled = self.sums.keys[-1], np.flatnonzero(self.count())
        before = np.append(0, np.cumsum(self.sums["count"]))
        wanted = before[self._first] + place
        found = np.full(len(place), np.nan)
        found[filled] = values[np.searchsorted(before, wanted[filled], "right") - 1]
        return found


def _number_of(table: Sequence[Int64], keys: Sequence[npt.NDArray[Any]]) -> Int64:
    """[n] the row of a table, whose rows all differ, that agrees with each of these."""
    columns = [np.concatenate([own, key]) for own, key in zip(table, keys, strict=True)]
    found, num_rows = group_rows(len(columns[0]), *columns), len(table[0])
    number = np.empty(len(found), np.int64)
    number[found.group[:num_rows]] = np.arange(num_rows)
    return number[found.group[num_rows:]]


def _differ(columns: Sequence[Int64]) -> Mask:
    """[n] whether each row differs from the one before it in some column; the first does."""
    is_new = np.ones(len(columns[0]), bool)
    is_new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return is_new

"""The parts of a run one after the other: held in memory, where a run is one part; files elsewhere."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tracekern.analysis.partial import add

Value = TypeVar("Value")
Other = TypeVar("Other")


class Parts(Sequence[Value]):
    """What there is of each part of a run, by part."""

    def beside(self, values: Sequence[Other]) -> Parts[Other]:
        """Something small of each part, to be given to a task with it."""
        return HeldParts(values)

    @abstractmethod
    def map(self, task: Callable[..., Other], *beside: Parts[Any]) -> Parts[Other]:
        """Returns what a task makes of each part, and of what there is of it beside."""

    @abstractmethod
    def each(self, task: Callable[[Any], Other], values: Iterable[Any]) -> Iterator[Other]:
        """Yields what a task, which may go through all parts, makes of each of some values."""

    @abstractmethod
    def in_turn(self, task: Callable[[Value], Other]) -> Parts[Other]:
        """The same, one part after the other, of a task that carries something from each to the next."""

    def handed_out(self) -> list[Any]:
        """What a task is given of each part, by whatever process does it."""
        return list(self)

    def share(self, value: Other) -> Other:
        """Returns a value, or another one that says the same, for many parts to hold."""
        return value

    def total(self) -> Any:
        """Adds up what there is."""
        return functools.reduce(add, self)


class HeldParts(Parts[Value]):
    """Parts in memory."""

    def __init__(self, values: Sequence[Value]) -> None:
        self._values = values

    def __getitem__(self, number: Any) -> Any:
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)

    def map(self, task: Callable[..., Other], *beside: Parts[Any]) -> Parts[Other]:
        return HeldParts([task(*values) for values in zip(self, *beside, strict=True)])

    def each(self, task: Callable[[Any], Other], values: Iterable[Any]) -> Iterator[Other]:
        return map(task, values)

    def in_turn(self, task: Callable[[Value], Other]) -> Parts[Other]:
        return self.map(task)

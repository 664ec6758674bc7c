"""What follows from the launches of a run alone is worked out once, for its Timeline and all parts of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tracekern.timeline.model import Timeline

Fact = TypeVar("Fact")

_KEPT = 4
"""So many runs are compared with each other at most."""


def once_for_launches(make: Callable[[Timeline], Fact]) -> Callable[[Timeline], Fact]:
    """Keeps the facts of the latest runs. `make` looks at launches, ranks and problems alone, which parts share."""
    known: list[tuple[tuple[Any, ...], Fact]] = []

    @functools.wraps(make)
    def fact(timeline: Timeline) -> Fact:
        about = timeline.launches, timeline.ranks, timeline.problems
        for others, found in tuple(known):
            if all(mine is theirs for mine, theirs in zip(about, others, strict=True)):
                return found
        found = make(timeline)
        known.insert(0, (about, found))
        del known[_KEPT:]
        return found

    return fact

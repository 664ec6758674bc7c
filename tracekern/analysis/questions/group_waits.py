"""How long the ranks of each group waited for each other, and for whom most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.partial import About, Partial, Sums
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.model import Timeline


@dataclass(frozen=True)
class GroupWaits(Partial):
    """The waits for other ranks in kernels of one group, over all its communicators."""

    name: About[str]
    """ "" where it has none."""
    label: About[str]
    """Its name, or else its ranks."""
    ranks: About[tuple[int, ...]]
    by_peer: dict[int, int]
    """Rank -> for how many ns it was waited for, summed over all warps."""

    @property
    def wait_ns(self) -> int:
        """Time in all these waits."""
        return sum(self.by_peer.values())

    @property
    def awaited(self) -> int:
        """The rank that they waited for longest; -1 where they waited for none."""
        return max(sorted(self.by_peer), key=self.by_peer.__getitem__, default=-1)

    @property
    def awaited_ns(self) -> int:
        """How long they waited for that rank."""
        return max(self.by_peer.values(), default=0)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        names = ("name", "label", "ranks", "wait_ns", "awaited", "awaited_ns")
        return {name: getattr(self, name) for name in names}


def waits_by_group(timeline: Timeline, waits: Waits) -> dict[int, GroupWaits]:
    """Sums up the waits of each group of some of the run's ranks, by its number."""
    number: dict[tuple[str, str, tuple[int, ...]], int] = {}
    of_launch = np.full(len(timeline.launches) + 1, -1)
    for idx, launch in enumerate(timeline.launches):
        if members := launch.members:
            of_launch[idx] = number.setdefault((members.name, members.label, members.ranks), len(number))
    between = np.flatnonzero((waits.peer >= 0) & (waits.peer != waits.rank))
    pairs = Sums.of((of_launch[waits.launch[between]], waits.peer[between]), ns=waits.wait_ns[between])
    found: dict[int, dict[int, int]] = {place: {} for place in number.values()}
    for place, peer, ns in pairs.rows():
        if place >= 0:
            found[place][peer] = ns
    return {place: GroupWaits(*group, found[place]) for group, place in number.items()}


def longest_first(groups: dict[int, GroupWaits]) -> tuple[GroupWaits, ...]:
    """Orders groups: those that waited longest come first."""
    return tuple(sorted(groups.values(), key=lambda one: -one.wait_ns))

"""How long the ranks of each group waited for each other, and for whom most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.model import Timeline


@dataclass(frozen=True)
class GroupWaits:
    """The waits for other ranks in kernels of one group, over all its communicators."""

    name: str
    """ "" where it has none."""
    label: str
    """Its name, or else its ranks."""
    ranks: tuple[int, ...]
    wait_ns: int
    """Summed over all warps."""
    awaited: int
    """The rank that they waited for longest; -1 where they waited for none."""
    awaited_ns: int


def waits_by_group(timeline: Timeline, waits: Waits) -> tuple[GroupWaits, ...]:
    """One for each group of some of the run's ranks, that which waited longest first; () where there is none."""
    number: dict[tuple[str, str, tuple[int, ...]], int] = {}
    of_launch = np.full(len(timeline.launches) + 1, -1)
    for idx, launch in enumerate(timeline.launches):
        if members := launch.members:
            of_launch[idx] = number.setdefault((members.name, members.label, members.ranks), len(number))
    between = np.flatnonzero((waits.peer >= 0) & (waits.peer != waits.rank))
    pairs = group_rows(len(between), of_launch[waits.launch[between]], waits.peer[between])
    sums = pairs.sum(waits.wait_ns[between])
    found = []
    for group, place in number.items():
        mine = np.flatnonzero(pairs.columns[0] == place)
        longest = mine[sums[mine].argmax()] if len(mine) else -1
        awaited = (int(pairs.columns[1][longest]), int(sums[longest])) if len(mine) else (-1, 0)
        found.append(GroupWaits(*group, int(sums[mine].sum()), *awaited))
    return tuple(sorted(found, key=lambda one: -one.wait_ns))

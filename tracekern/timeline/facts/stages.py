"""The stages of a run: launches of one name, by ranks that are compared with each other.

Where kernels count the ranks of a group, groups that are alike are one stage: of as many ranks, none of which they
share, and with the same launches, such as the expert groups of a world. Any other group has stages of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from tracekern.dump.event_table import Members
from tracekern.dump.format import RANK_BARRIER
from tracekern.formatting import ranks as name_ranks
from tracekern.timeline.facts.of_launches import once_for_launches
from tracekern.timeline.model import Int32, Int64, Launch, Mask, Timeline

CUT_SHORT = ("open_span", "open_work", "salvaged", "running", "launch_not_recorded", "launch_lost")
"""Problems of a capture whose last launches may be missing."""


class Stages:
    """Which launch is of which stage."""

    def __init__(self, timeline: Timeline) -> None:
        launches, ranks = timeline.launches, [rank.rank for rank in timeline.ranks]
        groups, group = _groups_of(launches, ranks)
        is_cut = any(problem.kind in CUT_SHORT for problem in timeline.problems)
        kind = _number_kinds(launches, groups, group, is_cut)
        of_launch = [(launch.name, kind[own]) for launch, own in zip(launches, group, strict=True)]
        found = {stage: idx for idx, stage in enumerate(dict.fromkeys(of_launch))}
        self.kernels = tuple(name for name, _ in found)
        """[num_stages] what their launches are called, by first launch."""
        num_kinds, labels = Counter(self.kernels), _label_kinds(groups, kind)
        self.names = tuple(f"{name} ({labels[own]})" if num_kinds[name] > 1 else name for name, own in found)
        """[num_stages] the same, with the groups where several kinds of them launch it."""
        self.of_launch: Int32 = np.array([found[stage] for stage in of_launch], np.int32)
        has_rank = np.zeros((len(labels), len(ranks)), bool)
        for members, own in zip(groups, kind, strict=True):
            has_rank[own] |= np.isin(ranks, members.ranks)
        self.has_rank: Mask = has_rank[[own for _, own in found]]
        """[num_stages, num_ranks] Whether the rank is one of those that are compared with each other."""
        joined = {own for launch, own in zip(launches, group, strict=True) if not _only_meets(launch)}
        self.island: Int64 = _islands([groups[own].ranks for own in joined], ranks)
        """[num_ranks] the same for ranks that kernels join, from group to group. What else joins them nobody knows."""


stages_of = once_for_launches(Stages)
"""Returns the Stages of a Timeline."""


def joined_ranks(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """The ranks of each island: one where some kernel is of all ranks."""
    island = stages_of(timeline).island
    ranks = np.array([rank.rank for rank in timeline.ranks], np.int64)
    return tuple(tuple(ranks[island == number].tolist()) for number in np.unique(island).tolist())


def _only_meets(launch: Launch) -> bool:
    return launch.is_align or launch.name == RANK_BARRIER


def _groups_of(launches: Sequence[Launch], ranks: Sequence[int]) -> tuple[list[Members], list[int]]:
    """(the groups, [num_launches] index of each launch's group). Communicators that a program makes of the same ranks,
    one after the other, are one group."""
    groups: dict[Members, int] = {}
    known: dict[Members | None, int] = {}
    for members in dict.fromkeys(launch.members for launch in launches):
        group = members._replace(generation=0) if members else Members("all ranks", 0, tuple(ranks))
        known[members] = groups.setdefault(group, len(groups))
    return list(groups), [known[launch.members] for launch in launches]


def _number_kinds(launches: Sequence[Launch], groups: list[Members], group: list[int], is_cut: bool) -> list[int]:
    """[num_groups] the kind of each. is_cut: some may not have come to their last launches."""
    of_rank: dict[int, dict[int, None]] = {}
    counts = [Counter[tuple[str, int]]() for _ in groups]
    for launch, own in zip(launches, group, strict=True):
        of_rank.setdefault(launch.rank, {})[own] = None
        counts[own][launch.name, launch.rank] += 1
    place = [0] * len(groups)
    for known in of_rank.values():
        for number, own in enumerate(known):
            place[own] = max(place[own], number)
    kinds: list[tuple[object, set[int]]] = []
    found = [0] * len(groups)
    # Those that their ranks use first come first: where each rank is in two, they are not mixed up.
    for own in sorted(range(len(groups)), key=lambda own: (place[own], groups[own].ranks)):
        most, ranks = Counter[str](), groups[own].ranks
        for (name, _), count in counts[own].items():
            most[name] = max(most[name], 1 if is_cut else count)
        about = len(ranks), frozenset(most.items())
        fitting = (idx for idx, (theirs, taken) in enumerate(kinds) if theirs == about and taken.isdisjoint(ranks))
        found[own] = next(fitting, len(kinds))
        if found[own] == len(kinds):
            kinds.append((about, set()))
        kinds[found[own]][1].update(ranks)
    return found


def _label_kinds(groups: list[Members], kind: list[int]) -> list[str]:
    labels: list[dict[str, Members]] = [{} for _ in {*kind}]
    for members, own in zip(groups, kind, strict=True):
        labels[own].setdefault(members.label, members)
    first = [next(iter(own.items())) for own in labels]
    shared = Counter(label for label, _ in first)
    return [
        (label if shared[label] < 2 else f"{label}: {name_ranks(members.ranks)}")
        + (" and alike" if len(own) > 1 else "")
        for own, (label, members) in zip(labels, first, strict=True)
    ]


def _islands(groups: Iterable[tuple[int, ...]], ranks: Sequence[int]) -> Int64:
    """[num_ranks] equal for ranks of one group, and of groups that share a rank."""
    number = np.arange(len(ranks))
    for group in groups:
        mine = number[np.isin(ranks, group)]
        number[np.isin(number, mine)] = mine.min(initial=len(ranks))
    return number

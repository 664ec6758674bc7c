"""Where a run may be cut into windows of whole calls, and the Timeline of each.

A cut is sound where on each rank all launches ahead of it have ended when the rest begins, and where no key of a
channel lies on both sides: then no message, no barrier and no gap leads from a later window to an earlier one. Whatever
belongs to no launch, such as lanes of hosts and engines, is a part of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.model import OPEN_END, Channel, Int32, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.select import take_spans

_LATE = np.iinfo(np.int64).max
_EARLY = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Cuts:
    """[n] sound cuts, in the order of time; the last is behind all."""

    ahead: Int64
    """[n, num_ranks] how many launches of each rank lie ahead, in the order in which its host made them."""
    first: Int64
    """[num_ranks] the first launch of each rank in the Timeline."""
    num_launches: int

    def between(self, iteration: Int32) -> Cuts:
        """Returns those that leave launches of one iteration on one side.

        iteration: [num_launches]; -1 for set-up, which counts to the next of its rank, or to the last.
        """
        num_ranks, is_parted = len(self.first), np.zeros(len(self.ahead) + 1, np.int64)
        rank = np.repeat(np.arange(num_ranks), np.diff(self.first, append=self.num_launches))
        place = np.arange(self.num_launches) - self.first[rank]
        since = np.empty(self.num_launches, np.int64)  # the first cut that each launch is ahead of
        group = np.full(self.num_launches, -1)
        for number in range(num_ranks):
            own = np.flatnonzero(rank == number)
            since[own] = np.searchsorted(self.ahead[:, number], place[own], "right")
            if len(known := own[iteration[own] >= 0]):
                following = np.minimum(np.searchsorted(known, own), len(known) - 1)
                group[own] = iteration[known[following]]
        num_groups = int(group.max(initial=-1)) + 1
        first, last = np.full(num_groups, len(self.ahead)), np.zeros(num_groups, np.int64)
        known = np.flatnonzero(group >= 0)
        np.minimum.at(first, group[known], since[known])
        np.maximum.at(last, group[known], since[known])
        np.add.at(is_parted, first, 1)
        np.add.at(is_parted, np.maximum(first, last), -1)
        whole = np.cumsum(is_parted)[:-1] == 0
        whole[-1] = True
        return dataclasses.replace(self, ahead=self.ahead[whole])

    def windows(self, size: Int64, at_most: int) -> list[Mask]:
        """[num_launches] those of each window: as many as have no more than `at_most` together, where cuts allow it.

        size: [num_launches]
        """
        before = np.append(0, np.cumsum(size))
        total = (before[self.first + self.ahead] - before[self.first]).sum(axis=1)
        found, start, done = list[Mask](), np.zeros_like(self.first), 0
        if not self.num_launches:
            return found
        for number, following in zip(range(len(total)), [*total[1:].tolist(), None], strict=True):
            if following is None or following - done > at_most:
                if total[number] == done and following is not None:
                    continue
                inside = np.zeros(self.num_launches + 1, np.int64)
                np.add.at(inside, self.first + start, 1)
                np.add.at(inside, self.first + self.ahead[number], -1)
                found.append(np.cumsum(inside)[:-1] > 0)
                start, done = self.ahead[number], int(total[number])
        return found


def find_cuts(timeline: Timeline, channels: Mapping[str, frozenset[Channel]]) -> Cuts:
    """Returns all sound cuts of a run, of which the lanes of launches are enough.

    channels: name of a kernel -> those on which it signals or waits.
    """
    place = {rank.rank: idx for idx, rank in enumerate(timeline.ranks)}
    rank = np.array([place[launch.rank] for launch in timeline.launches], np.int64)
    start, end = _launch_times(timeline)
    group, key = _keys(timeline, channels, start)
    main = int(np.argmax(np.bincount(group))) if len(group) else 0
    values = np.unique(key[group == main])
    ahead, sound = np.zeros((len(values), len(place)), np.int64), np.ones(len(values), bool)
    groups = np.unique(group)
    reach_before = np.full((len(values), len(groups)), _EARLY)
    reach_after = np.full((len(values), len(groups)), _LATE)
    for number in range(len(place)):
        own = np.flatnonzero(rank == number)
        is_main, own_key = group[own] == main, key[own]
        places = np.flatnonzero(is_main)
        count = np.searchsorted(np.maximum.accumulate(own_key[places]), values, "right")
        # What follows of other groups comes after the cut.
        ahead[:, number] = np.where(count > 0, np.append(places, -1)[count - 1] + 1, 0)
        stop = ahead[:, number]
        sound &= _until(end[own])[stop] <= _from(start[own])[stop]
        for column, other in enumerate(groups.tolist()):
            is_other = group[own] == other
            before, after = _until(np.where(is_other, own_key, _EARLY)), _from(np.where(is_other, own_key, _LATE))
            reach_before[:, column] = np.maximum(reach_before[:, column], before[stop])
            reach_after[:, column] = np.minimum(reach_after[:, column], after[stop])
    sound &= (reach_before < reach_after).all(axis=1)
    counts = np.bincount(rank, minlength=len(place))
    is_last = (ahead == counts).all(axis=1)
    ahead = np.concatenate([ahead[sound & ~is_last], counts[None]])
    return Cuts(ahead, np.cumsum(counts) - counts, len(rank))


def _until(values: Int64) -> Int64:
    """[n + 1] the largest of those ahead of each place."""
    return np.append(_EARLY, np.maximum.accumulate(values))


def _from(values: Int64) -> Int64:
    """[n + 1] the smallest from each place on."""
    return np.append(np.minimum.accumulate(values[::-1])[::-1], _LATE)


def _launch_times(timeline: Timeline) -> tuple[Int64, Int64]:
    """[num_launches] by their lanes: from _LATE to _EARLY where one left nothing, to _LATE where it never ended."""
    spans, count = timeline.spans, len(timeline.launches)
    row = np.flatnonzero(timeline.tracks_of(TrackKind.LAUNCH)[spans.track] & (spans.launch >= 0))
    start, end = np.full(count, _LATE), np.full(count, _EARLY)
    start[spans.launch[row]] = spans.start[row]
    end[spans.launch[row]] = np.where(spans.end[row] == OPEN_END, _LATE, spans.end[row])
    return start, end


def _keys(timeline: Timeline, channels: Mapping[str, frozenset[Channel]], start: Int64) -> tuple[Int64, Int64]:
    """([num_launches] group of kernels that share channels, [num_launches] what tells calls of a group apart)

    That is the epoch, or where none of the group has one the sequence: as join/flows.py joins them. Epochs wrap around:
    the number is that of the order in which they come. start: [num_launches]
    """
    group_of = {name: idx for idx, name in enumerate(sorted({launch.name for launch in timeline.launches}))}
    by_channel: dict[Channel, list[str]] = {}
    for name in sorted(channels.keys() & group_of.keys()):
        for channel in channels[name]:
            by_channel.setdefault(channel, []).append(name)
    for names in by_channel.values():
        joined = {group_of[name] for name in names}
        group_of = {name: min(joined) if own in joined else own for name, own in group_of.items()}
    group = np.array([group_of[launch.name] for launch in timeline.launches], np.int64)
    epoch = np.array([launch.epoch for launch in timeline.launches], np.int64)
    sequence = np.array([launch.sequence for launch in timeline.launches], np.int64)
    key = np.zeros(len(group), np.int64)
    for number in np.unique(group).tolist():
        mine = np.flatnonzero(group == number)
        _, found = np.unique((epoch if epoch[mine].any() else sequence)[mine], return_inverse=True)
        first = np.full(int(found.max()) + 1, _LATE)
        np.minimum.at(first, found, start[mine])
        key[mine] = np.argsort(np.argsort(first, kind="stable"))[found]
    return group, key


def channels_of_kernels(timeline: Timeline) -> dict[str, frozenset[Channel]]:
    """Name of each kernel -> the channels on which its spans signal or wait for others."""
    names = sorted({launch.name for launch in timeline.launches})
    number = {name: idx for idx, name in enumerate(names)}
    kernel = np.array([*(number[launch.name] for launch in timeline.launches), len(names)], np.int64)
    code = kernel[timeline.spans.launch] * len(timeline.events) + timeline.spans.event
    found: dict[str, set[Channel]] = {name: set() for name in names}
    for one in np.flatnonzero(np.bincount(code, minlength=1)).tolist():
        idx, event = divmod(one, len(timeline.events))
        channel = timeline.events[event].channel
        if idx < len(names) and channel is not None and channel.kind.has_pairs:
            found[names[idx]].add(channel)
    return {name: frozenset(own) for name, own in found.items()}


def parts_of(timeline: Timeline, windows: Sequence[Mask]) -> list[Timeline]:
    """The lanes of hosts and engines, and the spans of each window's launches. Tables are those of the whole.

    windows: [num_launches] of each.
    """
    parts = []
    for launches in (np.zeros(len(timeline.launches), bool), *windows):
        is_in = np.append(launches, not launches.any())
        part = take_spans(timeline, is_in[timeline.spans.launch])
        parts.append(part.replace(marks=timeline.marks.take(is_in[timeline.marks.launch])))
    return parts

"""Rings that are full or dry: how long warps waited for room that was not given back yet, or for what was not sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import Partial, Sums
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.edges import of_events
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.intervals import unions
from tracekern.timeline.join.flows import values_of
from tracekern.timeline.model import Channel, ChannelKind, Int64, Timeline
from tracekern.timeline.select import Window, reaches_into


@dataclass(frozen=True)
class FullRing:
    """The ring that was full longest of those from one rank to another on one channel of kind `credit`."""

    channel: str
    slots: int
    """What the channel holds before any signal; 0 where it does not say."""
    sender: int
    """The rank that waited for room."""
    receiver: int
    num_rings: int
    """Those of the channel's keys between the two ranks that were full at some time."""
    full_ns: int
    """How long at least one warp waited for room that was not given back yet: its late_receiver."""
    kernels_ns: int
    """How long the sender's kernels ran that have such waits."""

    @property
    def share(self) -> float:
        return self.full_ns / max(1, self.kernels_ns)


@dataclass(frozen=True)
class DryRing:
    """The ring that was empty longest of those from one rank to another on one channel of kind `credit` with a tail."""

    channel: str
    tail: str
    sender: int
    receiver: int
    """The rank that waited for something to come."""
    num_rings: int
    """Those of the channel's keys between the two ranks that were dry at some time."""
    dry_ns: int
    """How long at least one warp waited for what was not sent yet: its late_sender."""
    kernels_ns: int
    """How long the receiver's kernels ran that have such waits."""


def full_rings(timeline: Timeline, starved: Starved) -> tuple[FullRing, ...]:
    """The rings that were full at some time, the largest share of the sender's kernels first.

    starved: find_starved() of kind CREDIT.
    """
    found = [FullRing(channel.name, channel.initial, *pair) for channel, pair in starved.by_pair(timeline)]
    return tuple(sorted(found, key=lambda ring: (-ring.share, ring.channel, ring.sender, ring.receiver)))


def dry_rings(timeline: Timeline, starved: Starved) -> tuple[DryRing, ...]:
    """The rings that were empty at some time. starved: find_starved() of kind DATA."""
    rings = _rings_of_tails(timeline)
    found = [
        DryRing(rings[channel.name, channel.key], channel.name, sender, receiver, *rest)
        for channel, (receiver, sender, *rest) in starved.by_pair(timeline)
    ]
    return tuple(sorted(found, key=lambda ring: (-ring.dry_ns, ring.channel, ring.sender, ring.receiver)))


def _rings_of_tails(timeline: Timeline) -> dict[tuple[str, tuple[str, ...]], str]:
    """(name, key) of a tail -> name of the channel whose rings it fills."""
    channels = (event.channel for event in timeline.events if event.channel and event.channel.tail)
    return {(channel.tail, channel.key): channel.name for channel in channels}


@dataclass(frozen=True)
class Starved(Partial):
    """Waits for room, or for what fills a ring, that were not served at once."""

    of_rings: dict[Channel, Sums]
    """`ns` in which some warp waited, by the rank that waits, the one it waits for, and the channel's key."""
    launches: dict[Channel, Sums]
    """`waits` by the rank and launch that have them."""
    of_launch_ns: Int64
    """[num_launches] from the first record of each to the last; 0 where there are no such rings."""

    def by_pair(self, timeline: Timeline) -> Iterator[tuple[Channel, tuple[int, int, int, int, int]]]:
        """Yields channel, rank that waits, rank that it waits for, keys, ns of the key with most, ns of the kernels of
        the waiting rank that have such waits."""
        for channel, of_rings in self.of_rings.items():
            waiter, peer, *_ = of_rings.keys
            rank, launch = self.launches[channel].keys
            for pair in sorted({*zip(waiter.tolist(), peer.tolist(), strict=True)}):
                of_pair = of_rings["ns"][(waiter == pair[0]) & (peer == pair[1])]
                names = {timeline.launches[idx].name for idx in launch[rank == pair[0]].tolist()}
                mine = [one.rank == pair[0] and one.name in names for one in timeline.launches]
                yield channel, (*pair, len(of_pair), int(of_pair.max()), int(self.of_launch_ns[mine].sum()))


def find_starved(timeline: Timeline, waits: Waits, kind: WaitKind, window: Window | None) -> Starved:
    """Sums up waits of one kind; of kind DATA those for what fills rings.

    A wait has no channel where a flight recorder overwrote its begin.

    waits: those that reach into the window; as they are, kernels are counted whole.
    """
    starved = np.flatnonzero((waits.kind == kind) & (waits.late_ns > 0) & (waits.launch >= 0) & (waits.peer >= 0))
    tails, of_rings, launches = _rings_of_tails(timeline), dict[Channel, Sums](), dict[Channel, Sums]()
    event = timeline.spans.event[waits.row[starved]]
    for channel in {timeline.events[idx].channel for idx in np.flatnonzero(np.bincount(event, minlength=1)).tolist()}:
        if channel is None or (kind is WaitKind.DATA and (channel.name, channel.key) not in tails):
            continue
        is_mine = of_events(timeline, [about.channel == channel for about in timeline.events])[waits.row[starved]]
        mine = waits.take(starved[is_mine])
        keys = [values_of(timeline, mine.row, name) for name in channel.key]
        rings = group_rows(len(mine), mine.rank, mine.peer, *keys)
        waited_ns = _covered(rings.group, timeline.spans.start[mine.row], mine.late_ns, len(rings))
        of_rings[channel] = Sums(rings.columns, {"ns": waited_ns})
        launches[channel] = Sums.of((mine.rank, mine.launch), waits=np.ones(len(mine), np.int64))
    kinds = {event.channel.kind for event in timeline.events if event.channel}
    may_starve = bool(tails) if kind is WaitKind.DATA else ChannelKind.CREDIT in kinds
    nothing = np.zeros(len(timeline.launches), np.int64)
    return Starved(of_rings, launches, _launch_times(timeline, window) if may_starve else nothing)


def _covered(group: Int64, start: Int64, length: Int64, num_groups: int) -> Int64:
    """[num_groups] ns that at least one interval of the group covers."""
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], (start + length)[order]
    first, last_end = unions(group, start, end)
    covered = np.zeros(num_groups, np.int64)
    np.add.at(covered, group[first], last_end - start[first])
    return covered


def _launch_times(timeline: Timeline, window: Window | None) -> Int64:
    """[num_launches] from the first record of each launch to the last; 0 outside the window."""
    spans, end = timeline.spans, known_ends(timeline)
    row = np.flatnonzero(spans.launch >= 0)
    launches = group_rows(len(row), spans.launch[row])
    first, last = -launches.largest(-spans.start[row]), launches.largest(np.maximum(spans.start, end)[row])
    times = np.zeros(len(timeline.launches), np.int64)
    times[launches.columns[0]] = np.where(reaches_into(window, first, last), last - first, 0)
    return times

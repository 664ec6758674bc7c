"""Rings that are full or dry: how long warps waited for room that was not given back yet, or for what was not sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.edges import of_events
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.intervals import unions
from tracekern.timeline.join.flows import values_of
from tracekern.timeline.model import Channel, Int64, Timeline
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


def find_full_rings(timeline: Timeline, waits: Waits, window: Window | None = None) -> tuple[FullRing, ...]:
    """The rings that were full at some time, the largest share of the sender's kernels first.

    waits: those that reach into the window; as they are, kernels are counted whole.
    """
    channels = {event.channel for event in timeline.events if event.channel}
    found = [
        FullRing(channel.name, channel.initial, *starved)
        for channel, starved in _starved(timeline, waits, WaitKind.CREDIT, channels, window)
    ]
    return tuple(sorted(found, key=lambda ring: (-ring.share, ring.channel, ring.sender, ring.receiver)))


def find_dry_rings(timeline: Timeline, waits: Waits, window: Window | None = None) -> tuple[DryRing, ...]:
    """The rings that were empty at some time. Arguments as above."""
    rings = {
        (event.channel.tail, event.channel.key): event.channel.name
        for event in timeline.events
        if event.channel and event.channel.tail
    }
    tails = {event.channel for event in timeline.events if event.channel}
    tails = {channel for channel in tails if (channel.name, channel.key) in rings}
    found = [
        DryRing(rings[channel.name, channel.key], channel.name, sender, receiver, *rest)
        for channel, (receiver, sender, *rest) in _starved(timeline, waits, WaitKind.DATA, tails, window)
    ]
    return tuple(sorted(found, key=lambda ring: (-ring.dry_ns, ring.channel, ring.sender, ring.receiver)))


_Starved = tuple[int, int, int, int, int]
"""Rank that waited, rank that it waited for, keys, ns of the key with most, ns of the waiting rank's kernels."""


def _starved(
    timeline: Timeline, waits: Waits, kind: WaitKind, channels: set[Channel], window: Window | None
) -> Iterator[tuple[Channel, _Starved]]:
    """What a flight recorder overwrote the begin of has no channel."""
    starved = np.flatnonzero((waits.kind == kind) & (waits.late_ns > 0) & (waits.launch >= 0) & (waits.peer >= 0))
    there = np.unique(timeline.spans.event[waits.row[starved]]).tolist() if channels else []
    of_launch_ns = np.empty(0, np.int64)
    for channel in channels & {timeline.events[idx].channel for idx in there}:
        of_launch_ns = of_launch_ns if len(of_launch_ns) else _launch_times(timeline, window)
        is_mine = of_events(timeline, [event.channel == channel for event in timeline.events])[waits.row[starved]]
        for found in _of_channel(timeline, waits.take(starved[is_mine]), channel, of_launch_ns):
            yield channel, found


def _of_channel(timeline: Timeline, waits: Waits, channel: Channel, of_launch_ns: Int64) -> list[_Starved]:
    keys = [values_of(timeline, waits.row, name) for name in channel.key]
    rings = group_rows(len(waits), waits.rank, waits.peer, *keys)
    waited_ns = _covered(rings.group, timeline.spans.start[waits.row], waits.late_ns, len(rings))
    waiter, peer, *_ = rings.columns
    found = []
    for pair in sorted({*zip(waiter.tolist(), peer.tolist(), strict=True)}):
        of_pair = waited_ns[(waiter == pair[0]) & (peer == pair[1])]
        names = {timeline.launches[idx].name for idx in np.unique(waits.launch[waits.rank == pair[0]]).tolist()}
        mine = [launch.rank == pair[0] and launch.name in names for launch in timeline.launches]
        kernels_ns = int(of_launch_ns[mine].sum())
        found.append((*pair, len(of_pair), int(of_pair.max()), kernels_ns))
    return found


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

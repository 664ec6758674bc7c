"""Rings that are full: the time in which warps waited for room that the receiver had not given back yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.edges import of_events
from tracekern.timeline.flows import values_of
from tracekern.timeline.intervals import unions
from tracekern.timeline.model import Channel, Int64, Timeline
from tracekern.timeline.open_spans import known_ends
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


def find_full_rings(timeline: Timeline, waits: Waits, window: Window | None = None) -> tuple[FullRing, ...]:
    """The rings that were full at some time, the largest share of the sender's kernels first.

    waits: those that reach into the window; as they are, kernels are counted whole.
    """
    is_starved = (waits.kind == WaitKind.CREDIT) & (waits.late_ns > 0) & (waits.launch >= 0) & (waits.peer >= 0)
    starved = np.flatnonzero(is_starved)
    channels = {timeline.events[idx].channel for idx in np.unique(timeline.spans.event[waits.row[starved]]).tolist()}
    of_launch_ns = _launch_times(timeline, window) if len(starved) else np.empty(0, np.int64)
    found: list[FullRing] = []
    for channel in channels - {None}:  # a flight recorder overwrote the begin of those without one
        assert channel is not None
        is_mine = of_events(timeline, [event.channel == channel for event in timeline.events])[waits.row[starved]]
        found += _of_channel(timeline, waits.take(starved[is_mine]), channel, of_launch_ns)
    return tuple(sorted(found, key=lambda ring: (-ring.share, ring.channel, ring.sender, ring.receiver)))


def _of_channel(timeline: Timeline, waits: Waits, channel: Channel, of_launch_ns: Int64) -> list[FullRing]:
    keys = [values_of(timeline, waits.row, name) for name in channel.key]
    rings = group_rows(len(waits), waits.rank, waits.peer, *keys)
    full_ns = _covered(rings.group, timeline.spans.start[waits.row], waits.late_ns, len(rings))
    sender, receiver, *_ = rings.columns
    found = []
    for pair in sorted({*zip(sender.tolist(), receiver.tolist(), strict=True)}):
        of_pair = full_ns[(sender == pair[0]) & (receiver == pair[1])]
        names = {timeline.launches[idx].name for idx in np.unique(waits.launch[waits.rank == pair[0]]).tolist()}
        mine = [launch.rank == pair[0] and launch.name in names for launch in timeline.launches]
        kernels_ns = int(of_launch_ns[mine].sum())
        found.append(FullRing(channel.name, channel.initial, *pair, len(of_pair), int(of_pair.max()), kernels_ns))
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

"""What rings of slots hold at every moment, from what their writers and readers signal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.join.calls import epochs_of_ends
from tracekern.timeline.join.flows import values_of
from tracekern.timeline.model import OPEN_END, Channel, ChannelKind, EventClass, Int64, Timeline
from tracekern.timeline.table import Table


@dataclass(frozen=True, repr=False)
class RingSteps(Table):
    """Changes of what the rings of one channel of kind credit hold, in order of ring and time. All begin empty.

    Every column is [n].
    """

    ring: Int64
    """Number of the ring, which is one of a key, an epoch and two ranks."""
    sender: Int64
    """Rank that fills its slots."""
    receiver: Int64
    """Rank that gives them back."""
    time: Int64
    change: Int64
    """Slots that were filled; below 0: given back."""
    channel: Channel


def find_ring_steps(timeline: Timeline) -> list[RingSteps]:
    """Steps of each channel of kind credit that names a tail, of rings whose both ends are on record.

    Between ranks whose clocks are not aligned there are none.
    """
    channels = {event.channel for event in timeline.events if event.channel and event.channel.tail}
    found = [_steps_of(timeline, channel) for channel in sorted(channels, key=lambda channel: channel.name)]
    return [steps for steps in found if len(steps)]


def _steps_of(timeline: Timeline, channel: Channel) -> RingSteps:
    filled = _signals(timeline, channel.tail, ChannelKind.COUNT)
    freed = _signals(timeline, channel.name, ChannelKind.CREDIT)
    row, is_freed = np.concatenate([filled, freed]), np.repeat([0, 1], [len(filled), len(freed)])
    own = timeline.track_ranks()[timeline.spans.track[row]].astype(np.int64)
    peer = values_of(timeline, row, "peer")
    sender, receiver = np.where(is_freed, peer, own), np.where(is_freed, own, peer)
    keys = [values_of(timeline, row, name) for name in channel.key if name != "peer"]
    columns = np.stack([sender, receiver, *keys, epochs_of_ends(timeline, filled, freed)])
    ring = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)
    position = values_of(timeline, row, "value") - np.where(is_freed, channel.initial, 0)
    end = timeline.spans.end[row]
    time = np.where(end == OPEN_END, timeline.spans.start[row], end)

    order = np.lexsort((time, is_freed, ring))
    ring, is_freed, position = ring[order], is_freed[order], _highest_so_far(2 * ring + is_freed, position, order)
    is_first = np.append(True, np.diff(2 * ring + is_freed) != 0)[: len(ring)]
    change = position - np.where(is_first, 0, np.roll(position, 1))
    steps = RingSteps(ring, sender[order], receiver[order], time[order], np.where(is_freed, -change, change), channel)
    kept = np.isin(ring, ring[is_freed == 0]) & np.isin(ring, ring[is_freed == 1]) & (change != 0)
    if not timeline.aligned:
        kept &= steps.sender == steps.receiver
    steps = steps.take(np.flatnonzero(kept))
    return steps.take(np.lexsort((steps.time, steps.ring)))


def _signals(timeline: Timeline, name: str, kind: ChannelKind) -> Int64:
    """Rows of the signals on a channel."""
    is_on_it = [
        event.event_class is EventClass.SIGNAL
        and event.channel is not None
        and (event.channel.name, event.channel.kind) == (name, kind)
        for event in timeline.events
    ]
    return np.flatnonzero(np.array(is_on_it, bool)[timeline.spans.event]) if is_on_it else np.empty(0, np.int64)


def _highest_so_far(group: Int64, position: Int64, order: Int64) -> Int64:
    """[n] in the order: the highest position of the group up to this one. A signal may overtake one before it."""
    levels, place = np.unique(position, return_inverse=True)
    highest = np.maximum.accumulate(group[order] << 32 | place[order]) & ((1 << 32) - 1)
    found: Int64 = levels[highest]
    return found

"""How full rings are: on average and at most, of each channel and pair of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.facts.rings import RingSteps, find_ring_steps
from tracekern.timeline.model import Int64, Timeline
from tracekern.timeline.select import Window


@dataclass(frozen=True)
class RingFill:
    """The rings from one rank to another on one channel of kind `credit` that names its tail."""

    channel: str
    tail: str
    slots: int
    """How many a ring has; 0 where the channel does not say it."""
    sender: int
    receiver: int
    num_rings: int
    """Those of the channel's keys, in each call."""
    mean_slots: float
    """Full slots of a ring from its first to the last of its changes, on average over its time."""
    most_slots: int


@dataclass(frozen=True)
class RingSlots:
    """What such rings held in some calls."""

    num_rings: int
    total_ns: int
    """From the first to the last change of each ring."""
    slots_ns: int
    """Full slots, each as long as it was full."""
    most_slots: int

    def __add__(self, other: RingSlots) -> RingSlots:
        return RingSlots(
            self.num_rings + other.num_rings,
            self.total_ns + other.total_ns,
            self.slots_ns + other.slots_ns,
            max(self.most_slots, other.most_slots),
        )


_Place = tuple[str, str, int, int, int]
"""Channel, tail, slots, sender, receiver."""


def fullest_first(slots: Mapping[_Place, RingSlots]) -> tuple[RingFill, ...]:
    """The rings that were used, those first that held most of their slots on average. slots: slots_of_rings()."""
    found = [
        RingFill(*place, one.num_rings, float(one.slots_ns) / one.total_ns, one.most_slots)
        for place, one in sorted(slots.items())
    ]
    return tuple(sorted(found, key=lambda fill: (-fill.mean_slots / max(1, fill.slots), fill.channel, fill.sender)))


def slots_of_rings(timeline: Timeline, window: Window | None = None) -> dict[_Place, RingSlots]:
    """What the rings held in the window."""
    return {place: one for steps in find_ring_steps(timeline) for place, one in _of_channel(steps, window)}


def _of_channel(steps: RingSteps, window: Window | None) -> Iterator[tuple[_Place, RingSlots]]:
    is_last = np.append(np.diff(steps.ring) != 0, True)
    until = np.where(is_last, steps.time, np.roll(steps.time, -1))
    level = np.maximum(_levels(steps), 0)
    low, high = window or (int(steps.time.min()), int(steps.time.max()))
    length = np.maximum(np.minimum(until, high) - np.maximum(steps.time, low), 0)
    channel = steps.channel
    for sender, receiver in sorted({*zip(steps.sender.tolist(), steps.receiver.tolist(), strict=True)}):
        mine = (steps.sender == sender) & (steps.receiver == receiver) & (length > 0)
        if mine.any():
            place = channel.name, channel.tail, channel.initial, sender, receiver
            slots_ns, most = int((level[mine] * length[mine]).sum()), int(level[mine].max())
            yield place, RingSlots(len(np.unique(steps.ring[mine])), int(length[mine].sum()), slots_ns, most)


def _levels(steps: RingSteps) -> Int64:
    """[n] full slots of the ring behind each step."""
    total = np.cumsum(steps.change)
    is_first = np.append(True, np.diff(steps.ring) != 0)
    before = (total - steps.change)[is_first]
    levels: Int64 = total - np.repeat(before, np.diff(np.append(np.flatnonzero(is_first), len(total))))
    return levels

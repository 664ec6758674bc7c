"""How full rings are: on average and at most, of each channel and pair of ranks."""

from __future__ import annotations

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


def find_ring_fills(timeline: Timeline, window: Window | None = None) -> tuple[RingFill, ...]:
    """The rings that were used in the window, those first that held most of their slots on average."""
    found = [fill for steps in find_ring_steps(timeline) for fill in _of_channel(steps, window)]
    return tuple(sorted(found, key=lambda fill: (-fill.mean_slots / max(1, fill.slots), fill.channel, fill.sender)))


def _of_channel(steps: RingSteps, window: Window | None) -> list[RingFill]:
    is_last = np.append(np.diff(steps.ring) != 0, True)
    until = np.where(is_last, steps.time, np.roll(steps.time, -1))
    level = np.maximum(_levels(steps), 0)
    low, high = window or (int(steps.time.min()), int(steps.time.max()))
    length = np.maximum(np.minimum(until, high) - np.maximum(steps.time, low), 0)
    found = []
    for sender, receiver in sorted({*zip(steps.sender.tolist(), steps.receiver.tolist(), strict=True)}):
        mine = (steps.sender == sender) & (steps.receiver == receiver) & (length > 0)
        if not mine.any():
            continue
        channel, total_ns = steps.channel, int(length[mine].sum())
        mean = float((level[mine] * length[mine]).sum()) / total_ns
        num_rings, most = len(np.unique(steps.ring[mine])), int(level[mine].max())
        found.append(RingFill(channel.name, channel.tail, channel.initial, sender, receiver, num_rings, mean, most))
    return found


def _levels(steps: RingSteps) -> Int64:
    """[n] full slots of the ring behind each step."""
    total = np.cumsum(steps.change)
    is_first = np.append(True, np.diff(steps.ring) != 0)
    before = (total - steps.change)[is_first]
    levels: Int64 = total - np.repeat(before, np.diff(np.append(np.flatnonzero(is_first), len(total))))
    return levels

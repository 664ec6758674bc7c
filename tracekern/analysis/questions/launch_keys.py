"""The launches of a capture by their keys, `launch(..., key="layer 3")`: how many, how long, from when to when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.errors import BadInput
from tracekern.formatting import similar
from tracekern.timeline.model import OPEN_END, EventClass, Timeline
from tracekern.timeline.select import Window


@dataclass(frozen=True)
class KeyedLaunches:
    """The launches of one key, on all ranks. Times are those of launches that recorded anything and ended."""

    key: str
    num_launches: int
    median_ns: float
    """nan if none ended."""
    longest_ns: int
    window: Window | None
    """From the begin of the first to the end of the last; None if none ended."""


def launches_by_key(timeline: Timeline) -> list[KeyedLaunches]:
    """Returns the keys in the order in which they first appear; launches without a key are left out."""
    spans = timeline.spans
    rows = np.flatnonzero(
        timeline.events_of(EventClass.LAUNCH)[spans.event] & (spans.launch >= 0) & (spans.end != OPEN_END)
    )
    numbers = {key: number for number, key in enumerate(dict.fromkeys(launch.key for launch in timeline.launches))}
    of_launch = np.array([numbers[launch.key] for launch in timeline.launches], np.int64)
    counts = np.bincount(of_launch, minlength=len(numbers))
    of_row = of_launch[spans.launch[rows]]
    found = []
    for key, number in numbers.items():
        own = rows[of_row == number]
        ns = spans.end[own] - spans.start[own]
        window = (int(spans.start[own].min()), int(spans.end[own].max())) if len(own) else None
        median = float(np.median(ns)) if len(own) else float("nan")
        found.append(KeyedLaunches(key, int(counts[number]), median, int(ns.max(initial=0)), window))
    return [entry for entry in found if entry.key]


def window_of_key(timeline: Timeline, key: str) -> Window:
    """Returns the time from the begin of the key's first launch to the end of its last. Raises BadInput for no such."""
    known = {entry.key: entry for entry in launches_by_key(timeline)}
    if key not in known:
        raise BadInput(f"no launch has the key {key!r}; {similar(key, known)}")
    if (window := known[key].window) is None:
        raise BadInput(f"key {key!r}: none of its launches recorded anything and ended")
    return window

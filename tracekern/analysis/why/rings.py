"""Rings that are too small: who waits for room in them, and the run in which nobody has to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.run_graph import RunGraph
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.timeline.model import Timeline


@dataclass(frozen=True)
class FullestRing:
    """Of a channel's rings, those between the two ranks that warps waited for room in most."""

    channel: str
    slots: int
    """What it holds; 0 where the channel does not say."""
    sender: int
    receiver: int
    late_ns: int
    """How long warps of the sender waited for room that was not given back yet, added up."""


class Rings:
    """The messages that give room back, by channel."""

    def __init__(self, timeline: Timeline, waits: Waits, run_graph: RunGraph) -> None:
        messages = run_graph.messages
        of_credit = np.flatnonzero(waits.kind[messages.wait] == WaitKind.CREDIT)
        wait, edge = messages.wait[of_credit], messages.edge[of_credit]
        channels = [event.channel for event in timeline.events]
        names = sorted({channel.name for channel in channels if channel is not None})
        number = np.array([names.index(channel.name) if channel else -1 for channel in channels] or [-1], np.int64)
        of_wait = number[timeline.spans.event[waits.row[wait]]]
        rings = group_rows(len(wait), of_wait, waits.rank[wait], waits.peer[wait])
        late_ns = rings.sum(waits.late_ns[wait])
        self.fullest = dict[str, FullestRing]()
        """By channel; those that nobody waited for room in are left out."""
        self._edges = {}
        waited_for = np.flatnonzero(late_ns)
        for place in waited_for[np.argsort(late_ns[waited_for])].tolist():  # the fullest of a channel comes last
            channel, sender, receiver = (int(column[place]) for column in rings.columns)
            slots = next(known.initial for known in channels if known and known.name == names[channel])
            found = FullestRing(names[channel], slots, sender, receiver, int(late_ns[place]))
            self.fullest[found.channel] = found
            self._edges[found.channel] = edge[of_wait == channel]

    def without(self, channel: str) -> Change:
        """-inf where a warp had to see that there is room: there is, at all times."""
        edge = self._edges[channel]
        return Change(edge, np.full(len(edge), -np.inf))

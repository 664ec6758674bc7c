"""Rings that are too small: who waits for room in them, and the run in which nobody has to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.partial import Partial, Sums
from tracekern.analysis.waits.analyze import WaitKind
from tracekern.timeline.model import Int64, Timeline


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


@dataclass(frozen=True)
class _Credits(Partial):
    """Messages that give room back, in some parts of a run."""

    late: Sums
    """By event, and the ranks that wait and that are waited for: how long warps waited for room, in ns."""
    edge: dict[int, tuple[Int64, ...]]
    """Event -> edges of the whole run, see Moments, part by part."""

    @classmethod
    def of(cls, part: PartGraph, first_edge: int) -> _Credits:
        messages, waits = part.run_graph.messages, part.waits
        of_credit = np.flatnonzero(waits.kind[messages.wait] == WaitKind.CREDIT)
        wait, edge = messages.wait[of_credit], first_edge + messages.edge[of_credit]
        event = part.timeline.spans.event[waits.row[wait]]
        late = Sums.of((event, waits.rank[wait], waits.peer[wait]), late_ns=waits.late_ns[wait])
        return cls(late, {number: (edge[event == number],) for number in np.unique(event).tolist()})


class Rings:
    """The messages that give room back, by channel."""

    def __init__(self, timeline: Timeline, moments: Moments) -> None:
        found: _Credits = moments.graphs.map(_Credits.of, moments.first_edges).total()
        channels = [event.channel for event in timeline.events]
        names = sorted({channel.name for channel in channels if channel is not None})
        number = np.array([names.index(channel.name) if channel else -1 for channel in channels] or [-1], np.int64)
        event, rank, peer = found.late.keys
        rings = Sums.of((number[event], rank, peer), late_ns=found.late["late_ns"])
        late_ns = rings["late_ns"]
        self.fullest = dict[str, FullestRing]()
        """By channel; those that nobody waited for room in are left out."""
        self._edges = dict[str, Int64]()
        waited_for = np.flatnonzero(late_ns)
        for place in waited_for[np.argsort(late_ns[waited_for])].tolist():  # the fullest of a channel comes last
            channel, sender, receiver = (int(column[place]) for column in rings.keys)
            slots = next(known.initial for known in channels if known and known.name == names[channel])
            ring = FullestRing(names[channel], slots, sender, receiver, int(late_ns[place]))
            self.fullest[ring.channel] = ring
            of_channel = (edges for one, edges in found.edge.items() if number[one] == channel)
            self._edges[ring.channel] = np.concatenate([edge for edges in of_channel for edge in edges])

    def without(self, channel: str) -> Change:
        """-inf where a warp had to see that there is room: there is, at all times."""
        edge = self._edges[channel]
        return Change(edge, np.full(len(edge), -np.inf))

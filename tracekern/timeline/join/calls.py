"""What tells the calls of a channel apart: the epochs of their launches, or their numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.facts.of_launches import once_for_launches
from tracekern.timeline.model import Int64, Timeline


@dataclass(frozen=True)
class CallKeys:
    """What decides it for the ends of one channel. Adds up over the parts of a run."""

    has_epochs: bool
    """Whether some launch of an end has one."""
    signal_graphs: frozenset[str] = frozenset()
    wait_graphs: frozenset[str] = frozenset()
    """Graphs of whose launches ends are, where none has an epoch. A launch of a graph is named `graph/launch`."""

    @classmethod
    def of(cls, timeline: Timeline, signal: Int64, wait: Int64) -> CallKeys:
        """signal, wait: [n] spans."""
        launches = [
            (np.flatnonzero(np.bincount(timeline.spans.launch[rows] + 1)) - 1).tolist() for rows in (signal, wait)
        ]
        if any(timeline.launches[idx].epoch for of_side in launches for idx in of_side):
            return cls(has_epochs=True)
        graphs = (frozenset(_graph_of(timeline.launches[idx].name) for idx in of_side) for of_side in launches)
        return cls(False, *graphs)

    def __add__(self, other: CallKeys) -> CallKeys:
        return CallKeys(
            self.has_epochs or other.has_epochs,
            self.signal_graphs | other.signal_graphs,
            self.wait_graphs | other.wait_graphs,
        )

    def number_launches(self, timeline: Timeline) -> Int64:
        """[num_launches] equal for launches of one call; known of earlier parts of a run.

        Launches that know no epochs are told apart by their sequence number, and those of a graph, which are counted
        anew, from all others, where both ends of the channel are in that graph.
        """
        known = _known_numbers(timeline)
        if self not in known:
            known[self] = self._number(timeline)
        return known[self]

    def _number(self, timeline: Timeline) -> Int64:
        if self.has_epochs:
            return _number([launch.epoch for launch in timeline.launches])
        names = [_graph_of(launch.name) for launch in timeline.launches]
        graph = np.unique(np.array(names, str), return_inverse=True)[1]
        is_whole = np.isin(names, list(self.signal_graphs & self.wait_graphs))
        sequence = _number([launch.sequence for launch in timeline.launches])
        return _number(append_digit(sequence, np.where(is_whole, graph + 1, 0)))


def _no_numbers(_: Timeline) -> dict[CallKeys, Int64]:
    return {}


_known_numbers = once_for_launches(_no_numbers)


def _graph_of(name: str) -> str:
    return name.rpartition("/")[0]


def _number(values: list[int] | Int64) -> Int64:
    number: Int64 = np.unique(np.array(values, np.int64), return_inverse=True)[1].astype(np.int64)
    return number


def epochs_of_ends(timeline: Timeline, signal: Int64, wait: Int64, keys: CallKeys | None = None) -> Int64:
    """[n] number of the call of each span, signals first. keys: of the whole run; without, of these ends."""
    launch = np.concatenate([timeline.spans.launch[signal], timeline.spans.launch[wait]])
    number: Int64 = (keys or CallKeys.of(timeline, signal, wait)).number_launches(timeline)[launch]
    return number


def append_digit(packed: Int64, digit: Int64) -> Int64:
    """A number that tells (packed, digit) apart, in the order of the two, kept small enough for the next digit."""
    digit = digit - digit.min(initial=0)
    base = int(digit.max(initial=0)) + 1
    if int(packed.max(initial=0)) >= (1 << 62) // base:
        packed = np.unique(packed, return_inverse=True)[1].astype(np.int64)
        if int(packed.max(initial=0)) >= (1 << 62) // base:
            digit = np.unique(digit, return_inverse=True)[1].astype(np.int64)
            base = int(digit.max(initial=0)) + 1
    return packed * base + digit

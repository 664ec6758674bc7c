"""A part of a run as questions see it: some whole calls, or all of them, with what the waits in them were for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from tracekern.analysis.doubt import charge_ranks
from tracekern.analysis.parts import Parts
from tracekern.analysis.questions.balance import BalanceSums
from tracekern.analysis.questions.group_waits import waits_by_group
from tracekern.analysis.questions.imbalance import work_of_ranks
from tracekern.analysis.questions.nodes import node_waits
from tracekern.analysis.questions.receive_matrix import sums_of_pairs
from tracekern.analysis.questions.ring_steps import sums_of_tiles
from tracekern.analysis.questions.stages import idle_times
from tracekern.analysis.questions.staging import sums_of_sweeps
from tracekern.analysis.questions.summary import SpanCounts
from tracekern.analysis.questions.time_shares import share_time
from tracekern.analysis.waits.analyze import WaitKind, Waits, analyze_waits
from tracekern.analysis.waits.full_rings import find_starved
from tracekern.analysis.waits.matrix import wait_matrix
from tracekern.analysis.waits.ring_fill import slots_of_rings
from tracekern.analysis.waits.statistics import WaitSums, WaitTotals
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.model import Mask, Timeline
from tracekern.timeline.select import Window, reaches_into, select


@dataclass(eq=False)
class Part:
    """Some whole calls of a run, or all of them.

    Waits are divided on all of the part first: what released a wait may be outside the window.
    """

    timeline: Timeline
    """In ns. Its spans are those of the part, its tables those of the whole run."""
    window: Window | None = None
    """Begin and end of what is judged, in ns from the origin. None: all of it."""
    launches: Mask | None = None
    """[num_launches] which are the part's. None: all. Whatever is of no launch is a part with none, or with all."""

    @property
    def is_own(self) -> Mask:
        """[num_launches] which are the part's."""
        return np.ones(len(self.timeline.launches), bool) if self.launches is None else self.launches

    @cached_property
    def in_window(self) -> Timeline:
        """What reaches into the window."""
        return select(self.timeline, self.window)

    @cached_property
    def every_wait(self) -> Waits:
        """All waits, also those outside the window, and those that never ended."""
        return analyze_waits(self.timeline)

    @cached_property
    def waits(self) -> Waits:
        """Those that reach into the window."""
        every, start = self.every_wait, self.timeline.spans.start
        if self.window is None:
            return every
        begin = start[every.row]
        return every.take(np.flatnonzero(reaches_into(self.window, begin, begin + every.wait_ns)))

    @cached_property
    def counted_waits(self) -> Waits:
        """The same without those of start-up, which nothing is charged for."""
        is_start_up = self.is_start_up[self.waits.launch]
        return self.waits.take(np.flatnonzero(~is_start_up)) if is_start_up.any() else self.waits

    @cached_property
    def ended_waits(self) -> Waits:
        """All that ended: what replays and paths follow."""
        return without_endless(self.every_wait)

    @cached_property
    def is_start_up(self) -> Mask:
        """[num_launches + 1] by launch; the last is of a span of no launch."""
        return np.append(launch_iterations(self.timeline).is_start_up, False)


def without_endless(waits: Waits) -> Waits:
    """Returns those that ended."""
    return waits.take(np.flatnonzero(~waits.endless)) if waits.endless.any() else waits


_QUESTIONS: dict[str, Callable[[Part], Any]] = {
    "counts": lambda part: SpanCounts.of(part.in_window),
    "time": lambda part: share_time(part.in_window),
    "balance": lambda part: BalanceSums.of(part.in_window),
    "work": lambda part: work_of_ranks(part.in_window),
    "idle": lambda part: idle_times(part.timeline, part.window),
    "received": lambda part: sums_of_pairs(part.in_window),
    "sweeps": lambda part: sums_of_sweeps(part.in_window),
    "tiles": lambda part: sums_of_tiles(part.in_window),
    "waits": lambda part: WaitSums.of(part.counted_waits, by=("phase",)),
    "charges": lambda part: charge_ranks(part.timeline, part.counted_waits),
    "matrix": lambda part: wait_matrix(part.timeline, part.counted_waits),
    "groups": lambda part: waits_by_group(part.timeline, part.counted_waits),
    "nodes": lambda part: node_waits(part.timeline, part.counted_waits),
    "full_rings": lambda part: find_starved(part.timeline, part.waits, WaitKind.CREDIT, part.window),
    "dry_rings": lambda part: find_starved(part.timeline, part.waits, WaitKind.DATA, part.window),
    "ring_slots": lambda part: slots_of_rings(part.timeline, part.window),
    "totals": lambda part: WaitTotals.of(part.waits),
    "ended": lambda part: WaitTotals.of(part.ended_waits),
}


def ask(part: Part, name: str) -> Any:
    """Returns what the part says to a question: a partial result."""
    return _QUESTIONS[name](part)


def ask_all(part: Part) -> dict[str, Any]:
    """Returns what it says to all questions."""
    return {name: ask(part, name) for name in _QUESTIONS}


class SumsOfParts(Mapping[str, Any]):
    """What all parts say to each question, which is asked when it is first needed, and once."""

    def __init__(self, parts: Parts[Part]) -> None:
        self._parts, self._known = parts, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if len(self._parts) > 1 and not self._known:  # each is looked at once for all questions
            self._known = self._parts.map(ask_all).total()
        if name not in self._known:
            self._known[name] = self._parts.map(partial(ask, name=name)).total()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_QUESTIONS)

    def __len__(self) -> int:
        return len(_QUESTIONS)

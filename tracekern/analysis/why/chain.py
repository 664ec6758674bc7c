"""Why a single wait lasted: what it was for, and what that had waited for, back to when the wait began."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tracekern.analysis.graph.launch_graph import EdgeKind
from tracekern.analysis.graph.moments import Moments, Place
from tracekern.analysis.part import Part, without_endless
from tracekern.analysis.waits.analyze import Phase
from tracekern.analysis.why.critical_path import PathPart, PathWalker, Stretches
from tracekern.formatting import brief
from tracekern.timeline.facts.iterations import launch_iterations


@dataclass(frozen=True)
class Chain:
    rank: int
    phase: Phase
    start_ns: int
    wait_ns: int
    is_start_up: bool
    """Whether it lies in a launch that came before the first iteration."""
    links: tuple[PathPart, ...]
    """Messages, kernels and gaps, the last one first; a kernel has the phase that took most of its time. They sum to
    the wait, less what its warp did in it once it was over. Empty where nothing on record ended it."""

    __repr__ = brief


class LongWait(NamedTuple):
    """A wait. The first in order is the longest, of several that last as long the one that the timeline shows first."""

    negative_ns: int
    track: int
    start: int
    part: int
    row: int
    """Of the part's spans."""
    is_start_up: bool


@dataclass(frozen=True)
class LongestWaits:
    """The longest wait of each phase in some parts of a run."""

    by_phase: dict[int, LongWait]
    """By PhaseNumbers."""

    @classmethod
    def of(cls, part: Part, number: int) -> LongestWaits:
        """number: of the part."""
        waits, start = without_endless(part.waits), part.timeline.spans.start
        longest = np.zeros(len(waits.phases), np.int64)
        np.maximum.at(longest, waits.phase, waits.wait_ns)
        found = np.flatnonzero(waits.wait_ns == longest[waits.phase])
        _, first = np.unique(waits.phase[found], return_index=True)
        waits = waits.take(found[first])
        columns = -waits.wait_ns, waits.track, start[waits.row], waits.row, part.is_start_up[waits.launch], waits.phase
        known = zip(*(column.tolist() for column in columns), strict=True)
        by_phase = {
            waits.phase_numbers[phase]: LongWait(negative_ns, track, begin, number, row, is_start_up)
            for negative_ns, track, begin, row, is_start_up, phase in known
        }
        return cls(by_phase)

    def __add__(self, other: LongestWaits) -> LongestWaits:
        both = self.by_phase.keys() & other.by_phase.keys()
        longer = {phase: min(self.by_phase[phase], other.by_phase[phase]) for phase in both}
        return LongestWaits(self.by_phase | other.by_phase | longer)

    def longest_first(self) -> list[LongWait]:
        """Returns those of start-up last."""
        by_phase = (wait for _, wait in sorted(self.by_phase.items()))
        return sorted(by_phase, key=lambda wait: (wait.is_start_up, wait.negative_ns))


def find_chain(moments: Moments, part: int, row: int) -> Chain:
    """Returns the chain of a wait, which is the row of a part's spans."""
    graph, walker = moments.graphs[part], PathWalker(moments)
    waits, run_graph = graph.waits, graph.run_graph
    wait = int(np.searchsorted(waits.row, row))
    start_ns, heard = int(graph.timeline.spans.start[row]), run_graph.heard
    place = int(np.searchsorted(heard, wait))
    links: list[PathPart] = []
    if place < len(heard) and heard[place] == wait:
        stretches = walker.stretches(Place(part, run_graph.first_heard + place), start_ns)
        for link in reversed(_links(stretches)):
            largest, *others = walker.parts(link)
            links.append(dataclasses.replace(largest, time_ns=largest.time_ns + sum(part.time_ns for part in others)))
    phase, launch = waits.phases[waits.phase[wait]], int(waits.launch[wait])
    is_start_up = launch >= 0 and bool(launch_iterations(graph.timeline).is_start_up[launch])
    return Chain(int(waits.rank[wait]), phase, start_ns, int(waits.wait_ns[wait]), is_start_up, tuple(links))


def _links(path: Stretches) -> list[Stretches]:
    """What neighbours do in one kernel of a rank is one link."""
    kind = np.where(path.kind == EdgeKind.MEETING, EdgeKind.OWN, path.kind)
    is_new = np.ones(len(path), bool)
    is_new[1:] = np.any([np.diff(column) != 0 for column in (kind, path.launch, path.sender)], axis=0)
    first = np.flatnonzero(is_new).tolist()
    return [path.take(slice(*bounds)) for bounds in zip(first, [*first[1:], len(path)], strict=True)]

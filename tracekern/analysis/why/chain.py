"""Why a single wait lasted: what it was for, and what that had waited for, back to when the wait began."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.run_graph import EdgeKind
from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.analysis.why.critical_path import PathPart, PathWalker, Stretches
from tracekern.formatting import brief
from tracekern.timeline.model import Int64, Mask, Timeline


@dataclass(frozen=True)
class Chain:
    row: int
    """The wait: index into Timeline.spans."""
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


def longest_of_phases(waits: Waits, is_start_up: Mask) -> Int64:
    """Returns indices into `waits`: the longest wait of each phase, longest first; those of start-up come last.

    is_start_up: [num_waits]
    """
    longest = np.zeros(len(waits.phases), np.int64)
    np.maximum.at(longest, waits.phase, waits.wait_ns)
    found = np.flatnonzero(waits.wait_ns == longest[waits.phase])
    _, first = np.unique(waits.phase[found], return_index=True)
    found = found[first]
    return found[np.lexsort((-waits.wait_ns[found], is_start_up[found]))]


def find_chain(
    timeline: Timeline, waits: Waits, moments: Moments, walker: PathWalker, row: int, is_start_up: bool
) -> Chain:
    """Returns the chain of the wait `row` of Timeline.spans. waits: all of the Timeline."""
    wait = int(np.searchsorted(waits.row, row))
    start_ns, heard = int(timeline.spans.start[row]), moments.run_graph.heard
    place = int(np.searchsorted(heard, wait))
    links: list[PathPart] = []
    if place < len(heard) and heard[place] == wait:
        stretches = walker.stretches(moments.run_graph.first_heard + place, start_ns)
        for link in reversed(_links(stretches)):
            largest, *others = walker.parts(link)
            links.append(dataclasses.replace(largest, time_ns=largest.time_ns + sum(part.time_ns for part in others)))
    phase = waits.phases[waits.phase[wait]]
    return Chain(row, int(waits.rank[wait]), phase, start_ns, int(waits.wait_ns[wait]), is_start_up, tuple(links))


def _links(path: Stretches) -> list[Stretches]:
    """What neighbours do in one kernel of a rank is one link."""
    kind = np.where(path.kind == EdgeKind.MEETING, EdgeKind.OWN, path.kind)
    is_new = np.ones(len(path), bool)
    is_new[1:] = np.any([np.diff(column) != 0 for column in (kind, path.launch, path.sender)], axis=0)
    first = np.flatnonzero(is_new).tolist()
    return [path.take(slice(*bounds)) for bounds in zip(first, [*first[1:], len(path)], strict=True)]

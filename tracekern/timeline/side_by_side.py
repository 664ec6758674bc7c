"""Two captures as one Timeline, their clocks set so that the same launch starts at the same time in both."""

from __future__ import annotations

import dataclasses

import numpy as np

from tracekern.errors import BadInput
from tracekern.timeline.merge import concatenate
from tracekern.timeline.model import OPEN_END, Flows, Timeline, TrackKind


def side_by_side(
    first: Timeline, second: Timeline, names: tuple[str, str] = ("A", "B"), at: tuple[str, int] | None = None
) -> Timeline:
    """Both Timelines (in ns) in one, each shifted as a whole so that one launch starts at the same time in both.

    Ranks are labelled `A rank 0`, ..., and those of `second` renumbered to follow those of `first`; the field `peer` of
    a span keeps the number in its own capture. at: (launch name, sequence); without, the second launch of the first
    kernel that both launched twice, since the first warms up, or else the first launch that both have.
    Raises BadInput where there is no such launch.
    """
    at = at or _choose(first, second)
    pair = (first, second)
    starts = [_start_of(timeline, at, name) for timeline, name in zip(pair, names, strict=True)]
    lead = max(start - _earliest(timeline) for timeline, start in zip(pair, starts, strict=True))
    first_free = max((rank.rank for rank in first.ranks), default=-1) + 1
    sides = [
        _shifted(_relabelled(timeline, name, offset), lead - start)
        for timeline, name, offset, start in zip(pair, names, (0, first_free), starts, strict=True)
    ]
    flows = Flows(
        np.concatenate([first.flows.signal, second.flows.signal + len(first.spans)]),
        np.concatenate([first.flows.wait, second.flows.wait + len(first.spans)]),
    )
    title = "; ".join(f"{name}: {side.title or 'trace'}" for name, side in zip(names, pair, strict=True))
    return concatenate(sides).replace(flows=flows, title=title, aligned=first.aligned and second.aligned)


def _choose(first: Timeline, second: Timeline) -> tuple[str, int]:
    theirs = {(launch.name, launch.sequence) for launch in second.launches}
    common = [(launch.name, launch.sequence) for launch in first.launches if (launch.name, launch.sequence) in theirs]
    if not common:
        raise BadInput("the two captures have no launch in common; there is nothing to align them at")
    return next((pair for pair in common if pair[1] == 1), common[0])


def _start_of(timeline: Timeline, at: tuple[str, int], name: str) -> int:
    """When the first rank started that launch."""
    if timeline.unit != "ns":
        raise BadInput(f"{name} is in {timeline.unit}; align it to ns first")
    spans = timeline.spans
    chosen = np.array([(launch.name, launch.sequence) == at for launch in timeline.launches], bool)
    is_lane = np.array([track.kind == TrackKind.LAUNCH for track in timeline.tracks], bool)
    which = np.flatnonzero(is_lane[spans.track]) if len(chosen) and len(is_lane) else np.empty(0, np.int64)
    which = which[chosen[spans.launch[which]]]
    if not len(which):
        known = ", ".join(dict.fromkeys(launch.name for launch in timeline.launches)) or "none"
        raise BadInput(f"{name} has no launch {at[1]} of {at[0]!r} with records in it; its launches are {known}")
    return int(spans.start[which].min())


def _earliest(timeline: Timeline) -> int:
    columns = [column for column in (timeline.spans.start, timeline.marks.time) if len(column)]
    return min(int(column.min()) for column in columns)


def _shifted(timeline: Timeline, by: int) -> Timeline:
    """No time becomes negative: -1 is the end of a span that never closed."""
    spans = timeline.spans
    return timeline.replace(
        spans=dataclasses.replace(
            spans, start=spans.start + by, end=np.where(spans.end == OPEN_END, OPEN_END, spans.end + by)
        ),
        marks=dataclasses.replace(timeline.marks, time=timeline.marks.time + by),
    )


def _relabelled(timeline: Timeline, name: str, offset: int) -> Timeline:
    ranks = (
        dataclasses.replace(rank, rank=rank.rank + offset, label=f"{name} rank {rank.rank}") for rank in timeline.ranks
    )
    return timeline.replace(
        ranks=tuple(ranks),
        tracks=tuple(dataclasses.replace(track, rank=track.rank + offset) for track in timeline.tracks),
        launches=tuple(dataclasses.replace(launch, rank=launch.rank + offset) for launch in timeline.launches),
        problems=tuple(
            dataclasses.replace(problem, rank=problem.rank + offset if problem.rank >= 0 else -1)
            for problem in timeline.problems
        ),
    )

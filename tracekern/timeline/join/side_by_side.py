"""Two captures as one Timeline, their clocks set so that the same launch starts at the same time in both."""

from __future__ import annotations

import dataclasses

import numpy as np

from tracekern.errors import BadInput
from tracekern.timeline.join.concatenate import concatenate
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
    pair = (first, second)
    started = [_starts(timeline, name) for timeline, name in zip(pair, names, strict=True)]
    at = at or _choose(*started)
    starts = [_start_of(at, known, name) for known, name in zip(started, names, strict=True)]
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
    return concatenate(sides).replace(flows=flows, title=title)


def _starts(timeline: Timeline, name: str) -> dict[tuple[str, int], int]:
    """When the first rank started each launch, by (name, sequence); those that left nothing are missing."""
    if timeline.unit != "ns":
        raise BadInput(f"{name} is in {timeline.unit}; align it to ns first")
    spans = timeline.spans
    is_lane = timeline.tracks_of(TrackKind.LAUNCH)
    lanes = np.flatnonzero(is_lane[spans.track] & (spans.launch >= 0))
    found: dict[tuple[str, int], int] = {}
    for idx, start in zip(spans.launch[lanes].tolist(), spans.start[lanes].tolist(), strict=True):
        launch = timeline.launches[idx].name, timeline.launches[idx].sequence
        found[launch] = min(found.get(launch, start), start)
    return found


def _choose(first: dict[tuple[str, int], int], second: dict[tuple[str, int], int]) -> tuple[str, int]:
    common = sorted(first.keys() & second.keys(), key=lambda launch: (first[launch], launch))
    if not common:
        raise BadInput("the two captures have no launch in common; there is nothing to align them at")
    return next((launch for launch in common if launch[1] == 1), common[0])


def _start_of(at: tuple[str, int], started: dict[tuple[str, int], int], name: str) -> int:
    if at not in started:
        known = ", ".join(dict.fromkeys(launch for launch, _ in started)) or "none"
        raise BadInput(f"{name} has no launch {at[1]} of {at[0]!r} with records in it; its launches are {known}")
    return started[at]


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
        dataclasses.replace(
            rank,
            rank=rank.rank + offset,
            label=f"{name} rank {rank.rank}",
            died_ns=None,  # on the axis before the shift
            clock_id=rank.clock_id and f"{name} {rank.clock_id}",  # shifted, it is another clock
        )
        for rank in timeline.ranks
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

"""Finds times that cannot be: events farther apart than the capture lasted, clocks known to less than all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekern.formatting import duration, ranks
from tracekern.timeline.join.host_lanes import opened_ns
from tracekern.timeline.model import Int64, Mask, Problem, Rank, Timeline, TrackKind

_MIN_BOUND_NS = 1e8
"""No sound clock is known to so little, however short the capture."""
_SLACK_NS = 60 * 10**9
"""The wall clock that says how long a capture lasted may have been set meanwhile; so the double is allowed, too."""


@dataclass(frozen=True)
class TrackTimes:
    """[num_tracks] the first and the last recorded time of each track. Adds up over the parts of a run."""

    first: Int64
    """Larger than the last where there is none."""
    last: Int64

    @classmethod
    def of(cls, timeline: Timeline) -> TrackTimes:
        limits, spans, marks = np.iinfo(np.int64), timeline.spans, timeline.marks
        first, last = (np.full(len(timeline.tracks), limit) for limit in (limits.max, limits.min))
        for track, start, end in (
            (spans.track, spans.start, np.maximum(spans.start, spans.end)),
            (marks.track, marks.time, marks.time),
        ):
            np.minimum.at(first, track, start)
            np.maximum.at(last, track, end)
        return cls(first, last)

    def __add__(self, other: TrackTimes) -> TrackTimes:
        return TrackTimes(np.minimum(self.first, other.first), np.maximum(self.last, other.last))


def damaged_times(timeline: Timeline, times: TrackTimes | None = None) -> tuple[Problem, ...]:
    """The problem of times that cannot be: no figure is built on them.

    timeline: in ns. times: of all its parts; without, its own.
    """
    times = times or TrackTimes.of(timeline)
    for numbers, text in _contradictions(timeline, times.first, times.last):
        advice = f"record again, or leave {ranks(numbers)} out"
        return (Problem("error", "damaged_times", numbers[-1], -1, f"the times are damaged: {text}; {advice}"),)
    return ()


def damage_of(timeline: Timeline) -> str:
    """The text of that problem; "" where the times can be right."""
    return next((problem.text for problem in timeline.problems if problem.kind == "damaged_times"), "")


def _contradictions(timeline: Timeline, first: Int64, last: Int64) -> Iterator[tuple[list[int], str]]:
    """Yields the ranks and what is wrong with their times."""
    lasted_ns = {rank.rank: lasted for rank in timeline.ranks if (lasted := _lasted_ns(rank)) is not None}
    of_rank, of_host = timeline.track_ranks(), timeline.tracks_of(TrackKind.HOST)
    for number, lasted in lasted_ns.items():
        for of_kind in (~of_host, of_host):
            if (apart := _apart_ns(first, last, of_kind & (of_rank == number))) > 2 * lasted + _SLACK_NS:
                yield [number], f"events of rank {number} lie {duration(apart)} apart, {_capture(lasted)}"
    apart = _apart_ns(first, last, ~of_host)
    if timeline.has_one_axis and lasted_ns and apart > 2 * max(lasted_ns.values()) + _SLACK_NS:
        known = np.flatnonzero(~of_host & (last >= first))
        ends = known[[first[known].argmin(), last[known].argmax()]]
        text = f"events lie {duration(apart)} apart, {_capture(max(lasted_ns.values()))}"
        yield sorted({int(of_rank[track]) for track in ends}), text
    for rank in timeline.ranks if timeline.aligned else ():
        if rank.clock and rank.clock.hard_ns > max(apart, _MIN_BOUND_NS):
            bound = f"the clock of rank {rank.rank} is known to ±{duration(rank.clock.hard_ns)}"
            yield [rank.rank], f"{bound}, and all events lie within {duration(apart)}"


def _capture(lasted_ns: int) -> str:
    return f"the capture lasted {duration(lasted_ns)}"


def _lasted_ns(rank: Rank) -> int | None:
    """From the opening of a rank's capture to its packing; None where that is not known."""
    opened, packed = opened_ns(rank.metadata), rank.metadata.get("packed_ns")
    return packed - opened if opened is not None and isinstance(packed, int) and packed >= opened else None


def _apart_ns(first: Int64, last: Int64, of_tracks: Mask) -> int:
    known = of_tracks & (last >= first)
    return int(last[known].max()) - int(first[known].min()) if known.any() else 0

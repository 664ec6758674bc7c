"""Parts of a Timeline: a window of time, some ranks, some tracks. A viewer dies at ten million spans; a part opens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracekern.errors import BadInput
from tracekern.formatting import number_ranges
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.join.damage import damage_of, damaged_times
from tracekern.timeline.model import ABSENT_KINDS, OPEN_END, Flows, Int32, Int64, Mask, Problem, Timeline

Window = tuple[int, int]
"""Two times in the timeline's unit, counted from its origin, both included."""


def select(
    timeline: Timeline,
    window: Window | None = None,
    ranks: Sequence[int] | None = None,
    last_heard: Int64 | None = None,
) -> Timeline:
    """The part of `timeline` inside `window` and on `ranks`.

    A span that reaches into the window is kept whole. A flow is kept when both of its spans are. last_heard: as of
    known_ends().

    Raises:
        BadInput: the window is empty or a rank is not in the timeline.
    """
    if ranks is not None:
        timeline = _select_ranks(timeline, ranks)
    if window is not None:
        timeline = _select_window(timeline, window, last_heard)
    return timeline


def reaches_into(window: Window | None, start: Int64, end: Int64) -> Mask:
    """[n] whether what lasts from each start to its end, or OPEN_END, has a part in the window; without one, all."""
    if window is None:
        return np.ones(len(start), bool)
    first, last = window
    return np.asarray((start <= last) & ((end >= first) | (end == OPEN_END)), bool)


def take_spans(timeline: Timeline, kept: Mask) -> Timeline:
    """The timeline with the spans of the mask `kept` [num_spans], and the flows between them."""
    new_index = np.cumsum(kept, dtype=np.int64) - 1
    signal, wait = timeline.flows.signal, timeline.flows.wait
    kept_flows = kept[signal] & kept[wait]
    flows = Flows(new_index[signal[kept_flows]], new_index[wait[kept_flows]])
    return timeline.replace(spans=timeline.spans.take(kept), flows=flows)


def take_tracks(timeline: Timeline, kept: Mask) -> Timeline:
    """The timeline with the tracks of the mask `kept` [num_tracks] and what is on them."""
    reduced = take_spans(timeline, kept[timeline.spans.track])
    marks = reduced.marks.take(kept[reduced.marks.track])
    new_track = _renumber(kept)
    return reduced.replace(
        tracks=tuple(track for track, keep in zip(timeline.tracks, kept, strict=True) if keep),
        spans=_with(reduced.spans, track=new_track[reduced.spans.track]),
        marks=_with(marks, track=new_track[marks.track]),
        problems=tuple(
            _with(problem, track=int(new_track[problem.track]) if problem.track >= 0 else -1)
            for problem in timeline.problems
            if problem.track < 0 or kept[problem.track]
        ),
    )


def _select_ranks(timeline: Timeline, ranks: Sequence[int]) -> Timeline:
    wanted = set(ranks)
    known = {rank.rank for rank in timeline.ranks}
    if unknown := sorted(wanted - known):
        raise BadInput(f"rank {unknown[0]} is not in the timeline, which has ranks {number_ranges(sorted(known))}")
    if not wanted:
        raise BadInput(f"no rank selected; choose from {number_ranges(sorted(known))}")
    reduced = take_tracks(timeline, np.isin(timeline.track_ranks(), list(wanted)))
    kept_launches = np.array([launch.rank in wanted for launch in timeline.launches], bool)
    new_launch = np.append(_renumber(kept_launches), np.int32(-1))  # index -1: no launch
    chosen = reduced.replace(
        ranks=tuple(rank for rank in timeline.ranks if rank.rank in wanted),
        launches=tuple(launch for launch in timeline.launches if launch.rank in wanted),
        spans=_with(reduced.spans, launch=new_launch[reduced.spans.launch]),
        marks=_with(reduced.marks, launch=new_launch[reduced.marks.launch]),
    )
    stay = (p for p in reduced.problems if p.rank < 0 or p.rank in wanted or p.kind in ABSENT_KINDS)
    problems = [*(p for p in stay if p.kind != "damaged_times"), *_left_out(sorted(known - wanted), len(known))]
    still_damaged = damaged_times(chosen) if damage_of(timeline) else ()
    return chosen.replace(problems=(*still_damaged, *problems))


def _left_out(ranks: list[int], num_known: int) -> list[Problem]:
    """What is left may have waited for them: the reader has to know."""
    if not ranks:
        return []
    text = f"{len(ranks)} of {num_known} ranks left out: {number_ranges(ranks)}"
    return [Problem("note", "left_out_rank", ranks[0], -1, text, len(ranks))]


def _select_window(timeline: Timeline, window: Window, last_heard: Int64 | None) -> Timeline:
    first, last = window
    if first >= last:
        raise BadInput(f"the window {first} ns to {last} ns is empty; its end must be after its start")
    spans, marks = timeline.spans, timeline.marks
    inside = (marks.time >= first) & (marks.time <= last)
    reaches_in = np.asarray((spans.start <= last) & (known_ends(timeline, last_heard) >= first), bool)
    return take_spans(timeline, reaches_in).replace(marks=marks.take(inside))


def _renumber(kept: Mask) -> Int32:
    return np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)


def _with(record: Any, **changes: Any) -> Any:
    return dataclasses.replace(record, **changes)

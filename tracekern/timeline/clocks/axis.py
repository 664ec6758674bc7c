"""Puts the decoded ranks of a run on one axis: ticks of each rank as ns of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.timeline.clocks.by_hosts import fit_by_hosts, round_trips
from tracekern.timeline.clocks.fit import UnrelatedClocks, apply_clock, fit_clocks, unaligned_clocks
from tracekern.timeline.clocks.host_times import apply_host, relate_hosts, time_of_death
from tracekern.timeline.model import OPEN_END, ClockFit, Int32, Int64, Marks, Spans, Timeline, TrackKind

Times = tuple[int, int]
"""The first and the last of some events."""


def fit_ranks(
    pieces: Sequence[Timeline], ticks: Mapping[int, Times], samples: npt.NDArray[Any], unaligned: bool
) -> dict[int, ClockFit]:
    """The map from ticks to axis ns of each rank; one axis unless `unaligned`.

    pieces: the ranks in ticks, of whose spans only those of engines are looked at. ticks: rank -> device_times().
    """
    ranks = [piece.ranks[0] for piece in pieces]
    if unaligned:
        fits = unaligned_clocks(ranks, ticks)
        for rank in ranks:  # beside its own host at least: wall clock and device clock may be years apart
            fits = relate_hosts(samples, [rank], fits, {}, {})
        return fits
    try:
        return fit_clocks(samples, ranks, ticks)
    except UnrelatedClocks as unrelated:
        try:
            return fit_by_hosts(round_trips(pieces), samples, ranks, ticks)
        except UnrelatedClocks:
            raise unrelated from None


def device_times(piece: Timeline) -> Times | None:
    """Of what a rank stamped with its own clock; None where it stamped nothing."""
    of_engine = piece.tracks_of(TrackKind.ENGINE)  # in the time of the host
    spans, marks = piece.spans, piece.marks
    if of_engine.any():
        spans, marks = spans.take(~of_engine[spans.track]), marks.take(~of_engine[marks.track])
    return first_and_last(spans, marks)


def first_and_last(spans: Spans, marks: Marks) -> Times | None:
    """None where there are neither spans nor marks."""
    begins = [column for column in (spans.start, marks.time) if len(column)]
    if not begins:
        return None
    ends = [spans.end] if len(spans) else []
    return int(min(map(np.min, begins))), int(max(map(np.max, [*begins, *ends])))


def join_times(times: Sequence[Times | None]) -> Times | None:
    """The first and the last of all; None where there are none."""
    known = [one for one in times if one]
    return (min(first for first, _ in known), max(last for _, last in known)) if known else None


def times_to_ns(fit: ClockFit, ticks: Times | None) -> Times | None:
    """Of events that a rank stamped with its own clock. The map of no clock runs backwards: they stay the first and the
    last."""
    if ticks is None:
        return None
    first, last = apply_clock(fit, np.array(ticks, np.int64)).tolist()
    return first, last


def to_ns(piece: Timeline, fit: ClockFit, aligned: bool) -> Timeline:
    """A rank, or a part of it, in ns of the axis."""
    spans, of_engine = piece.spans, np.append(piece.tracks_of(TrackKind.ENGINE), False)

    def on_axis(ticks: Int64, track: Int32) -> Int64:
        if not len(ticks):
            return ticks
        times = apply_clock(fit, ticks)
        by_host = np.flatnonzero(of_engine[track])
        times[by_host] = apply_host(fit, ticks[by_host])
        return times

    end = on_axis(spans.end, spans.track)
    end[spans.end == OPEN_END] = OPEN_END
    return piece.replace(
        unit="ns",
        aligned=aligned,
        ranks=(dataclasses.replace(piece.ranks[0], clock=fit, died_ns=time_of_death(piece.ranks[0], fit)),),
        spans=dataclasses.replace(spans, start=on_axis(spans.start, spans.track), end=end),
        marks=dataclasses.replace(piece.marks, time=on_axis(piece.marks.time, piece.marks.track)),
    )

"""Relates the axis to the time of the hosts, so that host lanes can be drawn beside device tracks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import STATE_NAMES, SampleKind, SegmentState
from tracekern.timeline.clocks.course import Course, through_anchors
from tracekern.timeline.model import ClockFit, Int64, Rank

MAX_HOST_RATE = 500e-6
"""Assumed: a host steers its wall clock by no more than this (the limit of adjtimex)."""
MAX_HOST_DRIFT = 100e-6
"""A wall clock that moves faster against the axis was set between two rounds, or is being steered hard: what it
did meanwhile cannot be said."""
MAX_HOST_WANDER_PER_NS = 1e-6 / 1e9
"""Assumed: between two rounds the rate of the wall clock changes by no more than 1 ppm in a second."""
MIN_BASELINE_NS = 1e9
"""The middle of a bracket is off by some 0.1 us: over a shorter time a slope would be noise, and lanes reach far."""

_Interval = tuple[float, float, float]  # time, at least, at most: ns
_Times = Mapping[int, tuple[int, int]]
_SECOND = 10**9


def apply_host(fit: ClockFit, wall_ns: Int64) -> Int64:
    """[n] int64 axis ns of [n] int64 ns of host time; unchanged where nothing relates the two."""
    if not fit.host_anchor_ns:
        return wall_ns
    return through_anchors(fit.host_anchor_ns, fit.host_axis_ns, wall_ns)


def time_of_death(rank: Rank, fit: ClockFit) -> int | None:
    """Returns the axis ns when a rank died; None if that is not known."""
    died_ns = rank.metadata.get("died_ns", 0)
    if rank.state != STATE_NAMES[SegmentState.OPEN] or not died_ns or not fit.host_anchor_ns:
        return None
    return int(apply_host(fit, np.array([died_ns]))[0])


def relate_hosts(
    samples: npt.NDArray[Any],
    ranks: Sequence[Rank],
    fits: Mapping[int, ClockFit],
    hard_ns: Mapping[int, float],
    events: _Times,
) -> dict[int, ClockFit]:
    """The fits with the map from the wall clock to the axis filled in; ranks of one machine share it.

    hard_ns: rank -> bound of its fit where the brackets were taken, which is not where its events are. events: rank ->
    (first, last) axis ns for which host_hard_ns has to hold; without any, the time between the first and the last
    round. A machine without host brackets keeps host_hard_ns = nan; so does one whose wall clock was set while it was
    sampled, and its map is about that.
    """
    related = dict(fits)
    for machine in sorted({rank.machine for rank in ranks}):
        members = [rank for rank in ranks if rank.machine == machine]
        brackets = [_bracket(samples, rank, fits[rank.rank], hard_ns.get(rank.rank, 0.0)) for rank in members]
        round_idx, host, at_least, at_most = (np.concatenate(column) for column in zip(*brackets, strict=True))
        if not len(host):
            continue
        base, first = int(at_least[0]), int(host[0])
        # int64 differences first: axis and wall clock may be 1e18 apart.
        least, most, time = (
            (at_least - base).astype(float),
            (at_most - base).astype(float),
            (host - first).astype(float),
        )
        rounds = [_intersect(time[which], least[which], most[which]) for which in _each(round_idx)]
        seen = [(start - base - first, end - base - first) for start, end in _of(events, members)]
        times, offsets, hard = _combine(rounds, seen)
        anchors = tuple(first + round(at) for at in times)
        axis = tuple(first + round(at) + base + round(offset) for at, offset in zip(times, offsets, strict=True))
        for rank in members:
            related[rank.rank] = dataclasses.replace(
                related[rank.rank], host_anchor_ns=anchors, host_axis_ns=axis, host_hard_ns=hard
            )
    return related


def _of(events: _Times, members: Sequence[Rank]) -> list[tuple[int, int]]:
    return [events[rank.rank] for rank in members if rank.rank in events]


def _each(round_idx: npt.NDArray[Any]) -> list[npt.NDArray[np.bool_]]:
    return [round_idx == one for one in np.unique(round_idx)]


def bracket_rows(samples: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
    """The samples of one rank that hold its wall clock; those during which it was set back are left out."""
    is_bracket = (samples["kind"] == SampleKind.HOST_BRACKET) & (samples["initiator"] == rank)
    rows: npt.NDArray[Any] = samples[is_bracket & (samples["t3"] >= samples["t0"])]
    return rows


def _bracket(
    samples: npt.NDArray[Any],
    rank: Rank,
    fit: ClockFit,
    hard_ns: float,
) -> tuple[npt.NDArray[Any], ...]:
    """(round, host ns, least, most) of the brackets of one rank: axis minus wall clock, int64 ns."""
    rows = bracket_rows(samples, rank.rank)
    axis = through_anchors(fit.anchor_ticks, fit.anchor_ns, rows["t1"].astype(np.int64))
    doubt = int(np.ceil(hard_ns))
    tick_ns = int(np.ceil(rank.resolution_ns))
    return rows["round_idx"], rows["t0"], axis - doubt - rows["t3"], axis + doubt + tick_ns - rows["t0"]


def _intersect(time: npt.NDArray[Any], at_least: npt.NDArray[Any], at_most: npt.NDArray[Any]) -> _Interval:
    """What the brackets of one round prove at the moment of the sharpest."""
    at = float(time[np.argmin(at_most - at_least)])
    doubt = MAX_HOST_RATE * np.abs(time - at)
    return at, float(np.max(at_least - doubt)), float(np.min(at_most + doubt))


def _combine(
    rounds: Sequence[_Interval], events: Sequence[tuple[float, float]]
) -> tuple[Iterable[float], Iterable[float], float]:
    """(times, offsets of the anchors, bound): a line from round to round."""
    time, least, most = (np.array(column) for column in zip(*rounds, strict=True))
    limits = (MAX_HOST_RATE, MAX_HOST_WANDER_PER_NS, MIN_BASELINE_NS)
    course = Course(time, (least + most) / 2, (most - least) / 2, *limits)
    if not _is_steady(course):
        middle = float(least.min() + most.max()) / 2
        return (time[0], time[0] + _SECOND), (middle, middle), float("nan")
    first = min((start for start, _ in events), default=time[0])
    last = max((end for _, end in events), default=time[-1])
    return *course.anchors(), course.error_within(first, last) + 1


def _is_steady(course: Course) -> bool:
    """Whether no round contradicts itself, or the one before by more than clocks drift: the wall clock was not set.

    Rounds so vague that the map would run backwards from one to the next are not steady either.
    """
    gap, moved = np.diff(course.time), np.abs(np.diff(course.offset))
    allowed = MAX_HOST_DRIFT * gap + course.error[:-1] + course.error[1:]
    return bool((course.error >= 0).all() and (moved < gap).all() and (moved <= allowed).all())

"""Relates the axis to the wall clocks of the hosts, so that host lanes can stand beside device tracks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.record.format import SampleKind
from tracekern.timeline.model import ClockFit, Int64, Rank

MAX_HOST_RATE = 500e-6
"""Assumed: a host steers its wall clock by no more than this (the limit of adjtimex)."""
MAX_HOST_WANDER_PER_NS = 1e-6 / 1e9
"""Assumed: between two rounds the rate of the wall clock changes by no more than 1 ppm in a second."""

_Interval = tuple[float, float, float]  # time, at least, at most: ns


def relate_hosts(
    samples: npt.NDArray[Any],
    ranks: Sequence[Rank],
    fits: Mapping[int, ClockFit],
    hard_ns: Mapping[int, float],
    apply_clock: Callable[[ClockFit, Int64], Int64],
) -> dict[int, ClockFit]:
    """The fits with host_offset_ns and host_hard_ns filled in; ranks of one node share both.

    hard_ns: rank -> bound of its fit where the brackets were taken, which is not where its events are. A node without
    host brackets keeps host_hard_ns = nan; so does one whose wall clock was set while it was sampled, and its offset is
    about that.
    """
    related = dict(fits)
    for node in sorted({rank.node for rank in ranks}):
        members = [rank for rank in ranks if rank.node == node]
        brackets = [
            _bracket(samples, rank, fits[rank.rank], hard_ns.get(rank.rank, 0.0), apply_clock) for rank in members
        ]
        round_idx, host, at_least, at_most = (np.concatenate(column) for column in zip(*brackets, strict=True))
        if not len(host):
            continue
        base = int(at_least[0])
        # int64 differences first: axis and wall clock may be 1e18 apart.
        least, most, time = (
            (at_least - base).astype(float),
            (at_most - base).astype(float),
            (host - host[0]).astype(float),
        )
        rounds = [_intersect(time[which], least[which], most[which]) for which in _each(round_idx)]
        offset, hard = _combine(rounds)
        for rank in members:
            related[rank.rank] = dataclasses.replace(
                related[rank.rank], host_offset_ns=base + round(offset), host_hard_ns=hard
            )
    return related


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
    apply_clock: Callable[[ClockFit, Int64], Int64],
) -> tuple[npt.NDArray[Any], ...]:
    """(round, host ns, least, most) of the brackets of one rank: axis minus wall clock, int64 ns."""
    rows = bracket_rows(samples, rank.rank)
    axis = apply_clock(fit, rows["t1"].astype(np.int64))
    doubt = int(np.ceil(hard_ns))
    tick_ns = int(np.ceil(rank.resolution_ticks * 1e9 / rank.ticks_per_second))
    return rows["round_idx"], rows["t0"], axis - doubt - rows["t3"], axis + doubt + tick_ns - rows["t0"]


def _intersect(time: npt.NDArray[Any], at_least: npt.NDArray[Any], at_most: npt.NDArray[Any]) -> _Interval:
    """What the brackets of one round prove at the moment of the sharpest."""
    at = float(time[np.argmin(at_most - at_least)])
    doubt = MAX_HOST_RATE * np.abs(time - at)
    return at, float(np.max(at_least - doubt)), float(np.min(at_most + doubt))


def _combine(rounds: Sequence[_Interval]) -> tuple[float, float]:
    """(offset, hard): one number for the whole capture, so what the two clocks drift apart is part of its bound."""
    low, high = min(r[1] for r in rounds), max(r[2] for r in rounds)
    if any(at_least > at_most for _, at_least, at_most in rounds):
        return (low + high) / 2, float("nan")
    longest_gap = float(np.diff(sorted(r[0] for r in rounds)).max(initial=0.0))
    return (low + high) / 2, (high - low) / 2 + MAX_HOST_WANDER_PER_NS * longest_gap**2 / 8 + 1

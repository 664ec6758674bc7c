"""How long the kernels of each stage take on each rank, and for how much of that none of their warps works.

A stage is a launch name, a call is one launch of it. Each is timed by the clock of its own GPU, from the first warp
that started to the last that ended; nothing is compared across clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.groups import median_of_groups
from tracekern.analysis.questions.idle import idle_of_launches
from tracekern.formatting import brief
from tracekern.timeline.facts.iterations import LaunchIterations, launch_iterations
from tracekern.timeline.model import OPEN_END, Float64, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.select import Window, reaches_into


@dataclass(frozen=True)
class StageTime:
    """Medians, and one quantile, over the calls of one stage, a value for each rank; nan for a rank without a call."""

    stage: str
    """ "" of all stages together: the sum of an iteration."""
    num_calls: tuple[int, ...]
    median_ns: tuple[float, ...]
    p90_ns: tuple[float, ...]
    """9 of 10 calls take no longer."""
    idle_ns: tuple[float, ...]
    """For how long no warp works, of calls that lack no record; nan for a rank without one."""

    @property
    def mean_ns(self) -> float:
        """Over the ranks that have calls."""
        return float(np.nanmean(self.median_ns))

    @property
    def p90_of_slowest_ns(self) -> float:
        """p90_ns of the rank whose median is longest."""
        return self.p90_ns[int(np.nanargmax(self.median_ns))]

    @property
    def imbalance(self) -> float:
        """How many times the mean of the ranks the slowest takes."""
        return float(np.nanmax(self.median_ns)) / self.mean_ns if self.mean_ns else 1.0


@dataclass(frozen=True)
class StageTimes:
    """Times of the launches that ended, without those of start-up."""

    ranks: tuple[int, ...]
    stages: tuple[StageTime, ...]
    """Ordered by first launch."""
    together: StageTime | None
    """None where an iteration has one stage only."""
    is_first_left_out: bool
    """Whether the calls of the first iteration, which warm up, are left out of all medians."""
    kernel_ns: tuple[int, ...]
    """For each rank the sum over all calls that lack no record, those of the first iteration included."""
    idle_ns: tuple[int, ...]
    """For each rank the part of kernel_ns in which no warp works."""
    num_open: int
    """Launches that did not end, and are left out."""
    num_cut: int
    """Launches that lost records, or of which a flight recorder overwrote some: their idle time is not known."""

    __repr__ = brief

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, None for nan."""
        return {
            "ranks": list(self.ranks),
            "is_first_left_out": self.is_first_left_out,
            "num_open": self.num_open,
            "num_cut": self.num_cut,
            "kernel_ns": list(self.kernel_ns),
            "idle_ns": list(self.idle_ns),
            "stages": [_plain(row) for row in self.stages],
            "together": _plain(self.together) if self.together else None,
        }


def _plain(row: StageTime) -> dict[str, Any]:
    def known(values: tuple[float, ...]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    name = {"stage": row.stage} if row.stage else {}
    of_ranks = {"median_ns": known(row.median_ns), "p90_ns": known(row.p90_ns), "idle_ns": known(row.idle_ns)}
    return {**name, "num_calls": list(row.num_calls), **of_ranks, "mean_ns": row.mean_ns, "imbalance": row.imbalance}


def idle_times(timeline: Timeline, window: Window | None = None) -> Int64:
    """[num_launches] ns in which no warp works, of those that stage_times() looks at; 0 of others."""
    (launch, start, end), _ = _ended_launches(timeline, launch_iterations(timeline).is_start_up, window)
    idle = np.zeros(len(timeline.launches), np.int64)
    idle[launch] = idle_of_launches(timeline, launch, start, end)
    return idle


def stage_times(timeline: Timeline, window: Window | None = None, idle_ns: Int64 | None = None) -> StageTimes:
    """The times of a Timeline in ns; with a window, of the launches that reach into it.

    idle_ns: idle_times(), of the timeline by default.
    """
    of_launch_ns = idle_times(timeline, window) if idle_ns is None else idle_ns
    iterations = launch_iterations(timeline)
    (launch, start, end), num_open = _ended_launches(timeline, iterations.is_start_up, window)
    ranks = tuple(rank.rank for rank in timeline.ranks)
    rank = np.array([ranks.index(timeline.launches[idx].rank) for idx in launch.tolist()], np.int64)
    records = [(timeline.launches[idx].records_lost, timeline.launches[idx].records_overwritten) for idx in launch]
    is_cut = np.array([any(missing) for missing in records], bool)
    length = end - start
    is_last = np.append(np.diff(launch) != 0, True)[: len(launch)]  # of several spans of a launch
    idle = np.where(is_cut, np.nan, np.where(is_last, of_launch_ns[launch], 0))
    measured = iterations.is_measured | (iterations.of_launch < 0)
    is_counted = measured[launch] if measured[launch].any() else np.ones(len(launch), bool)
    kernel_ns, kernel_idle_ns = (
        tuple(int(values[~is_cut & (rank == place)].sum()) for place in range(len(ranks))) for values in (length, idle)
    )
    launch, rank, length = (column[is_counted] for column in (launch, rank, length))
    idle = idle[is_counted]
    stage = iterations.stage_of_launch[launch]
    rows = [
        _medians(iterations.stages[number], rank[chosen], length[chosen], idle[chosen], ranks)
        for number in dict.fromkeys(stage.tolist())
        for chosen in [stage == number]
    ]
    return StageTimes(
        ranks=ranks,
        stages=tuple(rows),
        together=_together(iterations, launch, rank, length, idle, ranks),
        is_first_left_out=not is_counted.all(),
        kernel_ns=kernel_ns,
        idle_ns=kernel_idle_ns,
        num_open=num_open,
        num_cut=int(is_cut.sum()),
    )


def _ended_launches(
    timeline: Timeline, is_start_up: Mask, window: Window | None
) -> tuple[tuple[Int64, Int64, Int64], int]:
    """Returns (launch, start, end) of those that ended, by their launches; and how many others there are."""
    spans = timeline.spans
    lanes = np.flatnonzero(timeline.tracks_of(TrackKind.LAUNCH)[spans.track] & (spans.launch >= 0))
    lanes = lanes[~is_start_up[spans.launch[lanes]]]
    lanes = lanes[reaches_into(window, spans.start[lanes], spans.end[lanes])]
    lanes = lanes[np.argsort(spans.launch[lanes], kind="stable")]
    ended = lanes[spans.end[lanes] != OPEN_END]
    return (spans.launch[ended].astype(np.int64), spans.start[ended], spans.end[ended]), len(lanes) - len(ended)


def _medians(stage: str, rank: Int64, length: Int64 | Float64, idle: Float64, ranks: tuple[int, ...]) -> StageTime:
    count, known = np.bincount(rank, minlength=len(ranks)), np.isfinite(idle)
    median = median_of_groups(rank, length, len(ranks))
    of_idle = median_of_groups(rank[known], idle[known], len(ranks))
    of_ranks = (length[rank == place] for place in range(len(ranks)))
    p90 = (float(np.quantile(own, 0.9, method="inverted_cdf")) if len(own) else math.nan for own in of_ranks)
    return StageTime(stage, tuple(count.tolist()), tuple(median.tolist()), tuple(p90), tuple(of_idle.tolist()))


def _together(
    iterations: LaunchIterations, launch: Int64, rank: Int64, length: Int64, idle: Float64, ranks: tuple[int, ...]
) -> StageTime | None:
    """Sums all stages of each iteration that lacks no launch: a rank that is slow in one stage and fast in another is
    not slow."""
    of_launch = iterations.of_launch[launch]
    num_launches, num_here = (
        np.bincount(owner[owner >= 0], minlength=iterations.count) for owner in (iterations.of_launch, of_launch)
    )
    chosen = of_launch >= 0
    chosen[chosen] = (iterations.is_whole & (num_here == num_launches))[of_launch[chosen]]
    if len(np.unique(iterations.stage_of_launch[launch[chosen]])) < 2:
        return None
    cell, row = np.unique(of_launch[chosen] * np.int64(len(ranks)) + rank[chosen], return_inverse=True)
    sums = np.zeros((2, len(cell)))
    for total, values in zip(sums, (length, idle), strict=True):
        np.add.at(total, row, values[chosen])
    return _medians("", cell % len(ranks), sums[0], sums[1], ranks)

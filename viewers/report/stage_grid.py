"""Device time by stage and rank, as rows for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.questions.stages import StageTime, StageTimes
from tracekern.formatting import count, duration, factor, percent

_MAX_RANKS = 8
"""With more ranks, the shortest, the median and the longest are shown, and where they are."""
TOGETHER = "all of an iteration"


@dataclass(frozen=True)
class StageGrid:
    numbers: tuple[str, ...]
    """Heads of the columns with numbers."""
    words: tuple[str, ...]
    """Heads of those with words; the first is the stage."""
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """Numbers and words of each row."""


def stage_grid(times: StageTimes, idle: bool = False) -> StageGrid:
    """How long a call takes, or with `idle` for how much of it no warp works."""
    every = [*times.stages, *([times.together] if times.together else [])]
    rows = [(row, row.idle_ns if idle else row.median_ns) for row in every]
    rows = [(row, values) for row, values in rows if not np.isnan(values).all()]
    numbers: tuple[str, ...] = ("calls", "shortest", "median", "longest")
    words: tuple[str, ...] = ("stage", "shortest on", "longest on")
    if len(times.ranks) > _MAX_RANKS:
        found = [_ends(times, row, values) for row, values in rows]
    else:
        numbers = ("calls", *(f"rank {rank}" for rank in times.ranks))
        words = ("stage", "longest on") if len(times.ranks) > 1 else ("stage",)
        found = [_each(times, row, values) for row, values in rows]
    if idle:
        return StageGrid(numbers, words, tuple(found))
    heads: tuple[str, ...] = ("p90", "mean", "longest / mean") if len(times.ranks) > 1 else ("p90",)
    with_more = [
        ((*cells, *_spread(row)[: len(heads)]), said) for (row, _), (cells, said) in zip(rows, found, strict=True)
    ]
    return StageGrid((*numbers, *heads), words, tuple(with_more))


def _spread(row: StageTime) -> tuple[str, ...]:
    return duration(row.p90_of_slowest_ns), duration(row.mean_ns), factor(row.imbalance)


def about_times(times: StageTimes, of_window: bool = False) -> str:
    """Returns what the numbers of the grid are."""
    calls = "its calls that reach into the window" if of_window else "its calls"
    left_out = ["those of the first iteration"] if times.is_first_left_out else []
    if times.num_open:
        left_out.append(f"{count(times.num_open, 'launch')} that did not end")
    without = f", without {' and '.join(left_out)}" if left_out else ""
    p90 = "p90 of those on the rank that takes longest" if len(times.ranks) > 1 else "p90"
    return f"device time of a kernel, from its first warp to its last: median of {calls}, {p90}{without}"


def describe_idle(times: StageTimes) -> str:
    """For how long no warp of a kernel works, by rank, over all calls."""
    unknown = f"; not known of {count(times.num_cut, 'launch')} that lack records" if times.num_cut else ""
    entries = [entry for entry in zip(times.idle_ns, times.kernel_ns, times.ranks, strict=True) if entry[1]]
    places = [""] * len(entries)
    if len(entries) > _MAX_RANKS:
        entries.sort()
        entries = [entries[0], entries[(len(entries) - 1) // 2], entries[-1]]
        places = [", the least", ", the median", ", the most"]
    said = [
        f"{percent(idle, whole)} on rank {rank} ({duration(idle)}{place})"
        for (idle, whole, rank), place in zip(entries, places, strict=True)
    ]
    return f"no warp works in this share of the kernels' time: {', '.join(said) or '-'}{unknown}"


def _each(times: StageTimes, row: StageTime, values: Sequence[float]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    cells = ("-" if math.isnan(value) else duration(value) for value in values)
    longest = [f"rank {times.ranks[int(np.nanargmax(values))]}"] if len(values) > 1 else []
    return (_calls(row), *cells), (_name(row), *longest)


def _ends(times: StageTimes, row: StageTime, values: Sequence[float]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    shortest, longest = int(np.nanargmin(values)), int(np.nanargmax(values))
    cells = (values[shortest], float(np.nanmedian(values)), values[longest])
    places = (f"rank {times.ranks[place]}" for place in (shortest, longest))
    return (_calls(row), *map(duration, cells)), (_name(row), *places)


def _name(row: StageTime) -> str:
    return row.stage or TOGETHER


def _calls(row: StageTime) -> str:
    """Returns the calls of each rank; "4-5" if they differ."""
    fewest, most = min(row.num_calls), max(row.num_calls)
    return f"{most:,}" if fewest == most else f"{fewest:,}-{most:,}"

"""How much of staging hides under the multiplication: sweeps of int4 experts that are on record step by step.

docs/int4_trace.md defines the terms. A sweep is a span of work with a field `expert`; steps are the spans inside it
whose events are named as below and have a field `group`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from tracekern.analysis.partial import Sums
from tracekern.analysis.questions.balance import EventRows, join_columns, rows_by_event
from tracekern.timeline.model import Int64, Timeline
from tracekern.timeline.table import Table

EXPOSED = ("stage", "park", "decode")
"""Steps in which a warp serves staging and multiplies nothing."""
MULTIPLIES = ("load_b", "multiply")
_SWEEP = "sweep"
_STEPS = (*EXPOSED, *MULTIPLIES)
_NAMES = (_SWEEP, *_STEPS)


@dataclass(frozen=True, repr=False)
class Staging(Table):
    """[n] sums by rank, kernel, expert and warp of a block, in this order. Times are of all such sweeps together."""

    rank: Int64
    kernel: Int64
    """Index into `kernels`."""
    expert: Int64
    warp: Int64
    sweeps: Int64
    sweep_ns: Int64
    stage_ns: Int64
    park_ns: Int64
    decode_ns: Int64
    multiply_ns: Int64
    """Time in `load_b` and `multiply`."""
    hidden_ns: Int64
    """The part of it in which a later group was staged already: its staging went on meanwhile."""
    kernels: tuple[str, ...]
    """Names of launches."""

    @property
    def exposed_ns(self) -> Int64:
        """[n] time that staging took of the warps: they multiplied nothing."""
        return self.stage_ns + self.park_ns + self.decode_ns

    def of_kernel(self, kernel: str) -> Staging:
        """Returns the rows of one kernel."""
        return self.take(self.kernel == self.kernels.index(kernel))


def staging(timeline: Timeline, sums: Sums | None = None) -> Staging | None:
    """Sums up the steps of all sweeps. None where no sweep has any.

    Works on unaligned Timelines too: nothing is compared across ranks. sums: sums_of_sweeps(), of the timeline by
    default.
    """
    sums = sums_of_sweeps(timeline) if sums is None else sums
    if not len(sums):
        return None
    rank, kernel, expert, warp = sums.keys
    known, kernel = np.unique(kernel, return_inverse=True)
    names = launch_names(timeline)
    return Staging(rank, kernel, expert, warp, **sums.values, kernels=tuple(names[number] for number in known.tolist()))


def launch_names(timeline: Timeline) -> list[str]:
    """What launches are called, sorted."""
    return sorted({launch.name for launch in timeline.launches})


def sums_of_sweeps(timeline: Timeline) -> Sums:
    """The columns of a Staging, by its first four; kernels are numbered as launch_names()."""
    events = [event for event in rows_by_event(timeline) if event.is_work]
    sweeps = [event for event in events if event.about.name == _SWEEP and event.has("expert")]
    steps = [event for event in events if event.about.name in _STEPS and event.has("group")]
    spans = timeline.spans
    row, name, number = join_columns((*_columns(timeline, sweeps, "expert"), *_columns(timeline, steps, "group")), 3)
    order = np.lexsort((name, spans.start[row], spans.track[row]))  # a sweep, then its steps, a `stage` first
    row, name, number = row[order], name[order], number[order]
    is_sweep = name == _NAMES.index(_SWEEP)
    sweep_row, expert = row[is_sweep], number[is_sweep]
    last = np.cumsum(is_sweep) - 1  # the sweep that began last, on whatever track
    outer = np.append(sweep_row, -1)[last]
    is_inside = ~is_sweep & (last >= 0) & (spans.track[row] == spans.track[outer])
    is_inside &= spans.end[row] <= spans.end[outer]
    # Sweeps that have steps, by number; the columns of steps from here on.
    which, sweep = np.unique(last[is_inside], return_inverse=True)
    row, name, group = row[is_inside], name[is_inside], number[is_inside]
    ns = spans.end[row] - spans.start[row]
    is_multiply = np.isin(name, [_NAMES.index(step) for step in MULTIPLIES])
    staged = _largest_so_far(sweep, np.where(name == _NAMES.index("stage"), group, -1))
    exposed = [np.where(name == _NAMES.index(step), ns, 0) for step in EXPOSED]
    hidden = np.where(is_multiply & (staged > group), ns, 0)
    columns = (*exposed, np.where(is_multiply, ns, 0), hidden)
    return _sum_up(timeline, sweep_row[which], expert[which], sweep, columns)


def _columns(timeline: Timeline, events: list[EventRows], field: str) -> list[tuple[Int64, Int64, Int64]]:
    """Columns of the spans of each event: row, index into _NAMES, value of a begin field."""
    return [
        (event.row, np.full(len(event.row), _NAMES.index(event.about.name)), event.field(timeline, field))
        for event in events
    ]


def _largest_so_far(sweep: Int64, group: Int64) -> Int64:
    """[n] the largest group of its sweep up to each row. sweep: ascending. group: -1 for none."""
    width = int(group.max(initial=0)) + 2
    largest: Int64 = np.maximum.accumulate(sweep * width + group + 1) - sweep * width - 1
    return largest


def _sum_up(timeline: Timeline, sweep_row: Int64, expert: Int64, sweep: Int64, columns: tuple[Int64, ...]) -> Sums:
    """sweep_row, expert: of each sweep. sweep: of each step. columns: of steps, as Staging has them."""
    spans, names = timeline.spans, launch_names(timeline)
    number = {name: idx for idx, name in enumerate(names)}
    of_launch = np.array([*(number[launch.name] for launch in timeline.launches), -1], np.int64)
    track = spans.track[sweep_row]
    warp = np.array([track.warp for track in timeline.tracks], np.int64)[track]
    keys = timeline.track_ranks()[track], of_launch[spans.launch[sweep_row]], expert, warp
    of_sweeps = [np.bincount(sweep, column, len(sweep_row)).astype(np.int64) for column in columns]
    values = np.ones(len(sweep_row), np.int64), spans.end[sweep_row] - spans.start[sweep_row], *of_sweeps
    named = [field.name for field in fields(Staging)][len(keys) : -1]
    return Sums.of(keys, **dict(zip(named, values, strict=True)))

"""Finds probes so dense that they change what they measure, judged by what a span costs on that device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracekern.dump.reader import Dump
from tracekern.timeline.decode.record_columns import WriterRuns
from tracekern.timeline.model import OPEN_END, EventClass, Problem, Timeline

MAX_PROBE_SHARE = 0.05
"""Part of a kernel's time that its probes may take."""
MIN_SPAN_COSTS = 2
"""A span of work is to be at least so many times as long as it costs to record."""
_MIN_SPANS = 100

_Costs = npt.NDArray[np.float64]


def dense_probes(timeline: Timeline, dump: Dump, runs: WriterRuns) -> list[Problem]:
    """Warnings for kernels whose probes take too much of their time, and for events too short to be timed.

    The CPU backend is never judged: its durations mean nothing anyway. Nor is a capture that does not say what a span
    costs.
    """
    overhead_ns = dump.metadata.get("overhead_ns", {})
    if dump.metadata["backend"] == "cpu" or not overhead_ns:
        return []
    ns_per_tick = 1e9 / timeline.ranks[0].ticks_per_second
    costs = _cost_of_launches(timeline, runs, overhead_ns)
    return _dense_kernels(timeline, runs, costs, ns_per_tick) + _short_events(timeline, costs, ns_per_tick)


def _cost_of_launches(timeline: Timeline, runs: WriterRuns, overhead_ns: dict[str, float]) -> _Costs:
    """[num_launches] ns of a span, for the number of warps that shared an SM."""
    warps, costs = np.array(sorted((int(warps), cost) for warps, cost in overhead_ns.items()), np.float64).T
    num_launches = len(timeline.launches)
    launch, sm = runs.launch[runs.started], runs.sm[runs.started]
    placed = np.unique(launch.astype(np.int64) << 32 | sm) >> 32  # in 32 bits, as stored
    num_sms = np.bincount(placed, minlength=num_launches)
    num_warps = np.bincount(launch, minlength=num_launches)
    return np.asarray(np.interp(num_warps / np.maximum(num_sms, 1), warps, costs))


def _dense_kernels(timeline: Timeline, runs: WriterRuns, costs: _Costs, ns_per_tick: float) -> list[Problem]:
    which = runs.finished & (runs.written > 0)
    names = list(dict.fromkeys(launch.name for launch in timeline.launches))
    number = {name: idx for idx, name in enumerate(names)}
    name_of_launch = np.array([number[launch.name] for launch in timeline.launches], np.int64)
    num_spans = runs.written[which] / np.where(runs.is_span[which], 1, 2)
    columns = (num_spans * costs[runs.launch[which]], (runs.end - runs.start)[which] * ns_per_tick, num_spans)
    name = name_of_launch[runs.launch[which]]
    sums = (np.bincount(name, column, len(names)).tolist() for column in columns)
    rank = timeline.ranks[0].rank
    return [
        Problem(
            "warning",
            "dense_probes",
            rank,
            -1,
            f"rank {rank} kernel {name}: its probes take about {probes / lasted:.0%} of its time "
            f"({probes / spans:.0f} ns for each of {spans:.0f} spans); "
            "put several into one span, or compile a body without them (levels)",
            int(spans),
        )
        for name, probes, lasted, spans in zip(names, *sums, strict=True)
        if lasted and probes > MAX_PROBE_SHARE * lasted
    ]


def _short_events(timeline: Timeline, costs: _Costs, ns_per_tick: float) -> list[Problem]:
    spans, rank = timeline.spans, timeline.ranks[0].rank
    is_timed = (spans.end != OPEN_END) & ~timeline.headless_spans()
    problems = []
    for idx, event in enumerate(timeline.events):
        if event.event_class != EventClass.WORK:
            continue
        rows = np.flatnonzero((spans.event == idx) & is_timed)
        if len(rows) < _MIN_SPANS:
            continue
        median_ns = float(np.median(spans.end[rows] - spans.start[rows])) * ns_per_tick
        cost_ns = float(costs[spans.launch[rows]].mean())
        if median_ns < MIN_SPAN_COSTS * cost_ns:
            text = (
                f"rank {rank} event {event.name}: half of its {len(rows)} spans are shorter than {median_ns:.0f} ns, "
                f"and recording one takes {cost_ns:.0f} ns; put several into one span"
            )
            problems.append(Problem("warning", "dense_probes", rank, -1, text, len(rows)))
    return problems

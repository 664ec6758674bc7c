"""How long waits took, apart from being late: what of it is on record, and what flags usually take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.arrivals import find_arrivals
from tracekern.analysis.graph.points import RUNS_AT_ONCE, ByRun, Points, is_message
from tracekern.analysis.groups import group_rows, median_of_groups, quantile_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.columns import order_by
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import OPEN_END, Float64, Int64, Mask, Timeline

NEVER = np.iinfo(np.int64).min
_HELD_UP = 0.5
"""A wait that lasts this part of a flag's way was held up by the flag."""
_POLLS, _PART, _AS_USUAL = 3, 0.2, 2
"""So was one that lasts as many times as long as a poll, and this part of the way, or whose flag took at most as many
times as long as others of its pair. Single polls are slow, too, long after the flag was there."""


@dataclass(frozen=True)
class WaitTimes:
    """[num_waits] what each wait took, apart from being late."""

    latency: Float64
    """From the last signal's begin, or the last arrival, to the end of the wait."""
    least: Float64
    """What it takes where nothing holds it up."""
    passed: Int64
    """The same, as recorded."""
    over: Int64
    """When it was over, in ns from the timeline's origin."""
    was_held_up: Mask


def latest_told(timeline: Timeline, waits: Waits) -> Int64:
    """[num_waits] when the last of all that each wait was for told, or NEVER."""
    start = timeline.spans.start
    latest = np.full(len(waits), NEVER)
    by_message, local = np.flatnonzero(is_message(waits)), np.flatnonzero(waits.last_arrival >= 0)
    latest[by_message] = start[waits.signal[by_message]]
    latest[local] = start[waits.last_arrival[local]]
    at_barrier, arrival = find_arrivals(timeline, waits)
    np.maximum.at(latest, at_barrier, start[arrival])
    return latest


def ends_of_waits(timeline: Timeline, waits: Waits, points: Points, latest: Int64) -> Int64:
    """[num_waits] when each was over: at its end, or where its warp sent a signal before that, once all had arrived.

    A warp that acknowledges what it waited for, inside the span of the wait, has waited no longer.
    """
    spans, over = timeline.spans, timeline.spans.end[waits.row]
    told, heard = ByRun.of(points.told_run), ByRun.of(points.heard_run)
    for at in range(0, int(points.heard_run.max(initial=-1)) + 1, RUNS_AT_ONCE):
        some = told.places(at, at + RUNS_AT_ONCE)
        run, sent = points.told_run[some], spans.start[points.told[some]]
        order = order_by(run, sent)
        run, sent = run[order], sent[order]
        some = heard.places(at, at + RUNS_AT_ONCE)
        wait = points.heard[some]
        signal = waits.signal[wait]
        drained = np.where((signal >= 0) & (spans.end[signal] != OPEN_END), spans.end[signal], NEVER)
        there = np.maximum(np.maximum(spans.start[waits.row[wait]], latest[wait]), drained)
        first, stop = (np.searchsorted(run, points.heard_run[some], side) for side in ("left", "right"))
        place = bisect_right(sent, first, stop, there)
        begun = np.append(sent, 0)[place]
        inside = (place < stop) & (begun < over[wait])
        over[wait[inside]] = begun[inside]
    return over


def time_waits(timeline: Timeline, waits: Waits, latest: Int64, over: Int64) -> WaitTimes:
    """How long a message took that nothing waited for is not on record: its drain, and what flags usually take."""
    spans = timeline.spans
    known, lasted = latest > NEVER, over - timeline.spans.start[waits.row]
    passed = np.where(known, over - np.where(known, latest, 0), 0)
    message = is_message(waits)
    drain = np.where(message, np.maximum(spans.end[waits.signal] - spans.start[waits.signal], 0), 0)
    flag = np.maximum(passed - drain, 0)
    by_phase = group_rows(len(waits), waits.phase)
    was_late = (latest >= spans.start[waits.row]) | (waits.late_ns + waits.drain_ns > 0)
    held_up = known & (was_late | (lasted >= _HELD_UP * np.maximum(flag, 1)))
    # Of those that found their signal there most only polled once.
    there = known & ~held_up
    polled = quantile_of_groups(by_phase.group[there], lasted[there], len(by_phase), 0.25)[by_phase.group]
    held_up |= known & (lasted > _POLLS * polled) & (lasted >= _PART * flag)
    usual = _usual_flags(timeline, waits, flag, held_up)
    held_up |= known & (lasted > _POLLS * polled) & (flag <= _AS_USUAL * usual)
    return WaitTimes(
        latency=np.where(held_up, passed, np.minimum(drain + usual, passed)).astype(float),
        least=np.where(held_up, np.minimum(np.nan_to_num(polled), lasted), lasted).astype(float),
        passed=passed,
        over=over,
        was_held_up=held_up,
    )


def _usual_flags(timeline: Timeline, waits: Waits, flag: Int64, held_up: Mask) -> Float64:
    """[num_waits] what flags of each pair of ranks take in a phase, by the median of those that held up a wait.

    Of a pair without any it is what the pair takes in other phases, or else what a quarter of all pairs take at most:
    those that hold up waits may be the slow ones.
    """
    pairs = group_rows(len(waits), waits.phase, waits.peer, waits.rank)
    usual = median_of_groups(pairs.group[held_up], flag[held_up], len(pairs))
    _, peer, rank = pairs.columns
    near = timeline.on_same_node(peer.astype(np.int32), rank.astype(np.int32)).astype(np.int64)
    links, known = group_rows(len(pairs), peer, rank), np.flatnonzero(np.isfinite(usual))
    of_link = median_of_groups(links.group[known], usual[known], len(links))[links.group]
    usual = np.where(np.isfinite(usual), usual, of_link)
    known = np.flatnonzero(np.isfinite(usual))
    usual = np.where(np.isfinite(usual), usual, quantile_of_groups(near[known], usual[known], 2, 0.25)[near])
    return np.asarray(np.nan_to_num(usual)[pairs.group], float)

"""How long each rank took for its own part of each iteration, and each link for its messages: waiting left out.

Such times are durations by one clock: no error between clocks is in them. An iteration is one of the launches'. Where a
capture has a single one, as a persistent kernel has, the repetitions of a phase take their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.doubt import Bound, pair_doubt
from tracekern.analysis.groups import group_rows
from tracekern.analysis.iterations import Iterations
from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import is_message
from tracekern.timeline.model import EventClass, Float64, Int64, Timeline

_SHORTEST, _FOUND_RAISED = 0.05, 3
"""Waits that take no longer than so many times the quantile of the shortest ones found their flag raised."""


@dataclass(frozen=True)
class OwnTimes:
    """Times in ns. `ranks` are the members, in the order of the timeline."""

    ranks: tuple[int, ...]
    iterations: Int64
    """[n] numbers of the iterations."""
    work: Float64
    """[num_ranks, n, num_phases] by phase of the graph, summed over warps; 0 for waits."""
    gaps: Float64
    """[num_ranks, n] before kernels."""
    repeats: dict[int, Float64]
    """Phase -> [num_ranks, m], where n is 1 and every warp went through the phase m times."""
    waited_for: frozenset[int]
    """Ranks that another one waited for, whether or not they were late."""

    def of_phases(self, phases: list[int]) -> Float64:
        """[num_ranks, n or m] of the phases; of repetitions those of the first phase that has some."""
        summed: Float64 = self.work[:, :, phases].sum(axis=2)
        repeated = [self.repeats[phase] for phase in phases if phase in self.repeats]
        return repeated[0] if repeated else summed


def own_times(timeline: Timeline, graph: EventGraph, waits: Waits, iterations: Iterations) -> OwnTimes:
    """Of the iterations that are given."""
    ranks = tuple(rank.rank for rank in timeline.ranks)
    place = np.full(max(ranks, default=-1) + 2, -1)
    place[list(ranks)] = np.arange(len(ranks))
    column = _column_of_launch(graph, iterations)
    shape = (len(ranks), len(iterations), len(graph.phases))
    runs, schedule = graph.runs, graph.schedule
    row = place[schedule.rank] * shape[1] + column
    is_wait = {event.name for event in timeline.events if event.event_class is EventClass.WAIT}
    counted = np.array([phase.event not in is_wait for phase in graph.phases], bool)
    run_of_piece = np.repeat(np.arange(len(runs)), runs.stop - runs.first)
    length = graph.activity.end - graph.activity.start
    kept = np.flatnonzero((column[runs.launch[run_of_piece]] >= 0) & counted[graph.phase])
    code = row[runs.launch[run_of_piece[kept]]] * shape[2] + graph.phase[kept]
    work: Float64 = np.bincount(code, length[kept], shape[0] * shape[1] * shape[2]).astype(float)
    of_run = np.flatnonzero(column[runs.launch] >= 0)
    covered = np.bincount(run_of_piece, length, len(runs))[of_run]
    launch = runs.launch[of_run]
    for phase, ns in (
        (graph.between_spans, runs.end[of_run] - runs.start[of_run] - covered),
        (graph.not_started, runs.start[of_run] - schedule.start[launch]),
    ):
        work += np.bincount(row[launch] * shape[2] + phase[schedule.stage[launch]], ns, len(work))
    shown = np.flatnonzero((column >= 0) & (schedule.stream >= 0))
    gap = schedule.start[shown] - schedule.gap_start[shown]
    gaps: Float64 = np.bincount(row[shown], gap, shape[0] * shape[1]).reshape(shape[:2]).astype(float)
    repeats = _repeats(graph, place, run_of_piece, kept) if shape[1] == 1 else {}
    arrived = timeline.track_ranks()[timeline.spans.track[waits.arrivals.signal]]
    waited_for = frozenset(np.concatenate([waits.peer[waits.peer != waits.rank], arrived]).tolist()) - {-1}
    return OwnTimes(ranks, iterations.number, work.reshape(shape), gaps, repeats, waited_for)


@dataclass(frozen=True)
class LinkTimes:
    """Times of the messages that one phase of waits is for. Links are the members."""

    phase: Phase
    links: tuple[tuple[int, int], ...]
    """Source and destination."""
    iterations: Int64
    """[n] numbers of the iterations, or of a link's messages where there is one iteration."""
    drain: Float64
    """[num_links, n] mean ns in which stores drained, by the sender's clock; nan where there was no message."""
    seen: Float64
    """[num_links, n] mean ns from the flag's store until a warp that it held up had seen it; nan where none was."""
    doubt_ns: Int64
    """[num_links] by how much all of `seen` is likely to be wrong: it is between two clocks."""


def link_times(timeline: Timeline, waits: Waits, iterations: Iterations) -> tuple[LinkTimes, ...]:
    """One for each phase of waits for messages, within nodes and across: others are not compared."""
    message = np.flatnonzero(is_message(waits) & (waits.peer >= 0) & (waits.peer != waits.rank))
    if not len(message):
        return ()
    is_near = timeline.on_same_node(waits.peer[message], waits.rank[message])
    kinds = group_rows(len(message), waits.phase[message], is_near)
    return tuple(_link_times(timeline, waits, message[kinds.group == kind], iterations) for kind in range(len(kinds)))


def _link_times(timeline: Timeline, waits: Waits, message: Int64, iterations: Iterations) -> LinkTimes:
    spans = timeline.spans
    signal, row = waits.signal[message], waits.row[message]
    groups = group_rows(len(message), waits.peer[message], waits.rank[message])
    column, number = _column_of_message(waits, message, groups.group, iterations)
    sent = spans.end[signal]
    kept = (column >= 0) & (sent >= spans.start[signal])
    # A wait that found its flag raised says nothing of the flag's way: it takes as long as the shortest ones.
    took = spans.end[row] - spans.start[row]
    held_up = (spans.start[row] <= sent) | (took > _FOUND_RAISED * np.quantile(took, _SHORTEST))
    means: list[Float64] = []
    for rows, ns in (
        (np.flatnonzero(kept), sent - spans.start[signal]),
        (np.flatnonzero(kept & held_up), spans.end[row] - sent),
    ):
        code = groups.group[rows] * number + column[rows]
        count = np.bincount(code, minlength=len(groups) * number)
        sums = np.bincount(code, ns[rows], len(count))
        means.append(np.where(count > 0, sums / np.maximum(count, 1), np.nan).reshape(len(groups), number))
    links = tuple((int(one), int(two)) for one, two in zip(*groups.columns, strict=True))
    numbers = iterations.number if len(iterations) > 1 else np.arange(number)
    source, destination = (values.astype(np.int32) for values in groups.columns)
    doubt = pair_doubt(timeline, source, destination, Bound.LIKELY)
    drain, seen = means
    return LinkTimes(waits.phases[waits.phase[message[0]]], links, numbers, drain, seen, doubt)


def _column_of_launch(graph: EventGraph, iterations: Iterations) -> Int64:
    """[num_launches of the Schedule] place of its iteration among those given; -1."""
    column = np.full(len(graph.schedule.rank), -1, np.int64)
    known = {number: place for place, number in enumerate(iterations.number.tolist())}
    column[: len(iterations.of_launch)] = [known.get(number, -1) for number in iterations.of_launch.tolist()]
    return column


def _column_of_message(waits: Waits, message: Int64, link: Int64, iterations: Iterations) -> tuple[Int64, int]:
    """([n] iteration of each message, or its place among those of its link where there is one iteration; how many)"""
    if len(iterations) > 1:
        known = {number: place for place, number in enumerate(iterations.number.tolist())}
        of_launch = np.array([*(known.get(number, -1) for number in iterations.of_launch.tolist()), -1], np.int64)
        return of_launch[waits.launch[message]], len(iterations)
    order = np.argsort(link, kind="stable")  # of a link in the order of Waits: by track, then by time
    count = np.bincount(link)
    place = np.empty(len(message), np.int64)
    place[order] = np.arange(len(message)) - np.repeat(np.cumsum(count) - count, count)
    return place, int(count.max(initial=0))


def _repeats(graph: EventGraph, place: Int64, run_of_piece: Int64, kept: Int64) -> dict[int, Float64]:
    """Phases that every run of theirs went through equally often, more than once, on all ranks."""
    runs, num_ranks = graph.runs, int((place >= 0).sum())
    found = {}
    for phase in np.unique(graph.phase[kept]).tolist():
        mine = kept[graph.phase[kept] == phase]
        of_run, count = np.unique(run_of_piece[mine], return_counts=True)
        rank = place[graph.schedule.rank[runs.launch[of_run]]]
        if count.min() != count.max() or count[0] < 2 or len(np.unique(rank)) < num_ranks:
            continue
        length = (graph.activity.end[mine] - graph.activity.start[mine]).reshape(len(of_run), count[0])
        times = np.zeros((num_ranks, count[0]))
        np.add.at(times, rank, length)
        found[phase] = times
    return found

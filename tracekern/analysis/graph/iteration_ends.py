"""Which moments of a run end an iteration, of a persistent kernel each repetition of what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.graph.part_graph import PartGraph
from tracekern.analysis.graph.schedule import Schedule
from tracekern.analysis.groups import group_rows
from tracekern.formatting import brief
from tracekern.timeline.facts.iterations import Iterations, launch_iterations
from tracekern.timeline.intervals import bisect_right
from tracekern.timeline.model import Int32, Int64, Timeline

MIN_REPETITIONS = 3


class _Tells(Protocol):
    """Tells which iteration runs are in at a time."""

    def __call__(self, events: EventGraph, run: Int64, time: Int64) -> Int64:
        """run, time: [n]. Returns [n] iterations; -1 for none."""
        ...


@dataclass(frozen=True)
class IterationEnds:
    """[n] nodes by iteration: one is over when all of its nodes have happened."""

    node: Int64
    """See Moments.replay()."""
    launch: Int64
    """[n] Index into the Schedule of the launch that the node belongs to."""
    first: Int64
    """[num_iterations] place of its first node."""
    of_launch: Int64
    """[num_launches of the Schedule] iteration that each launch is in, begins in, or delays; -1 for none."""
    at: _Tells

    def __len__(self) -> int:
        return len(self.first)

    __repr__ = brief

    @property
    def iteration(self) -> Int64:
        """[n] The iteration that the node belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.first, append=len(self.node)))


@dataclass(frozen=True)
class _ByLaunch:
    """A run is in the iteration that its launch is in."""

    of_launch: Int64

    def __call__(self, events: EventGraph, run: Int64, time: Int64) -> Int64:
        return self.of_launch[events.runs.launch[run]]


def ends_of_iterations(timeline: Timeline, moments: Moments, iterations: Iterations) -> IterationEnds:
    """The ends of the launches of each iteration.

    Where launches show a single iteration, its repetitions take their place: of the phase that takes most time of those
    that every run of theirs went through equally often, on all ranks, and between whose ends most of the rest repeats.
    """
    schedule = moments.schedule
    is_start_up = np.zeros(len(schedule.rank), bool)
    is_start_up[: len(timeline.launches)] = launch_iterations(timeline).is_start_up
    if len(iterations) == 1 and moments.only_part >= 0:
        found = _repetitions(len(timeline.ranks), moments, schedule.order[~is_start_up[schedule.order]])
        if found:
            return found
    row = np.full(1 + int(iterations.of_launch.max(initial=-1)), -1)
    row[iterations.number] = np.arange(len(iterations))
    of_launch = np.full(len(schedule.rank), -1)
    named = np.flatnonzero(iterations.of_launch >= 0)
    of_launch[named] = row[iterations.of_launch[named]]
    set_up = np.setdiff1d(np.flatnonzero(~is_start_up), named)
    comes_again = is_start_up & np.isin(schedule.stage, schedule.stage[set_up])
    _add_set_up(of_launch, schedule, np.union1d(set_up, np.flatnonzero(comes_again)))
    shown = schedule.order[of_launch[schedule.order] >= 0]
    order = np.argsort(of_launch[shown], kind="stable")
    first = np.searchsorted(of_launch[shown[order]], np.arange(len(iterations)))
    ended = shown[order]
    return IterationEnds(moments.launches.ends(ended), ended, first, of_launch, _ByLaunch(of_launch))


def _add_set_up(of_launch: Int64, schedule: Schedule, set_up: Int64) -> None:
    """Counts set-up to the iteration that it delays: the next of its rank, or the last. Ahead of the first iteration it
    is what comes again later."""
    for rank in np.unique(schedule.rank[set_up]).tolist():
        known = np.flatnonzero((schedule.rank == rank) & (of_launch >= 0))
        known = known[np.argsort(schedule.start[known], kind="stable")]
        if len(known):
            own = set_up[schedule.rank[set_up] == rank]
            place = np.searchsorted(schedule.start[known], schedule.start[own])
            of_launch[own] = of_launch[known[np.minimum(place, len(known) - 1)]]


def _repetitions(num_ranks: int, moments: Moments, launches: Int64) -> IterationEnds | None:
    """Returns for each run the first nodes at or after the phase's ends; for the last repetition the launches' ends.

    moments: of a run whose spans are in one part. launches: those that belong to a repetition.
    """
    part, schedule, num_outer = moments.graphs[moments.only_part], moments.schedule, moments.launches.num_nodes
    graph, runs, activity = part.events, part.events.runs, part.events.activity
    run_of_piece = np.repeat(np.arange(len(runs)), runs.stop - runs.first)
    kinds = group_rows(len(activity), graph.phase, run_of_piece)
    phase_of_kind, run_of_kind = kinds.columns
    count, rank_of_run = kinds.count(), schedule.rank[runs.launch].astype(np.int64)
    time_of_phase = np.bincount(graph.phase, activity.end - activity.start)
    for phase in np.argsort(-time_of_phase, kind="stable").tolist():
        times, own = np.unique(count[phase_of_kind == phase]), run_of_kind[phase_of_kind == phase]
        ranks, place = np.unique(rank_of_run[own], return_index=True)
        if len(times) != 1 or times[0] < MIN_REPETITIONS or len(ranks) < num_ranks:
            continue
        piece = np.flatnonzero(graph.phase == phase)
        ends = activity.end[piece].reshape(-1, int(times[0]))
        at = _ByTime.of(own, ends, rank_of_run)
        if not _repeats(graph.phase, at(graph, run_of_piece, (activity.start + activity.end + 1) // 2), int(times[0])):
            continue
        node = num_outer + _next_nodes(part, run_of_piece[piece], activity.end[piece]).reshape(ends.shape).T
        of_node = runs.launch[run_of_piece[piece]].reshape(ends.shape).T[:-1].ravel()
        last = moments.launches.ends(schedule.order)
        first = np.arange(len(node), dtype=np.int64) * node.shape[1]
        of_launch = np.full(len(schedule.rank), -1)
        run_of_rank = own[place[np.searchsorted(ranks, schedule.rank[launches])]]
        of_launch[launches] = at(graph, run_of_rank, schedule.start[launches])
        nodes, of_nodes = np.concatenate([node[:-1].ravel(), last]), np.concatenate([of_node, schedule.order])
        return IterationEnds(nodes, of_nodes, first, of_launch, at)
    return None


def _repeats(phase: Int32, repetition: Int64, count: int) -> bool:
    """Whether most pieces are of phases that most of the repetitions have: not where a kernel has a barrier thrice."""
    seen = group_rows(len(phase), phase, repetition).columns[0]
    return bool((2 * np.bincount(seen)[phase] > count).mean() > 0.5)


@dataclass(frozen=True)
class _ByTime:
    """Tells repetitions by when they ended."""

    first: Int64
    """[num_runs] where its repetitions, or those of its rank, begin."""
    count: int
    """How many each has."""
    ends: Int64

    @classmethod
    def of(cls, run: Int64, ends: Int64, rank_of_run: Int64) -> _ByTime:
        """Tells a run that has none by those of its rank. ends: [num_runs, num_repetitions], of each `run`."""
        ranks, place = np.unique(rank_of_run[run], return_index=True)
        own = place[np.searchsorted(ranks, rank_of_run)]
        own[run] = np.arange(len(run))
        return cls(own * ends.shape[1], ends.shape[1], ends.ravel())

    def __call__(self, events: EventGraph, run: Int64, time: Int64) -> Int64:
        first = self.first[run]
        place = bisect_right(self.ends, first, first + self.count, time - 1) - first
        return np.asarray(np.minimum(place, self.count - 1), np.int64)


def _next_nodes(part: PartGraph, run: Int64, time: Int64) -> Int64:
    """[n] the first node of the run that happened at this time or later."""
    segments = part.run_graph.segments
    first, stop = (np.searchsorted(segments.run, run, side) for side in ("left", "right"))
    place = np.minimum(bisect_right(segments.end, first, stop, time - 1), stop - 1)
    node: Int64 = part.run_graph.target[place].astype(np.int64)
    return node

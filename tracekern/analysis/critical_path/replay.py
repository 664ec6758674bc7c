"""Would it be faster without? The run replayed with one part of the critical path as long as it is elsewhere.

Before anything is said of a change, the unchanged replay has to give the makespan that was measured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.history import bisect_right
from tracekern.analysis.critical_path.event_replay import Change, EventReplay
from tracekern.analysis.critical_path.path import Nodes, PathKind, PathPart, find_nodes
from tracekern.analysis.groups import group_rows, median_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import is_message
from tracekern.formatting import brief, duration
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.model import EventClass, Float64, Int64, Mask, Timeline

MAX_ERROR = 0.02
"""Of the makespan: by how much an unchanged replay may miss it."""


@dataclass(frozen=True)
class Gain:
    part: PathPart
    saved_ns: int
    """By how much the makespan shrinks with this part at its peers' median: the same phase on other ranks, their
    hosts' gaps before the same launch, or the other links."""


@dataclass(frozen=True)
class Replay:
    """Of all launches that ended by end_ns."""

    start_ns: int
    end_ns: int
    replayed_ns: int
    """Makespan of the unchanged replay."""
    gains: tuple[Gain, ...]
    """Largest first; parts that have no peers, and waits, are left out."""
    note: str
    """Why there are no gains; empty where there are."""

    __repr__ = brief


def replay_without(
    timeline: Timeline, graph: EventGraph, waits: Waits, replayed: Mask, parts: tuple[PathPart, ...]
) -> Replay:
    """replayed: [num_launches of the Schedule] the launches of the replay: they follow nothing that is not replayed."""
    before = np.where(replayed[graph.schedule.before], graph.schedule.before, -1)
    schedule = dataclasses.replace(graph.schedule, before=before)
    graph = dataclasses.replace(graph, schedule=schedule)
    shown = np.flatnonzero(replayed)
    start, end = int(schedule.start[shown].min()), int(schedule.end[shown].max())
    nodes = find_nodes(timeline, graph, waits, replayed)
    if nodes is None:
        return Replay(start, end, 0, (), "the clocks of the ranks contradict the signals: no order to replay them in")
    here = np.flatnonzero(replayed[graph.runs.launch])
    graph = dataclasses.replace(graph, runs=graph.runs.take(here))
    nodes = dataclasses.replace(nodes, run=np.searchsorted(here, nodes.run))
    changes = _Changes(timeline, graph, waits, nodes, shown)
    changed = [(part, change) for part in parts if (change := changes.of(part)) is not None]
    replay = EventReplay(timeline, graph, waits, nodes, shown, [change for _, change in changed])
    ends = np.max(list(replay.run().end_of.values()), axis=0) - start
    replayed_ns = round(float(ends[0]))
    if abs(replayed_ns - (end - start)) > MAX_ERROR * (end - start):
        times = f"{duration(replayed_ns)}, not {duration(end - start)}"
        note = f"an unchanged replay takes {times}: it would say nothing true of a change"
        return Replay(start, end, replayed_ns, (), note)
    gains = [Gain(part, round(float(ends[0] - without))) for (part, _), without in zip(changed, ends[1:], strict=True)]
    return Replay(start, end, replayed_ns, tuple(sorted(gains, key=lambda gain: -gain.saved_ns)), "")


class _Changes:
    """`graph` has no runs but those that are replayed."""

    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits, nodes: Nodes, launches: Int64) -> None:
        self._graph, self._waits, self._nodes, self._launches = graph, waits, nodes, launches
        self._wait_names = {event.name for event in timeline.events if event.event_class is EventClass.WAIT}
        runs, activity = graph.runs, graph.activity
        run = np.arange(len(runs))
        count = graph.runs.stop[run] - graph.runs.first[run]
        self._run_of_piece, self._pieces = np.repeat(run, count), rows_of_ranges(graph.runs.first[run], count)
        piece = bisect_right(activity.start, runs.first[nodes.run], runs.stop[nodes.run], nodes.begin) - 1
        self._piece = np.maximum(piece, runs.first[nodes.run])
        inside = np.minimum(nodes.begin, activity.end[self._piece]) - activity.start[self._piece]
        self._in_piece = np.maximum(inside, 0)
        self._nothing = Change.none(graph, nodes)

    def of(self, part: PathPart) -> Change | None:
        """With `part` as long as at its peers, where those are faster; None where it has no peers, or is a wait."""
        if part.kind is PathKind.LINK:
            return self._link(part)
        if part.kind in (PathKind.HOST, PathKind.GAP):
            return self._gap(part)
        return self._phase(part)

    def _phase(self, part: PathPart) -> Change | None:
        graph, runs = self._graph, self._graph.runs
        if part.phase.event in self._wait_names:
            return None
        phase = graph.phases.index(part.phase)
        if phase in graph.not_started:
            return self._not_started(part, graph.stage_of_phase[phase])
        between_spans = phase in graph.between_spans
        phases = np.arange(len(graph.phases))
        counted = graph.stage_of_phase == graph.stage_of_phase[phase] if between_spans else phases == phase
        chosen = counted[graph.phase[self._pieces]]
        length = np.where(chosen, (graph.activity.end[self._pieces] - graph.activity.start[self._pieces]), 0)
        of_run = np.zeros(len(runs), np.int64)
        np.add.at(of_run, self._run_of_piece, length)
        if between_spans:
            whole = graph.schedule.end[runs.launch] - runs.start
            of_run = np.where(graph.schedule.stage[runs.launch] == graph.stage_of_phase[phase], whole - of_run, 0)
        of_launch = np.zeros(len(graph.schedule.rank), np.int64)
        np.add.at(of_launch, runs.launch, of_run)
        saved_share = self._excess_share(of_launch, part.rank)
        if saved_share is None:
            return None
        share_of_run = saved_share[runs.launch]
        piece, run = self._piece, self._nodes.run
        sums = np.append(0, np.cumsum(length))
        place, first = (np.searchsorted(self._pieces, wanted) for wanted in (piece, runs.first[run]))
        by_node = sums[place] - sums[first] + np.where(counted[graph.phase[piece]], self._in_piece, 0)
        if between_spans:
            in_stage = graph.schedule.stage[runs.launch[run]] == graph.stage_of_phase[phase]
            by_node = np.where(in_stage, self._nodes.begin - runs.start[run] - by_node, 0)
        return Change(by_node * share_of_run[run], of_run * share_of_run, self._nothing.link, self._nothing.gap)

    def _not_started(self, part: PathPart, stage: int) -> Change | None:
        graph, runs = self._graph, self._graph.runs
        in_stage = graph.schedule.stage[runs.launch] == stage
        of_run = np.where(in_stage, runs.start - graph.schedule.start[runs.launch], 0)
        of_launch = np.zeros(len(graph.schedule.rank), np.int64)
        np.add.at(of_launch, runs.launch, of_run)
        saved_share = self._excess_share(of_launch, part.rank)
        if saved_share is None:
            return None
        saved = of_run * saved_share[runs.launch]
        return Change(saved[self._nodes.run], saved, self._nothing.link, self._nothing.gap)

    def _excess_share(self, of_launch: Int64, rank: int) -> Float64 | None:
        """[num_launches] what part of `of_launch` rank has more than the median of its peers in the same launch."""
        schedule, launches = self._graph.schedule, self._launches
        groups = group_rows(len(launches), schedule.stage[launches], schedule.sequence[launches])
        is_peer = schedule.rank[launches] != rank
        median = median_of_groups(groups.group[is_peer], of_launch[launches[is_peer]], len(groups))[groups.group]
        compared = ~is_peer & np.isfinite(median)
        if not compared.any():
            return None
        compared &= of_launch[launches] > 0
        mine = launches[compared]
        share = np.zeros(len(of_launch))
        share[mine] = np.maximum(0.0, 1 - median[compared] / of_launch[mine])
        return share

    def _gap(self, part: PathPart) -> Change | None:
        """Of what the gaps are longer than at peers: the part that was surely the host's, or the rest."""
        schedule = self._graph.schedule
        since = int(schedule.start[self._launches].min())
        gap_start = np.maximum(schedule.gap_start, since)
        host = np.clip(schedule.gap_start + schedule.host_gap_ns - gap_start, 0, None)
        whole = np.where(schedule.stream >= 0, schedule.start - gap_start, 0)
        share = self._excess_share(whole, part.rank)
        if share is None:
            return None
        excess = whole * share
        of_host = np.clip(host - (whole - excess), 0, excess)
        saved = of_host if part.kind is PathKind.HOST else excess - of_host
        return Change(self._nothing.before_node, self._nothing.in_run, self._nothing.link, saved)

    def _link(self, part: PathPart) -> Change | None:
        nodes, waits = self._nodes, self._waits
        message = nodes.hears & is_message(waits, nodes.wait)
        source, destination = waits.peer[nodes.wait], waits.rank[nodes.wait]
        mine = message & (source == part.rank) & (destination == part.peer)
        others = message & ~mine & (source != destination)
        if not mine.any() or not others.any():
            return None
        pair = source[others].astype(np.int64) << 32 | destination[others]
        pairs, number = np.unique(pair, return_inverse=True)
        means = np.bincount(number, self._nodes.latency[others], len(pairs)) / np.bincount(number)
        own = float(self._nodes.latency[mine].mean())
        factor = min(1.0, max(0.0, float(np.median(means))) / own) if own > 0 else 1.0
        return Change(self._nothing.before_node, self._nothing.in_run, np.where(mine, factor, 1.0), self._nothing.gap)

"""Would it be faster without? The run replayed with one part of the critical path as long as it is elsewhere.

A discrete event replay: what a run did between two dependencies takes as long as it took, gaps of the host too; when
waits end and kernels begin is worked out anew from the signals. Before anything is said of a change, the unchanged
replay has to give the makespan that was measured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.history import bisect_right
from tracekern.analysis.critical_path.path import Nodes, PathKind, PathPart, find_nodes
from tracekern.analysis.groups import group_rows, median_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import is_message
from tracekern.formatting import duration
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
    replay = _EventReplay(graph, waits, nodes, shown, changes, [change for _, change in changed])
    ends = replay.makespans() - start
    replayed_ns = round(float(ends[0]))
    if abs(replayed_ns - (end - start)) > MAX_ERROR * (end - start):
        times = f"{duration(replayed_ns)}, not {duration(end - start)}"
        note = f"an unchanged replay takes {times}: it would say nothing true of a change"
        return Replay(start, end, replayed_ns, (), note)
    gains = [Gain(part, round(float(ends[0] - without))) for (part, _), without in zip(changed, ends[1:], strict=True)]
    return Replay(start, end, replayed_ns, tuple(sorted(gains, key=lambda gain: -gain.saved_ns)), "")


@dataclass(frozen=True)
class _Change:
    """What is shorter in one replay."""

    before_node: Float64
    """[num_nodes] ns saved by each node of what its run did in this launch."""
    in_run: Float64
    """[num_runs] ns saved in the whole run."""
    link: Float64
    """[num_nodes] factor on the link's time of a wait."""
    gap: Float64
    """[num_launches] ns that the gap before a launch is shorter."""


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
        self.nothing = _Change(
            np.zeros(len(nodes)), np.zeros(len(runs)), np.ones(len(nodes)), np.zeros(len(graph.schedule.rank))
        )
        self.latency = nodes.end - nodes.latest[nodes.meeting]
        """[num_nodes] of those that hear: from the last one's telling to the end of the wait."""

    def of(self, part: PathPart) -> _Change | None:
        """With `part` as long as at its peers, where those are faster; None where it has no peers, or is a wait."""
        if part.kind is PathKind.LINK:
            return self._link(part)
        if part.kind in (PathKind.HOST, PathKind.GAP):
            return self._gap(part)
        return self._phase(part)

    def _phase(self, part: PathPart) -> _Change | None:
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
        return _Change(by_node * share_of_run[run], of_run * share_of_run, self.nothing.link, self.nothing.gap)

    def _not_started(self, part: PathPart, stage: int) -> _Change | None:
        graph, runs = self._graph, self._graph.runs
        in_stage = graph.schedule.stage[runs.launch] == stage
        of_run = np.where(in_stage, runs.start - graph.schedule.start[runs.launch], 0)
        of_launch = np.zeros(len(graph.schedule.rank), np.int64)
        np.add.at(of_launch, runs.launch, of_run)
        saved_share = self._excess_share(of_launch, part.rank)
        if saved_share is None:
            return None
        saved = of_run * saved_share[runs.launch]
        return _Change(saved[self._nodes.run], saved, self.nothing.link, self.nothing.gap)

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

    def _gap(self, part: PathPart) -> _Change | None:
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
        return _Change(self.nothing.before_node, self.nothing.in_run, self.nothing.link, saved)

    def _link(self, part: PathPart) -> _Change | None:
        nodes, waits = self._nodes, self._waits
        message = nodes.hears & is_message(waits, nodes.wait)
        source, destination = waits.peer[nodes.wait], waits.rank[nodes.wait]
        mine = message & (source == part.rank) & (destination == part.peer)
        others = message & ~mine & (source != destination)
        if not mine.any() or not others.any():
            return None
        pair = source[others].astype(np.int64) << 32 | destination[others]
        pairs, number = np.unique(pair, return_inverse=True)
        means = np.bincount(number, self.latency[others], len(pairs)) / np.bincount(number)
        own = float(self.latency[mine].mean())
        factor = min(1.0, max(0.0, float(np.median(means))) / own) if own > 0 else 1.0
        return _Change(self.nothing.before_node, self.nothing.in_run, np.where(mine, factor, 1.0), self.nothing.gap)


class _EventReplay:
    """All replays at once: every time is a row of one number for each, the unchanged one first."""

    def __init__(
        self, graph: EventGraph, waits: Waits, nodes: Nodes, launches: Int64, changes: _Changes, some: list[_Change]
    ) -> None:
        self._graph, self._nodes, self._launches = graph, nodes, launches
        every = [changes.nothing, *some]
        runs, schedule = graph.runs, graph.schedule
        saved = np.stack([change.before_node for change in every], axis=1)
        saved_in_run = np.stack([change.in_run for change in every], axis=1)
        self._gap = schedule.gap_ns[:, None] - np.stack([change.gap for change in every], axis=1)
        order = np.argsort(nodes.run, kind="stable")
        run, follows = nodes.run[order], np.append(False, nodes.run[order][1:] == nodes.run[order][:-1])
        since = np.where(follows, np.append(0, nodes.end[order][:-1]), schedule.start[runs.launch[run]])
        saved_since = np.where(follows[:, None], np.roll(saved[order], 1, axis=0), 0)
        self._work = np.empty_like(saved)
        self._work[order] = np.maximum((nodes.begin[order] - since)[:, None] - (saved[order] - saved_since), 0)
        # From the last node of a run to its end.
        last_node_end, last_saved = schedule.start[runs.launch].copy(), np.zeros_like(saved_in_run)
        last_node_end[run], last_saved[run] = nodes.end[order], saved[order]
        self._tail = np.maximum((runs.end - last_node_end)[:, None] - (saved_in_run - last_saved), 0)
        late = changes.latency[:, None] * np.stack([change.link for change in every], axis=1)
        # A wait that had nothing to wait for takes as long as it took, and its signal had time to spare.
        spare = nodes.hears & (nodes.latest[nodes.meeting] < nodes.begin) & _arrived_early(waits, nodes)
        self._latency = np.where(spare[:, None], 0, late)
        self._least = np.where(spare, nodes.end - nodes.begin, 0)
        self._num_replays = len(every)
        self._replayed = frozenset(launches.tolist())
        self._begun: dict[int, Float64] = {}
        self._now = np.zeros((len(runs), len(every)))
        last_end = np.full(len(schedule.rank), np.iinfo(np.int64).min)
        np.maximum.at(last_end, runs.launch, runs.end)
        self._after_runs = np.where(schedule.last_run >= 0, schedule.end - last_end, 0)
        self._runs_of_launch = np.split(
            np.argsort(runs.launch, kind="stable"), np.cumsum(np.bincount(runs.launch, minlength=len(schedule.rank)))
        )

    def makespans(self) -> Float64:
        """[num_replays] time at which the last launch ended."""
        nodes = self._nodes
        told = np.repeat(nodes.told_before.astype(float)[:, None], self._num_replays, axis=1)
        launch_of_node = self._graph.runs.launch[nodes.run].tolist()
        table = zip(nodes.run.tolist(), nodes.meeting.tolist(), nodes.hears.tolist(), launch_of_node, strict=True)
        for node, (run, meeting, hears, launch) in enumerate(table):
            if launch not in self._begun:
                self._start(launch)
            time = self._now[run]
            time += self._work[node]
            if hears:
                time += self._least[node]
                np.maximum(time, told[meeting] + self._latency[node], out=time)
            else:
                np.maximum(told[meeting], time, out=told[meeting])
        for launch in self._launches.tolist():
            self._start(launch)
        makespans: Float64 = np.max([self._end(launch) for launch in self._launches.tolist()], axis=0)
        return makespans

    def _start(self, launch: int) -> None:
        """Starts the launch, and those before it on its stream that no node has started."""
        schedule, waiting = self._graph.schedule, []
        while launch in self._replayed and launch not in self._begun:
            waiting.append(launch)
            launch = int(schedule.before[launch])
        for following in reversed(waiting):
            before = int(schedule.before[following])
            if before in self._begun:
                time = self._end(before) + self._gap[following]
            else:
                time = schedule.start[following] + self._gap[following] - schedule.gap_ns[following]
            self._begun[following] = time
            self._now[self._runs_of_launch[following]] = time

    def _end(self, launch: int) -> Float64:
        """Of a launch that was started, when all its nodes are through."""
        schedule, mine = self._graph.schedule, self._runs_of_launch[launch]
        if not len(mine):
            return self._begun[launch] + float(schedule.end[launch] - schedule.start[launch])
        last: Float64 = (self._now[mine] + self._tail[mine]).max(axis=0)
        return last + float(self._after_runs[launch])


def _arrived_early(waits: Waits, nodes: Nodes) -> Mask:
    """[num_nodes] whether the wait found that all it waited for had come."""
    return np.asarray(((waits.late_ns + waits.drain_ns) == 0)[nodes.wait], bool)

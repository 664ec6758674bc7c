"""A discrete event replay of a run, as it was and with something in it shorter.

What a run did between two dependencies takes as long as it took, and the gaps before kernels too; when waits end and
kernels begin is worked out anew from the signals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.critical_path.path import Nodes
from tracekern.analysis.groups import group_rows, median_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import is_message
from tracekern.timeline.model import Float64, Int64, Timeline

_HELD_UP = 0.5
"""Share of a flag's time on its way: a wait for more of it was held up by that flag."""
_ON_ITS_WAY = 1.5
"""Times as long as usual: a flag that was seen after more had been there before the wait began."""


@dataclass(frozen=True)
class Change:
    """What is shorter in one replay."""

    before_node: Float64
    """[num_nodes] ns saved by each node of what its run did in this launch."""
    in_run: Float64
    """[num_runs] ns saved in the whole run."""
    link: Float64
    """[num_nodes] factor on the link's time of a wait."""
    gap: Float64
    """[num_launches] ns that the gap before a launch is shorter."""

    @classmethod
    def none(cls, graph: EventGraph, nodes: Nodes) -> Change:
        return cls(
            np.zeros(len(nodes)), np.zeros(len(graph.runs)), np.ones(len(nodes)), np.zeros(len(graph.schedule.rank))
        )


@dataclass(frozen=True)
class Replayed:
    """When things happened: a column for each replay, the unchanged one first."""

    begin: Float64
    """[num_nodes, num_replays]"""
    end: Float64
    latest: Float64
    """[num_meetings, num_replays] when the last of all told."""
    start_of: dict[int, Float64]
    """[num_replays] of each launch that was replayed."""
    end_of: dict[int, Float64]


class EventReplay:
    """All replays at once: every time is a row of one number for each, the unchanged one first."""

    def __init__(
        self, timeline: Timeline, graph: EventGraph, waits: Waits, nodes: Nodes, launches: Int64, changes: list[Change]
    ) -> None:
        """launches: those that are replayed. `graph` and `nodes` have no runs but theirs."""
        self._graph, self._nodes, self._launches = graph, nodes, launches
        every = [Change.none(graph, nodes), *changes]
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
        latency, self._least = link_times(timeline, waits, nodes)
        self._latency = latency[:, None] * np.stack([change.link for change in every], axis=1)
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

    def run(self) -> Replayed:
        """Goes through all nodes in their order. Once for each object: launches and runs keep their times."""
        nodes = self._nodes
        told = np.repeat(nodes.told_before.astype(float)[:, None], self._num_replays, axis=1)
        begin, end = np.empty((2, len(nodes), self._num_replays))
        launch_of_node = self._graph.runs.launch[nodes.run].tolist()
        table = zip(nodes.run.tolist(), nodes.meeting.tolist(), nodes.hears.tolist(), launch_of_node, strict=True)
        for node, (run, meeting, hears, launch) in enumerate(table):
            if launch not in self._begun:
                self._start(launch)
            time = self._now[run]
            time += self._work[node]
            begin[node] = time
            if hears:
                time += self._least[node]
                np.maximum(time, told[meeting] + self._latency[node], out=time)
            else:
                np.maximum(told[meeting], time, out=told[meeting])
            end[node] = time
        for launch in self._launches.tolist():
            self._start(launch)
        ends = {launch: self._end(launch) for launch in self._launches.tolist()}
        return Replayed(begin, end, told, self._begun, ends)

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


def link_times(timeline: Timeline, waits: Waits, nodes: Nodes) -> tuple[Float64, Int64]:
    """([num_nodes] ns from the last one's telling until the wait that it released can end, [num_nodes] ns that a wait
    takes at least: all of one that had nothing to wait for).

    How long a message took for which nothing waited is not on record: as long as its stores drained, and then as long
    as other flags of the pair usually were on their way, but it was there in time.
    """
    node = np.flatnonzero(nodes.hears)
    wait, passed = nodes.wait[node], nodes.latency[node]
    span = np.where(is_message(waits, wait), waits.signal[wait], -1)
    drain = np.where(span < 0, 0, np.maximum(timeline.spans.end[span] - timeline.spans.start[span], 0))
    flag = np.maximum(passed - drain, 0)
    was_late = (nodes.latest[nodes.meeting[node]] >= nodes.begin[node]) | ((waits.late_ns + waits.drain_ns)[wait] > 0)
    held_up = was_late | (waits.wait_ns[wait] >= _HELD_UP * flag)
    event = group_rows(len(node), timeline.spans.event[waits.row[wait]])
    pair = group_rows(len(node), event.group, waits.peer[wait], waits.rank[wait])
    usual = np.zeros(len(node))
    for groups in (event, pair):  # the pair's where it has any
        median = median_of_groups(groups.group[held_up], flag[held_up], len(groups))[groups.group]
        usual = np.where(np.isfinite(median), median, usual)
    spare = ~held_up & (flag > _ON_ITS_WAY * usual)
    latency, least = np.zeros(len(nodes)), np.zeros(len(nodes), np.int64)
    latency[node] = np.where(spare, np.minimum(drain + usual, passed), passed)
    least[node[spare]] = (nodes.end - nodes.begin)[node[spare]]
    return latency, least

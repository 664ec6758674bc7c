"""The timeline of a run in which something did not take as long: all spans at the times of a replay."""

from __future__ import annotations

import dataclasses

import numpy as np

from tracekern.analysis.causes.removal import Removal
from tracekern.analysis.critical_path.event_replay import Replayed
from tracekern.analysis.critical_path.path import Nodes
from tracekern.analysis.waits.event_graph import EventGraph, build_graph
from tracekern.timeline.model import OPEN_END, Float64, Int64, Timeline, TrackKind


def timeline_of(timeline: Timeline, graph: EventGraph, nodes: Nodes, removal: Removal, replayed: Replayed) -> Timeline:
    """Device spans and the lanes of kernels at the times of the last replay; all others stay where they are."""
    spans = timeline.spans
    start, end = spans.start.copy(), spans.end.copy()
    kind = np.array([track.kind for track in timeline.tracks], np.int8)[spans.track]
    device = np.flatnonzero(kind == TrackKind.DEVICE)
    run = graph.run_of_spans(timeline, device)
    device, run = device[run >= 0], run[run >= 0]
    times = _RunTimes(graph, nodes, removal, replayed)
    start[device] = times.of(run, spans.start[device])
    closed = np.flatnonzero(spans.end[device] != OPEN_END)
    end[device[closed]] = times.of(run[closed], spans.end[device[closed]])
    lanes = np.flatnonzero((kind == TrackKind.LAUNCH) & (spans.launch >= 0) & (spans.end != OPEN_END))
    for lane, launch in zip(lanes.tolist(), spans.launch[lanes].tolist(), strict=True):
        if launch in replayed.start_of:
            start[lane], end[lane] = (round(float(of[launch][-1])) for of in (replayed.start_of, replayed.end_of))
    return timeline.replace(spans=dataclasses.replace(spans, start=start, end=end))


def graph_of(timeline: Timeline, before: EventGraph) -> EventGraph:
    """Of a timeline whose gaps before kernels are shorter than in the graph `before`: of what the host took of them,
    as much is gone. Its own lanes show when it launched the kernels as they were."""
    graph = build_graph(timeline)
    gap, old = (np.maximum(of.start - of.gap_start, 0) for of in (graph.schedule, before.schedule))
    shorter = np.where(graph.schedule.stream >= 0, np.maximum(old - gap, 0), 0)
    least, most = (
        np.clip(of_host - shorter, 0, gap)
        for of_host in (before.schedule.host_gap_ns, before.schedule.host_gap_most_ns)
    )
    schedule = dataclasses.replace(graph.schedule, host_gap_ns=least, host_gap_most_ns=np.maximum(least, most))
    return dataclasses.replace(graph, schedule=schedule)


class _RunTimes:
    """Times inside runs, as they were, to those of the last replay."""

    def __init__(self, graph: EventGraph, nodes: Nodes, removal: Removal, replayed: Replayed) -> None:
        self._graph, self._removal = graph, removal
        order = np.argsort(nodes.run, kind="stable")
        self._run = nodes.run[order]
        self._begin, self._end = nodes.begin[order], nodes.end[order]
        self._new_begin, self._new_end = replayed.begin[order, -1], replayed.end[order, -1]
        begun = np.zeros(len(graph.schedule.rank))
        begun[list(replayed.start_of)] = [float(times[-1]) for times in replayed.start_of.values()]
        self._begun = begun

    def of(self, run: Int64, time: Int64) -> Int64:
        """[n]: in a wait as long after its begin, else as long after the last wait or signal less what was saved."""
        node = self._last_node(run, time)
        launch = self._graph.runs.launch[run]
        start = self._graph.schedule.start[launch]
        since, now = (
            np.where(node < 0, start, self._end[node]),
            np.where(node < 0, self._begun[launch], self._new_end[node]),
        )
        saved = self._removal.until(self._graph, run, time)
        saved -= np.where(node < 0, 0, self._removal.until(self._graph, run, since))
        moved: Float64 = now + np.maximum(time - since - saved, 0)
        inside = np.minimum(self._new_begin[node] + time - self._begin[node], self._new_end[node])
        return np.rint(np.where((node >= 0) & (time < self._end[node]), inside, moved)).astype(np.int64)

    def _last_node(self, run: Int64, time: Int64) -> Int64:
        """[n] the last that began by then in the run; -1."""
        base = int(self._begin.min(initial=0))
        width = int(self._begin.max(initial=0)) - base + 2
        key = self._run * width + self._begin - base
        wanted = run * width + np.clip(time - base, -1, width - 1)
        node = np.searchsorted(key, wanted, side="right") - 1
        return np.where((node >= 0) & (self._run[node] == run), node, -1)

"""When each moment of a run came, with the times as recorded: what replays and the critical path start from."""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.longest_path import LongestPath, order_graph
from tracekern.analysis.graph.run_graph import RunGraph, build_run_graph
from tracekern.analysis.waits.analyze import Waits
from tracekern.formatting import brief
from tracekern.timeline.model import Float64, Int32, Timeline


@dataclass(frozen=True)
class Moments:
    run_graph: RunGraph
    path: LongestPath
    times: Float64
    """[num_nodes] ns from run_graph.start_ns; -inf for a moment that never came."""
    deciding: Int32
    """[num_nodes] the edge that decided each time, by what counts; -1 for none."""

    __repr__ = brief


def find_moments(timeline: Timeline, graph: EventGraph, waits: Waits) -> Moments | str:
    """Returns the moments, or why there are none.

    graph: build_graph(timeline). waits: all of analyze_waits(timeline).
    """
    if not timeline.has_one_axis:
        return "the ranks' clocks are not aligned"
    if not len(graph.schedule.order):
        return "no kernel is on record"
    run_graph = build_run_graph(timeline, graph, waits)
    path = order_graph(run_graph.num_nodes, run_graph.source, run_graph.target)
    if path.is_cyclic:
        return "by the ranks' clocks, signals were waited for before they were sent"
    times, deciding = path.run(run_graph.weight)
    if len(run_graph.uncounted):
        _, deciding = path.run(run_graph.counted)
    return Moments(run_graph, path, times, deciding)

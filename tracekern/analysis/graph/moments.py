"""When each moment of a run came, with the times as recorded: what replays and the critical path start from.

The parts of a run follow each other: what leads from one to the next are the moments of launches, whose times are
carried on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tracekern.analysis.graph.launch_graph import LaunchGraph, build_launch_graph
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.part_graph import PartGraph, RecordedPart
from tracekern.analysis.graph.program import Program
from tracekern.analysis.graph.schedule import Schedule
from tracekern.analysis.graph.wait_times import finish
from tracekern.analysis.part import Part
from tracekern.analysis.parts import Parts
from tracekern.formatting import brief
from tracekern.timeline.model import Float64, Int32, Int64, Timeline


@dataclass(frozen=True)
class Recorded:
    """The launches of a run as they were recorded, part by part."""

    program: Program
    parts: Parts[RecordedPart]
    schedule: Schedule

    __repr__ = brief

    @classmethod
    def of(cls, timeline: Timeline, parts: Parts[Part]) -> Recorded:
        """timeline: of the whole run, with the lanes of launches and hosts at least."""
        program = parts.share(Program.of(timeline))
        recorded = parts.map(partial(RecordedPart.of, program=program))
        times = recorded.map(attrgetter("launch_times")).total()
        return cls(program, recorded, parts.share(Schedule.of(timeline, program, times)))


@dataclass(frozen=True)
class Timed:
    """When the moments of a part came."""

    times: Float64
    """[num_nodes] ns from the start of the run; -inf for a moment that never came."""
    deciding: Int32
    """[num_nodes] the edge that decided each time, by what counts; -1 for none."""


class Place(NamedTuple):
    """Where a moment is."""

    part: int
    node: int
    """Its number in the graph of the part."""


@dataclass(frozen=True, eq=False)
class Moments:
    """The graph of a whole run, part by part.

    Its edges are numbered: those of the LaunchGraph, then what lies inside the launches of each part.
    """

    program: Program
    schedule: Schedule
    launches: LaunchGraph
    graphs: Parts[PartGraph]
    timed: Parts[Timed]
    part_of_launch: Int64
    """[num_launches]"""
    first_edge: Int64
    """[num_parts] number of the first edge inside the launches of each."""
    times: Float64
    """[num_nodes of the LaunchGraph] ns from the start of the run; -inf for a moment that never came."""
    only_part: int
    """The part that has all spans of kernels; -1 where several have some."""

    __repr__ = brief

    @property
    def first_edges(self) -> Parts[int]:
        """The number of the first edge inside the launches of each part."""
        return self.graphs.beside(self.first_edge.tolist())

    def place_of(self, node: int) -> Place:
        """Finds a node of the LaunchGraph."""
        part = int(self.part_of_launch[self.launches.launch_of_node[node]])
        return Place(part, int(self.graphs[part].run_graph.node_of(np.int64(node))))

    def replay(self, of_launches: Float64, changes: Sequence[Change], wanted: Int64) -> Float64:
        """Returns [num_changes, num_wanted] times of nodes: of the LaunchGraph, or behind these of the only part.

        of_launches: [num of the LaunchGraph's edges] ns. changes: see PartGraph.replay().
        """
        num_nodes = self.launches.num_nodes
        times, of_launch = np.full((len(changes), num_nodes), -np.inf), wanted < num_nodes
        times[:, 0] = 0.0
        inside, result = wanted[~of_launch] - num_nodes, np.empty((len(changes), len(wanted)))
        by_part = [self._rows_by_part(change.edge) for change in changes]
        for number, graph in enumerate(self.graphs):
            own = [
                Change(self._own_edges(number, graph, change.edge[rows[number]]), change.ns[rows[number]])
                for change, rows in zip(changes, by_part, strict=True)
            ]
            outer = graph.run_graph.outer[~graph.run_graph.is_carried]
            nodes = graph.run_graph.node_of(outer)
            wanted_inside = inside if number == self.only_part else inside[:0]
            found = graph.replay(of_launches, times, own, np.append(nodes, wanted_inside))
            times[:, outer] = found[:, : len(outer)]
            if number == self.only_part:
                result[:, ~of_launch] = found[:, len(outer) :]
        result[:, of_launch] = times[:, wanted[of_launch]]
        return result

    def _rows_by_part(self, edge: Int64) -> Sequence[Int64 | slice]:
        """Which of some edges are of each part."""
        if len(self.graphs) == 1:
            return [slice(None)]
        of_launch = self.part_of_launch[self.launches.launch[np.minimum(edge, len(self.launches.launch) - 1)]]
        inside = np.searchsorted(self.first_edge, edge, "right") - 1
        part = np.where(edge < self.first_edge[0], of_launch, inside)
        order = np.argsort(part, kind="stable")
        return np.split(order, np.searchsorted(part[order], np.arange(1, len(self.graphs))))

    def _own_edges(self, part: int, graph: PartGraph, edge: Int64) -> Int64:
        """[n] the numbers that edges of a part have there."""
        of_launch = graph.run_graph.num_inside + np.searchsorted(graph.run_graph.edges_of_launches, edge)
        return np.where(edge < self.first_edge[0], of_launch, edge - self.first_edge[part])


def find_moments(timeline: Timeline, recorded: Recorded) -> Moments | str:
    """Returns the moments, or why there are none. timeline: of the whole run, with the lanes of launches at least."""
    if not timeline.has_one_axis:
        return "the ranks' clocks are not aligned"
    schedule = recorded.schedule
    if not len(schedule.order):
        return "no kernel is on record"
    launches = recorded.parts.share(build_launch_graph(timeline, schedule))
    times = finish(recorded.parts.map(RecordedPart.time_waits), timeline)
    graphs = recorded.parts.map(partial(PartGraph.of, schedule=schedule, launches=launches), times)
    del times  # much of what it holds is in the graphs
    part_of_launch = np.zeros(recorded.program.num_launches, np.int64)
    sizes, with_spans = [], []
    for number, (part, graph) in enumerate(zip(recorded.parts, graphs, strict=True)):
        if graph.path.is_cyclic:
            return "by the ranks' clocks, signals were waited for before they were sent"
        part_of_launch[part.is_own] = number
        sizes.append(graph.run_graph.num_inside)
        with_spans += [number] if len(graph.events.runs) else []
    timed, carried = _time(graphs, launches)
    only_part = with_spans[0] if len(with_spans) == 1 else -1
    first_edge = (len(launches.weight) + np.cumsum([0, *sizes[:-1]])).astype(np.int64)
    return Moments(recorded.program, schedule, launches, graphs, timed, part_of_launch, first_edge, carried, only_part)


def _time(graphs: Parts[PartGraph], launches: LaunchGraph) -> tuple[Parts[Timed], Float64]:
    """When the moments of all parts, and those of launches, came."""
    times, counted_times = np.full((2, launches.num_nodes), -np.inf)
    times[0] = counted_times[0] = 0.0
    counted = launches.counted

    def time(graph: PartGraph) -> Timed:
        outer = graph.run_graph.outer[~graph.run_graph.is_carried]
        nodes = graph.run_graph.node_of(outer)
        of_part, deciding = graph.run(launches.weight, times)
        times[outer] = of_part[nodes]
        if len(launches.uncounted):
            of_counted, deciding = graph.run(counted, counted_times)
            counted_times[outer] = of_counted[nodes]
        return Timed(of_part, deciding)

    return graphs.in_turn(time), times

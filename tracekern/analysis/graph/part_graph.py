"""What happened in the launches of one part of a run: its events, its waits and the graph of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph, build_graph
from tracekern.analysis.graph.launch_graph import LaunchGraph
from tracekern.analysis.graph.longest_path import Change, LongestPath, order_graph
from tracekern.analysis.graph.points import find_points
from tracekern.analysis.graph.program import Program
from tracekern.analysis.graph.run_graph import RunGraph, build_run_graph
from tracekern.analysis.graph.schedule import LaunchTimes, Schedule
from tracekern.analysis.graph.wait_times import WaitTimes
from tracekern.analysis.part import Part
from tracekern.analysis.waits.analyze import Waits
from tracekern.formatting import brief
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline


@dataclass(frozen=True)
class RecordedPart:
    """What the spans of a part say, before it is known what is usual in the others."""

    timeline: Timeline
    waits: Waits
    """Those that ended."""
    events: EventGraph
    launch_times: LaunchTimes
    is_own: Mask
    """[num_launches of the Program] which are the part's."""

    __repr__ = brief

    @classmethod
    def of(cls, part: Part, program: Program) -> RecordedPart:
        events = build_graph(part.timeline, program)
        times = LaunchTimes.of(part.timeline, program, events.runs)
        has_others = part.is_own.all() or not part.is_own.any()
        is_own = np.append(part.is_own, np.full(len(part.timeline.ranks), has_others))
        return cls(part.timeline, part.ended_waits, events, times, is_own)

    def time_waits(self) -> WaitTimes:
        points = find_points(self.timeline, self.events, self.waits)
        return WaitTimes.of(self.timeline, self.waits, points)


@dataclass(frozen=True, eq=False)
class PartGraph:
    timeline: Timeline
    waits: Waits
    """Those that ended."""
    events: EventGraph
    run_graph: RunGraph
    path: LongestPath

    __repr__ = brief

    @classmethod
    def of(cls, part: RecordedPart, times: WaitTimes, schedule: Schedule, launches: LaunchGraph) -> PartGraph:
        """times: with all rounds over."""
        run_graph = build_run_graph(part.timeline, part.events, part.waits, times, schedule, launches, part.is_own)
        path = order_graph(run_graph.num_nodes, run_graph.source, run_graph.target)
        return cls(part.timeline, part.waits, part.events, run_graph, path)

    def run(self, of_launches: Float64, carried: Float64) -> tuple[Float64, Int32]:
        """Returns ([num_nodes] time, [num_nodes] the edge that decided it; -1 for none).

        of_launches: [num of the LaunchGraph's edges] ns. carried: [num of its nodes] when those of earlier parts were.
        """
        weight, graph = self._weights(of_launches), self.run_graph
        weight[graph.num_own :] = carried[graph.outer[graph.is_carried]]
        return self.path.run(weight)

    def replay(self, of_launches: Float64, carried: Float64, changes: Sequence[Change], wanted: Int64) -> Float64:
        """Returns [num_changes, num_wanted] times of the nodes `wanted`. No edge becomes shorter than nothing.

        carried: [num_changes, num of the LaunchGraph's nodes]. changes: how much longer its own edges take; -inf where
        nothing waits for one.
        """
        graph, weight = self.run_graph, self._weights(of_launches)
        outer = graph.outer[graph.is_carried]
        edge = graph.num_own + np.arange(len(outer))
        weights = list[Change]()
        for change, times in zip(changes, carried, strict=True):
            before = weight[change.edge]
            at_least = np.where(change.ns > -np.inf, np.minimum(before, 0), -np.inf)
            after = np.maximum(before + change.ns, at_least)
            weights.append(Change(np.append(change.edge, edge), np.append(after, times[outer])))
        return self.path.replay(weight, weights, wanted)

    def _weights(self, of_launches: Float64) -> Float64:
        """[num_edges] ns; of carried ones anything."""
        graph = self.run_graph
        weight = graph.weight if graph.weight.flags.writeable else graph.weight.copy()  # as it is in a file
        weight[graph.num_inside : graph.num_own] = of_launches[graph.edges_of_launches]
        return weight

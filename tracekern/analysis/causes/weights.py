"""A run and its waits, and what they are charged to by weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracekern.analysis.causes.charges import Cost, LaunchCosts, charge_causes
from tracekern.analysis.causes.order import Edges, find_edges
from tracekern.analysis.causes.shares import Shares, split_waits
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import is_message
from tracekern.timeline.model import Int64, Mask, Timeline


@dataclass(frozen=True)
class Run:
    timeline: Timeline
    graph: EventGraph
    waits: Waits
    is_charged: Mask
    """[num_waits]"""

    @cached_property
    def link_ns(self) -> Int64:
        """[num_waits] drain and visibility of waits for messages."""
        return np.where(is_message(self.waits), self.waits.wait_ns - self.waits.late_ns, 0)

    @cached_property
    def charged_ns(self) -> int:
        """All waiting that is to be charged."""
        return int((self.waits.late_ns + self.link_ns)[self.is_charged].sum())


@dataclass(frozen=True)
class Weighed:
    costs: list[Cost]
    """They sum to `Run.charged_ns`."""
    by_launch: LaunchCosts
    edges: Edges
    shares: Shares


def charge_by_weights(run: Run) -> Weighed:
    graph, waits = run.graph, run.waits
    edges = find_edges(run.timeline, graph, waits)
    shares = split_waits(run.timeline, graph, waits, edges, run.link_ns[edges.wait], run.is_charged)
    costs, by_launch = charge_causes(run.timeline, graph, waits, edges, shares, run.link_ns, run.is_charged)
    return Weighed(costs, by_launch, edges, shares)

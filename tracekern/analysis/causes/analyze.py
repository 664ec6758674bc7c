"""Why ranks waited: each wait charged to the work, the host or the link that caused it, however many waits lie between.

Delay analysis after Boehme, Geimer, Arnold, Voigtlaender and Wolf, "Identifying the Root Causes of Wait States in
Large-Scale Parallel Applications" (ACM Transactions on Parallel Computing 3(2), 2016). docs/analysis.md has the
definition, and where it departs from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.blame import GAP_TARGETS, Chain, Target, blame_causes, find_chains, targets_of_phases
from tracekern.analysis.causes.order import Edges, find_edges
from tracekern.analysis.causes.shares import Shares, solve_costs, split_waits, spread
from tracekern.analysis.doubt import Blame
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Phase, WaitKind, Waits
from tracekern.analysis.waits.event_graph import EventGraph, build_graph
from tracekern.analysis.waits.pieces import is_message
from tracekern.timeline.model import Float64, Int32, Int64, Mask, Timeline
from tracekern.timeline.select import Window, reaches_into

_NO_PHASE = Phase("", "")


@dataclass(frozen=True)
class Cost:
    """What one cause made others wait."""

    rank: int
    """Where it lies; of the link: the rank that sent. -1 where that is not known."""
    target: Target
    phase: Phase
    """Of target WORK: what took longer there. Of target LINK: the signals that took longer to send, or empty for the
    waits that took longer to see them. Empty for all others."""
    peer: int
    """Of target LINK, where it is known: the rank that received. -1 for all others."""
    direct_ns: float
    """Of the waits for this rank itself."""
    passed_on_ns: float
    """Of waits for ranks that had to wait for this one, directly or through others."""

    @property
    def total_ns(self) -> float:
        return self.direct_ns + self.passed_on_ns


@dataclass(frozen=True)
class LaunchCosts:
    """[n] columns: what the work of ranks and the gaps before their kernels cost, by the launch in which they lay."""

    rank: Int32
    target: tuple[Target, ...]
    phase: tuple[Phase, ...]
    launch: Int64
    """Index into Timeline.launches, or beyond for spans that name no launch."""
    total_ns: Float64


@dataclass(frozen=True)
class Causes:
    """`costs` sum to `charged_ns`, but for the rounding of floats (1e-9 of it)."""

    costs: tuple[Cost, ...]
    """Largest total first."""
    charged_ns: int
    """late_sender + late_receiver + barrier_late + drain + visibility over all waits that are charged."""
    blames: tuple[Blame, ...]
    """What each rank caused by its own work and its host, most first, and how sure that is: for doubt.name_worst. The
    links belong to no rank."""
    chains: tuple[Chain, ...]
    """Largest first; of the longest waits alone."""
    chained_ns: int
    """Lateness of the waits that `chains` was made from."""
    note: str
    """Why there is nothing to charge; empty where there is."""
    by_launch: LaunchCosts | None = None
    """None where nothing is charged."""


def analyze_causes(
    timeline: Timeline, waits: Waits, graph: EventGraph | None = None, window: Window | None = None
) -> Causes:
    """Charges the waits of `waits` (all of the same Timeline, in ns) to their causes. `graph`: build_graph(timeline).

    window: charges those that reach into it; their causes may lie before it.

    Ranks whose clocks were not aligned cannot be compared: then nothing is charged, and `note` says so.
    """
    if not timeline.has_one_axis:
        return Causes((), 0, (), (), 0, "the ranks' clocks are not aligned: which rank was late is unknown")
    link_ns = np.where(is_message(waits), waits.wait_ns - waits.late_ns, 0)
    is_charged = reaches_into(window, timeline.spans.start[waits.row], timeline.spans.end[waits.row])
    charged = int((waits.late_ns + link_ns)[is_charged].sum())
    if not charged:
        return Causes((), 0, (), (), 0, _why_nothing(waits, is_charged))
    graph = graph or build_graph(timeline)
    edges = find_edges(timeline, graph, waits)
    shares = split_waits(timeline, graph, waits, edges, link_ns[edges.wait], is_charged)
    costs = solve_costs(shares, shares.charged_ns[:, None].astype(float))[:, 0]
    tables = [
        _direct_costs(timeline, graph, edges, shares, costs),
        _link_costs(waits, edges, shares, costs, link_ns, is_charged),
        _unexplained(graph, waits, edges, shares, costs, is_charged),
    ]
    rows = [cost for table in tables for cost in table if cost.total_ns > 0]
    rows.sort(key=lambda cost: -cost.total_ns)
    blames = blame_causes(timeline, graph, waits, edges, shares, costs, is_charged)
    chains = find_chains(timeline, graph, waits, edges, shares)
    by_launch = _costs_by_launch(timeline, graph, edges, shares, costs)
    return Causes(tuple(rows), charged, blames, *chains, "", by_launch)


def _why_nothing(waits: Waits, is_charged: Mask) -> str:
    if not is_charged.any():
        return "no waits on record"
    if (waits.kind[is_charged] == WaitKind.UNMATCHED).any():
        return "the signals that ended the waits are not on record"
    return "no rank waited for anybody"


def _categories(timeline: Timeline, graph: EventGraph) -> tuple[list[Target], list[Phase]]:
    """Target and phase of each direct category."""
    phases = [*graph.phases, *[_NO_PHASE] * len(GAP_TARGETS)]
    return [*targets_of_phases(timeline, graph), *GAP_TARGETS], phases


def _costs_by_launch(
    timeline: Timeline, graph: EventGraph, edges: Edges, shares: Shares, costs: np.ndarray
) -> LaunchCosts:
    targets, phases = _categories(timeline, graph)
    launch = graph.runs.launch[edges.source[shares.edge[shares.direct_wait]]]
    total = costs[shares.direct_wait] * shares.direct_share
    groups = group_rows(len(launch), launch, shares.direct_category)
    launch, category = groups.columns
    return LaunchCosts(
        graph.schedule.rank[launch],
        tuple(targets[idx] for idx in category.tolist()),
        tuple(phases[idx] for idx in category.tolist()),
        launch,
        np.bincount(groups.group, total, len(groups)),
    )


def _direct_costs(timeline: Timeline, graph: EventGraph, edges: Edges, shares: Shares, costs: np.ndarray) -> list[Cost]:
    """Charges to phases of work, to the stores that signals waited for, and to hosts."""
    targets, phases = _categories(timeline, graph)
    source = edges.source[shares.edge[shares.direct_wait]]
    rank = graph.schedule.rank[graph.runs.launch[source]]
    groups = group_rows(len(rank), rank, shares.direct_category)
    late = shares.charged_ns[shares.direct_wait] * shares.direct_share
    total = costs[shares.direct_wait] * shares.direct_share
    sums = (np.bincount(groups.group, weights, len(groups)) for weights in (late, total - late))
    table = zip(*(column.tolist() for column in (*groups.columns, *sums)), strict=True)
    return [
        Cost(rank, targets[category], phases[category], -1, direct, passed) for rank, category, direct, passed in table
    ]


def _link_costs(
    waits: Waits, edges: Edges, shares: Shares, costs: np.ndarray, link_ns: Int64, is_charged: Mask
) -> list[Cost]:
    """Charges to the links: of each wait itself, and of waits whose sources had waited for a link."""
    passed = np.zeros(len(waits))
    received = spread(shares.link_waits, shares.link_ranges, costs * shares.link)
    passed[edges.wait[shares.link_waits.edge]] = received
    some = np.flatnonzero(link_ns > 0)
    groups = group_rows(len(some), waits.peer[some], waits.rank[some])
    sums = (np.bincount(groups.group, values[some], len(groups)) for values in (link_ns * is_charged, passed))
    table = zip(*(column.tolist() for column in (*groups.columns, *sums)), strict=True)
    return [Cost(peer, Target.LINK, _NO_PHASE, rank, direct, passed) for peer, rank, direct, passed in table]


def _unexplained(
    graph: EventGraph, waits: Waits, edges: Edges, shares: Shares, costs: np.ndarray, is_charged: Mask
) -> list[Cost]:
    """Lateness of sources that waited for a rank without records, did nothing longer than the waiter, or
    left nothing on record."""
    rank = graph.schedule.rank[graph.runs.launch[edges.source[shares.edge]]]
    is_lost = is_charged & (waits.late_ns > 0)
    is_lost[edges.wait] = False
    lost = np.flatnonzero(is_lost)
    rows = []
    for entry in np.unique(np.append(rank, waits.peer[lost])).tolist():
        mine = rank == entry
        nowhere = int(waits.late_ns[lost[waits.peer[lost] == entry]].sum())
        direct = float((shares.charged_ns * shares.unexplained)[mine].sum()) + nowhere
        total = float((costs * shares.unexplained)[mine].sum()) + nowhere
        rows.append(Cost(entry, Target.UNEXPLAINED, _NO_PHASE, -1, direct, total - direct))
    return rows

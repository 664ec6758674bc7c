"""Why ranks waited: each wait charged to the work, the host or the link that caused it, however many waits lie between.

Delay analysis after Boehme, Geimer, Arnold, Voigtlaender and Wolf, "Identifying the Root Causes of Wait States in
Large-Scale Parallel Applications" (ACM Transactions on Parallel Computing 3(2), 2016). docs/analysis.md has the
definition, and where it departs from the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.analysis.causes.blame import Chain, blame_causes, find_chains
from tracekern.analysis.causes.charges import Cost as Cost
from tracekern.analysis.causes.charges import LaunchCosts, own_of_ranks
from tracekern.analysis.causes.take_out import take_out
from tracekern.analysis.causes.weights import Run, charge_by_weights
from tracekern.analysis.doubt import Blame
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.event_graph import EventGraph, build_graph
from tracekern.formatting import brief
from tracekern.timeline.model import Mask, Timeline
from tracekern.timeline.select import Window, reaches_into


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
    """By weights. None where nothing is charged."""
    num_taken_out: int = 0
    """Of the largest causes, those that cost what a replay without them saved; all others are charged by weights."""

    __repr__ = brief


def analyze_causes(
    timeline: Timeline, waits: Waits, graph: EventGraph | None = None, window: Window | None = None
) -> Causes:
    """Charges the waits of `waits` (all of the same Timeline, in ns) to their causes. `graph`: build_graph(timeline).

    window: charges those that reach into it; their causes may lie before it.

    Ranks whose clocks were not aligned cannot be compared: then nothing is charged, and `note` says so.
    """
    if not timeline.has_one_axis:
        return Causes((), 0, (), (), 0, "the ranks' clocks are not aligned: which rank was late is unknown")
    is_charged = reaches_into(window, timeline.spans.start[waits.row], timeline.spans.end[waits.row])
    run = Run(timeline, graph or build_graph(timeline), waits, is_charged)
    if not run.charged_ns:
        return Causes((), 0, (), (), 0, _why_nothing(waits, is_charged))
    graph = run.graph
    weighed = charge_by_weights(run)
    edges, shares = weighed.edges, weighed.shares
    rows, num_taken_out = take_out(run, weighed.costs)
    rows.sort(key=lambda cost: -cost.total_ns)
    blames = blame_causes(timeline, graph, waits, edges, shares, own_of_ranks(timeline, rows), is_charged)
    chains = find_chains(timeline, graph, waits, edges, shares)
    return Causes(tuple(rows), run.charged_ns, blames, *chains, "", weighed.by_launch, num_taken_out)


def _why_nothing(waits: Waits, is_charged: Mask) -> str:
    if not is_charged.any():
        return "no waits on record"
    if (waits.kind[is_charged] == WaitKind.UNMATCHED).any():
        return "the signals that ended the waits are not on record"
    return "no rank waited for anybody"

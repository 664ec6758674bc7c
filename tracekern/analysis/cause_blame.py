"""What each rank made others wait by its own work and its host, within what the clocks leave open."""

from __future__ import annotations

import dataclasses

import numpy as np

from tracekern.analysis.cause_chains import Target, targets_of_phases
from tracekern.analysis.cause_order import Edges
from tracekern.analysis.cause_shares import Shares
from tracekern.analysis.cause_solve import solve_costs
from tracekern.analysis.doubt import Blame, Bound, Interval, late_charges, late_limits, may_be_late
from tracekern.analysis.event_graph import EventGraph
from tracekern.analysis.waits import Waits
from tracekern.timeline.model import Float64, Int64, Mask, Timeline


def blame_causes(
    timeline: Timeline,
    graph: EventGraph,
    waits: Waits,
    edges: Edges,
    shares: Shares,
    costs: Float64,
    is_charged: Mask,
) -> tuple[Blame, ...]:
    """One for each rank, most first; costs: [num_late_waits] of the time stamps as they are. is_charged: [num_waits].

    The limits are those of the lateness, passed on by the shares as they are; to the lower one a wait passes on no more
    than it was late at least. Where more waits may have been late, or a barrier may have waited for another rank, that
    adds to the upper limit of the rank waited for.
    """
    near = np.flatnonzero(may_be_late(timeline, waits) & is_charged)
    charged = np.flatnonzero(is_charged[edges.wait[shares.edge]])
    maybe_late, split = waits.take(near), np.searchsorted(near, edges.wait[shares.edge[charged]])
    limits, lows, direct = np.zeros((len(shares.edge), 4)), [], []
    for place, bound in enumerate((Bound.LIKELY, Bound.PROVEN)):
        limits[charged, 2 * place], limits[charged, 2 * place + 1], beside = _limits(timeline, maybe_late, split, bound)
        direct.append(beside)
        lowest = late_limits(timeline, waits, bound)[0][edges.wait[shares.edge]].astype(float)
        lowest[charged] = limits[charged, 2 * place]
        lows.append(solve_costs(_passing_less(shares, lowest), limits[:, [2 * place]]))
    highs = solve_costs(shares, limits[:, 1::2])
    columns = np.column_stack([costs, lows[0], highs[:, 0], lows[1], highs[:, 1]])
    late, *others = _of_ranks(timeline, graph, edges, shares, columns)
    likely_lo, likely_hi, proven_lo, proven_hi = others
    blames = [
        Blame(
            entry.rank,
            int(late[entry.rank]),
            Interval(int(likely_lo[entry.rank]), int(np.ceil(likely_hi[entry.rank] + direct[0][entry.rank]))),
            Interval(int(proven_lo[entry.rank]), int(np.ceil(proven_hi[entry.rank] + direct[1][entry.rank]))),
        )
        for entry in timeline.ranks
    ]
    return tuple(sorted(blames, key=lambda blame: (-blame.late_ns, -blame.likely.hi_ns, blame.rank)))


def _passing_less(shares: Shares, lowest_ns: Float64) -> Shares:
    """What was passed on through a wait that may have been less late is less by as much."""
    kept = np.where(shares.late_ns > 0, lowest_ns / np.maximum(shares.late_ns, 1), 1.0)
    return dataclasses.replace(shares, late_ns=shares.late_ns * np.minimum(kept, 1.0))


def _limits(timeline: Timeline, waits: Waits, split: Int64, bound: Bound) -> tuple[Float64, Float64, Int64]:
    """([n] lowest, [n] highest lateness, [largest rank + 1] ns on top of the highest).

    waits: all that may have been late and are charged; split: [n] indices of those that were split.
    """
    charges = late_charges(timeline, waits, bound)
    is_split = np.zeros(len(waits), bool)
    is_split[split] = True
    usual = is_split[charges.wait] & (charges.rank == waits.peer[charges.wait])
    lo, hi = np.zeros(len(waits)), np.zeros(len(waits))
    lo[charges.wait[usual]], hi[charges.wait[usual]] = charges.lo_ns[usual], charges.hi_ns[usual]
    beside = ~usual & (charges.rank != waits.rank[charges.wait]) & (charges.hi_ns > 0)
    on_top = np.zeros(max(entry.rank for entry in timeline.ranks) + 1, np.int64)
    np.add.at(on_top, charges.rank[beside], charges.hi_ns[beside])
    return lo[split], hi[split], on_top


def _of_ranks(timeline: Timeline, graph: EventGraph, edges: Edges, shares: Shares, costs: Float64) -> Float64:
    """[columns of costs, largest rank + 1] ns charged to the work and the host of each rank."""
    own = np.array([target is Target.WORK for target in targets_of_phases(timeline, graph)] + [True])
    chosen = own[shares.direct_category]
    wait, share = shares.direct_wait[chosen], shares.direct_share[chosen]
    rank = graph.schedule.rank[graph.runs.launch[edges.source[shares.edge[wait]]]]
    num_ranks = max(entry.rank for entry in timeline.ranks) + 1
    return np.stack([np.bincount(rank, column[wait] * share, num_ranks) for column in costs.T])

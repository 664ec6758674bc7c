"""What each rank made others wait by its own work and its host, within what the clocks leave open.

The longest waits are followed to their roots: who waited for whom, who waited for whom, ... and what lay at the end.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.order import Edges
from tracekern.analysis.causes.shares import Ranges, Sequence, Shares, solve_costs
from tracekern.analysis.doubt import Blame, Bound, Interval, late_charges, late_limits, may_be_late
from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.timeline.model import ChannelKind, EventClass, Float64, Int64, Mask, Timeline

_NUM_WAITS = 1000
_NUM_CHAINS = 20
_MAX_SHOWN = 12
"""Waits of one chain that a report shows."""


class Target(enum.Enum):
    """What a wait can be charged to."""

    WORK = "work"
    """A phase that took longer than at the rank that waited."""
    HOST = "host"
    """A kernel that its host launched later, by a host lane or the launch itself."""
    GAP = "gap"
    """A kernel that began later: its host or an unrecorded kernel."""
    LINK = "link"
    """Stores that drained and flags that travelled."""
    UNEXPLAINED = "unexplained"
    """Waits for a rank without records, records that were overwritten, or nothing took longer."""


@dataclass(frozen=True)
class Chain:
    """At each step the largest share was followed."""

    waiters: tuple[tuple[int, Phase], ...]
    """(rank, phase) that waited; the one that waited longest first, each for the next one."""
    is_cut: bool
    """More waits lie between these and the root."""
    rank: int
    """Where the root lies; of target LINK the rank that sent."""
    target: Target
    phase: Phase
    """Of targets WORK and LINK, as in Cost."""
    late_ns: int
    """Lateness at the first waiter, over `num_waits` waits."""
    num_waits: int


End = tuple[int, Target, Phase]
Root = tuple[tuple[tuple[int, Phase], ...], bool, int, Target, Phase]
"""The first five fields of a Chain; its end is the last three."""


def targets_of_phases(timeline: Timeline, graph: EventGraph) -> list[Target]:
    """A signal that takes longer waits for its stores: that is the link's, as is a barrier of ranks once all came."""
    of_link = {
        event.name
        for event in timeline.events
        if event.event_class is EventClass.SIGNAL or (event.channel and event.channel.kind is ChannelKind.BARRIER)
    }
    return [Target.LINK if phase.event in of_link else Target.WORK for phase in graph.phases]


def find_chains(
    timeline: Timeline, graph: EventGraph, waits: Waits, edges: Edges, shares: Shares
) -> tuple[tuple[Chain, ...], int]:
    """(the largest chains, ns of the waits they were made from): of the _NUM_WAITS most late of those charged."""
    follow = _Follower(graph, waits, edges, shares, targets_of_phases(timeline, graph))
    # Of waits as late as each other those that began first: ticks make many of them, and ranks may be in any order.
    longest = np.lexsort((edges.begin[shares.edge], -shares.charged_ns))[:_NUM_WAITS]
    longest = longest[shares.charged_ns[longest] > 0]
    found: dict[Root, tuple[int, int]] = {}
    for wait in longest.tolist():
        root = follow.root_of(wait)
        late, count = found.get(root, (0, 0))
        found[root] = late + int(shares.charged_ns[wait]), count + 1
    largest = sorted(found.items(), key=lambda item: -item[1][0])[:_NUM_CHAINS]
    chains = tuple(Chain(*root, *values) for root, values in largest)
    return chains, int(shares.charged_ns[longest].sum())


class _Follower:
    def __init__(self, graph: EventGraph, waits: Waits, edges: Edges, shares: Shares, targets: list[Target]) -> None:
        self._graph, self._waits, self._edges, self._shares, self._targets = graph, waits, edges, shares, targets
        self._first_direct = np.searchsorted(shares.longer.wait, np.arange(len(shares.edge) + 1))
        self._next: dict[int, int] = {}
        self._end: dict[int, End] = {}
        """Both of waits that were looked at: chains run together, and none is followed twice."""

    def root_of(self, wait: int) -> Root:
        """Of the chain that begins at late wait `wait`."""
        path = [wait]
        while path[-1] not in self._end:
            following = self._follow(path[-1])
            if isinstance(following, int):
                self._next[path[-1]] = following
                path.append(following)
            else:
                self._end[path[-1]] = following
        end = self._end[path[-1]]
        self._end.update(dict.fromkeys(path, end))
        shown = [wait]
        while len(shown) <= _MAX_SHOWN and shown[-1] in self._next:
            shown.append(self._next[shown[-1]])
        return tuple(map(self._waiter, shown[:_MAX_SHOWN])), len(shown) > _MAX_SHOWN, *end

    def _waiter(self, wait: int) -> tuple[int, Phase]:
        waits, row = self._waits, self._edges.wait[self._shares.edge[wait]]
        return int(waits.rank[row]), waits.phases[waits.phase[row]]

    def _follow(self, wait: int) -> int | End:
        """The wait that most of `wait` is passed on to, or what lies at the end."""
        graph, waits, edges, shares = self._graph, self._waits, self._edges, self._shares
        rank = int(graph.schedule.rank[graph.runs.launch[edges.source[shares.edge[wait]]]])
        direct = slice(int(self._first_direct[wait]), int(self._first_direct[wait + 1]))
        best = max(shares.direct_share[direct], default=0.0)
        unexplained = shares.unexplained[wait]
        if shares.waiting[wait] > max(best, shares.link[wait], unexplained):
            return _longest(shares.late_waits, shares.source.late_ranges, wait)
        if shares.link[wait] > max(best, unexplained):
            slow = shares.link_waits.item[_longest(shares.link_waits, shares.source.link_ranges, wait)]
            return int(waits.peer[edges.wait[slow]]), Target.LINK, Phase("", "")
        if unexplained >= best:
            return rank, Target.UNEXPLAINED, Phase("", "")
        row = direct.start + int(shares.direct_share[direct].argmax())
        category = int(shares.longer.category[row])
        if category == len(graph.phases):
            is_host = 2 * shares.of_host_ns[row] >= shares.longer.ns[row]
            return rank, Target.HOST if is_host else Target.GAP, Phase("", "")
        return rank, self._targets[category], graph.phases[category]


def _longest(sequence: Sequence, ranges: Ranges, wait: int) -> int:
    """The wait of most weight among those that the source of `wait` had."""
    own = np.arange(ranges.own_first[wait], ranges.own_stop[wait])
    past = sequence.by_stream[ranges.past_first[wait] : ranges.past_stop[wait]]
    candidates = np.concatenate([own, past])
    return int(candidates[sequence.weight_ns[candidates].argmax()])


def blame_causes(
    timeline: Timeline,
    graph: EventGraph,
    waits: Waits,
    edges: Edges,
    shares: Shares,
    caused_ns: Float64,
    is_charged: Mask,
) -> tuple[Blame, ...]:
    """One for each rank, most first. caused_ns: [largest rank + 1] what is charged to its own work and its host.

    How far that may be off is how far the lateness may be, passed on by the shares as they are; to the lower limit a
    wait passes on no more than it was late at least. Where more waits may have been late, or a barrier may have waited
    for another rank, that adds to the upper limit of the rank waited for. is_charged: [num_waits].
    """
    near = np.flatnonzero(may_be_late(timeline, waits) & is_charged)
    charged = np.flatnonzero(is_charged[edges.wait[shares.edge]])
    maybe_late, split = waits.take(near), np.searchsorted(near, edges.wait[shares.edge[charged]])
    limits, low_columns, beside = np.zeros((len(shares.edge), 4)), [], []
    for place, bound in enumerate((Bound.LIKELY, Bound.PROVEN)):
        limits[charged, 2 * place], limits[charged, 2 * place + 1], on_top = _limits(timeline, maybe_late, split, bound)
        beside.append(on_top)
        lowest = late_limits(timeline, waits, bound)[0][edges.wait[shares.edge]].astype(float)
        lowest[charged] = limits[charged, 2 * place]
        low_columns.append(solve_costs(_passing_less(shares, lowest), limits[:, [2 * place]]))
    asis_and_highs = solve_costs(shares, np.column_stack([shares.charged_ns, limits[:, 1::2]]))
    asis, *highs = _of_ranks(timeline, graph, edges, shares, asis_and_highs)
    lows = _of_ranks(timeline, graph, edges, shares, np.column_stack(low_columns))
    ratio = caused_ns / np.maximum(asis, 1)
    bounds = [
        (np.minimum(low * ratio, caused_ns), caused_ns + np.maximum(high - asis, 0) * np.maximum(ratio, 1) + on_top)
        for low, high, on_top in zip(lows, highs, beside, strict=True)
    ]
    blames = [
        Blame(
            entry.rank,
            int(caused_ns[entry.rank]),
            *(Interval(int(low[entry.rank]), int(np.ceil(high[entry.rank]))) for low, high in bounds),
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
    own = np.array([target is Target.WORK for target in targets_of_phases(timeline, graph)] + [True, False])
    chosen = own[shares.longer.category]
    wait, share = shares.longer.wait[chosen], shares.direct_share[chosen]
    rank = graph.schedule.rank[graph.runs.launch[edges.source[shares.edge[wait]]]]
    num_ranks = max(entry.rank for entry in timeline.ranks) + 1
    return np.stack([np.bincount(rank, column[wait] * share, num_ranks) for column in costs.T])

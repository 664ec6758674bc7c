"""Who is to blame for the waiting: named only where ranks, or links, that are all alike would not show the same.

Charges say what each cause cost, and are the measure of what is named first. They are no evidence: in a chain the first
rank is charged most with work that is as long as everybody's. What is named has to take longer than its peers for its
own part of an iteration, by more than chance explains over the iterations at hand; one iteration has no such evidence.
A single time that is far beyond all others is named as such. Where the clocks leave open whether any of the waiting was
for the rank, or several are as slow, the rest is left open.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.causes.analyze import Causes, Cost
from tracekern.analysis.causes.blame import Target
from tracekern.analysis.doubt import Blame
from tracekern.analysis.iterations import Iterations
from tracekern.analysis.naming.exchangeable import Event, Lead, indistinct, leads, single_event
from tracekern.analysis.naming.own_times import LinkTimes, OwnTimes
from tracekern.analysis.waits.analyze import Phase
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.formatting import brief
from tracekern.timeline.model import Float64

ALIKE = 0.1
"""Members of a set have leads within this share of each other."""
MIN_SHARE = 0.005
"""Of the charged waiting: less is not named, however sure it is."""
_SHOWN_PHASES = 0.9
_OPEN_LEAD, _OPEN_SHARE = 0.5, 0.25
"""Nothing is named for less than this share of what a suspect cost whose lead is more than half of what it takes."""


class Kind(enum.Enum):
    """What a suspect is suspected of."""

    WORK = "work"
    """Work of ranks."""
    HOST = "host"
    """Gaps before kernels, mostly the hosts'."""
    GAP = "gap"
    """Gaps before kernels: the host or an unrecorded kernel."""
    LINK = "link"


class Why(enum.Enum):
    """Why nothing is named."""

    CPU = "cpu"
    """The CPU backend shows order and coverage, never durations."""
    NO_WAITS = "no waits"
    """Nothing is charged; Causes.note says why."""
    ONE_ITERATION = "one iteration"
    ALIKE = "alike"
    """Nothing stands out, or too little of what was waited for."""
    CLOCKS = "clocks"
    """What stands out may have cost nothing, for all that the clocks say."""


@dataclass(frozen=True)
class Suspect:
    """A rank's work or gaps, or a link: what it cost, and whether it takes longer than its peers."""

    kind: Kind
    member: tuple[int, ...]
    """(rank,), or (source, destination) of a link."""
    cost_ns: float
    phase: Phase
    """Of kind WORK: the phase that cost most; of all others empty."""
    lead: Lead
    event: Event | None
    """The one time that makes it stand out, if one does, ..."""
    iteration: int
    """... and the number of its iteration."""
    event_cost_ns: float
    """Of the iteration of the event."""
    peers: tuple[tuple[int, ...], ...]
    """Members whose times are within ALIKE, or that chance may have put behind it."""

    @property
    def named_cost_ns(self) -> float:
        """What it would be named for."""
        return self.event_cost_ns if self.event else self.cost_ns


@dataclass(frozen=True)
class Culprit:
    kind: Kind | None
    """None: nothing is named, and `why` says why."""
    members: tuple[tuple[int, ...], ...]
    """Ranks, or links by source and destination, that are named; the one that cost most first."""
    phase: Phase
    cost_ns: float
    lead: Lead | None
    event: int | None
    """The number of the iteration, where it happened once."""
    is_proven: bool
    """For all that the clocks leave open, some waiting was for it."""
    why: Why | None
    suspects: tuple[Suspect, ...]
    """All ranks' work and gaps and all links that cost anything, largest first."""

    __repr__ = brief

    @property
    def rank(self) -> int | None:
        """The one rank that is named; None for links, sets and where nothing is named."""
        return self.members[0][0] if self.kind not in (None, Kind.LINK) and len(self.members) == 1 else None


_NO_PHASE = Phase("", "")


def name_culprit(
    causes: Causes,
    graph: EventGraph,
    own: OwnTimes,
    links: Sequence[LinkTimes],
    iterations: Iterations,
    floor_ns: float,
) -> Culprit:
    """floor_ns: how far a single time is uncertain, a tick of the coarsest clock."""
    found = sorted(
        [
            *_of_ranks(causes, graph, own, iterations, floor_ns),
            *_of_links(causes, links, floor_ns),
        ],
        key=lambda suspect: -suspect.cost_ns,
    )
    suspects = tuple(found)
    enough = [suspect for suspect in suspects if suspect.named_cost_ns >= MIN_SHARE * causes.charged_ns]
    standing = [suspect for suspect in enough if suspect.lead.stands_out or suspect.event]
    blames = {blame.rank: blame for blame in causes.blames}
    sure = [suspect for suspect in standing if _may_be_named(suspect, blames)]
    if not sure:
        return open_verdict(Why.CLOCKS if standing else _why_open(enough), suspects)
    first = sure[0]
    may_be_worse = [
        suspect.cost_ns
        for suspect in enough
        if suspect not in standing and suspect.lead.lead_ns > _OPEN_LEAD * suspect.lead.noise_ns
    ]
    if first.named_cost_ns < _OPEN_SHARE * max(may_be_worse, default=0.0):
        return open_verdict(Why.ALIKE, suspects)
    if first.event:
        return _named(first, [first.member], first.named_cost_ns, first.iteration, blames, suspects)
    alike = {first.member: first.cost_ns}
    cost_of = {one.member: one.cost_ns for one in suspects if one.kind in _same(first.kind)}
    for member in first.peers:
        # Ranks that are as slow hide each other: all waiting may be charged to one of them.
        if member in cost_of or (first.kind is not Kind.LINK and member[0] in own.waited_for):
            alike[member] = cost_of.get(member, 0.0)
    members = sorted(alike, key=lambda member: -alike[member])
    return _named(first, members, sum(alike.values()), None, blames, suspects)


def open_verdict(why: Why, suspects: tuple[Suspect, ...]) -> Culprit:
    """Nothing is named."""
    return Culprit(None, (), _NO_PHASE, 0.0, None, None, False, why, suspects)


def _why_open(suspects: Sequence[Suspect]) -> Why:
    judged = any(np.isfinite(suspect.lead.noise_ns) for suspect in suspects)
    return Why.ALIKE if judged else Why.ONE_ITERATION


def _named(
    first: Suspect,
    members: Sequence[tuple[int, ...]],
    cost_ns: float,
    event: int | None,
    blames: dict[int, Blame],
    suspects: tuple[Suspect, ...],
) -> Culprit:
    is_proven = first.kind is Kind.LINK or blames[first.member[0]].proven.lo_ns > 0
    return Culprit(first.kind, tuple(members), first.phase, cost_ns, first.lead, event, is_proven, None, suspects)


def _same(kind: Kind) -> tuple[Kind, ...]:
    """Kinds that are judged by the same times."""
    return (Kind.HOST, Kind.GAP) if kind in (Kind.HOST, Kind.GAP) else (kind,)


def _may_be_named(suspect: Suspect, blames: dict[int, Blame]) -> bool:
    """Whether some of the waiting was for it, whatever the clocks likely are. Times of a link are its own."""
    return suspect.kind is Kind.LINK or blames[suspect.member[0]].likely.lo_ns > 0


def _of_ranks(
    causes: Causes, graph: EventGraph, own: OwnTimes, iterations: Iterations, floor_ns: float
) -> list[Suspect]:
    suspects = []
    for place, rank in enumerate(own.ranks):
        mine = [cost for cost in causes.costs if cost.rank == rank]
        worked = [cost for cost in mine if cost.target is Target.WORK]
        gaps = [cost for cost in mine if cost.target in (Target.HOST, Target.GAP)]
        if worked:
            times = own.of_phases(_main_phases(worked, graph))
            suspects.append(_suspect_rank(Kind.WORK, place, own, worked, times, causes, iterations, floor_ns))
        if gaps:
            of_host = sum(cost.total_ns for cost in gaps if cost.target is Target.HOST)
            kind = Kind.HOST if 2 * of_host >= sum(cost.total_ns for cost in gaps) else Kind.GAP
            suspects.append(_suspect_rank(kind, place, own, gaps, own.gaps, causes, iterations, floor_ns))
    return suspects


def _main_phases(worked: Sequence[Cost], graph: EventGraph) -> list[int]:
    """The phases that make up most of what a rank's work cost, largest first."""
    total, before, phases = sum(cost.total_ns for cost in worked), 0.0, []
    for cost in worked:  # largest first
        if before < _SHOWN_PHASES * total:
            phases.append(graph.phases.index(cost.phase))
        before += cost.total_ns
    return phases


def _suspect_rank(
    kind: Kind,
    place: int,
    own: OwnTimes,
    costs: Sequence[Cost],
    times: Float64,
    causes: Causes,
    iterations: Iterations,
    floor_ns: float,
) -> Suspect:
    lead, event, alike = _judge(times, place, floor_ns)
    total, event_cost, number = sum(cost.total_ns for cost in costs), 0.0, -1
    if event:
        number = int(own.iterations[event.iteration]) if len(own.iterations) > 1 else event.iteration
        in_iteration = _cost_in(causes, own.ranks[place], kind is not Kind.WORK, iterations, event.iteration)
        event_cost = min(in_iteration or total, total)
    peers = tuple((own.ranks[idx],) for idx in alike)
    phase = costs[0].phase if kind is Kind.WORK else _NO_PHASE
    return Suspect(kind, (own.ranks[place],), total, phase, lead, event, number, event_cost, peers)


def _cost_in(causes: Causes, rank: int, is_gap: bool, iterations: Iterations, place: int) -> float:
    """What the rank cost in one of several iterations; 0 where there are no several."""
    table = causes.by_launch
    if table is None or len(iterations) < 2:
        return 0.0
    of_launch = np.append(iterations.of_launch, -1)[np.minimum(table.launch, len(iterations.of_launch))]
    mine = (table.rank == rank) & (table.is_gap == is_gap) & (of_launch == iterations.number[place])
    return max(float(table.total_ns[mine].sum()), 0.0)


def _of_links(causes: Causes, links: Sequence[LinkTimes], floor_ns: float) -> list[Suspect]:
    cost_of: dict[tuple[int, ...], float] = {}
    for cost in causes.costs:
        if cost.target is Target.LINK and cost.peer >= 0:
            cost_of[cost.rank, cost.peer] = cost_of.get((cost.rank, cost.peer), 0.0) + cost.total_ns
    best: dict[tuple[int, ...], Suspect] = {}
    for kind in links:
        floors: list[tuple[Float64, Float64 | float]]
        floors = [(kind.drain, floor_ns), (kind.seen, floor_ns + kind.doubt_ns.astype(float))]
        for place, link in enumerate(kind.links):
            if not cost_of.get(link):
                continue
            for times, floor in floors:
                suspect = _suspect_link(kind, times, place, floor, cost_of[link])
                if link not in best or _excess(suspect) > _excess(best[link]):
                    best[link] = suspect
    return list(best.values())


def _suspect_link(kind: LinkTimes, times: Float64, place: int, floor_ns: Float64 | float, cost_ns: float) -> Suspect:
    lead, event, alike = _judge(times, place, floor_ns)
    part = event.excess_ns / max(float(np.nansum(times[place])), 1.0) if event else 0.0
    peers = tuple(kind.links[idx] for idx in alike)
    number = int(kind.iterations[event.iteration]) if event else -1
    return Suspect(Kind.LINK, kind.links[place], cost_ns, _NO_PHASE, lead, event, number, part * cost_ns, peers)


def _excess(suspect: Suspect) -> float:
    """Of what stands out the lead; of all others less than that."""
    return suspect.lead.lead_ns if suspect.lead.stands_out or suspect.event else -1.0


def _judge(times: Float64, place: int, floor_ns: Float64 | float) -> tuple[Lead, Event | None, list[int]]:
    """(the lead of a member, the event that alone makes it stand out, the members that are as slow)"""
    every = leads(times, floor_ns)
    lead = every[place]
    tick_ns = float(np.min(floor_ns))
    event = single_event(times, place, tick_ns)
    if event and not leads(np.delete(times, event.iteration, axis=1), floor_ns)[place].stands_out:
        return lead, event, []
    if not lead.stands_out:
        return lead, None, []
    near = set(indistinct(times, place, tick_ns).tolist())
    alike = [
        idx
        for idx, other in enumerate(every)
        if idx != place and other.stands_out and (idx in near or other.lead_ns >= (1 - ALIKE) * lead.lead_ns)
    ]
    return lead, None, alike

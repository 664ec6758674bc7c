"""What each cause made the ranks wait: all that took longer somewhere, counted as often as waits came of it.

What took longer at the source of a wait is charged, what took longer at the waiter shortened the wait and is taken off.
Over many waits in a row both cancel where ranks take turns, as noise makes them do: so sums are taken first, with their
signs. What is then less than nothing goes off the other charges of its kind, and only the rest of it off all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tracekern.analysis.causes.blame import Target, targets_of_phases
from tracekern.analysis.causes.order import Edges
from tracekern.analysis.causes.shares import Ranges, Sequence, Shares, Side, solve_weights, spread
from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import Phase, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.formatting import brief
from tracekern.timeline.model import EventClass, Float64, Int64, Mask, Timeline, field_values

NO_PHASE = Phase("", "")
_DUST_NS = 1e-6
"""What floats leave of sums that are nothing."""
_UNKNOWN, _LINK = 1, 2
"""Categories behind the gaps before kernels: without a cause on record, and the link in waits."""


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


class _Part(NamedTuple):
    """[m] charges, of either sign."""

    rank: Int64
    category: Int64
    """A phase, the gaps before kernels, or one of those behind it."""
    peer: Int64
    direct_ns: Float64
    total_ns: Float64


@dataclass(frozen=True)
class _Charger:
    """Weighs what a wait is due to, once as the wait alone and once with all that came of it."""

    timeline: Timeline
    graph: EventGraph
    waits: Waits
    edges: Edges
    shares: Shares
    own: Float64
    """[n] 1 for each late wait that is charged, else 0."""
    weight: Float64
    """[n] of solve_weights()."""

    @property
    def gap(self) -> int:
        """Its category: the one behind all phases."""
        return len(self.graph.phases)

    def run_of(self, side: Side, wait: Int64) -> Int64:
        """[n] the run of the source, or of the waiter, of late waits."""
        runs = self.edges.source if side is self.shares.source else self.edges.waiter
        return runs[self.shares.edge[wait]]

    def weights(self, side: Side, wait: Int64 | slice = slice(None)) -> tuple[Float64, Float64]:
        """([n] of the waits alone: only the source makes wait for itself, [n] with all that came of them)."""
        sign = 1.0 if side is self.shares.source else -1.0
        return max(sign, 0.0) * self.own[wait], sign * self.weight[wait]

    def by_rank(self, side: Side, category: Int64 | int, wait: Int64, ns: Int64) -> _Part:
        """Charges by rank and category; ns: [n] of each of the late waits `wait`, for what one side of them did."""
        rank = self.graph.schedule.rank[self.graph.runs.launch[self.run_of(side, wait)]].astype(np.int64)
        sums = self._sums(rank, category + 0 * rank, *(weight * ns for weight in self.weights(side, wait)))
        return _Part(sums[0], sums[1], np.full(len(sums[0]), -1), *sums[2:])

    def by_peer(self, rank: Int64, peer: Int64, category: int, direct: Float64, total: Float64) -> _Part:
        """Charges of one category by rank and peer, which may be -1."""
        ranks, peers, *sums = self._sums(rank, peer + 1, direct, total)
        return _Part(ranks, np.full(len(ranks), category), peers - 1, *sums)

    @staticmethod
    def _sums(rank: Int64, other: Int64, direct: Float64, total: Float64) -> tuple[Any, Any, Any, Any]:
        """Distinct (rank, other), neither below zero, and the sums of both columns."""
        base = int(other.max(initial=0)) + 1
        code = rank * base + other
        found = np.flatnonzero(np.bincount(code))
        return found // base, found % base, np.bincount(code, direct)[found], np.bincount(code, total)[found]


@dataclass(frozen=True)
class LaunchCosts:
    """[m] columns: what the work of ranks and the gaps before their kernels cost, by the launch in which they lay. With
    their signs, before what is less than nothing goes off the other charges."""

    rank: Int64
    is_gap: Mask
    launch: Int64
    """Index into Timeline.launches, or beyond for spans that name no launch."""
    total_ns: Float64

    __repr__ = brief


def charge_causes(
    timeline: Timeline, graph: EventGraph, waits: Waits, edges: Edges, shares: Shares, link_ns: Int64, is_charged: Mask
) -> tuple[list[Cost], LaunchCosts]:
    """All causes, without those that cost nothing. link_ns, is_charged: [num_waits].

    They sum to the lateness and the link of the waits that are charged.
    """
    own = is_charged[edges.wait[shares.edge]].astype(float)
    charger = _Charger(timeline, graph, waits, edges, shares, own, solve_weights(shares, own))
    parts = [_unexplained(charger), _own_links(charger, link_ns * is_charged)]
    signals = _Signals.of_all(timeline, graph)
    for side in (shares.source, shares.waiter):
        parts += [*_excess(charger, side, signals), _links(charger, side)]
    columns = _Part(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    lost = _without_records(waits, edges, is_charged)
    charged = float((waits.late_ns + link_ns)[is_charged].sum()) - sum(lost.values())
    costs = _costs(timeline, graph, columns, charged, lost)
    return _divide_gaps(charger, costs), _by_launch(charger)


def _divide_gaps(charger: _Charger, costs: list[Cost]) -> list[Cost]:
    """With each rank's charge for gaps as two: for what surely was its host's, in the proportion that this has of all
    that was longer before its kernels, and for the rest."""
    shares, longer = charger.shares, charger.shares.longer
    row = np.flatnonzero(longer.category == charger.gap)
    wait = longer.wait[row]
    rank = charger.graph.schedule.rank[charger.graph.runs.launch[charger.run_of(shares.source, wait)]]
    num_ranks = max(entry.rank for entry in charger.timeline.ranks) + 1
    weight = np.maximum(charger.weight[wait], 0)
    whole, of_host = (np.bincount(rank, weight * ns[row], num_ranks) for ns in (longer.ns, shares.of_host_ns))
    divided = []
    for cost in costs:
        if cost.target is Target.GAP:
            part = float(of_host[cost.rank] / max(whole[cost.rank], 1))
            divided += [
                Cost(cost.rank, target, NO_PHASE, -1, cost.direct_ns * share, cost.passed_on_ns * share)
                for target, share in ((Target.HOST, part), (Target.GAP, 1 - part))
                if share > 0
            ]
        else:
            divided.append(cost)
    return divided


def _by_launch(charger: _Charger) -> LaunchCosts:
    shares, graph = charger.shares, charger.graph
    is_work = np.array([target is Target.WORK for target in targets_of_phases(charger.timeline, graph)])
    kept = np.append(is_work, [True, False])
    launch, is_gap, total = [], [], []
    for side, sign in ((shares.source, 1.0), (shares.waiter, -1.0)):
        excess = side.excess
        row = np.flatnonzero(kept[excess.category])
        wait = excess.wait[row]
        launch.append(graph.runs.launch[charger.run_of(side, wait)].astype(np.int64))
        is_gap.append(excess.category[row] == charger.gap)
        total.append(sign * charger.weight[wait] * excess.ns[row])
    groups = group_rows(sum(map(len, launch)), np.concatenate(launch), np.concatenate(is_gap).astype(np.int64))
    of_launch, of_gap = groups.columns
    sums = np.bincount(groups.group, np.concatenate(total), len(groups))
    return LaunchCosts(graph.schedule.rank[of_launch].astype(np.int64), of_gap > 0, of_launch, sums.astype(float))


@dataclass(frozen=True)
class _Signals:
    """A phase of signals to peers."""

    category: int
    sequence: Sequence
    """Its items are pieces of activity."""

    @classmethod
    def of_all(cls, timeline: Timeline, graph: EventGraph) -> list[_Signals]:
        names = {e.name for e in timeline.events if e.event_class is EventClass.SIGNAL and e.has("peer")}
        return [cls._of(graph, number) for number, phase in enumerate(graph.phases) if phase.event in names]

    @classmethod
    def _of(cls, graph: EventGraph, category: int) -> _Signals:
        piece = np.flatnonzero(graph.phase == category)
        run = np.searchsorted(graph.runs.first, piece, side="right") - 1
        end = graph.activity.end[piece]
        sequence = Sequence.of(graph, run, end, end - graph.activity.start[piece])
        return cls(category, dataclasses.replace(sequence, item=piece[sequence.item]))

    def before(self, charger: _Charger, side: Side, wait: Int64) -> Ranges:
        """Those that one side of each of the late waits `wait` sent since the two were ordered."""
        shares = charger.shares
        asked = charger.edges.take(shares.edge[wait])
        until = asked.release if side is shares.source else asked.begin
        return self.sequence.ranges(charger.graph, charger.run_of(side, wait), shares.since[wait], until)

    def peers(self, charger: _Charger, which: Int64) -> Int64:
        """[n] the peer of some of the signals; -1 where it is not on record."""
        timeline = charger.timeline
        span, peer = charger.graph.activity.span[self.sequence.item[which]], np.full(len(which), -1, np.int64)
        event = timeline.spans.event[span]
        for number in np.flatnonzero(np.bincount(event)).tolist():
            mine = np.flatnonzero(event == number)
            named = field_values(timeline.events[number], "peer", timeline.spans, span[mine])
            if named is not None:
                peer[mine] = named
        return peer


def _excess(charger: _Charger, side: Side, signals: list[_Signals]) -> list[_Part]:
    """Phases, gaps before kernels, waits without a cause on record. Of phases of signals the peers are told apart."""
    excess = side.excess
    parts, is_rest = [], np.ones(len(excess.wait), bool)
    for phase in signals:
        mine = np.flatnonzero(excess.category == phase.category)
        sent = phase.before(charger, side, excess.wait[mine])
        known = np.flatnonzero(sent.count)
        if len(known):
            is_rest[mine[known]] = False
            parts.append(_by_peer(charger, side, phase, sent.take(known), mine[known]))
    rest = charger.by_rank(side, excess.category[is_rest], excess.wait[is_rest], excess.ns[is_rest])
    return [*parts, rest]


def _by_peer(charger: _Charger, side: Side, phase: _Signals, sent: Ranges, row: Int64) -> _Part:
    """The excess of some rows of a side. Of several signals all are taken to be longer than usual but by the same time,
    so that the longest stand out."""
    sequence, wait = phase.sequence, side.excess.wait[row]
    usual = (sent.total_ns - side.excess.ns[row]) / sent.count
    direct, total = (
        sequence.weight_ns * spread(sequence, sent, of) - spread(sequence, sent, of * usual)
        for of in charger.weights(side, wait)
    )
    some = np.flatnonzero((direct != 0) | (total != 0))
    rank = charger.graph.schedule.rank[charger.graph.runs.launch[sequence.run[some]]].astype(np.int64)
    return charger.by_peer(rank, phase.peers(charger, some), phase.category, direct[some], total[some])


def _links(charger: _Charger, side: Side) -> _Part:
    """The link in the waits that the source, or the waiter, had before."""
    shares = charger.shares
    rate = side.link_ns / np.maximum(side.link_ranges.total_ns, 1) * charger.weights(side)[1]
    passed_on = shares.link_waits.weight_ns * spread(shares.link_waits, side.link_ranges, rate)
    return _of_pairs(charger, charger.edges.wait[shares.link_waits.item], np.zeros(len(passed_on)), passed_on)


def _own_links(charger: _Charger, link_ns: Int64) -> _Part:
    """The link in each wait that is charged; link_ns: [num_waits]."""
    some = np.flatnonzero(link_ns)
    ns = link_ns[some].astype(np.float64)
    return _of_pairs(charger, some, ns, ns)


def _of_pairs(charger: _Charger, some: Int64, direct: Float64, total: Float64) -> _Part:
    peer, rank = charger.waits.peer[some].astype(np.int64), charger.waits.rank[some].astype(np.int64)
    return charger.by_peer(peer, rank, charger.gap + _LINK, direct, total)


def _unexplained(charger: _Charger) -> _Part:
    """What is left of each wait: of waits whose source, or waiter, waited for something that is not on record."""
    shares = charger.shares
    source, waiter = shares.source, shares.waiter
    rest = shares.late_ns - (source.late_ns + source.link_ns) + (waiter.late_ns + waiter.link_ns)
    for excess, sign in ((source.excess, 1), (waiter.excess, -1)):
        np.subtract.at(rest, excess.wait, sign * excess.ns)
    some = np.flatnonzero(rest)
    return charger.by_rank(source, charger.gap + _UNKNOWN, some, rest[some])


def _without_records(waits: Waits, edges: Edges, is_charged: Mask) -> dict[int, int]:
    """Rank -> lateness of waits for it that left nothing on record."""
    is_lost = is_charged & (waits.late_ns > 0)
    is_lost[edges.wait] = False
    lost = np.flatnonzero(is_lost)
    groups = group_rows(len(lost), waits.peer[lost])
    return dict(zip(groups.columns[0].tolist(), groups.sum(waits.late_ns[lost]).tolist(), strict=True))


def _costs(timeline: Timeline, graph: EventGraph, part: _Part, charged_ns: float, lost: dict[int, int]) -> list[Cost]:
    groups = group_rows(len(part.rank), part.category, part.rank, part.peer)
    category, rank, peer = groups.columns
    direct, total = (np.bincount(groups.group, column, len(groups)) for column in (part.direct_ns, part.total_ns))
    targets = [*targets_of_phases(timeline, graph), Target.GAP, Target.UNEXPLAINED, Target.LINK]
    of_link = np.array([target is Target.LINK for target in targets])[category]
    # Links into one rank run side by side: what is below zero of one goes off the others first.
    base = len(targets)
    kept = _net([np.where(of_link, base + 1 + peer, category), np.where(of_link, -1, category)], total, charged_ns)
    direct = np.clip(direct * kept, 0, np.maximum(total * kept, 0))
    phases = [*graph.phases, NO_PHASE, NO_PHASE, NO_PHASE]
    costs = []
    for row in np.flatnonzero(total * kept > 0).tolist():
        ns, own = float(total[row] * kept[row]), float(direct[row])
        where = int(rank[row]), targets[category[row]], phases[category[row]], int(peer[row])
        nowhere = lost.pop(where[0], 0) if where[1] is Target.UNEXPLAINED else 0
        costs.append(Cost(*where, own + nowhere, ns - own))
    return costs + [Cost(one, Target.UNEXPLAINED, NO_PHASE, -1, float(ns), 0.0) for one, ns in lost.items()]


def _net(kinds: list[Any], total_ns: Any, charged_ns: float) -> Float64:
    """[n] what part of each charge is kept: 0 of those below zero, which go off the others of their kind, by the first
    of `kinds` ([n] each), then by the next; what is left of them goes off all, so that `charged_ns` remains."""
    left = np.asarray(total_ns, np.float64).copy()  # sums of no charges are integers
    for kind in kinds:
        groups = group_rows(len(kind), kind)
        above, sums = (np.bincount(groups.group, column, len(groups)) for column in (np.maximum(left, 0), left))
        positive = np.maximum(sums, 0) / np.where(above > 0, above, 1)
        below = above - sums
        negative = np.maximum(-sums, 0) / np.where(below > 0, below, 1)
        left *= np.where(left > 0, positive[groups.group], negative[groups.group])
    left = np.where(left > _DUST_NS, left, 0)
    if (remaining := float(left.sum())) > 0:
        left *= charged_ns / remaining
    kept = np.zeros(len(left))
    np.divide(left, total_ns, out=kept, where=total_ns > 0)
    return kept


def own_of_ranks(timeline: Timeline, costs: list[Cost]) -> Float64:
    """[largest rank + 1] what the work of each rank and the gaps before its kernels cost."""
    caused = np.zeros(max(entry.rank for entry in timeline.ranks) + 1)
    for cost in costs:
        if cost.target in (Target.WORK, Target.HOST, Target.GAP):
            caused[cost.rank] += cost.total_ns
    return caused

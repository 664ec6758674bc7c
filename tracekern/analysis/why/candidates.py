"""What could be to blame for the length of a run: how much it exceeds its peers, and the run without it."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.iteration_ends import IterationEnds
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.waits.analyze import Phase
from tracekern.analysis.why.chance import Finding, Measure, Pattern, beside_peers
from tracekern.analysis.why.links import Links, Route
from tracekern.analysis.why.members import Suspects
from tracekern.analysis.why.outside_spans import longest_gap
from tracekern.analysis.why.peers import PeerTable
from tracekern.analysis.why.replays import added
from tracekern.analysis.why.rings import Rings
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

_MOST, _NEARLY_ALL = 0.6, 0.8
_WARP = "warp"
"""Measure of single warps, whose finding is of kind PACE."""


class CauseKind(enum.Enum):
    PACE = "pace"
    """Each piece of a rank's work takes longer than at its peers."""
    AMOUNT = "amount"
    """A rank has more pieces of work."""
    EXTRA = "extra"
    """A rank does what no other rank does."""
    HOST = "host"
    """More time passes before a rank's kernels."""
    LINK = "link"
    """Messages of a link take longer than those of other links."""
    LINKS_OUT = "links_out"
    """So do those of all links out of a rank, ..."""
    LINKS_IN = "links_in"
    """... or into it."""
    RING = "ring"
    """A channel's rings have too few slots: ranks wait for room. Nobody is compared with anybody."""

    @property
    def is_of_links(self) -> bool:
        return self in (CauseKind.LINK, CauseKind.LINKS_OUT, CauseKind.LINKS_IN)


@dataclass(frozen=True)
class Candidate:
    kind: CauseKind
    rank: int
    """The rank; the source of a link; the rank that waits longest for room in a ring."""
    peer: int = -1
    """The destination of a link or ring; else -1."""
    others: tuple[int, ...] = ()
    """More ranks of which the same is true."""
    node: str = ""
    """The node, where all of its ranks, and no others, are meant."""
    channel: str = ""
    """The channel of rings, all of which are meant; else ""."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rank, *self.others


@dataclass(frozen=True)
class Excess:
    """How far a cause exceeds its peers."""

    ns: float
    """How much later a host is in the median iteration; how much longer a link takes a message; how long warps of the
    rank waited for room in a ring, added up; else 0."""
    factor: float
    """How many times as long each piece of work takes, or as many pieces there are, ..."""
    phase: Phase | None
    """... in the phase that most of the excess is of; None where there is none."""
    warp: tuple[int, int] | None = None
    """(block, warp) of the only one that takes longer; None where it is not one alone."""
    between: tuple[str, str] | None = None
    """Events that time outside of spans lies between: "" for the begin or the end of the kernel."""
    slots: int = 0
    """What a ring holds; 0 where that is not on record."""
    stage: str = ""
    """The kernel before which a host's gaps are longest, beside those of its peers."""


class Candidates:
    """The excess of all ranks and links over their peers, without what has been taken out so far."""

    def __init__(self, timeline: Timeline, moments: Moments, ends: IterationEnds) -> None:
        self.table = PeerTable(timeline, moments, ends)
        self.links = Links(moments, ends)
        self.rings = Rings(timeline, moments)
        self._moments = moments
        self._ranks = [rank.rank for rank in timeline.ranks]
        self.tick_ns = float(max(rank.resolution_ns for rank in timeline.ranks))
        table = self.table
        pace_ns, self._warps = table.pace_ns()
        self._excess = {
            CauseKind.PACE: pace_ns,
            CauseKind.AMOUNT: table.amount_ns(),
            CauseKind.EXTRA: table.extra_ns(),
            CauseKind.HOST: table.hosts.excess_ns(),
        }
        self._of_links = self.links.excess_ns()
        self._nodes = self._groups_of([rank.node for rank in timeline.ranks])

    def _groups_of(self, nodes: list[str]) -> dict[str, Int64]:
        """Node -> its ranks, where there are several nodes, of several ranks each."""
        found = {node: np.flatnonzero(np.array(nodes) == node) for node in dict.fromkeys(nodes)}
        return found if len(found) > 1 and min(map(len, found.values())) > 1 else {}

    # ---- measures and findings ----

    def measures(self, with_links: bool, with_rare_hosts: bool = False) -> list[Callable[[], Measure]]:
        """Returns what makes the measures of ranks by kind, of single warps, and of links, from what is left.

        with_rare_hosts: also where most iterations begin no kernel, which tells nothing of how hosts vary.
        """
        with_hosts = with_rare_hosts or self.table.hosts.are_in_most_iterations
        of_ranks = [kind for kind in self._excess if with_hosts or kind is not CauseKind.HOST]
        names = [kind.value for kind in of_ranks] + [_WARP] * (self._warps is not None)
        if with_links and len(self.links.routes) > 1:
            names += [kind.value for kind in CauseKind if kind.is_of_links]
        return [functools.partial(self._measure, name) for name in names]

    def _measure(self, name: str) -> Measure:
        nodes = tuple(self._nodes.values())
        if name == _WARP:
            return Measure(name, beside_peers(self._slowest_warps()[1]), self.tick_ns)
        kind = CauseKind(name)
        if kind is CauseKind.LINK:
            return Measure(name, beside_peers(self._of_links), self.tick_ns, has_sets=False)
        excess = self._of_ends(int(kind is CauseKind.LINKS_IN)) if kind.is_of_links else self._excess[kind]
        return Measure(name, beside_peers(excess), self.tick_ns, nodes, is_chance=kind is not CauseKind.EXTRA)

    def candidate(self, finding: Finding, as_measured: bool = False) -> Candidate:
        """Returns what a finding is of: of links, whether it is one link or a rank's. as_measured: no such question."""
        kind = CauseKind.PACE if finding.measure == _WARP else CauseKind(finding.measure)
        if kind is CauseKind.LINK:
            of_rank = None if as_measured else self._rank_of_links(finding)
            return of_rank or self._link(int(finding.members[0]))
        if kind.is_of_links and not as_measured and (link := self._only_link(kind, finding)) >= 0:
            return self._link(link)
        members = [self._ranks[idx] for idx in finding.members.tolist()]
        node = next((name for name, own in self._nodes.items() if np.array_equal(own, finding.members)), "")
        return Candidate(kind, members[0], others=tuple(members[1:]), node=node)

    def _link(self, idx: int) -> Candidate:
        route = self.links.routes[idx]
        return Candidate(CauseKind.LINK, route.source, route.destination)

    def _rank_of_links(self, finding: Finding) -> Candidate | None:
        """Returns the rank of whose links, out or in, most are as slow as this one; None where it is this one alone."""
        excess = beside_peers(self._of_links)[:, finding.pattern.hits].mean(axis=1)
        route = self.links.routes[int(finding.members[0])]
        for one in (Candidate(CauseKind.LINKS_OUT, route.source), Candidate(CauseKind.LINKS_IN, route.destination)):
            rows = [idx for idx, other in enumerate(self.links.routes) if _is_on(other, one)]
            as_slow = sum(2 * excess[row] > finding.excess_ns for row in rows)
            if as_slow > _MOST * len(rows) and as_slow > 1:
                return one
        return None

    def _only_link(self, kind: CauseKind, finding: Finding) -> int:
        """Returns the one link of a rank that nearly all of its excess is of; -1 where several share it."""
        end = Candidate(kind, self._ranks[finding.members[0]])
        rows = [idx for idx, route in enumerate(self.links.routes) if _is_on(route, end)]
        if len(finding.members) > 1 or not rows:
            return -1
        excess = np.maximum(beside_peers(self._of_links)[rows][:, finding.pattern.hits].mean(axis=1), 0)
        return rows[int(excess.argmax())] if excess.max() > _NEARLY_ALL * excess.sum() else -1

    def warp(self, finding: Finding) -> int:
        """Returns the warp that a finding is of, see Writers; -1 for whole ranks."""
        if finding.measure != _WARP:
            return -1
        return self.table.only_writer(Suspects(finding.members, finding.pattern.hits))

    def take_out(self, candidate: Candidate, hits: Mask, is_incident: bool = False) -> None:
        """From now on the candidate takes as long as its peers in these iterations; after an incident as long as it
        takes in others."""
        level = _level_with_itself if is_incident else _level_with_peers
        if candidate.kind.is_of_links:
            rows = [idx for idx, route in enumerate(self.links.routes) if _is_on(route, candidate)]
            level(self._of_links, np.array(rows, np.int64), hits)
            return
        members = self._indices(candidate)
        level(self._excess[candidate.kind], members, hits)
        if candidate.kind is CauseKind.PACE and self._warps is not None:
            level(self._warps, members, hits)

    def costliest(self, most: int, with_links: bool) -> list[tuple[float, Candidate]]:
        """Returns (mean excess, candidate) of single ranks and links, at most so many of each kind, largest first."""
        found = list[tuple[float, Candidate]]()
        for measure in (make() for make in self.measures(with_links, with_rare_hosts=True)):
            if measure.name == _WARP or len(measure.excess) < 2:
                continue
            mean, everything = measure.excess.mean(axis=1), Pattern(np.ones(measure.excess.shape[1], bool))
            for member in np.argsort(-mean)[:most].tolist():
                if mean[member] > 0:
                    one = Finding(measure.name, np.array([member]), everything, float(mean[member]))
                    found.append((float(mean[member]), self.candidate(one)))
        return found

    def _slowest_warps(self) -> tuple[Int64, Float64]:
        """([num_ranks] the warp of each that exceeds its peers most, [num_ranks, num_iterations] by how much)"""
        assert self._warps is not None
        writer = self._warps.mean(axis=2).argmax(axis=1)
        return writer, self._warps[np.arange(len(writer)), writer]

    def _of_ends(self, end: int) -> Float64:
        """[num_ranks, num_iterations] The mean of all links out of (0) or into (1) each rank; of a rank that has none
        the median of the others."""
        rank = np.array([(route.source, route.destination)[end] for route in self.links.routes])
        found = [self._of_links[rank == one] for one in self._ranks]
        means = [rows.mean(axis=0) for rows in found if len(rows)]
        usual = np.median(means, axis=0)
        return np.stack([rows.mean(axis=0) if len(rows) else usual for rows in found])

    def _indices(self, candidate: Candidate) -> Int64:
        return np.array([self._ranks.index(rank) for rank in candidate.ranks], np.int64)

    def of_rings(self) -> list[Candidate]:
        """Returns the channels of rings that somebody waited for room in."""
        found = self.rings.fullest.values()
        return [Candidate(CauseKind.RING, ring.sender, ring.receiver, channel=ring.channel) for ring in found]

    # ---- the run without it ----

    def without(self, candidate: Candidate, hits: Mask, own_hosts: bool = False, warp: int = -1) -> Change:
        """How much longer edges of the run graph take. own_hosts: of Asks.weight()."""
        if candidate.kind.is_of_links:
            return added([self.links.without(route, hits) for route in _routes(candidate)])
        if candidate.kind is CauseKind.RING:
            return self.rings.without(candidate.channel)
        suspects = Suspects(self._indices(candidate), hits, warp)
        if candidate.kind is CauseKind.HOST:
            return self.table.hosts.without_asks(suspects) if own_hosts else self.table.hosts.without(suspects)
        if candidate.kind is CauseKind.EXTRA:
            return self.table.without_extra(suspects, own_hosts)
        is_pace = candidate.kind is CauseKind.PACE
        return self.table.without_pace(suspects) if is_pace else self.table.without_amount(suspects)

    def is_host(self, candidate: Candidate, hits: Mask) -> bool:
        """Whether it was mostly the host that made gaps before kernels longer than those of other ranks."""
        suspects = Suspects(self._indices(candidate), hits)
        return self.table.hosts.host_share(suspects, self._moments.schedule.host_gap_ns) > 0.5

    def describe(self, candidate: Candidate, hits: Mask, warp: int = -1) -> Excess:
        """Says by how much a candidate exceeds its peers."""
        if candidate.kind.is_of_links:
            return Excess(
                float(np.mean([self.links.longer_ns(route, hits) for route in _routes(candidate)])), 1.0, None
            )
        if candidate.kind is CauseKind.RING:
            ring = self.rings.fullest[candidate.channel]
            return Excess(float(ring.late_ns), 1.0, None, slots=ring.slots)
        suspects = Suspects(self._indices(candidate), hits, warp)
        if candidate.kind is CauseKind.HOST:
            hosts = self.table.hosts
            stage = self._moments.program.stages[hosts.longest_stage(suspects)]
            return Excess(hosts.mean_excess_ns(suspects), 1.0, None, stage=stage)
        if candidate.kind is CauseKind.PACE and warp < 0:
            warp = self.table.only_writer(suspects)
            suspects = dataclasses.replace(suspects, writer=warp)
        phase, factor = self.table.longest_phase(suspects, candidate.kind.value)
        where = None if warp < 0 else self._place_of(warp)
        found = self._moments.program.phases[phase] if phase >= 0 else None
        return Excess(0.0, factor, found, where, self._between(suspects, phase))

    def _between(self, suspects: Suspects, phase: int) -> tuple[str, str] | None:
        """Returns the events around time that no span covers, where the phase is such time."""
        program = self._moments.program
        if phase not in (*program.between_spans.tolist(), *program.not_started.tolist()):
            return None
        return longest_gap(self._moments, phase // program.num_names, self.table.runs_of(suspects))

    def _place_of(self, writer: int) -> tuple[int, int]:
        return int(self.table.writers.block[writer]), int(self.table.writers.warp[writer])


def _routes(candidate: Candidate) -> list[Route]:
    if candidate.kind is CauseKind.LINK:
        return [Route(candidate.rank, candidate.peer)]
    return [Route(rank, -1) if candidate.kind is CauseKind.LINKS_OUT else Route(-1, rank) for rank in candidate.ranks]


def _is_on(route: Route, candidate: Candidate) -> bool:
    if candidate.kind is CauseKind.LINK:
        return route == Route(candidate.rank, candidate.peer)
    return (route.source if candidate.kind is CauseKind.LINKS_OUT else route.destination) in candidate.ranks


def _level_with_peers(table: Float64, rows: Int64, hits: Mask) -> None:
    """Gives rows of [num_members, ..., num_iterations] the median of the others, in these iterations."""
    table[np.ix_(rows, *map(np.arange, table.shape[1:-1]), np.flatnonzero(hits))] = _others(table, rows)[..., hits]


def _level_with_itself(table: Float64, rows: Int64, hits: Mask) -> None:
    """Gives rows of [num_members, ..., num_iterations] in these iterations what they usually have more than the
    median of the others."""
    others = _others(table, rows)
    usual = np.median((table[rows] - others)[..., ~hits], axis=-1, keepdims=True)
    table[np.ix_(rows, *map(np.arange, table.shape[1:-1]), np.flatnonzero(hits))] = others[..., hits] + usual


def _others(table: Float64, rows: Int64) -> Float64:
    """[..., num_iterations] the median of all members but these."""
    return np.asarray(np.median(np.delete(table, rows, axis=0), axis=0), float)

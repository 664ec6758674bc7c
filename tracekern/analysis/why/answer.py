"""What a run would save without each of its causes, and which of them the record shows beyond chance.

Who takes longer than its peers is measured iteration by iteration and tested against chance (chance.py). What that
costs is another question: the run is replayed without it, and everything that waited for it worked out anew. What is
found is taken out, and the search goes on in what is left.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.iteration_ends import ends_of_iterations
from tracekern.analysis.graph.longest_path import Change
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.left_out import block_waits
from tracekern.analysis.waits.statistics import WaitTotals
from tracekern.analysis.why.candidates import Candidate, Candidates, CauseKind, Excess
from tracekern.analysis.why.chance import MIN_ITERATIONS, Finding, search
from tracekern.analysis.why.incidents import MIN_FOR_INCIDENTS, find_incident
from tracekern.analysis.why.replays import Replays, Saving, added
from tracekern.formatting import brief, percent
from tracekern.timeline.facts.iterations import Iterations
from tracekern.timeline.model import ABSENT_KINDS, CONTRADICTION_KINDS, Mask, Timeline
from tracekern.timeline.select import Window

MIN_SHARE = 0.01
"""A cause is named from this share of the run on, however sure it is."""
_MOST_OF_MEASURE, _MOST_INCIDENTS = 8, 12
_SURE = 2.0
"""So many standard errors hold in 19 of 20 runs."""
_TICKS = 3
"""By so many ticks of the clock what an iteration saves may be wrong: that of pieces that follow each other."""
_REPLAY = 0.02
"""By such a share of what they save replays of simulated runs were wrong, whatever their noise."""
_MAX_OF_KIND = 4
"""Ranks, or links, of each kind whose cost is worked out whether they are named or not."""
_MOST_UNMATCHED = 0.1
"""Largest share of all waiting that nothing on record ended. With more, a replay would miss what held the run up."""


class Silence(enum.Enum):
    """Why nothing is named."""

    NO_COST = "no cost"
    """The record does not say what causes cost; Answer.note says why."""
    CPU = "cpu"
    """The CPU backend shows order and coverage, never durations."""
    FEW_ITERATIONS = "few iterations"
    ALIKE = "alike"
    """Nobody takes longer than chance explains."""
    SMALL = "small"
    """What does costs less than MIN_SHARE of the run."""
    HALF = "half"
    """It is half of the ranks or more: which of them are as they should be is not on record."""


@dataclass(frozen=True)
class Cost:
    """What the run would save without one candidate, and nothing else."""

    candidate: Candidate
    saving: Saving
    excess_ns: float
    """How much longer it took than its peers, by the mean of an iteration."""


@dataclass(frozen=True)
class Cause:
    """A candidate that is named."""

    candidate: Candidate
    saving: Saving
    """At most, without this cause alone: hosts ask for a kernel as long after the one before it ended as they did."""
    within_ns: tuple[float, float]
    """What it saves lies between these in 19 runs of 20, as its excess is known from so many iterations."""
    finding: Finding | None
    """What makes it stand out among its peers; None of rings, which have none."""
    at_least_ns: float | None
    """Saving of the whole run if hosts that ran ahead ask when they did; None if that is not on record."""
    together_ns: float
    """Largest saving of the whole run without this cause and all that are named before it."""
    together_at_least_ns: float | None
    excess: Excess
    is_host: bool
    """Whether the record shows that it was mostly the host, and no unrecorded kernel; only for kind HOST."""

    @property
    def excess_ns(self) -> float:
        return self.finding.excess_ns if self.finding else self.excess.ns


@dataclass(frozen=True)
class Incident:
    """What happened in a few iterations only: a cost and a place, no habit."""

    candidate: Candidate
    iterations: tuple[int, ...]
    saving: Saving
    excess_ns: float
    """The smallest of its excesses over its peers."""


@dataclass(frozen=True)
class Answer:
    """One answer for terminal, page and programs."""

    makespan_ns: float
    causes: tuple[Cause, ...]
    """Largest first."""
    num_iterations: int
    costs: tuple[Cost, ...]
    """Costs of single ranks and links that exceed their peers most, largest first, named or not."""
    even_hosts_ns: float
    """An estimate: how much shorter the run would be with the gaps before all kernels at the median of the ranks."""
    silence: Silence | None
    """Why there are no causes; None where there are."""
    note: str
    """Why there is no cost; "" where there is."""
    halves: tuple[Cause, ...] = ()
    """What half of the ranks or more have in common, and no node tells apart."""
    incidents: tuple[Incident, ...] = ()
    """Largest first."""
    is_parted: bool = False
    """Whether there are ranks that no kernel joins: what is saved is of those that a cause concerns."""

    __repr__ = brief


def no_cost(note: str) -> Answer:
    """An answer that names nothing. note: why."""
    return Answer(0.0, (), 0, (), 0.0, Silence.NO_COST, note)


def explain(
    timeline: Timeline,
    moments: Moments | str,
    ended: WaitTotals,
    iterations: Iterations,
    window: Window | None = None,
) -> Answer:
    """Replays the run without its causes.

    timeline: of the whole run, for its tables. ended: of all its waits that did. iterations:
    find_iterations(timeline).
    """
    note = _why_no_cost(timeline, ended, window)
    if isinstance(moments, str) or note:
        return no_cost(moments if isinstance(moments, str) else note)
    moments = moments.graphs.share(moments)
    launches = moments.launches
    ends = moments.graphs.share(ends_of_iterations(timeline, moments, iterations))
    counted, own_hosts = launches.counted, None
    if launches.asks.is_complete:
        own_hosts = Replays(moments, ends, launches.asks.weight(counted))
    return _Inquiry(timeline, Replays(moments, ends, counted), own_hosts, Candidates(timeline, moments, ends)).answer()


def _why_no_cost(timeline: Timeline, ended: WaitTotals, window: Window | None) -> str:
    if absent := [problem.text for problem in timeline.problems if problem.kind in ABSENT_KINDS]:
        return f"{' and '.join(absent)}, and what is not here may have been waited for"
    if len(timeline.ranks) < 2:
        return "one rank is on record: there is no peer to compare it with"
    if any(launch.records_lost or launch.records_overwritten for launch in timeline.launches):
        return "records are missing, so that not all waits lead to what they were for"
    if without := block_waits(timeline):
        return f"waits in {', '.join(without)} are not on record (detail peers), nor who held up whom within a block"
    if ended.unmatched_ns > _MOST_UNMATCHED * ended.waited_ns:
        share = percent(ended.unmatched_ns, ended.waited_ns)
        return f"the signals that ended {share} of the waits are not on record"
    return "" if window is None else "what a cause costs is said of the whole run, not of a window"


@dataclass(frozen=True, eq=False)
class _Found:
    """What stands out, and the run without it."""

    candidate: Candidate
    finding: Finding | None
    hits: Mask
    """[num_iterations] in which it takes longer."""
    warp: int
    """See writers_of(); -1: all."""
    change: Change
    alone: Saving


class _Inquiry:
    def __init__(self, timeline: Timeline, replays: Replays, own_hosts: Replays | None, candidates: Candidates) -> None:
        """own_hosts: the same run with times of their own for hosts that run ahead, where these are on record."""
        self._timeline, self._replays, self._candidates, self._own_hosts = timeline, replays, candidates, own_hosts
        self._always = np.ones(max(replays.num_iterations, 1), bool)
        # Where clocks contradict the messages, how long these took is not on record.
        self._with_links = not any(problem.kind in CONTRADICTION_KINDS for problem in timeline.problems)
        self._worth_ns = MIN_SHARE * replays.makespan_ns

    def answer(self) -> Answer:
        costs, even_hosts = self._costs()
        incidents = self._incidents()
        silence = self._why_nobody()
        found = [] if silence else self._find()
        # Of few iterations what is larger than a ring's cost, and cannot be judged, is not passed over.
        is_largest = bool(costs) and costs[0].candidate.kind is CauseKind.RING
        has_rings = silence is None or (silence is Silence.FEW_ITERATIONS and is_largest)
        kept = self._worth_naming(found + (self._rings() if has_rings else []))
        halves = [one for one in kept if self._is_half(one, kept)]
        causes = self._causes([one for one in kept if one not in halves])
        if not causes and silence is None:
            silence = Silence.HALF if halves else Silence.SMALL if found else Silence.ALIKE
        return Answer(
            self._replays.makespan_ns,
            causes,
            self._replays.num_iterations,
            costs,
            even_hosts.whole_ns,
            None if causes else silence,
            "",
            self._causes(halves),
            incidents,
            self._replays.is_parted,
        )

    def _why_nobody(self) -> Silence | None:
        """Why nobody may be named, whatever it costs."""
        if any(rank.backend == "cpu" for rank in self._timeline.ranks):
            return Silence.CPU
        return Silence.FEW_ITERATIONS if self._replays.num_iterations < MIN_ITERATIONS else None

    def _costs(self) -> tuple[tuple[Cost, ...], Saving]:
        """The costs of what exceeds its peers most, and what is saved where all hosts take as long as the median."""
        known = self._candidates.costliest(_MAX_OF_KIND, self._with_links)
        known += [(self._candidates.describe(one, self._always).ns, one) for one in self._candidates.of_rings()]
        excess = {one: excess_ns for excess_ns, one in reversed(known)}
        changes = (self._candidates.without(one, self._always) for one in excess)
        even_hosts, *savings = self._replays.saved(itertools.chain([self._candidates.table.hosts.even()], changes))
        found = (Cost(one, saving, excess[one]) for one, saving in zip(excess, savings, strict=True))
        return tuple(sorted(found, key=lambda cost: -cost.saving.whole_ns)), even_hosts

    def _incidents(self) -> tuple[Incident, ...]:
        """What happened in a few iterations, which are then taken out of all that is compared."""
        found = list[tuple[Candidate, Finding, Change]]()
        seen_before = set[tuple[Candidate, bytes]]()
        for _ in range(_MOST_INCIDENTS if self._replays.num_iterations >= MIN_FOR_INCIDENTS else 0):
            seen = find_incident([make() for make in self._candidates.measures(self._with_links, with_rare_hosts=True)])
            if seen is None:
                break
            candidate, hits = self._candidates.candidate(seen), seen.pattern.hits
            if (candidate, hits.tobytes()) in seen_before:  # what is left of it
                self._candidates.take_out(self._candidates.candidate(seen, as_measured=True), hits)
                continue
            seen_before.add((candidate, hits.tobytes()))
            change = self._candidates.without(candidate, hits, warp=self._candidates.warp(seen))
            self._candidates.take_out(candidate, hits, is_incident=True)
            found.append((candidate, seen, change))
        savings = self._replays.saved([change for _, _, change in found])
        incidents = (
            Incident(candidate, tuple(np.flatnonzero(seen.pattern.hits).tolist()), saving, seen.excess_ns)
            for (candidate, seen, _), saving in zip(found, savings, strict=True)
            if saving.whole_ns >= self._worth_ns
        )
        return tuple(sorted(incidents, key=lambda one: -one.saving.whole_ns))

    def _rings(self) -> list[_Found]:
        """Rings that ranks wait for room in: no chance, but a size, and a replay says what it costs."""
        rings = self._candidates.of_rings()
        changes = [self._candidates.without(one, self._always) for one in rings]
        savings = self._replays.saved(changes)
        found = zip(rings, changes, savings, strict=True)
        return [_Found(one, None, self._always, -1, change, saving) for one, change, saving in found]

    def _find(self) -> list[_Found]:
        """All that stands out, measure by measure; each is taken out before the next search."""
        found = dict[Candidate, tuple[Finding, int, Change]]()
        for make in self._candidates.measures(self._with_links):
            for seed in range(_MOST_OF_MEASURE):
                seen = search(make(), seed)
                if seen is None or not seen.stands_out:
                    break
                candidate, hits = self._candidates.candidate(seen), seen.pattern.hits
                if candidate in found:  # what is left of it
                    self._candidates.take_out(self._candidates.candidate(seen, as_measured=True), hits)
                    continue
                warp = self._candidates.warp(seen)
                change = self._candidates.without(candidate, hits, warp=warp)
                if candidate.kind.is_of_links:  # a rank's links may be one that was found, and little more
                    for _, _, other in found.values():
                        is_new = ~np.isin(change.edge, other.edge[other.ns != 0])
                        change = Change(change.edge[is_new], change.ns[is_new])
                self._candidates.take_out(candidate, hits)
                found[candidate] = seen, warp, change
        savings = self._replays.saved([change for _, _, change in found.values()])
        return [
            _Found(candidate, seen, seen.pattern.hits, warp, change, saving)
            for (candidate, (seen, warp, change)), saving in zip(found.items(), savings, strict=True)
        ]

    def _worth_naming(self, found: list[_Found]) -> list[_Found]:
        """Those that cost enough: alone, or beside the others, where causes hide each other. Largest first."""
        others = [[other for other in found if other is not one] for one in found]
        together_ns, *without_ns = self._together([found, *others])
        kept = [
            one
            for one, others_ns in zip(found, without_ns, strict=True)
            if one.alone.whole_ns >= self._worth_ns or together_ns - others_ns >= self._worth_ns
        ]
        return sorted(kept, key=lambda one: -one.alone.whole_ns)

    def _is_half(self, one: _Found, kept: list[_Found]) -> bool:
        """Whether it, or all that is found of its kind, is half of the ranks or more, without being a node."""
        if one.finding is None or one.candidate.kind.is_of_links or one.candidate.node:
            return False
        num_ranks = len(self._timeline.ranks)
        if len(one.candidate.ranks) > 1 and 2 * len(one.candidate.ranks) >= num_ranks:
            return True
        same = [other.candidate for other in kept if other.candidate.kind is one.candidate.kind]
        members = {rank for candidate in same if not candidate.node for rank in candidate.ranks}
        return len(members) > 1 and 2 * len(members) > num_ranks

    def _together(self, sets: Sequence[Sequence[_Found]]) -> list[float]:
        """What the run saves without all of each set."""
        changes = (added([one.change for one in found]) for found in sets)
        return [saving.whole_ns for saving in self._replays.saved(changes)]

    def _causes(self, found: list[_Found]) -> tuple[Cause, ...]:
        together = self._together([found[:number] for number in range(1, len(found) + 1)])
        return tuple(
            Cause(
                one.candidate,
                one.alone,
                self._within(one),
                one.finding,
                self._at_least([one], one.alone.whole_ns),
                together_ns,
                self._at_least(found[:number], together_ns),
                self._candidates.describe(one.candidate, one.hits, one.warp),
                one.candidate.kind is CauseKind.HOST and self._candidates.is_host(one.candidate, one.hits),
            )
            for number, (one, together_ns) in enumerate(zip(found, together, strict=True), 1)
        )

    def _within(self, one: _Found) -> tuple[float, float]:
        """What the run saves if the excess is as much smaller, or larger, as it may well be, with what ticks leave."""
        finding, known = one.finding, one.alone.whole_ns
        error = _SURE * finding.error_ns / finding.excess_ns if finding else 0.0
        scaled = [Change(one.change.edge, one.change.ns * (1 + by)) for by in (-min(error, 1.0), error) if by]
        found = [known, *(saving.whole_ns for saving in self._replays.saved(scaled))]
        doubt_ns = _TICKS * self._candidates.tick_ns * int(one.hits.sum()) + _REPLAY * known
        return min(found) - doubt_ns, max(found) + doubt_ns

    def _at_least(self, found: list[_Found], most_ns: float) -> float | None:
        """What the run would save without these, if hosts that ran ahead asked when they did."""
        if all(one.candidate.kind is CauseKind.EXTRA for one in found):
            return most_ns  # what is not launched needs no host
        if self._own_hosts is None:
            return None
        changes = [self._candidates.without(one.candidate, one.hits, own_hosts=True, warp=one.warp) for one in found]
        return min(max(self._own_hosts.saved([added(changes)])[0].whole_ns, 0.0), most_ns)

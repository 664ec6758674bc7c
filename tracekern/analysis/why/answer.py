"""What a run would save without each of its causes, and which of them the record shows beyond chance.

A cause costs time: the run is replayed with the times of one rank, or link, swapped for those of a peer, and everything
that waited for them worked out anew. Causes can hide each other, so they are taken out one after the other along the
critical path, and only those are kept that are needed together.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.events import EventGraph
from tracekern.analysis.graph.iteration_ends import ends_of_iterations
from tracekern.analysis.graph.moments import Moments
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.why.candidates import MAX_PEERS, Candidate, Candidates, CauseKind, Excess
from tracekern.analysis.why.evidence import Evidence, weigh
from tracekern.analysis.why.replays import Replays, Saving
from tracekern.formatting import brief, percent
from tracekern.timeline.facts.iterations import Iterations
from tracekern.timeline.model import ABSENT_KINDS, CONTRADICTION_KINDS, Float64, Timeline
from tracekern.timeline.select import Window

MIN_SHARE = 0.01
"""A cause is named from this share of the run on, however sure it is."""
_MOST_NAMED = 4
_TRIED_AT_ONCE = 4
_WORTH_TRYING = 0.005
"""A candidate has at least this share of the critical path."""
_LOSS = 0.002
"""Differences below this share of the run count as none."""
_MIN_ITERATIONS = 3
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
    """Nothing costs MIN_SHARE of the run and stands out."""


@dataclass(frozen=True)
class Cost:
    """What the run would save without one candidate, and nothing else."""

    candidate: Candidate
    saving: Saving
    evidence: Evidence
    """Evidence from what it saves in each iteration."""


@dataclass(frozen=True)
class Cause:
    """A candidate that is named."""

    candidate: Candidate
    saving: Saving
    """At most, without this cause alone: hosts ask for a kernel as long after the one before it ended as they did."""
    at_least_ns: float | None
    """Saving of the whole run if hosts that ran ahead ask when they did; None if that is not on record."""
    together_ns: float
    """Largest saving of the whole run without this cause and all that are named before it."""
    together_at_least_ns: float | None
    excess: Excess
    is_host: bool
    """Whether the record shows that it was mostly the host, and no unrecorded kernel; only for kind HOST."""
    evidence: Evidence
    """Evidence from what it saves in each iteration once the other causes are taken out."""


@dataclass(frozen=True)
class Answer:
    """One answer for terminal, page and programs."""

    makespan_ns: float
    causes: tuple[Cause, ...]
    """Largest first."""
    num_iterations: int
    costs: tuple[Cost, ...]
    """Costs of all candidates that were tried, largest first, named or not."""
    even_hosts_ns: float
    """An estimate: how much shorter the run would be with the gaps before all kernels at the median of the ranks."""
    silence: Silence | None
    """Why there are no causes; None where there are."""
    note: str
    """Why there is no cost; "" where there is."""

    __repr__ = brief


def no_cost(note: str) -> Answer:
    """An answer that names nothing. note: why."""
    return Answer(0.0, (), 0, (), 0.0, Silence.NO_COST, note)


def explain(
    timeline: Timeline,
    graph: EventGraph,
    waits: Waits,
    moments: Moments | str,
    iterations: Iterations,
    window: Window | None = None,
) -> Answer:
    """Replays the run without its causes.

    graph: build_graph(timeline). waits: all of analyze_waits(timeline). moments: find_moments() of these. iterations:
    find_iterations(timeline).
    """
    note = _why_no_cost(timeline, waits, window)
    if isinstance(moments, str) or note:
        return no_cost(moments if isinstance(moments, str) else note)
    run_graph = moments.run_graph
    ends = ends_of_iterations(timeline, graph, run_graph, iterations)
    replays, own_hosts = (
        Replays(moments, graph.schedule.order, ends, weight)
        for weight in (run_graph.counted, run_graph.asks.weight(run_graph.counted))
    )
    candidates = Candidates(timeline, graph, waits, run_graph, iterations.of_launch)
    return _Inquiry(timeline, replays, own_hosts if run_graph.asks.is_complete else None, candidates).answer()


def _why_no_cost(timeline: Timeline, waits: Waits, window: Window | None) -> str:
    if absent := [problem.text for problem in timeline.problems if problem.kind in ABSENT_KINDS]:
        return f"{' and '.join(absent)}, and what is not here may have been waited for"
    if len(timeline.ranks) < 2:
        return "one rank is on record: there is no peer to compare it with"
    if any(launch.records_lost or launch.records_overwritten for launch in timeline.launches):
        return "records are missing, so that not all waits lead to what they were for"
    unmatched_ns, waited_ns = int(waits.unmatched.sum()), int(waits.wait_ns.sum())
    if unmatched_ns > _MOST_UNMATCHED * waited_ns:
        return f"the signals that ended {percent(unmatched_ns, waited_ns)} of the waits are not on record"
    return "" if window is None else "what a cause costs is said of the whole run, not of a window"


class _Inquiry:
    def __init__(self, timeline: Timeline, replays: Replays, own_hosts: Replays | None, candidates: Candidates) -> None:
        """own_hosts: the same run with times of their own for hosts that run ahead, where these are on record."""
        self._timeline, self._replays, self._candidates, self._own_hosts = timeline, replays, candidates, own_hosts
        self._unchanged = np.zeros(replays.num_edges)
        # Where clocks contradict the messages, how long these took is not on record.
        is_contradicted = any(problem.kind in CONTRADICTION_KINDS for problem in timeline.problems)
        self._kinds = [kind for kind in CauseKind if not (kind is CauseKind.LINK and is_contradicted)]
        self._tick_ns = max(rank.resolution_ns for rank in timeline.ranks)
        self._alone: dict[Candidate, Saving] = {}

    def answer(self) -> Answer:
        path = self._replays.critical_path(self._unchanged)
        for kind in self._kinds:
            for _, candidate in self._candidates.on_path(kind, path):
                self._alone[candidate] = self._mean_saving(candidate)
        even_hosts_ns = self._replays.saved(self._candidates.table.even_gaps()).whole_ns
        silence = self._why_nobody()
        causes = () if silence else self._name()
        silence = silence or (None if causes else Silence.ALIKE)
        num_iterations = self._replays.num_iterations
        return Answer(self._replays.makespan_ns, causes, num_iterations, self._costs(), even_hosts_ns, silence, "")

    def _costs(self) -> tuple[Cost, ...]:
        costs = list[Cost]()
        for kind in self._kinds:
            savings = {one: saving for one, saving in self._alone.items() if one.kind is kind}
            costs += [Cost(one, saving, self._stands_out(one, savings)) for one, saving in savings.items()]
        return tuple(sorted(costs, key=lambda cost: -cost.saving.whole_ns))

    def _why_nobody(self) -> Silence | None:
        """Why nobody may be named, whatever it costs."""
        if any(rank.backend == "cpu" for rank in self._timeline.ranks):
            return Silence.CPU
        return Silence.FEW_ITERATIONS if self._replays.num_iterations < _MIN_ITERATIONS else None

    def _mean_saving(self, candidate: Candidate) -> Saving:
        """Alone, the mean over its peers: each has noise of its own."""
        found = [self._replays.saved(change) for change in self._candidates.changes(candidate)]
        return Saving(
            float(np.mean([saving.whole_ns for saving in found])),
            np.mean([saving.by_iteration for saving in found], axis=0),
        )

    def _name(self) -> tuple[Cause, ...]:
        """The candidates that are needed together, without those that chance may explain."""
        chosen = self._needed(self._in_turn())
        while chosen:
            weighed = [(candidate, *self._weigh(candidate, chosen)) for candidate in chosen]
            kept = {one: chosen[one] for one, saving, found in weighed if self._counts(saving, found)}
            if len(kept) == len(chosen):
                return self._causes(weighed, chosen)
            chosen = kept
        return ()

    def _counts(self, saving: Saving, evidence: Evidence) -> bool:
        return saving.whole_ns >= MIN_SHARE * self._replays.makespan_ns and evidence.stands_out

    def _in_turn(self) -> dict[Candidate, Float64]:
        """Takes out what the critical path would be most shorter without, then looks at the path that is left."""
        chosen: dict[Candidate, Float64] = {}
        makespan_ns, total = self._replays.makespan_ns, self._unchanged
        saved_ns = 0.0
        for _ in range(_MOST_NAMED):
            path = self._replays.critical_path(total)
            gains = [
                gain for kind in self._kinds for gain in self._candidates.on_path(kind, path) if gain[1] not in chosen
            ]
            gains = sorted(gains, key=lambda gain: -gain[0])[:_TRIED_AT_ONCE]
            for gain_ns, candidate in gains:
                if gain_ns < _WORTH_TRYING * makespan_ns:
                    return chosen
                change = self._candidates.changes(candidate, most=1)[0]
                together_ns = self._replays.saved(total + change).whole_ns
                if together_ns >= saved_ns - _LOSS * makespan_ns:
                    chosen[candidate], total, saved_ns = change, total + change, together_ns
                    break
            else:
                return chosen
        return chosen

    def _needed(self, chosen: dict[Candidate, Float64]) -> dict[Candidate, Float64]:
        """Leaves out, first those taken out last, what the others save as much without."""
        kept = dict(chosen)
        for candidate in reversed(chosen):
            rest = {one: change for one, change in kept.items() if one != candidate}
            if (
                kept
                and self._together(kept).whole_ns - self._together(rest).whole_ns < _LOSS * self._replays.makespan_ns
            ):
                kept = rest
        return kept

    def _together(self, chosen: dict[Candidate, Float64]) -> Saving:
        return self._replays.saved(sum(chosen.values(), self._unchanged))

    def _weigh(self, candidate: Candidate, chosen: dict[Candidate, Float64]) -> tuple[Saving, Evidence]:
        """(what it saves beyond the other causes, whether that is more than others of its kind would save)"""
        rest = {one: change for one, change in chosen.items() if one != candidate}
        before, total = self._together(rest), sum(rest.values(), self._unchanged)
        members = [one for one in self._alone if one.kind is candidate.kind and one not in rest]
        if candidate not in members:
            members.append(candidate)
        if rest:
            savings = {
                one: self._replays.saved(total + change) - before
                for one in members
                for change in self._candidates.changes(one, most=1)
            }
        else:
            savings = {one: self._alone.get(one) or self._mean_saving(one) for one in members}
        return savings[candidate], self._stands_out(candidate, savings)

    def _stands_out(self, candidate: Candidate, savings: dict[Candidate, Saving]) -> Evidence:
        """savings: of candidates of its kind. Those that are not among them save nothing."""
        is_link = candidate.kind is CauseKind.LINK
        num_members = self._candidates.links.num_links if is_link else len(self._timeline.ranks)
        table = np.zeros((max(num_members, len(savings)), self._replays.num_iterations))
        table[: len(savings)] = [saving.by_iteration for saving in savings.values()]
        return weigh(table, list(savings).index(candidate), self._tick_ns)

    def _causes(
        self, weighed: list[tuple[Candidate, Saving, Evidence]], chosen: dict[Candidate, Float64]
    ) -> tuple[Cause, ...]:
        for one in chosen:
            self._alone.setdefault(one, self._mean_saving(one))
        ordered = sorted(weighed, key=lambda entry: -self._alone[entry[0]].whole_ns)
        causes, taken = list[Cause](), dict[Candidate, Float64]()
        for candidate, _, evidence in ordered:
            path = self._replays.critical_path(sum(taken.values(), self._unchanged))
            taken[candidate] = chosen[candidate]
            saving, together_ns = self._alone[candidate], self._together(taken).whole_ns
            causes.append(
                Cause(
                    candidate,
                    saving,
                    self._at_least([candidate], saving.whole_ns, MAX_PEERS),
                    together_ns,
                    self._at_least(list(taken), together_ns, most_peers=1),
                    self._candidates.describe(candidate, path, evidence.event.iteration if evidence.event else None),
                    candidate.kind is CauseKind.HOST and self._candidates.is_host(candidate.rank),
                    evidence,
                )
            )
        return tuple(causes)

    def _at_least(self, taken: list[Candidate], most_ns: float, most_peers: int) -> float | None:
        """What the run would save without these, if hosts that ran ahead asked when they did."""
        if self._own_hosts is None:
            return None
        by_peer = zip(*(self._candidates.changes(one, most_peers, own_hosts=True) for one in taken), strict=False)
        saved = [self._own_hosts.saved(sum(changes, self._unchanged)).whole_ns for changes in by_peer]
        return min(max(float(np.mean(saved)), 0.0), most_ns)

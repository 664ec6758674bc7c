"""What a cause costs: by how much all waiting shrinks when it takes as long as at its peers.

Charges by weights say what each ns more or less would change. But a late rank also covers waits: for flags on their
way, and for ranks that are a little late, too. They come to light where it is in time. So the largest causes are taken
out one after the other, in a replay; what is still waited then is charged by weights.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tracekern.analysis.causes.charges import Cost
from tracekern.analysis.causes.counterfactual import graph_of, timeline_of
from tracekern.analysis.causes.removal import Peers, Removal, Subject
from tracekern.analysis.causes.weights import Run, charge_by_weights
from tracekern.analysis.critical_path.event_replay import EventReplay
from tracekern.analysis.critical_path.path import Nodes, count_nodes, find_nodes
from tracekern.analysis.waits.analyze import analyze_waits

MAX_NODES = 100_000
"""Signals and waits: more would take seconds."""
_MAX_PIECES = 500_000
"""Of activity: all of them are analyzed anew after each replay."""
_MAX_REPLAYS = 4
_MAX_CANDIDATES = 16
_LEAST_SHARE = 0.02
"""Of all charges: what costs less is not taken out."""
_MAX_ERROR = 0.02
"""Of all times: by how much an unchanged replay may miss the ends of the kernels."""


def take_out(run: Run, costs: Sequence[Cost]) -> tuple[list[Cost], int]:
    """(what all causes cost, how many were taken out)

    costs: by weights. Those that are returned sum to `run.charged_ns` as well. With more than MAX_NODES
    signals and waits, or _MAX_PIECES, they stay as they are."""
    if len(run.graph.activity) > _MAX_PIECES or count_nodes(run.timeline, run.waits).sum() > MAX_NODES:
        return list(costs), 0
    found: list[Cost] = []
    tried: set[Subject] = set()
    num_taken = 0
    while len(tried) < _MAX_REPLAYS and (step := _without_largest(run, costs, tried)):
        subject, without = step
        tried.add(subject)
        if without is None or without.charged_ns >= run.charged_ns:
            continue
        mine = [cost for cost in costs if Subject.of(cost) == subject]
        scale = (run.charged_ns - without.charged_ns) / sum(cost.total_ns for cost in mine)
        found += [_scaled(cost, scale) for cost in mine]
        num_taken += 1
        run, costs = without, charge_by_weights(without).costs if without.charged_ns else []
    return _joined([*found, *costs]), num_taken


def _without_largest(run: Run, costs: Sequence[Cost], tried: set[Subject]) -> tuple[Subject, Run | None] | None:
    """The largest cause that is longer than at its peers, and the run without it; None where there is no such cause."""
    timeline, graph, waits = run.timeline, run.graph, run.waits
    nodes = find_nodes(timeline, graph, waits, graph.schedule.stream >= 0)
    if nodes is None or not len(nodes):
        return None
    peers = Peers(timeline, graph, waits, nodes)
    for subject in _largest(costs, tried, _LEAST_SHARE * run.charged_ns):
        removal = peers.without(subject, [cost for cost in costs if Subject.of(cost) == subject])
        if removal:
            return subject, _replay(run, nodes, removal)
    return None


def _largest(costs: Sequence[Cost], tried: set[Subject], least_ns: float) -> list[Subject]:
    total: dict[Subject, float] = defaultdict(float)
    for cost in costs:
        subject = Subject.of(cost)
        if subject and subject not in tried:
            total[subject] += cost.total_ns
    in_order = sorted(total, key=lambda subject: -total[subject])
    return [subject for subject in in_order[:_MAX_CANDIDATES] if total[subject] >= least_ns]


def _replay(run: Run, nodes: Nodes, removal: Removal) -> Run | None:
    """None where the run cannot be replayed as it was."""
    timeline, graph, waits = run.timeline, run.graph, run.waits
    launches = np.flatnonzero(graph.schedule.stream >= 0)
    times = EventReplay(timeline, graph, waits, nodes, launches, [removal.change(graph, nodes)]).run()
    start, end = graph.schedule.start[launches], graph.schedule.end[launches]
    missed = np.array([times.end_of[launch][0] for launch in launches.tolist()]) - end
    if np.abs(missed).max() > _MAX_ERROR * (end.max() - start.min()):
        return None
    other = timeline_of(timeline, graph, nodes, removal, times)
    found = analyze_waits(other)
    if not np.array_equal(found.row, waits.row):
        return None
    return Run(other, graph_of(other, graph), found, run.is_charged)


def _scaled(cost: Cost, by: float) -> Cost:
    return dataclasses.replace(cost, direct_ns=cost.direct_ns * by, passed_on_ns=cost.passed_on_ns * by)


def _joined(costs: Sequence[Cost]) -> list[Cost]:
    """One for each cause."""
    sums: dict[Cost, Cost] = {}
    for cost in costs:
        cause = dataclasses.replace(cost, direct_ns=0.0, passed_on_ns=0.0)
        sofar = sums.get(cause, cause)
        direct, passed_on = sofar.direct_ns + cost.direct_ns, sofar.passed_on_ns + cost.passed_on_ns
        sums[cause] = dataclasses.replace(cost, direct_ns=direct, passed_on_ns=passed_on)
    return list(sums.values())

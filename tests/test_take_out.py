"""Causes that are taken out: what is left is the run as it would have been without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cause_oracle import any_program
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulator import Case, Drain, Injection, LateHost, Latency, Shape, SlowWork, simulate
from timelines import timelines

import tracekern
from tracekern.analysis.causes.analyze import analyze_causes
from tracekern.analysis.causes.blame import Target
from tracekern.analysis.causes.counterfactual import timeline_of
from tracekern.analysis.causes.removal import Removal, Subject
from tracekern.analysis.causes.take_out import take_out
from tracekern.analysis.causes.weights import Run, charge_by_weights
from tracekern.analysis.critical_path.event_replay import EventReplay
from tracekern.analysis.critical_path.path import find_nodes
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.analysis.waits.event_graph import build_graph
from tracekern.timeline.model import Timeline

DELAY_NS = 5_000
TRACES = Path(__file__).resolve().parent.parent / "traces"


def run_of(timeline: Timeline) -> Run:
    waits = analyze_waits(timeline)
    return Run(timeline, build_graph(timeline), waits, np.ones(len(waits), bool))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_with_nothing_taken_out_the_timeline_stays_as_it_is(seed: int):
    timeline = any_program(seed).timeline()
    run = run_of(timeline)
    graph = run.graph
    replayed = graph.schedule.stream >= 0
    nodes = find_nodes(timeline, graph, run.waits, replayed)
    assume(nodes is not None and len(nodes))
    sizes = len(graph.activity), len(graph.runs), len(nodes), len(graph.schedule.rank)
    nothing = Removal(*(np.full(size, value) for size, value in zip(sizes, (0.0, 0.0, 1.0, 0.0), strict=True)))
    times = EventReplay(timeline, graph, run.waits, nodes, np.flatnonzero(replayed), []).run()
    spans = timeline_of(timeline, graph, nodes, nothing, times).spans
    np.testing.assert_array_equal(spans.start, timeline.spans.start)
    np.testing.assert_array_equal(spans.end, timeline.spans.end)


@pytest.mark.parametrize(
    ("shape", "injection", "subject"),
    [
        (Shape.RING, SlowWork(DELAY_NS, rank=2), Subject(Target.WORK, 2, -1)),
        (Shape.CREDITS, SlowWork(DELAY_NS, rank=1), Subject(Target.WORK, 1, -1)),
        (Shape.BARRIER, SlowWork(DELAY_NS, rank=0), Subject(Target.WORK, 0, -1)),
        (Shape.BARRIER, LateHost(DELAY_NS, rank=3), Subject(Target.GAP, 3, -1)),
        (Shape.EXCHANGE, Latency(DELAY_NS, source=1, destination=3), Subject(Target.LINK, 1, 3)),
        (Shape.EXCHANGE, Drain(DELAY_NS, source=1, destination=3), Subject(Target.LINK, 1, 3)),
    ],
    ids=lambda value: getattr(value, "value", type(value).__name__),
)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_what_is_left_is_what_would_have_been_waited(
    shape: Shape, injection: Injection, subject: Subject, is_persistent: bool, tmp_path: Path
):
    if is_persistent and isinstance(injection, LateHost):
        pytest.skip("one launch a rank: its host is late once")
    case = Case(shape, 4, 12, (injection,), is_persistent=is_persistent, work_ns=DELAY_NS)
    late = run_of(tracekern.load(simulate(case, 1, tmp_path / "late").directory))
    true = run_of(tracekern.load(simulate(case.without_injections(), 1, tmp_path / "true").directory))
    found = sum(
        cost.total_ns for cost in take_out(late, charge_by_weights(late).costs)[0] if Subject.of(cost) == subject
    )
    usual = sum(cost.total_ns for cost in charge_by_weights(true).costs if Subject.of(cost) == subject)
    assert found - usual == pytest.approx(late.charged_ns - true.charged_ns, rel=0.08)


def test_noise_is_not_taken_out(tmp_path: Path):
    case = Case(Shape.BARRIER, 6, 20, noise=0.05)
    run = run_of(tracekern.load(simulate(case, 3, tmp_path).directory))
    costs = charge_by_weights(run).costs
    assert take_out(run, costs) == (costs, 0)


def test_what_is_too_much_to_replay_is_charged_by_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = Case(Shape.RING, 4, 6, (SlowWork(DELAY_NS, rank=1),), work_ns=DELAY_NS)
    run = run_of(tracekern.load(simulate(case, 1, tmp_path).directory))
    costs = charge_by_weights(run).costs
    assert take_out(run, costs)[1] == 1
    monkeypatch.setattr("tracekern.analysis.causes.take_out.MAX_NODES", 10)
    assert take_out(run, costs) == (costs, 0)


@settings(max_examples=50, deadline=None)
@given(timelines())
def test_charges_of_any_timeline_are_finite_and_none_is_negative(timeline: Timeline):
    for cost in analyze_causes(timeline, analyze_waits(timeline)).costs:
        assert 0 <= cost.direct_ns <= cost.total_ns < np.inf


@pytest.mark.parametrize(("name", "rank", "left"), [("h200_resident", 3, 0.25), ("h200x4_late_host", 0, 0.45)])
def test_without_the_late_host_of_a_kept_capture_little_is_waited(name: str, rank: int, left: float):
    """Flags that lay there long before a wait looked at them must not hold up the replay."""
    run = run_of(tracekern.load(TRACES / name))
    gaps = [
        cost
        for cost in take_out(run, charge_by_weights(run).costs)[0]
        if Subject.of(cost) == Subject(Target.GAP, rank, -1)
    ]
    assert (1 - left) * run.charged_ns <= sum(cost.total_ns for cost in gaps) < run.charged_ns

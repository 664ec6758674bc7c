"""The graph of a run: replayed as it is, it takes as long as it took, in the extension and in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import SEE_NS, SIGNAL_NS, Scenario
from scenarios_causes import every_kind_of_wait
from simulator import Case, Shape, SlowWork, simulate
from timelines import timelines

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import Findings, analyze
from tracekern.analysis.graph import longest_path
from tracekern.analysis.graph.longest_path import Change, InterpretedPath, order_graph
from tracekern.analysis.why.candidates import Candidate, CauseKind
from tracekern.analysis.why.replays import NOTHING
from tracekern.dump.format import ALIGN
from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.model import Timeline

OF_ENGINES = {"fabric_late_rank", "kv_cache", "weights", "weights_broadcast"}
OF_KERNELS = sorted({path.parent.name for path in TRACES.glob("*/capture.json")} - OF_ENGINES)


def assert_replayed(timeline: Timeline) -> None:
    moments = Findings(timeline).moments
    launches, schedule, shown = moments.launches, moments.schedule, moments.schedule.order
    if len(launches.uncounted):
        counted = moments.replay(launches.counted, [NOTHING], launches.ends(shown))
        assert counted.max() == aligned_ns(timeline)
    np.testing.assert_array_equal(moments.times[launches.ends(shown)] + launches.start_ns, schedule.end[shown])


def aligned_ns(timeline: Timeline) -> int:
    """What counts of a run whose calls are aligned: each call, from when all had come until its last kernel ended."""
    schedule = Findings(timeline).recorded.schedule
    call = LaunchIterations(timeline).of_launch
    meets = np.array([launch.name == ALIGN for launch in timeline.launches])
    start, end, sequence = (column[: len(call)] for column in (schedule.start, schedule.end, schedule.sequence))
    total = 0
    for number in range(int(call.max()) + 1):
        total += end[call == number].max() - start[meets & (sequence == number)].max()
    return int(total)


@pytest.mark.parametrize("name", OF_KERNELS)
def test_all_kernels_of_a_kept_capture_end_in_a_replay_when_they_ended(name: str):
    assert_replayed(tracekern.load(TRACES / name))


@given(timelines())
def test_any_timeline_gets_a_graph_or_a_reason(timeline: Timeline):
    answer = analyze(timeline).answer
    assert not (answer.note and answer.costs)
    assert all(cost.saving.whole_ns <= answer.makespan_ns for cost in answer.costs)


@pytest.mark.parametrize(
    "case",
    [
        Case(Shape.EXCHANGE, 4, 5, (SlowWork(5_000, rank=1),), 0.05),
        Case(Shape.PIPELINE, 4, 3, noise=0.05, num_warps=16, is_uneven=True),
        Case(Shape.CREDITS, 4, 10, noise=0.05, is_persistent=True),
    ],
    ids=lambda case: case.shape.value,
)
def test_python_answers_what_the_extension_answers(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timeline = tracekern.load(simulate(case, 5, tmp_path).directory)
    compiled = analyze(timeline).answer
    asked = []

    def interpreted(*graph) -> InterpretedPath:
        asked.append(graph)
        return InterpretedPath(*graph)

    monkeypatch.setattr("tracekern.analysis.graph.part_graph.order_graph", interpreted)
    answer = analyze(timeline).answer
    assert asked
    assert [cost.candidate for cost in answer.costs] == [cost.candidate for cost in compiled.costs]
    for ours, theirs in zip(answer.costs, compiled.costs, strict=True):
        np.testing.assert_array_equal(ours.saving.by_iteration, theirs.saving.by_iteration)
    assert answer.makespan_ns == compiled.makespan_ns
    assert answer.even_hosts_ns == compiled.even_hosts_ns


@given(st.data())
def test_both_find_the_longest_paths_of_any_graph(data: st.DataObject):
    num_nodes = data.draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    edges = data.draw(st.lists(st.tuples(node, node, st.integers(-5, 20)), max_size=30))
    source, target = (np.array([edge[place] for edge in edges], np.int32) for place in (0, 1))
    weight = np.array([edge[2] for edge in edges], float)
    both = order_graph(num_nodes, source, target), InterpretedPath(num_nodes, source, target)
    assert type(both[0]) is not longest_path.InterpretedPath
    assert both[0].is_cyclic == both[1].is_cyclic
    if not both[1].is_cyclic:
        for ours, theirs in zip(*(path.run(weight) for path in both), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        changed = st.lists(st.integers(0, len(edges) - 1), unique=True, max_size=len(edges)) if edges else st.just([])
        changes = [
            Change(np.array(rows, np.int64), weight[rows] + 3) for rows in data.draw(st.lists(changed, max_size=6))
        ]
        wanted = np.arange(num_nodes)[::-1]
        ours, theirs = (path.replay(weight, changes, wanted) for path in both)
        np.testing.assert_array_equal(ours, theirs)


def test_a_graph_that_waits_for_itself_says_so():
    for path in (order_graph, InterpretedPath):
        assert path(3, np.array([0, 1, 2], np.int32), np.array([1, 2, 1], np.int32)).is_cyclic


@pytest.mark.parametrize("wrong_ns", [0, -400, 300])
def test_every_kind_of_wait_is_replayed_as_it_was(wrong_ns: int):
    """Also with clocks by which waits end before their signals begin."""
    assert_replayed(every_kind_of_wait().timeline(clock_error={1: wrong_ns}))


def test_a_change_helps_only_until_the_next_one_is_the_longest():
    run = Scenario(3)
    run.launch("dispatch")
    for rank, ns in enumerate((90_000, 60_000, 10_000)):
        run.work(rank, ns)
    run.meet()
    first = analyze(run.timeline()).answer.costs[0]
    # Its peers took 60 and 10 us: with either's time the run waits for rank 1, which still takes 60.
    assert (first.candidate, first.saving.whole_ns) == (Candidate(CauseKind.PACE, 0), pytest.approx(30_000, abs=100))


def test_a_signal_inside_the_span_of_a_wait_was_sent_after_what_it_waited_for():
    """As kernels do that acknowledge a message before they close its wait: they would seem to be busy until then."""
    run = Scenario(2)
    run.launch("prepare")
    for rank in run.ranks:
        run.work(rank, 1_000)
    run.launch("dispatch", late={1: 50_000})
    run.signal(1, 0)
    run.wait(0, 1, see_ns=SEE_NS + SIGNAL_NS + 30)
    end = run.now[0, 0]
    run.now[0, 0] = end - SIGNAL_NS - 30
    run.grant(0, 1, value=1)
    run.now[0, 0] = end
    run.wait_room(1, 0, wanted=1)
    timeline = run.timeline()
    assert_replayed(timeline)
    first = analyze(timeline).answer.costs[0]
    assert (first.candidate, first.saving.whole_ns) == (Candidate(CauseKind.HOST, 1), pytest.approx(50_000, abs=100))

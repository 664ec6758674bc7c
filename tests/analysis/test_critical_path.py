"""The critical path: synthetic runs whose longest chain is known, sums to the tick, and Timelines that hold nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from scenarios import Scenario, rows_of
from scenarios_causes import COPY_NS, GAP_NS, CallScenario, chain, every_kind_of_wait, pipeline
from timelines import COPY, make_launch, make_spans, make_timeline, timelines

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import Findings
from tracekern.analysis.graph.program import NOT_STARTED
from tracekern.analysis.waits.analyze import Phase
from tracekern.analysis.why.critical_path import CriticalPath, IterationPath, PathKind
from tracekern.dump.format import ALIGN
from tracekern.timeline.facts.iterations import find_iterations
from tracekern.timeline.model import Flows, Timeline, TrackKind

OF_ENGINES = {"fabric_late_rank", "kv_cache", "weights", "weights_broadcast"}
OF_KERNELS = sorted({path.parent.name for path in TRACES.glob("*/capture.json")} - OF_ENGINES)
DELAY_NS, CALLS = 50_000, 4


def path_of(timeline: Timeline) -> CriticalPath:
    found = Findings(timeline).critical_path
    for path in (found.whole, *found.iterations):
        if path:
            assert_sums(path, has_start_up=any(launch.name == ALIGN for launch in timeline.launches))
    return found


def assert_sums(path: IterationPath, has_start_up: bool) -> None:
    """Start-up counts for nothing, and is left out."""
    assert sum(part.time_ns for part in path.parts) == path.makespan_ns
    assert (path.stretches.end - path.stretches.start).sum() == path.makespan_ns
    if path.makespan_ns:
        assert path.stretches.end[-1] == path.end_ns
        assert path.stretches.start[0] >= path.start_ns
    between = path.stretches.start[1:] - path.stretches.end[:-1]
    assert (between >= 0).all()
    if not has_start_up:
        assert path.makespan_ns == path.end_ns - path.start_ns
        assert not between.any()
    assert (path.stretches.start < path.stretches.end).all()


def time_in(path: IterationPath, rank: int, kind: PathKind, phase: Phase | None = None) -> int:
    return sum(
        part.time_ns for part in path.parts if (part.rank, part.kind) == (rank, kind) and phase in (None, part.phase)
    )


def test_a_chain_of_ranks_is_the_path():
    found = path_of(chain(DELAY_NS, CALLS).timeline())
    copy = Phase("dispatch", "copy_token")
    assert time_in(found.whole, 0, PathKind.PHASE, copy) == CALLS * (COPY_NS + DELAY_NS)
    for rank in (1, 2):
        assert time_in(found.whole, rank, PathKind.PHASE, copy) == CALLS * COPY_NS
    links = [(part.rank, part.peer, part.time_ns) for part in found.whole.parts if part.kind is PathKind.LINK]
    assert sorted(links) == [(0, 1, CALLS * 60), (1, 2, CALLS * 60)]  # 40 ns to signal, 20 ns to see it
    assert [path.iteration for path in found.iterations] == list(range(CALLS))
    for path in found.iterations:
        assert time_in(path, 0, PathKind.PHASE, copy) == COPY_NS + DELAY_NS


@pytest.mark.parametrize(
    ("run", "rank", "kind", "phase", "expected"),
    [
        (pipeline(copy={1: DELAY_NS}), 1, PathKind.PHASE, Phase("dispatch_send", "copy_token"), COPY_NS + DELAY_NS),
        (pipeline(receive={3: DELAY_NS}), 3, PathKind.PHASE, Phase("dispatch_recv", "receive_token"), 500 + DELAY_NS),
    ],
    ids=["longer work", "more tokens"],
)
def test_what_was_made_longer_is_on_the_path(run: Scenario, rank: int, kind: PathKind, phase: Phase, expected: int):
    assert time_in(path_of(run.timeline()).whole, rank, kind, phase) == CALLS * expected


def test_before_the_first_span_of_a_rank_nothing_of_another_is_on_its_path():
    run = Scenario(2)
    run.launch("dispatch")
    run.work(0, 1_000)
    run.pause(1, 500)
    run.work(1, 5_000)
    path = path_of(run.timeline()).whole
    assert [(part.rank, part.phase.event, part.time_ns) for part in path.parts] == [
        (1, "copy_token", 5_000),
        (1, NOT_STARTED, 500),
    ]


def test_a_gap_before_a_kernel_is_on_the_path():
    whole = path_of(pipeline(gap={2: DELAY_NS}).timeline()).whole
    # Before the first kernel of all there is no gap: the path begins with the first event.
    assert time_in(whole, 2, PathKind.GAP) == CALLS * (DELAY_NS + 4 * GAP_NS) - GAP_NS
    assert sum(part.time_ns for part in whole.parts if part.rank == 2) >= 0.99 * whole.makespan_ns


@pytest.mark.parametrize("arrives_ns", [-500, 0, 30_000])
def test_a_slow_link_is_on_the_path(arrives_ns: int):
    run = CallScenario(2)
    run.launch("dispatch")
    run.work(0, 1000)
    run.signal(0, 1, ns=DELAY_NS)
    run.work(1, 1000 + arrives_ns)
    run.wait(1, 0)
    run.work(1, 700, event="receive_token")
    whole = path_of(run.timeline()).whole
    # However late the waiter arrived: the stores of the signal took until then.
    assert [(part.rank, part.kind, part.peer, part.time_ns) for part in whole.parts] == [
        (0, PathKind.LINK, 1, DELAY_NS + 20),
        (0, PathKind.PHASE, -1, 1000),
        (1, PathKind.PHASE, -1, 700),
    ]


def test_iterations_are_those_of_the_gate():
    run = CallScenario(2)
    run.launch("setup")
    run.work(0, 5000)
    for _ in range(3):
        for stage in ("dispatch", "gemm", "gemm", "combine"):
            run.launch(stage)
            run.work(0, 1000)
            run.work(1, 3000)
    found = path_of(run.timeline())
    assert [path.iteration for path in found.iterations] == [0, 1, 2]
    assert found.iterations[0].start_ns == find_iterations(run.timeline()).start[0] > found.whole.start_ns
    assert [path.start_ns for path in found.iterations[1:]] == [path.end_ns for path in found.iterations[:-1]]
    assert found.iterations[-1].end_ns == found.whole.end_ns


def test_of_waits_that_ended_when_their_signals_began_there_is_no_path_and_no_cost():
    """The clocks of two ranks are wrong: each seems to wait for a signal that the other sends afterwards."""
    run = CallScenario(2)
    run.launch("dispatch")
    for rank in run.ranks:
        run.work(rank, 1000)
        run.signal(rank, 1 - rank)
    for rank in run.ranks:
        run.wait(rank, 1 - rank)
    timeline = run.timeline()
    spans = timeline.spans
    row = {(event, rank): rows_of(timeline, event)[rank] for event in ("signal_token", "wait_token") for rank in (0, 1)}
    start, end = spans.start.copy(), spans.end.copy()
    for rank in run.ranks:
        start[row["wait_token", rank]] = start[row["signal_token", rank]]
        start[row["signal_token", rank]] = end[row["signal_token", rank]] = end[row["wait_token", rank]]
    order = np.lexsort((start, spans.track))
    moved = dataclasses.replace(spans, start=start, end=end).take(order)
    place = np.argsort(order)
    flows = Flows(place[timeline.flows.signal], place[timeline.flows.wait])
    wrong = timeline.replace(spans=moved, flows=flows)
    assert path_of(wrong).whole is None
    note = "by the ranks' clocks, signals were waited for before they were sent"
    assert path_of(wrong).note == Findings(wrong).answer.note == note


@pytest.mark.parametrize("wrong_ns", [-400, 300])
def test_by_clocks_that_contradict_the_messages_it_still_is_as_long_as_the_run(wrong_ns: int):
    timeline = every_kind_of_wait().timeline(clock_error={1: wrong_ns})
    findings = Findings(timeline)
    whole = path_of(timeline).whole
    assert whole.makespan_ns == findings.answer.makespan_ns
    assert whole.end_ns == timeline.spans.end[timeline.tracks_of(TrackKind.DEVICE)[timeline.spans.track]].max()


@pytest.mark.parametrize("name", OF_KERNELS)
def test_of_a_kept_capture_it_is_as_long_as_the_run(name: str):
    timeline = tracekern.load(TRACES / name)
    findings, found = Findings(timeline), path_of(timeline)
    numbers = findings.iterations.number.tolist()
    assert [path.iteration for path in found.iterations] == (numbers if len(numbers) > 1 else [])
    assert not found.note
    schedule = findings.recorded.schedule
    first, last = schedule.start[schedule.order].min(), schedule.end[schedule.order].max()
    assert (found.whole.start_ns, found.whole.end_ns) == (first, last)
    stretches = found.whole.stretches
    on_device = stretches.track >= 0
    assert (timeline.track_ranks()[stretches.track[on_device]] == stretches.rank[on_device]).all()


@given(timelines())
def test_parts_of_any_timeline_sum_to_the_makespan(timeline: Timeline):
    found = path_of(timeline)
    assert (found.whole is None) == bool(found.note)


@pytest.mark.parametrize("before", [1_500_000_000, (1 << 32) - 10])
def test_after_billions_of_launches(before: int):
    timeline = pipeline(copy={1: DELAY_NS}).timeline()
    later = [dataclasses.replace(launch, sequence=launch.sequence + before) for launch in timeline.launches]
    assert path_of(timeline.replace(launches=tuple(later))).whole.parts == path_of(timeline).whole.parts


def test_segments_name_the_track_and_none_of_the_host():
    run = Scenario(1)
    for name, begin in (("dispatch", 1_000), ("combine", 5_000)):
        run.launch(name, at=begin)
        run.work(0, 1_000)
    found = path_of(run.timeline()).whole.stretches
    assert list(zip(found.track.tolist(), found.start.tolist(), strict=True)) == [(0, 1_000), (-1, 2_000), (0, 5_000)]


def test_a_kernel_that_took_no_time():
    spans = make_spans([(2, COPY, 0, 100, 100, 0, 0)])
    whole = path_of(make_timeline(1, launches=(make_launch(0),), spans=spans, flows=Flows())).whole
    assert (whole.start_ns, whole.makespan_ns, whole.parts, len(whole.stretches)) == (100, 0, (), 0)


def test_iterations_that_left_nothing():
    nameless = make_spans([(2, COPY, -1, 100, 300, 0, 0)])  # a span that names none of the two launches
    launches = (make_launch(0), make_launch(0, sequence=1))
    found = path_of(make_timeline(1, launches=launches, spans=nameless, flows=Flows()))
    assert (found.whole.makespan_ns, found.iterations) == (200, ())


def test_clear_answers_where_there_is_nothing_to_say():
    alone = CallScenario(1)
    alone.launch("dispatch")
    alone.work(0, 1000)
    assert time_in(path_of(alone.timeline()).whole, 0, PathKind.PHASE, Phase("dispatch", "copy_token")) == 1000
    for timeline, words in (
        (Timeline("ns", (), (), (), ()), "no kernel is on record"),
        (pipeline().timeline().replace(aligned=False), "not aligned"),
    ):
        found = path_of(timeline)
        assert words in found.note
        assert (found.whole, found.iterations) == (None, ())

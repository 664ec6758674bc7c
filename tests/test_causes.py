"""Root causes: synthetic runs of known causes, obvious oracles for the parts, Timelines that hold nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from cause_oracle import any_program, oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenarios import SEE_NS, Scenario, exchange
from scenarios_causes import COPY_NS, CallScenario, chain, pipeline
from timelines import make_rank, overwrite_begins, timelines

import tracekern
from tracekern.analysis.causes.analyze import Causes, analyze_causes
from tracekern.analysis.causes.blame import Target
from tracekern.analysis.causes.history import History, bisect_right
from tracekern.analysis.causes.order import find_edges, last_ordered, latest_before
from tracekern.analysis.causes.shares import solve_costs, split_waits
from tracekern.analysis.causes.weights import Run, charge_by_weights
from tracekern.analysis.doubt import Worst, name_worst
from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.analyze import Phase, WaitKind, analyze_waits
from tracekern.analysis.waits.event_graph import NOT_STARTED, build_graph
from tracekern.timeline.model import OPEN_END, Timeline
from tracekern.timeline.select import select, take_spans
from tracekern.viewers.report.headlines import headlines

TRACES = Path(__file__).resolve().parent.parent / "traces"
DELAY_NS, CALLS = 50_000, 4
COPY, RECEIVE = Phase("dispatch_send", "copy_token"), Phase("dispatch_recv", "receive_token")


def causes_of(run: Scenario) -> Causes:
    timeline = run.timeline()
    causes = analyze_causes(timeline, analyze_waits(timeline))
    assert sum(cost.total_ns for cost in causes.costs) == pytest.approx(causes.charged_ns, rel=1e-9)
    assert all(cost.total_ns > 0 and (cost.peer < 0 or cost.target is Target.LINK) for cost in causes.costs)
    assert not causes.note
    return causes


def charged(causes: Causes, rank: int, target: Target, phase: Phase | None = None) -> float:
    return sum(
        cost.total_ns
        for cost in causes.costs
        if (cost.rank, cost.target) == (rank, target) and phase in (None, cost.phase)
    )


def test_nothing_injected_nothing_charged_but_the_time_to_see_a_flag():
    for run in (pipeline(), exchange(tokens={1: DELAY_NS})):
        timeline = run.timeline()
        waits = analyze_waits(timeline)
        causes = analyze_causes(timeline, waits)
        assert {cost.target for cost in causes.costs} == {Target.LINK}
        assert causes.charged_ns == sum(cost.direct_ns for cost in causes.costs) == SEE_NS * len(waits)
        assert causes.chains == ()


@pytest.mark.parametrize(
    ("run", "rank", "target", "phase"),
    [
        (pipeline(num_calls=CALLS, copy={1: DELAY_NS}), 1, Target.WORK, COPY),
        (pipeline(num_calls=CALLS, receive={3: DELAY_NS}), 3, Target.WORK, RECEIVE),
        (pipeline(num_calls=CALLS, gap={2: DELAY_NS}), 2, Target.GAP, None),
        (exchange(num_launches=CALLS, late={0: DELAY_NS}), 0, Target.WORK, Phase("dispatch", "copy_token")),
    ],
    ids=["longer work", "more tokens", "gap before a kernel", "late sender"],
)
def test_the_cause_is_found(run: Scenario, rank: int, target: Target, phase: Phase | None):
    causes = causes_of(run)
    injected = 3 * CALLS * DELAY_NS
    assert 0.95 * injected <= charged(causes, rank, target, phase) <= injected
    others = sum(cost.total_ns for cost in causes.costs) - charged(causes, rank, target, phase)
    assert others <= 0.05 * injected
    assert name_worst(causes.blames) == Worst(rank, True, (rank,))
    assert (causes.chains[0].rank, causes.chains[0].target) == (rank, target)


def test_a_slow_link():
    causes = causes_of(pipeline(num_calls=CALLS, drain={(1, 2): DELAY_NS}))
    on_link = [cost for cost in causes.costs if cost.target is Target.LINK and (cost.rank, cost.peer) == (1, 2)]
    # Rank 2 waited for the link; then two ranks waited for rank 2, which had waited for the link.
    assert sum(cost.direct_ns for cost in on_link) >= 0.95 * CALLS * DELAY_NS
    assert sum(cost.passed_on_ns for cost in on_link) >= 0.95 * 2 * CALLS * DELAY_NS
    # They also waited for rank 1, whose kernel could not end before its stores had drained: that link's as well.
    assert sum(cost.total_ns for cost in on_link) >= 0.95 * 5 * CALLS * DELAY_NS
    assert sum(cost.total_ns for cost in on_link) >= 0.95 * causes.charged_ns


def test_in_a_chain_the_first_is_charged_and_not_the_one_between():
    causes = causes_of(chain(DELAY_NS, CALLS))
    injected = 2 * CALLS * DELAY_NS
    phase = Phase("dispatch", "copy_token")
    root = next(cost for cost in causes.costs if (cost.rank, cost.phase) == (0, phase))
    assert root.total_ns >= 0.95 * injected
    assert root.direct_ns == pytest.approx(CALLS * DELAY_NS, rel=0.1)
    assert root.passed_on_ns == pytest.approx(CALLS * DELAY_NS, rel=0.2)
    # What each works after its own wait makes the next one wait, and rank 0 at the barrier: not injected, and its own.
    assert charged(causes, 1, Target.WORK) == pytest.approx(2 * CALLS * COPY_NS, rel=0.2)
    longest = causes.chains[0]
    assert longest.waiters == ((2, Phase("dispatch", "wait_token")), (1, Phase("dispatch", "wait_token")))
    assert (longest.rank, longest.target, longest.phase) == (0, Target.WORK, phase)


def test_the_longest_waiter_is_not_blamed():
    run = CallScenario(3)
    run.launch("dispatch")
    run.work(0, 90_000)
    run.signal(0, 1)
    run.wait(1, 0)  # waits longest, and passes half of it on
    run.work(2, 40_000)
    run.work(1, 100)
    run.signal(1, 2)
    run.wait(2, 1)
    causes = causes_of(run)
    assert charged(causes, 0, Target.WORK) >= 0.95 * causes.charged_ns
    assert charged(causes, 1, Target.WORK) <= 0.01 * causes.charged_ns


def test_slow_credits_are_the_consumers():
    run = CallScenario(2)
    run.launch("dispatch")
    for number in range(CALLS):
        run.work(1, DELAY_NS, event="receive_token")
        run.grant(1, 0, value=number + 1)
        run.wait_room(0, 1, wanted=number + 1)
        run.work(0, 100)
    assert charged(causes_of(run), 1, Target.WORK, Phase("dispatch", "receive_token")) >= 0.95 * CALLS * DELAY_NS


def test_a_straggler_at_a_barrier_of_ranks():
    run = CallScenario(4)
    for _ in range(CALLS):
        run.launch("dispatch")
        for rank in run.ranks:
            run.work(rank, COPY_NS + (DELAY_NS if rank == 2 else 0))
        run.meet()
    causes = causes_of(run)
    assert charged(causes, 2, Target.WORK, Phase("dispatch", "copy_token")) >= 0.95 * causes.charged_ns


def test_a_warp_that_waited_for_a_peer_keeps_its_block_waiting():
    run = CallScenario(2, num_warps=3)
    run.launch("dispatch")
    run.work(0, DELAY_NS)
    run.signal(0, 1)
    run.wait(1, 0, warp=0)
    run.meet_block(1)
    causes = causes_of(run)
    assert charged(causes, 0, Target.WORK) >= 0.95 * 3 * DELAY_NS
    assert [(blame.rank, blame.late_ns) for blame in causes.blames][1:] == [(1, 0)]


def relay(in_two_kernels: bool) -> Timeline:
    """Rank 0 works long and tells rank 1, which tells rank 2; nothing of rank 0 is in the capture."""
    run = CallScenario(3)
    for call in range(CALLS):
        run.call = call
        run.launch("take")
        run.work(0, DELAY_NS)
        run.signal(0, 1)
        run.wait(1, 0)
        if in_two_kernels:
            run.launch("give")
        run.signal(1, 2)
        run.wait(2, 1)
    return select(run.timeline(hard_ns=100, sigma_ns=10), ranks=[1, 2])


@pytest.mark.parametrize("in_two_kernels", [False, True])
@pytest.mark.parametrize("lacks", ["signal", "end", "begin"])
def test_waiting_for_a_rank_that_is_not_on_record_is_nobodys_work(in_two_kernels: bool, lacks: str):
    timeline = relay(in_two_kernels)
    waits = analyze_waits(timeline)
    cut = waits.row[waits.rank == 1]
    if lacks == "begin":
        timeline = overwrite_begins(timeline, cut.tolist())
    elif lacks == "end":
        end = timeline.spans.end.copy()
        end[cut] = OPEN_END
        timeline = timeline.replace(spans=dataclasses.replace(timeline.spans, end=end))
    causes = analyze_causes(timeline, analyze_waits(timeline))
    assert charged(causes, 1, Target.UNEXPLAINED) >= 0.95 * causes.charged_ns >= 0.9 * CALLS * DELAY_NS
    assert sum(cost.total_ns for cost in causes.costs) == pytest.approx(causes.charged_ns, rel=1e-9)
    assert charged(causes, 1, Target.WORK) == 0
    assert max(blame.late_ns for blame in causes.blames) <= 0.05 * causes.charged_ns
    assert (causes.chains[0].rank, causes.chains[0].target) == (1, Target.UNEXPLAINED)


def test_what_a_flight_recorder_overwrote_is_nobodys_work():
    timeline = relay(in_two_kernels=False)
    waits = analyze_waits(timeline)
    kept = np.ones(len(timeline.spans), bool)
    kept[waits.row[waits.rank == 1]] = False
    launches = [dataclasses.replace(launch, records_overwritten=2) for launch in timeline.launches]
    cut = take_spans(timeline, kept).replace(launches=tuple(launches))
    causes = analyze_causes(cut, analyze_waits(cut))
    assert charged(causes, 1, Target.UNEXPLAINED) >= 0.95 * causes.charged_ns >= 0.9 * CALLS * DELAY_NS
    assert charged(causes, 1, Target.WORK) == 0


def test_nobody_is_named_for_what_is_not_on_record():
    said = headlines(analyze(relay(in_two_kernels=False)))[0].text
    assert said == "No rank can be named: what the ranks waited for is not on record."


def test_of_a_capture_of_several_ranks_one_alone_is_not_to_blame_for_its_waits():
    timeline = select(tracekern.load(TRACES / "h200x4"), ranks=[2])
    causes = analyze_causes(timeline, analyze_waits(timeline))
    assert (causes.costs[0].rank, causes.costs[0].target) == (2, Target.UNEXPLAINED)
    at_work = {cost.phase.event for cost in causes.costs if cost.target is Target.WORK}
    assert at_work.isdisjoint({"wait_result", "wait_token", "wait_counts"})


@pytest.mark.parametrize(("hard_ns", "sigma_ns", "named"), [(500, 100, True), (60_000, 30_000, False)])
def test_a_rank_is_named_only_where_the_clocks_allow_it(hard_ns: float, sigma_ns: float, named: bool):
    """Each late part of 50 us is known to 1 us, or to 120 us."""
    timeline = pipeline(copy={1: DELAY_NS}).timeline(hard_ns=hard_ns, sigma_ns=sigma_ns)
    causes = analyze_causes(timeline, analyze_waits(timeline))
    worst = causes.blames[0]
    assert worst.rank == 1
    assert worst.proven.lo_ns <= worst.likely.lo_ns <= worst.late_ns <= worst.likely.hi_ns <= worst.proven.hi_ns
    assert name_worst(causes.blames).rank == (1 if named else None)


@pytest.mark.parametrize("lost", ["signal_token", "copy_token", "wait_token"])
def test_lost_records_are_never_charged_to_nothing(lost: str):
    timeline = pipeline(copy={1: DELAY_NS}).timeline(without=[lost])
    causes = analyze_causes(timeline, analyze_waits(timeline))
    assert sum(cost.total_ns for cost in causes.costs) == pytest.approx(causes.charged_ns, rel=1e-9)
    if lost == "copy_token":  # the time is still there, without a name
        assert charged(causes, 1, Target.WORK, Phase("dispatch_send", NOT_STARTED)) >= 0.95 * 12 * DELAY_NS


@pytest.mark.parametrize("name", ["cpu_8_ranks", "h200x4"])
def test_costs_sum_to_the_waits_of_kept_captures(name: str):
    timeline = tracekern.load(TRACES / name)
    waits = analyze_waits(timeline)
    causes = analyze_causes(timeline, waits)
    totals = waits.totals()
    late_and_link = sum(
        totals[kind] for kind in ("late_sender", "late_receiver", "barrier_late", "drain", "visibility")
    )
    assert causes.charged_ns == late_and_link
    assert sum(cost.total_ns for cost in causes.costs) == pytest.approx(late_and_link, rel=1e-9)
    assert causes.chained_ns == sum(sorted(waits.late_ns.tolist())[-1000:])
    assert sum(chain.late_ns for chain in causes.chains) <= causes.chained_ns


@settings(max_examples=150, deadline=None)
@given(timelines())
def test_any_timeline_is_charged_in_full(timeline: Timeline):
    waits = analyze_waits(timeline)
    causes = analyze_causes(timeline, waits)
    assert sum(cost.total_ns for cost in causes.costs) == pytest.approx(causes.charged_ns, rel=1e-9)
    assert (causes.note == "") == (causes.charged_ns > 0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
@example(9)  # a launch that begins in the very ns in which a wait of the one before it ended
def test_costs_are_those_of_plain_loops(seed: int):
    timeline = any_program(seed).timeline()
    waits = analyze_waits(timeline)
    run = Run(timeline, build_graph(timeline), waits, np.ones(len(waits), bool))
    costs = charge_by_weights(run).costs if run.charged_ns else []
    found = {(c.rank, c.target, c.phase, c.peer): pytest.approx((c.direct_ns, c.passed_on_ns), abs=1e-6) for c in costs}
    assert oracle(timeline, waits) == found


def test_the_triangular_system_is_the_obvious_recursion():
    timeline = tracekern.load(TRACES / "h200x4")
    waits = analyze_waits(timeline)
    graph = build_graph(timeline)
    edges = find_edges(timeline, graph, waits)
    link_ns = (waits.wait_ns - waits.late_ns)[edges.wait]
    shares = split_waits(timeline, graph, waits, edges, link_ns, np.ones(len(waits), bool))
    late, ranges, sequence = shares.late_ns, shares.source.late_ranges, shares.late_waits
    passes = np.zeros((len(late), len(late)))
    for wait in range(len(late)):
        held = [*range(ranges.own_first[wait], ranges.own_stop[wait])]
        held += sequence.by_stream[ranges.past_first[wait] : ranges.past_stop[wait]].tolist()
        assert all(sequence.time[other] < sequence.time[wait] for other in held)
        assert ranges.total_ns[wait] == late[held].sum()
        if held:
            np.add.at(passes[wait], held, shares.waiting[wait] * late[held] / late[held].sum())
    expected = np.linalg.solve(np.eye(len(late)) - passes.T, late.astype(float))
    found = solve_costs(shares, np.stack([late, late / 2], axis=1))
    np.testing.assert_allclose(found, np.stack([expected, expected / 2], axis=1), rtol=1e-6, atol=1e-3)
    assert (expected > late + 1).any()


@pytest.mark.parametrize("pieces_at_once", [1, 5, 1000])
def test_history_against_a_walk_over_the_spans(pieces_at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tracekern.analysis.causes.history._PIECES_AT_ONCE", pieces_at_once)
    run = pipeline(num_ranks=2, num_calls=2, copy={1: 700}, gap={0: 300})
    timeline = run.timeline()
    graph, waits = build_graph(timeline), analyze_waits(timeline)
    history = History(timeline, graph, waits)
    spans, first = timeline.spans, int(graph.schedule.start.min())
    track = next(idx for idx, track in enumerate(timeline.tracks) if track.rank == 1)  # one warp: its own stream
    stream = int(graph.schedule.stream[graph.schedule.rank == 1][0])
    times = np.arange(first, int(spans.end.max()), 37)
    moments = history.of_streams(np.full(len(times), stream), times)
    spent = history.spent(moments, history.slots(moments)[0])
    start = history.of_streams(np.array([stream]), np.array([first]))
    spent -= history.spent(start, history.slots(start)[0])
    for time, row in zip(times.tolist(), spent, strict=True):
        overlap = np.clip(np.minimum(spans.end, time) - spans.start, 0, None)
        assert row.sum() == time - first
        for idx, phase in enumerate(graph.phases):
            if phase.event in ("copy_token", "receive_token", "signal_token"):
                names = [timeline.launches[launch].name == phase.stage for launch in spans.launch]
                mine = (spans.track == track) & np.array(names)
                mine &= np.array([timeline.events[event].name == phase.event for event in spans.event])
                assert row[idx] == overlap[mine].sum()


SMALL = st.integers(0, 4)


@given(st.lists(st.tuples(SMALL, SMALL), max_size=12), st.lists(st.tuples(SMALL, SMALL), max_size=12))
def test_the_latest_before_against_a_loop(entries: list[tuple[int, int]], asked: list[tuple[int, int]]):
    columns = [np.array([row[i] for row in rows], np.int64) for rows in (entries, asked) for i in range(2)]
    for found, (group, time) in zip(latest_before(*columns).tolist(), asked, strict=True):
        times = [other_time for other_group, other_time in entries if other_group == group and other_time <= time]
        assert (found >= 0) == bool(times)
        assert not times or entries[found] == (group, max(times))


@given(
    st.lists(st.lists(SMALL, max_size=6), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 5)), max_size=12),
)
def test_bisecting_slices(slices: list[list[int]], asked: list[tuple[int, int]]):
    slices = [sorted(values) for values in slices]
    stops = np.cumsum([len(values) for values in slices])
    values = np.array([value for entry in slices for value in entry], np.int64)
    which = np.array([number % len(slices) for number, _ in asked], np.int64)
    wanted = np.array([value for _, value in asked], np.int64)
    starts = np.append(0, stops[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracekern.analysis.causes.history._BLOCK", 3)
        found = bisect_right(values, starts[which], stops[which], wanted)
    for place, number, value in zip(found.tolist(), which.tolist(), wanted.tolist(), strict=True):
        assert place == starts[number] + sum(other <= value for other in slices[number])


def test_since_when_two_runs_are_compared():
    """Two messages of one launch, both late: the first since the ranks last met, the second since the first."""
    run = CallScenario(2)
    run.launch("meet")
    run.meet()
    run.launch("dispatch")
    for slot in range(2):
        run.work(0, 3000)
        run.signal(0, 1, slot=slot)
        run.wait(1, 0, slot=slot)
    timeline = run.timeline()
    waits, graph = analyze_waits(timeline), build_graph(timeline)
    edges = find_edges(timeline, graph, waits)
    tokens = np.flatnonzero(waits.kind[edges.wait] == WaitKind.DATA)
    ordered = last_ordered(timeline, graph, waits, edges, tokens)
    met = edges.release[waits.kind[edges.wait] == WaitKind.BARRIER]
    assert ordered.tolist() == [met.max(), edges.release[tokens[0]]]


def test_clear_answers_where_there_is_nothing_to_say():
    alone = CallScenario(1)
    alone.launch("dispatch")
    alone.work(0, 1000)
    for timeline, words in (
        (alone.timeline(), "no waits on record"),
        (Timeline("ns", (), (), (), ()), "no waits on record"),
        (pipeline(copy={1: DELAY_NS}).timeline().replace(aligned=False), "not aligned"),
        (Timeline("ns", (make_rank(0), make_rank(1)), (), (), (), aligned=False), "not aligned"),
    ):
        causes = analyze_causes(timeline, analyze_waits(timeline))
        assert words in causes.note
        assert (causes.costs, causes.charged_ns, causes.chains, causes.blames) == ((), 0, (), ())

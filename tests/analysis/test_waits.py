"""Waits taken apart: synthetic runs with known causes, an obvious oracle, kept captures, and what is empty."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import SEE_NS, SIGNAL_NS, Scenario, exchange, rows_of
from timelines import WAIT, make_rank, make_spans, make_timeline, timelines
from wait_oracle import Wait, any_runs, oracle

import tracekern
from tests.paths import TRACES
from tracekern.analysis.waits.analyze import CLASSES, Waits, analyze_waits, overtaken
from tracekern.analysis.waits.edges import NEVER
from tracekern.errors import BadInput
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.facts.span_facts import named_peers
from tracekern.timeline.model import OPEN_END, EventClass, Flows, Timeline


def by_rank_and_peer(waits: Waits, name: str) -> dict[tuple[int, int], int]:
    """(rank, peer) -> ns of a class, where there is any."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for rank, peer, ns in zip(waits.rank, waits.peer, getattr(waits, name), strict=True):
        found[int(rank), int(peer)] += int(ns)
    return {pair: ns for pair, ns in found.items() if ns}


def charged(waits: Waits, name: str, peer: int) -> int:
    return sum(ns for (_, other), ns in by_rank_and_peer(waits, name).items() if other == peer)


def test_nothing_injected_nothing_charged():
    waits = analyze_waits(exchange().timeline())
    totals = waits.totals()
    assert totals.pop("visibility") == len(waits) * SEE_NS
    assert totals == dict.fromkeys(totals, 0)
    assert not waits.wrong_order_ns.any()
    assert not waits.slack_ns.any()


def test_late_sender():
    late_ns, launches = 50_000, 5
    waits = analyze_waits(exchange(num_ranks=4, num_launches=launches, late={2: late_ns}).timeline())
    injected = 3 * launches * late_ns
    assert injected * 0.95 <= charged(waits, "late_sender", 2) <= injected
    totals = waits.totals()
    assert totals["late_sender"] == charged(waits, "late_sender", 2)
    assert totals["drain"] <= 0.05 * injected
    assert totals["visibility"] == len(waits) * SEE_NS


def test_a_slow_link_is_drain_and_nobody_is_late():
    waits = analyze_waits(exchange(slow_link={(1, 3): 40_000}, num_launches=4).timeline())
    assert by_rank_and_peer(waits, "drain") == {(3, 1): 4 * 40_000}
    assert waits.totals()["late_sender"] == 0


def test_slow_credits_are_the_receivers():
    run = Scenario(2)
    run.launch("send")
    for value in range(1, 6):
        run.work(1, 30_000, event="receive_token")  # the consumer is slow
        run.grant(1, peer=0, value=value)
        run.wait_room(0, peer=1, wanted=value)
        run.work(0, 100)
    waits = analyze_waits(run.timeline())
    injected = 5 * 30_000
    assert 0.95 * injected <= by_rank_and_peer(waits, "late_receiver")[0, 1] <= injected
    assert waits.totals()["late_sender"] == waits.totals()["unmatched"] == 0


def test_a_barrier_straggler():
    run = Scenario(4)
    run.launch("dispatch")
    for _ in range(3):
        for rank in run.ranks:
            run.work(rank, 1000 + (20_000 if rank == 2 else 0))
        run.meet()
    waits = analyze_waits(run.timeline())
    late = by_rank_and_peer(waits, "barrier_late")
    assert set(late) == {(rank, 2) for rank in (0, 1, 3)}
    assert 0.95 * 9 * 20_000 <= sum(late.values()) <= 9 * 20_000
    assert waits.totals() == {
        **dict.fromkeys(CLASSES, 0),
        "barrier_late": sum(late.values()),
        "completion": int(waits.wait_ns.sum()) - sum(late.values()),
    }
    assert len(waits.arrivals) == 12 * 4
    assert waits.peer.tolist() == [2] * 12


def test_the_last_warp_at_a_block_barrier():
    run = Scenario(2, num_warps=3)
    run.launch("combine")
    for _ in range(4):
        for rank in run.ranks:
            for warp in run.warps:
                run.work(rank, 1000 + (7000 if (rank, warp) == (1, 2) else 0), warp)
            run.meet_block(rank)
    timeline = run.timeline()
    waits = analyze_waits(timeline)
    assert by_rank_and_peer(waits, "barrier_late") == {(1, 1): 4 * 2 * 7000}
    assert waits.totals()["completion"] == len(waits) * SEE_NS
    late = waits.barrier_late > 0
    assert {timeline.tracks[track].warp for track in timeline.spans.track[waits.last_arrival[late]]} == {2}


def test_a_block_barrier_with_records_missing_charges_nobody():
    run = Scenario(1, num_warps=2)
    run.launch("combine")
    for ns in (1000, 9000):
        run.work(0, ns, warp=0)
        run.meet_block(0)
    timeline = run.timeline()
    lost = rows_of(timeline, "wait_block")[0]
    spans = timeline.spans.take(np.arange(len(timeline.spans)) != lost)
    waits = analyze_waits(timeline.replace(spans=spans))
    assert waits.totals() == {**dict.fromkeys(CLASSES, 0), "completion": int(waits.wait_ns.sum())}
    assert all(last in (-1, row) for last, row in zip(waits.last_arrival, waits.row, strict=True))


def test_wrong_order():
    run = Scenario(3)
    run.launch("dispatch")
    run.work(1, 50_000)
    for rank in (1, 2):
        run.signal(rank, peer=0)
    run.wait(0, peer=1)  # 2 was there all the time
    run.wait(0, peer=2)
    waits = analyze_waits(run.timeline())
    late = by_rank_and_peer(waits, "late_sender")
    assert late == {(0, 1): 50_000}
    assert waits.wrong_order_ns.tolist() == [50_000 - SIGNAL_NS, 0]


def test_a_message_of_a_later_launch_is_no_wrong_order():
    run = Scenario(3)
    for sender, ns in ((1, 50_000), (2, 100)):
        run.launch("dispatch")
        run.work(sender, ns)
        run.signal(sender, peer=0)
        run.wait(0, peer=sender)
    waits = analyze_waits(run.timeline())
    assert waits.late_sender.tolist() == [50_000, 0]
    assert waits.slack_ns[1] > 49_000
    assert waits.wrong_order_ns.tolist() == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20), st.integers(-1, 30)), max_size=12))
def test_overtaken_is_that_of_plain_loops(rows: list[tuple[int, int, int, int]]):
    group, begin, late, distance = np.array(rows or np.empty((0, 4)), np.int64).T
    arrived = np.where(distance < 0, NEVER, begin + late + distance)
    expected = []
    for i in range(len(rows)):
        later = [arrived[j] for j in range(i + 1, len(rows)) if group[j] == group[i]]
        expected.append(max(0, begin[i] + late[i] - max([begin[i], min(later, default=100)])))
    assert overtaken(group, begin, begin + late, arrived).tolist() == expected


def test_of_several_signals_the_last_to_arrive_releases():
    run = Scenario(3)
    run.launch("dispatch")
    run.signal(1, peer=0, ns=900)  # begins first, ends last
    run.work(2, 100)
    run.signal(2, peer=0)
    run.wait(0, peer=1)
    run.signal(2, peer=0, slot=1)
    run.wait(0, peer=2, slot=1)  # of one signal alone
    timeline = run.timeline()
    several, one = rows_of(timeline, "wait_token")
    first, second, third = rows_of(timeline, "signal_token")
    flows = Flows(np.array([second, first, third]), np.array([several, several, one]))
    waits = analyze_waits(timeline.replace(flows=flows))
    assert waits.peer.tolist() == [1, 2]
    assert waits.totals() == {**dict.fromkeys(CLASSES, 0), "drain": 900, "visibility": 2 * SEE_NS}


def test_waits_without_a_signal_or_a_channel_are_told_apart():
    run = Scenario(2)
    run.launch("dispatch")
    run.work(1, 3000)
    run.signal(1, peer=0)
    run.wait(0, peer=1)
    run.wait_other(0, 700)
    waits = analyze_waits(run.timeline(without=["signal_token"]))
    assert waits.totals() == {**dict.fromkeys(CLASSES, 0), "unmatched": 3000 + SIGNAL_NS + SEE_NS, "completion": 700}
    assert waits.peer.tolist() == [1, -1]


@pytest.mark.parametrize("name", ["cpu_8_ranks", "h200x4"])
def test_kept_captures_add_up_to_the_tick(name: str):
    timeline = tracekern.load(TRACES / name)
    waits = analyze_waits(timeline)
    check_invariants(timeline, waits)
    spans = timeline.spans
    is_wait = np.array([event.event_class is EventClass.WAIT for event in timeline.events])[spans.event]
    assert sum(waits.totals().values()) == int((spans.end - spans.start)[is_wait & (spans.end != OPEN_END)].sum())
    assert waits.totals()["unmatched"] == 0
    assert_same(waits, oracle(timeline))


def check_invariants(timeline: Timeline, waits: Waits) -> None:
    by_class = waits.by_class()
    assert tuple(by_class) == CLASSES
    assert all((values >= 0).all() for values in by_class.values())
    assert np.array_equal(sum(by_class.values()), waits.wait_ns)
    assert sum(waits.totals().values()) == int(waits.wait_ns.sum())
    assert np.array_equal(waits.wait_ns, (known_ends(timeline) - timeline.spans.start)[waits.row])
    assert (waits.slack_ns >= 0).all()
    assert (waits.wrong_order_ns >= 0).all()
    assert (waits.wrong_order_ns <= waits.late_sender).all()


def assert_same(waits: Waits, expected: list[Wait]) -> None:
    assert waits.row.tolist() == [wait["row"] for wait in expected]
    for name in (*CLASSES, "slack_ns", "wrong_order_ns", "peer"):
        assert getattr(waits, name).tolist() == [wait[name] for wait in expected], name


@given(st.one_of(any_runs(), timelines()))
def test_any_timeline_adds_up_and_agrees_with_the_oracle(timeline: Timeline):
    waits = analyze_waits(timeline)
    check_invariants(timeline, waits)
    assert_same(waits, oracle(timeline))


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline("ns", (make_rank(0),), (), (), ()),
        Scenario(2).timeline(),
        exchange(num_launches=2).timeline(without=["wait_token"]),
    ],
    ids=["no tracks", "no spans", "no waits"],
)
def test_nothing_to_wait_for(timeline: Timeline):
    waits = analyze_waits(timeline)
    assert len(waits) == waits.num_open == 0
    assert waits.totals() == dict.fromkeys(CLASSES, 0)


def test_an_endless_wait_has_a_row_with_its_peer_late_all_along():
    timeline = exchange(num_launches=1, num_ranks=3).timeline()
    end = timeline.spans.end.copy()
    end[rows_of(timeline, "wait_token")[0]] = OPEN_END
    waits = analyze_waits(timeline.replace(spans=dataclasses.replace(timeline.spans, end=end)))
    assert (len(waits), waits.num_open) == (6, 1)
    assert waits.endless.tolist().count(True) == 1
    assert (waits.late_sender == waits.wait_ns)[waits.endless].all()
    assert (waits.wait_ns > 0)[waits.endless].all()


def test_ticks_are_refused():
    with pytest.raises(BadInput, match=r"one time axis in ns, got ticks; use tracekern.load\(\)"):
        analyze_waits(make_timeline(unit="ticks"))


def test_the_end_of_a_wait_tells_who_came():
    """Where both ends name a rank: the begin says whom the wait would take a message from, the end from whom it did."""
    begin, end = 1, 2 << 13  # peer:10 slot:22, and seen:13 peer:10
    spans = make_spans([(2, WAIT, 0, 100, 200, begin, end), (3, WAIT, 0, 100, -1, begin, end)])
    assert named_peers(make_timeline(spans=spans, flows=Flows()), np.array([0, 1])).tolist() == [2, 1]

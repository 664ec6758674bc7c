"""Intervals hold the truth whatever the clocks did, and a rank is named only where they leave no other."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import SIGNAL_NS, Scenario, exchange, with_clocks
from wait_oracle import any_runs

import tracekern
from tests.paths import TRACES
from tracekern.analysis.doubt import (
    Blame,
    Bound,
    Interval,
    Worst,
    charge_ranks,
    clock_doubt,
    late_charges,
    late_limits,
    most_charged,
    name_worst,
    pair_doubt,
)
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.clocks.steadiness import COVERED_SIGMAS
from tracekern.timeline.model import Timeline


def judge(timeline: Timeline) -> tuple[dict[int, Blame], Worst]:
    blames = most_charged(charge_ranks(timeline, analyze_waits(timeline)))
    return {blame.rank: blame for blame in blames}, name_worst(blames)


def test_the_late_rank_is_named():
    blames, verdict = judge(exchange(late={2: 50_000}).timeline({1: 300, 3: -400}, hard_ns=600, sigma_ns=150))
    assert verdict == Worst(2, True, (2,))
    assert blames[2].likely.lo_ns <= 3 * 5 * 50_000 <= blames[2].likely.hi_ns


def test_the_longest_waiter_is_not_blamed():
    timeline = exchange(late={1: 30_000, 2: 30_000, 3: 45_000}).timeline(hard_ns=600, sigma_ns=100)
    waits = analyze_waits(timeline)
    waited = np.bincount(waits.rank, waits.wait_ns)
    assert waited.argmax() == 0
    assert judge(timeline)[1].rank == 3
    assert judge(timeline)[0][0].late_ns == 0


def test_nothing_injected_nobody_named():
    blames, verdict = judge(exchange().timeline(hard_ns=600, sigma_ns=100))
    assert verdict == Worst(None, False, verdict.candidates)
    assert {blame.late_ns for blame in blames.values()} == {0}
    assert {blame.likely.lo_ns for blame in blames.values()} == {0}


def test_with_perfect_clocks_and_nothing_late_there_is_no_candidate():
    assert judge(exchange().timeline())[1] == Worst(None, False, ())


def test_a_clock_error_larger_than_the_effect_is_inconclusive():
    run = exchange(late={2: 1000}, slow_link={(1, peer): 4000 for peer in (0, 2, 3)})
    blames, verdict = judge(run.timeline())
    assert (blames[1].late_ns, verdict.rank) == (0, 2)
    blames, verdict = judge(run.timeline({1: 3900}, hard_ns=4500, sigma_ns=1500))
    assert blames[1].late_ns > 3 * blames[2].late_ns  # the stamps alone accuse rank 1, which is not late
    assert verdict.rank is None
    assert verdict.candidates[:2] == (1, 2)
    assert blames[1].likely.lo_ns == 0
    assert blames[1].likely.inconclusive_ns == blames[1].likely.hi_ns >= blames[1].late_ns


def test_likely_is_said_where_it_is_not_proven():
    timeline = exchange(late={2: 2000}).timeline(hard_ns=4000, sigma_ns=100)
    assert judge(timeline)[1] == Worst(2, False, (2,))


def test_likely_is_never_wider_than_proven():
    timeline = exchange(num_ranks=3).timeline(hard_ns=500, sigma_ns=400)
    assert (
        clock_doubt(timeline, Bound.LIKELY).tolist() == clock_doubt(timeline, Bound.PROVEN).tolist() == [0, 500, 500, 0]
    )
    timeline = exchange(num_ranks=3).timeline(hard_ns=500, sigma_ns=40)
    assert clock_doubt(timeline, Bound.LIKELY).tolist() == [0, COVERED_SIGMAS * 40, COVERED_SIGMAS * 40, 0]


def test_within_a_rank_there_is_no_doubt():
    run = Scenario(2, num_warps=2)
    run.launch("dispatch")
    run.work(1, 500, warp=1)
    run.signal(1, peer=1, warp=1)
    run.wait(1, peer=1, warp=0)
    timeline = run.timeline(hard_ns=700, sigma_ns=700)
    charges = late_charges(timeline, analyze_waits(timeline), Bound.PROVEN)
    assert (charges.lo_ns.tolist(), charges.hi_ns.tolist()) == ([500], [500])
    blames, verdict = judge(timeline)
    assert verdict == Worst(None, False, ())
    assert blames[1] == Blame(1, 0, Interval(0, 0), Interval(0, 0))


@pytest.mark.parametrize(
    ("likely", "proven", "verdict"),
    [
        ([(90, 110), (0, 89)], [(90, 110), (0, 89)], Worst(0, True, (0,))),
        ([(90, 110), (0, 90)], [(90, 110), (0, 90)], Worst(None, False, (0, 1))),
        ([(90, 110), (0, 89)], [(50, 150), (0, 120)], Worst(0, False, (0,))),
        ([(0, 110), (0, 0)], [(0, 110), (0, 0)], Worst(None, False, (0,))),
        ([(10, 20), (30, 90), (40, 70)], [(10, 20), (30, 90), (40, 70)], Worst(None, False, (1, 2))),
        ([], [], Worst(None, False, ())),
    ],
)
def test_a_rank_is_named_when_its_lo_exceeds_the_hi_of_all_others(likely: list, proven: list, verdict: Worst):
    limits = zip(likely, proven, strict=True)
    blames = [Blame(rank, 0, Interval(*one), Interval(*other)) for rank, (one, other) in enumerate(limits)]
    assert name_worst(blames) == verdict


def test_unaligned_ranks_leave_everything_open():
    timeline = exchange(late={2: 50_000}).timeline().replace(aligned=False)
    blames, verdict = judge(timeline)
    assert verdict.rank is None
    assert set(verdict.candidates) == {0, 1, 2, 3}
    assert {blame.likely.lo_ns for blame in blames.values()} == {0}
    waits = analyze_waits(timeline)
    assert blames[2].likely.hi_ns == int(waits.wait_ns[waits.peer == 2].sum())


def test_every_rank_that_may_have_come_last_at_a_barrier_is_named():
    run = Scenario(4)
    run.launch("dispatch")
    for rank, ns in enumerate((1000, 20_000, 20_500, 1000)):
        run.work(rank, ns)
    run.meet()
    timeline = run.timeline(hard_ns=800, sigma_ns=50)
    waits = analyze_waits(timeline)
    proven, likely = (late_charges(timeline, waits, bound) for bound in (Bound.PROVEN, Bound.LIKELY))
    assert set(likely.rank) == {2}
    assert set(proven.rank) == {1, 2}
    blames, verdict = judge(timeline)
    assert verdict == Worst(2, False, (2,))
    assert blames[1].proven.lo_ns == blames[2].proven.lo_ns == 0
    assert blames[2].likely.lo_ns > 2 * 19_000
    assert blames[1].late_ns == 0
    assert blames[2].late_ns == pytest.approx(2 * 19_500 + 500, abs=4 * 4 * SIGNAL_NS)


@pytest.mark.parametrize("num_tellers", [1, 2, 4])
def test_a_rank_that_comes_to_a_barrier_with_several_warps_is_charged_once(num_tellers: int):
    run = Scenario(2, num_warps=4)
    run.launch("dispatch")
    for warp in run.warps:
        run.work(1, 5000 + 10 * warp, warp)
    run.meet(num_tellers=num_tellers)
    timeline = run.timeline(hard_ns=100, sigma_ns=10)
    waits = analyze_waits(timeline)
    late_ns, wait_ns = int(waits.late_ns[waits.rank == 0].sum()), int(waits.wait_ns[waits.rank == 0].sum())
    blames, verdict = judge(timeline)
    assert verdict == Worst(1, True, (1,))
    likely = Interval(late_ns - 30, min(late_ns + 30, wait_ns))
    assert blames[1] == Blame(1, late_ns, likely, Interval(late_ns - 100, min(late_ns + 100, wait_ns)))


@pytest.mark.parametrize("name", ["cpu_8_ranks", "h200x4"])
def test_kept_captures_charge_all_lateness_between_ranks_once(name: str):
    timeline = tracekern.load(TRACES / name)
    waits = analyze_waits(timeline)
    blames = most_charged(charge_ranks(timeline, waits))
    assert sum(blame.late_ns for blame in blames) == int(waits.late_ns[waits.rank != waits.peer].sum())
    for blame in blames:
        assert blame.proven.lo_ns <= blame.likely.lo_ns <= blame.late_ns <= blame.likely.hi_ns <= blame.proven.hi_ns


@given(any_runs(), st.integers(0, 30), st.data())
def test_the_truth_lies_inside_whatever_the_clocks_did(truth: Timeline, hard_ns: int, data: st.DataObject):
    error = {rank.rank: data.draw(st.integers(-hard_ns, hard_ns)) for rank in truth.ranks if rank.rank}
    seen = with_clocks(truth, hard_ns, hard_ns, error)
    true_waits, waits = analyze_waits(truth), analyze_waits(seen)
    lo, hi = late_limits(seen, waits, Bound.PROVEN)
    for late_ns in (true_waits.late_ns, waits.late_ns):
        assert (lo <= late_ns).all()
        assert (late_ns <= hi).all()
    charges = late_charges(seen, waits, Bound.PROVEN)
    for rank in (entry.rank for entry in truth.ranks):
        mine = charges.rank == rank
        true_ns = int(true_waits.late_ns[true_waits.peer == rank].sum())
        assert charges.lo_ns[mine].sum() <= true_ns <= charges.hi_ns[mine].sum()


@st.composite
def messages(draw: st.DrawFn) -> Timeline:
    """Some messages from rank 1 to rank 0: signals and waits at any time, a warp each."""
    times = st.tuples(st.integers(1000, 1050), st.integers(0, 25))
    pairs = draw(st.lists(st.tuples(times, times), min_size=1, max_size=5))
    run = Scenario(2, num_warps=len(pairs))
    run.launch("dispatch")
    for slot, (signal, wait) in enumerate(pairs):
        run.now[1, slot], run.now[0, slot] = signal[0], wait[0]
        run.signal(1, peer=0, slot=slot, ns=signal[1], warp=slot)
        run.wait(0, peer=1, slot=slot, warp=slot, see_ns=wait[1])
    return run.timeline()


@given(messages(), st.integers(0, 15))
def test_limits_of_a_sum_are_reached_by_some_offset(truth: Timeline, hard_ns: int):
    late = [
        int(analyze_waits(with_clocks(truth, 0, 0, {1: offset})).late_ns.sum())
        for offset in range(-hard_ns, hard_ns + 1)
    ]
    seen = with_clocks(truth, hard_ns, hard_ns, {})
    lo, hi = late_limits(seen, analyze_waits(seen), Bound.PROVEN)
    assert (lo.sum(), hi.sum()) == (min(late), max(late))


@given(st.tuples(*[st.integers(0, 60)] * 3), st.integers(0, 30))
def test_limits_at_a_barrier_are_reached_by_some_clocks(work_ns: tuple[int, int, int], hard_ns: int):
    run = Scenario(3)
    run.launch("dispatch")
    for rank, ns in enumerate(work_ns):
        run.work(rank, ns)
    run.meet(ns=3)
    truth = run.timeline()
    ends = itertools.product((-hard_ns, 0, hard_ns), repeat=2)
    late = [analyze_waits(with_clocks(truth, 0, 0, {1: one, 2: other})).late_ns for one, other in ends]
    seen = with_clocks(truth, hard_ns, hard_ns, {})
    lo, hi = late_limits(seen, analyze_waits(seen), Bound.PROVEN)
    assert lo.tolist() == np.min(late, axis=0).tolist()
    assert hi.tolist() == np.max(late, axis=0).tolist()


@pytest.mark.parametrize(
    ("files", "chosen", "said"),
    [
        ("rank_0000[1-3].tkdump", ("--partial",), "1 of 4 ranks have no dump: 0"),
        ("*.tkdump", ("--ranks", "1-3"), "1 of 4 ranks left out: 0"),
        (
            "rank_0000[1-3].tkdump",
            ("--partial", "--ranks", "2-3"),
            "1 of 4 ranks have no dump: 0 and 1 of 3 ranks left out: 1",
        ),
    ],
)
def test_nobody_is_named_where_one_that_was_waited_for_may_be_absent(command_line, files, chosen, said):
    """Rank 0 is the culprit of the whole capture."""
    dumps = sorted((TRACES / "h200x4_late_host").glob(files))
    lines = json.loads(command_line("report", *dumps, *chosen, "--json").stdout)
    assert lines["verdict"].startswith(f"No cause is named: {said}, and what is not here may have been waited for.")
    assert lines["answer"]["causes"] == []
    assert lines["trust"].startswith(said.replace(" and ", "; "))


def test_where_nobody_waited_before_a_rank_caused_what_it_was_late():
    """Within the same limits. Rank 2's message had come 500 ns early, which the clocks allow to have been late."""
    run = Scenario(3)
    run.launch("dispatch")
    for rank, ns in enumerate((6_000, 1_000, 5_500)):
        run.work(rank, ns)
        run.signal(rank, (rank + 1) % 3)
    for rank in run.ranks:
        run.wait(rank, (rank - 1) % 3, see_ns=20_000)
    timeline = run.timeline(hard_ns=900, sigma_ns=100)
    blames = most_charged(charge_ranks(timeline, analyze_waits(timeline)))
    late_ns = 6_000 - 1_000 - SIGNAL_NS
    likely, proven = Interval(late_ns - 300, late_ns + 300), Interval(late_ns - 900, late_ns + 900)
    assert blames[0] == Blame(0, late_ns, likely, proven)
    assert Blame(2, 0, Interval(0, 0), Interval(0, 900 - 500 - SIGNAL_NS)) in blames


def on_clocks(timeline: Timeline, clock_ids: str) -> Timeline:
    ranks = zip(timeline.ranks, clock_ids, strict=True)
    return timeline.replace(ranks=tuple(dataclasses.replace(rank, clock_id=clock) for rank, clock in ranks))


def test_between_ranks_of_one_clock_there_is_no_doubt():
    timeline = on_clocks(exchange(num_ranks=4).timeline(hard_ns=500, sigma_ns=400), "abab")
    one, other = (np.array(ranks, np.int32) for ranks in ((0, 1, 1, 1, -1), (2, 3, 2, 1, 3)))
    for bound in Bound:
        assert pair_doubt(timeline, one, other, bound).tolist() == [0, 0, 1000, 0, 0]
    assert pair_doubt(timeline.replace(aligned=False), one, other, Bound.PROVEN).tolist()[:2] == [0, 0]
    waits = analyze_waits(timeline)
    charges = late_charges(timeline, waits, Bound.PROVEN)
    of_twin = waits.peer[charges.wait] % 2 == waits.rank[charges.wait] % 2
    assert (charges.lo_ns == charges.hi_ns)[of_twin].all()
    assert (charges.lo_ns < charges.hi_ns)[~of_twin].any()


def test_of_ranks_of_one_clock_only_the_last_can_have_held_a_barrier():
    run = Scenario(4)
    run.launch("dispatch")
    for rank, ns in enumerate((0, 3000, 3100, 0)):
        run.work(rank, 100 + ns)
    run.meet()
    timeline = run.timeline(hard_ns=500, sigma_ns=500)
    for clocks, candidates in (("abcd", {1, 2}), ("abbd", {2})):
        shared = on_clocks(timeline, clocks)
        charges = late_charges(shared, analyze_waits(shared), Bound.PROVEN)
        waits = analyze_waits(shared)
        assert set(charges.rank[waits.rank[charges.wait] == 0].tolist()) == candidates

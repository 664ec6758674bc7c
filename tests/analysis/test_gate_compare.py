"""Verdicts: what is proven, what is not, and what cannot even be asked."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from runs import METRICS, draw_runs, make_run

from tracekern.formatting import is_share
from tracekern.gate.budget import Budget
from tracekern.gate.check import check
from tracekern.gate.compare import (
    FAMILY_ERROR,
    Rules,
    Verdict,
    _runs_to_decide,
    _verdict,
    compare,
    floors,
    minimal_detectable_changes,
)
from tracekern.gate.report import Outcome
from tracekern.gate.run import Run

RULES = Rules()
COPY = "dispatch.copy_token.p50"
FEW_AND_MANY = pytest.mark.parametrize("trials", [25, pytest.param(100, marks=pytest.mark.soak)])


def verdicts(base, head, rules=RULES) -> dict[str, Verdict]:
    comparison = compare(base, head, rules)
    assert comparison.problems == ()
    return {change.metric: change.verdict for change in comparison.changes}


def test_a_growth_of_one_metric_is_named_and_no_other():
    found = verdicts(draw_runs(8, 1), draw_runs(8, 2, factor={COPY: 1.15}))
    assert found.pop(COPY) is Verdict.REGRESSED
    assert set(found.values()) == {Verdict.SAME}


def test_five_runs_a_side_are_enough_for_a_clear_growth():
    assert verdicts(draw_runs(5, 1), draw_runs(5, 2, factor={COPY: 1.3}))[COPY] is Verdict.REGRESSED


def test_better_is_said():
    assert verdicts(draw_runs(8, 1), draw_runs(8, 2, factor={COPY: 0.8}))[COPY] is Verdict.BETTER


def test_a_growth_below_the_floor_is_the_same_however_sure():
    comparison = compare(draw_runs(8, 1, spread=0.001), draw_runs(8, 2, spread=0.001, factor={COPY: 1.03}), RULES)
    (change,) = [change for change in comparison.changes if change.metric == COPY]
    assert change.verdict is Verdict.SAME
    assert change.p <= FAMILY_ERROR
    assert change.low > 0.02


def test_noise_is_undecided_and_says_how_many_runs_would_tell():
    comparison = compare(draw_runs(8, 1, spread=0.1), draw_runs(8, 2, spread=0.1), RULES)
    undecided = comparison.of(Verdict.UNDECIDED)
    assert undecided
    assert any(change.runs_to_decide > 8 for change in undecided)
    assert not comparison.of(Verdict.REGRESSED)


def test_how_many_runs_would_decide():
    floor = 0.5
    # An interval of half 1/4, 1/8 beside the floor: half as wide with four times the runs.
    assert _runs_to_decide((0.375, 0.625, 0.875), floor, 8) == 32
    assert _runs_to_decide((0.5, 0.625, 0.75), floor, 8) == 9, "one more at least"
    assert _runs_to_decide((0.265625, 0.515625, 0.765625), floor, 8) == 0, "nobody would launch it 2,048 times"
    assert _runs_to_decide((0.25, floor, 0.75), floor, 8) == 0, "no number of runs would"


def test_the_floor_follows_ticks_probes_clocks_and_shares():
    metrics = {
        "a.long.p50": 100_000.0,
        "a.ticks.p50": 128.0,
        "a.probe.p50": 500.0,
        "a.nothing.p50": 0.0,
        "a.w.wait_share": 0.02,
        "a.w.wait_per_iteration": 40_000.0,
        "end_to_end.p50": 9000.0,
    }
    runs = [make_run(0, metrics, shape={"iterations": 11})]
    found = dict(zip(metrics, floors(runs, runs, list(metrics), RULES), strict=True))
    assert found == pytest.approx(
        {
            "a.long.p50": 0.05,
            "a.ticks.p50": 64 / 128,
            "a.probe.p50": 64 / 500,  # two ticks are more than the 56 ns of a probe
            "a.nothing.p50": 64 / 16,  # below half a tick nothing is believed
            "a.w.wait_share": 0.5,
            "a.w.wait_per_iteration": 64 * 50 / 40_000,  # 500 spans in 10 iterations
            "end_to_end.p50": 900 / 9000,
        }
    )
    costly = [dataclasses.replace(runs[0], probe_cost_ns=100.0)]
    assert floors(costly, costly, ["a.probe.p50"], RULES)[0] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("metric", "instrument"),
    [
        ("end_to_end.p50", {"clock_hard_ns": 20_000.0}),
        (COPY, {"resolution_ns": 512.0}),
        (COPY, {"probe_cost_ns": 900.0}),
    ],
)
@pytest.mark.parametrize("coarse", ["base", "head"])
def test_what_the_instrument_of_either_side_may_have_made_is_no_growth(metric, instrument, coarse):
    sides = {"base": draw_runs(8, 1), "head": draw_runs(8, 2, factor={metric: 1.15})}
    assert verdicts(*sides.values())[metric] is Verdict.REGRESSED
    sides[coarse] = [dataclasses.replace(run, **instrument) for run in sides[coarse]]
    assert verdicts(*sides.values())[metric] is Verdict.SAME


def test_a_p99_of_few_spans_is_not_gated():
    few = {"dispatch.wait_token": 99}
    base = [dataclasses.replace(run, spans={**run.spans, **few}) for run in draw_runs(5, 1)]
    comparison = compare(base, draw_runs(5, 2), RULES)
    assert "dispatch.wait_token.p99" not in {change.metric for change in comparison.changes}
    assert comparison.notes == ("not gated, fewer than 100 spans in a run: dispatch.wait_token.p99",)
    assert check(base, None, [Budget("dispatch.wait_token.p99", 1)]).outcome is Outcome.REGRESSED, "a budget holds it"


def test_only_the_metrics_asked_for():
    found = verdicts(draw_runs(5, 1), draw_runs(5, 2), Rules(metrics=("end_*", "combine.*.p50")))
    assert set(found) == {"end_to_end.p50", "combine.reduce_token.p50"}


@pytest.mark.parametrize("others", [(), ("combine.*.p50",)])
def test_a_pattern_that_names_no_metric_is_not_left_unheld(others):
    misspelt = compare(draw_runs(5, 1), draw_runs(5, 2), Rules(metrics=("dispatch.copy_tokn.*", *others)))
    assert misspelt.problems == (
        "no metric to compare in all runs matches dispatch.copy_tokn.*; correct it, or leave it out",
    )
    assert misspelt.changes == ()


def changed(**changes):
    return [dataclasses.replace(run, **changes) for run in draw_runs(8, 2)]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (draw_runs(4, 2), "head: 4 runs, wanted at least 5"),
        ([], "head: 0 runs"),
        (changed(losses=("3 records lost",)), "proves nothing: 3 records lost"),
        (changed(spans={}), "no span in a measured launch"),
        (changed(device="NVIDIA H100"), "other device"),
        (changed(backend="cpu"), "other device"),
        (changed(shape={"ranks": 4, "settings": {"tokens": 128}}), "settings.tokens is 128 in "),
        (changed(shape={"ranks": 8, "settings": {"tokens": 64}}), "ranks is 8 in "),
        (changed(nodes=("node-b",)), "other session"),
        (changed(aligned=False), "unaligned"),
        (changed(run_id="the same"), "in it twice"),
        ([*draw_runs(7, 2), *draw_runs(1, 1)], "1 launch of the program on both sides"),
        (draw_runs(8, 2, metrics={k: v for k, v in METRICS.items() if k != COPY}), f"gone: {COPY}"),
        ([*draw_runs(7, 2), make_run(9, shape={"ranks": 1})], "head: other shape"),
    ],
)
def test_what_cannot_be_compared_says_why_and_exits_2(head, said):
    comparison = compare(draw_runs(8, 1), head, RULES)
    assert any(said in problem for problem in comparison.problems), comparison.problems
    assert not any("no metric to compare" in problem for problem in comparison.problems)
    assert comparison.changes == ()
    assert check(head, draw_runs(8, 1), ()).outcome is Outcome.CANNOT_SAY


@pytest.mark.parametrize(
    ("interval", "p", "verdict"),
    [
        ((0.06, 0.1, 0.2), FAMILY_ERROR, Verdict.REGRESSED),
        ((0.06, 0.1, 0.2), 2 * FAMILY_ERROR, Verdict.UNDECIDED),  # it grew, but so does one of many by chance
        ((0.05, 0.1, 0.2), FAMILY_ERROR, Verdict.UNDECIDED),
        ((0.0, 0.04, 0.05), FAMILY_ERROR, Verdict.UNDECIDED),
        ((0.0, 0.03, 0.04), FAMILY_ERROR, Verdict.SAME),
        ((-0.2, -0.1, -0.05), 1.0, Verdict.SAME),
        ((-0.2, -0.1, -0.06), 1.0, Verdict.BETTER),
    ],
)
def test_a_verdict_needs_a_growth_above_the_floor_that_chance_does_not_explain(interval, p, verdict):
    assert _verdict(interval, 0.05, p) is verdict


def test_other_hosts_when_allowed():
    assert compare(draw_runs(8, 1), changed(nodes=("node-b",)), Rules(across_hosts=True)).problems == ()


def test_a_new_metric_is_noted_and_the_rest_compared():
    head = draw_runs(8, 2, metrics={**METRICS, "new.event.p50": 10.0})
    comparison = compare(draw_runs(8, 1), head, RULES)
    assert comparison.problems == ()
    assert comparison.notes == ("not gated, not in every run of base: new.event.p50",)


def test_zero_and_constant_values_are_no_trouble():
    metrics = {"a.nothing.p50": 0.0, "a.w.wait_share": 0.0, "a.fixed.p50": 64.0}
    base, head = [make_run(i, metrics) for i in range(5)], [make_run(i, metrics) for i in range(5, 10)]
    assert set(verdicts(base, head).values()) == {Verdict.SAME}


@FEW_AND_MANY
@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_false_alarms_are_rarer_than_promised(spread, trials):
    alarms = 0
    for seed in range(trials):
        comparison = compare(draw_runs(8, 2 * seed, spread=spread), draw_runs(8, 2 * seed + 1, spread=spread), RULES)
        alarms += bool(comparison.of(Verdict.REGRESSED))
    assert alarms <= 3 * trials / 100


def disturbed(runs: list[Run], seed: int) -> list[Run]:
    """One launch in ten takes 1.3 to 4 times as long."""
    rng = np.random.default_rng(seed)
    result = []
    for run in runs:
        slow = rng.uniform(1.3, 4) if rng.random() < 0.1 else 1.0
        metrics = {n: value if is_share(n) else value * slow for n, value in run.metrics.items()}
        result.append(dataclasses.replace(run, metrics=metrics))
    return result


@FEW_AND_MANY
@pytest.mark.parametrize(("spread", "slow_launches"), [(0.03, False), (0.02, True)])
def test_a_growth_of_15_percent_is_caught_where_runs_spread_by_3_and_one_in_ten_is_slow(spread, slow_launches, trials):
    caught = 0
    for seed in range(0, 2 * trials, 2):
        base, head = (draw_runs(8, seed + i, spread=spread, factor={COPY: 1 + 0.15 * i}) for i in (0, 1))
        if slow_launches:
            base, head = disturbed(base, seed), disturbed(head, seed + 1)
        caught += COPY in {change.metric for change in compare(base, head, RULES).of(Verdict.REGRESSED)}
    assert caught >= 0.95 * trials


@pytest.mark.parametrize(("num_grown", "verdict"), [(2, Verdict.SAME), (4, Verdict.UNDECIDED), (8, Verdict.REGRESSED)])
def test_a_growth_in_two_launches_of_eight_goes_unseen(num_grown, verdict):
    """The price of leaving out slow launches: they may be slow for a reason."""
    base, head = draw_runs(8, 1), [*draw_runs(num_grown, 2, factor={COPY: 1.3}), *draw_runs(8 - num_grown, 3)]
    assert verdicts(base, head)[COPY] is verdict


def drifting(count: int, seed: int, first: int, slope: float, factor: float = 1.0) -> list[Run]:
    """Each launch is slower by `slope` than the one before, in all but its shares."""
    runs = draw_runs(count, seed, spread=0.02, first=first)
    return [
        dataclasses.replace(
            run,
            created=f"2026-01-01T00:00:{first + i:02}+00:00",
            metrics={
                name: value * (1 if is_share(name) else factor * (1 + slope) ** (first + i))
                for name, value in run.metrics.items()
            },
        )
        for i, run in enumerate(runs)
    ]


def test_a_drift_from_launch_to_launch_is_no_regression():
    found = []
    for seed in range(0, 10, 2):
        base, head = drifting(8, seed, 0, 0.01), drifting(8, seed + 1, 8, 0.01)
        report = check(list(reversed(head)), base)  # the order of the files says nothing
        found.append(report.outcome)
        assert report.headline.startswith("cannot say: drift: within the sides ")
        assert "tracekern ab" in report.headline
        assert check(head, base, undecided_fails=False).outcome is Outcome.CANNOT_SAY
    assert set(found) == {Outcome.CANNOT_SAY}


def test_a_drift_that_hides_a_growth_is_seen():
    hidden = check(drifting(8, 2, 8, -0.01, 1.08), drifting(8, 1, 0, -0.01))
    assert hidden.outcome is Outcome.CANNOT_SAY
    assert hidden.headline.startswith("cannot say: drift: ")


def test_a_drift_adds_nothing_to_launches_that_alternate():
    """base, head, head, base, ... by the times in the captures, or because tracekern ab launched them."""
    runs = drifting(16, 1, 0, 0.005)
    base, head = ([runs[i] for i in range(16) if (i % 4 in (1, 2)) == is_head] for is_head in (False, True))
    assert check(head, base).all_problems == ()
    unknown = [[dataclasses.replace(run, created="") for run in side] for side in (runs[:8], runs[8:])]
    assert check(unknown[1], unknown[0]).outcome is Outcome.CANNOT_SAY
    assert check(unknown[1], unknown[0], rules=Rules(alternating=True)).all_problems == ()


@FEW_AND_MANY
def test_without_a_drift_none_is_seen(trials):
    seen = 0
    for seed in range(2 * trials):
        base, head = draw_runs(8, 2 * seed, spread=0.03), draw_runs(8, 2 * seed + 1, spread=0.03)
        seen += bool(compare(base, head, Rules(metrics=("*.p50",))).problems)
    assert seen <= 6 * trials / 100, "1 in 100; 7 of 200 come once in 200 times"


SHARE, WAITING = "dispatch.wait_token.wait_share", "dispatch.wait_token.wait_per_iteration"
FASTER = {COPY: 0.85, "combine.reduce_token.p50": 0.85, "end_to_end.p50": 0.863, SHARE: 1 / 0.863}


def test_less_work_beside_equal_waits_is_no_regression():
    report = check(draw_runs(8, 2, factor=FASTER), draw_runs(8, 1))
    assert report.outcome is Outcome.GOOD
    found = {change.metric: change.verdict for change in report.comparison.changes}
    assert (found[SHARE], found[WAITING], found[COPY]) == (Verdict.NOT_JUDGED, Verdict.SAME, Verdict.BETTER)


def test_a_share_regresses_where_the_waiting_does():
    found = verdicts(draw_runs(8, 1), draw_runs(8, 2, factor={SHARE: 1.2, WAITING: 1.3}))
    assert (found[SHARE], found[WAITING]) == (Verdict.REGRESSED, Verdict.REGRESSED)
    asked = compare(draw_runs(8, 1), draw_runs(8, 2, factor={SHARE: 1.2, WAITING: 1.3}), Rules(metrics=(SHARE,)))
    assert {change.metric for change in asked.of(Verdict.REGRESSED)} == {SHARE, WAITING}, "it needs the waiting"


def test_a_baseline_without_the_waiting_is_read_and_says_what_it_lacks():
    """One that was saved before runs had it."""
    old = draw_runs(8, 1, metrics={name: value for name, value in METRICS.items() if name != WAITING})
    comparison = compare(old, draw_runs(8, 2, factor={SHARE: 1.2, COPY: 1.2}), RULES)
    assert comparison.notes == (
        f"not gated, not in every run of base: {WAITING}",
        f"not gated, base lacks wait_per_iteration (save a new baseline): {SHARE}",
    )
    assert [change.metric for change in comparison.of(Verdict.REGRESSED)] == [COPY]
    assert compare(old, draw_runs(8, 2), Rules(metrics=(SHARE,))).problems


@FEW_AND_MANY
@pytest.mark.parametrize("num_runs", [5, 8])
def test_the_minimal_detectable_change_is_detected(num_runs, trials):
    """New runs that grew by what was promised on save, each time from the runs saved then, show it in about 95 of 100
    checks."""
    found = []
    for seed in range(trials):
        base = draw_runs(num_runs, 2 * seed, spread=0.1)
        growth = 1 + minimal_detectable_changes(base, RULES)[COPY].change
        head = draw_runs(num_runs, 2 * seed + 1, spread=0.1, factor={COPY: growth})
        found.append(COPY in {change.metric for change in compare(base, head, RULES).of(Verdict.REGRESSED)})
    assert np.mean(found) >= 0.85


@FEW_AND_MANY
@pytest.mark.parametrize(("num_runs", "spread", "growth"), [(5, 0.02, 1.15), (8, 0.05, 1.15), (8, 0.03, 1.15)])
def test_the_power_that_is_told_is_the_power_that_there_is(num_runs, spread, growth, trials):
    found, told = [], []
    for seed in range(trials):
        base = draw_runs(num_runs, 2 * seed, spread=spread)
        head = draw_runs(num_runs, 2 * seed + 1, spread=spread, factor={COPY: growth})
        (change,) = [change for change in compare(base, head, RULES).changes if change.metric == COPY]
        found.append(change.verdict is Verdict.REGRESSED)
        told.append(change.power)
    assert np.mean(told) == pytest.approx(np.mean(found), abs=0.16)


def test_the_minimal_detectable_change_shrinks_with_runs_and_grows_with_spread():
    few, many = (minimal_detectable_changes(draw_runs(n, 1, spread=0.02), RULES)[COPY] for n in (5, 24))
    assert 0.05 < many.change < few.change
    assert few.power < many.power
    noisy = minimal_detectable_changes(draw_runs(5, 1, spread=0.2), RULES)[COPY]
    assert noisy.change > 3 * few.change
    assert noisy.power < 0.1
    assert math.isfinite(noisy.change)


def test_runs_without_spread_show_all_that_is_above_the_floor():
    found = minimal_detectable_changes([make_run(i) for i in range(8)], RULES)[COPY]
    assert found.change == pytest.approx(RULES.floor, rel=1e-3)
    assert found.power == 1

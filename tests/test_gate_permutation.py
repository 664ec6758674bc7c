"""The statistics of the gate: against a slow spelling of the same tests, and against runs whose truth is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tracekern.gate import permutation
from tracekern.gate.permutation import adjusted_p, labelings, shift_interval

FAMILY_ERROR = 0.005
GRAIN = 1e-6


def slow_adjusted_p(base: np.ndarray, head: np.ndarray, grain: float) -> list[float]:
    """Westfall and Young's step-down with Welch's t, in loops; what is cut to a grain varies by grain**2 / 12."""
    values = np.concatenate([base, head])
    count, metrics = values.shape

    def t(chosen: tuple[int, ...], j: int) -> float:
        ours = values[list(chosen), j]
        theirs = values[[i for i in range(count) if i not in chosen], j]
        variances = [(side.var(ddof=1) + grain**2 / 12) / len(side) for side in (ours, theirs)]
        return (ours.mean() - theirs.mean()) / math.sqrt(sum(variances))

    observed = [t(tuple(range(len(base), count)), j) for j in range(metrics)]
    order = sorted(range(metrics), key=lambda j: -observed[j])
    exceed = dict.fromkeys(range(metrics), 0)
    choices = list(itertools.combinations(range(count), len(head)))
    for chosen in choices:
        drawn = [t(chosen, j) for j in range(metrics)]
        for place, j in enumerate(order):
            exceed[j] += max(drawn[k] for k in order[place:]) >= observed[j] - 1e-7
    result, highest = [0.0] * metrics, 0.0
    for j in order:
        highest = max(highest, exceed[j] / len(choices))
        result[j] = highest
    return result


@pytest.mark.parametrize("grain", [GRAIN, 1.0])
@pytest.mark.parametrize(("num_base", "num_head"), [(5, 5), (4, 6)])
def test_adjusted_p_equals_the_slow_spelling(num_base, num_head, grain):
    rng = np.random.default_rng(3)
    base, head = rng.standard_normal((num_base, 4)), rng.standard_normal((num_head, 4))
    head[:, 1] += 3
    head[:, 2] += 1
    fast = adjusted_p(base, head, np.full(4, grain))
    assert fast == pytest.approx(slow_adjusted_p(base, head, grain), abs=1e-12)


def test_all_labelings_where_they_are_few_and_a_fixed_sample_where_they_are_not():
    assert len(labelings(5, 5)) == 252
    assert len(labelings(8, 8)) == 12_870
    sample = labelings(12, 12)
    assert len(sample) == permutation.MAX_LABELINGS
    assert (sample.sum(axis=1) == 12).all()
    assert (sample == [0] * 12 + [1] * 12).all(axis=1).any(), "the observed labeling belongs to the sample"
    labelings.cache_clear()
    assert (labelings(12, 12) == sample).all()


def test_values_finer_than_the_clock_are_not_believed():
    """Runs that all read one tick, and one run a side that reads the next: no variance is no certainty."""
    grain = 0.3
    base, head = np.zeros((8, 1)), np.full((8, 1), 1e-4)
    assert adjusted_p(base, base, np.full(1, grain))[0] == 1
    base[0], head[0] = grain, 2 * grain
    assert adjusted_p(base, head, np.full(1, grain))[0] > FAMILY_ERROR


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.03 * rng.standard_normal(shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 0.02 * rng.standard_t(2, shape)


def with_slow_runs(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One run in seven is disturbed, in all its metrics."""
    return normal(rng, shape) + (rng.random((shape[0], 1)) < 1 / 7) * rng.exponential(0.5, (shape[0], 1))


@pytest.mark.parametrize("draw", [normal, heavy_tailed, with_slow_runs])
def test_the_family_error_holds_whatever_the_runs_look_like(draw):
    """5 against 5, 20 metrics, 2,000 times: with an error of 0.005 more than 22 alarms come once in 1,000 times."""
    rng = np.random.default_rng(11)
    grain = np.full(20, GRAIN)
    alarms = sum(adjusted_p(draw(rng, (5, 20)), draw(rng, (5, 20)), grain).min() <= FAMILY_ERROR for _ in range(2000))
    assert alarms <= 22


def test_growth_of_one_metric_among_many_is_named():
    rng = np.random.default_rng(12)
    hits = 0
    for _ in range(50):
        base, head = normal(rng, (8, 30)), normal(rng, (8, 30))
        head[:, 7] += math.log(1.15)
        p = adjusted_p(base, head, np.full(30, GRAIN))
        hits += p[7] <= FAMILY_ERROR and (np.delete(p, 7) > FAMILY_ERROR).all()
    assert hits >= 48


@pytest.mark.parametrize("counts", [(5, 5), (8, 8), (8, 5)])
@pytest.mark.parametrize("draw", [normal, heavy_tailed])
def test_the_interval_holds_the_true_change_as_often_as_it_says(counts, draw):
    rng = np.random.default_rng(13)
    metrics = 20_000  # each one a trial
    low, estimate, high = shift_interval(draw(rng, (counts[0], metrics)), draw(rng, (counts[1], metrics)) + 0.1)
    inside = ((low <= 0.1) & (high >= 0.1)).mean()
    assert 0.945 <= inside <= 0.985
    assert np.median(estimate) == pytest.approx(0.1, abs=1e-3)


def test_the_interval_is_cut_where_the_tables_of_mann_and_whitney_say():
    """Critical values of U, two-sided 5 %, from the published tables."""
    for (num_base, num_head), critical in {(5, 5): 2, (5, 8): 6, (8, 8): 13, (10, 10): 23, (20, 20): 127}.items():
        assert permutation._rank_sum_cut(num_base, num_head, 0.025) == critical


def test_one_run_that_went_astray_barely_moves_the_interval():
    rng = np.random.default_rng(14)
    base, head = normal(rng, (8, 1)), normal(rng, (8, 1)) + 0.1
    clean = shift_interval(base, head)
    head[3] = 5.0
    astray = shift_interval(base, head)
    assert max(abs(a - b)[0] for a, b in zip(clean, astray, strict=True)) < 0.05

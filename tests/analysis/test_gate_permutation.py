"""The statistics of the gate: against a slow spelling of the same tests, and against runs whose truth is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tracekern.gate import permutation
from tracekern.gate.compare import FAMILY_ERROR
from tracekern.gate.permutation import adjusted_p, labelings, shift_interval

GRAIN = 1e-6


def slow_adjusted_p(base: np.ndarray, head: np.ndarray, grain: float) -> list[float]:
    """Westfall and Young's step-down in loops, with the largest pooled t over the slowest runs dropped; what is cut to
    a grain varies by grain**2 / 12."""
    values = np.concatenate([base, head])
    count, metrics = values.shape

    def t(chosen: tuple[int, ...], j: int) -> float:
        return max(
            pooled_t(chosen, j, dropped)
            for dropped in (0, count // 8, min(5 * count // 16, len(base) - 2, len(head) - 2))
        )

    def pooled_t(chosen: tuple[int, ...], j: int, dropped: int) -> float:
        left = sorted(range(count), key=lambda i: values[i, j])[: count - dropped]
        ours = values[[i for i in left if i in chosen], j]
        theirs = values[[i for i in left if i not in chosen], j]
        squares = sum(((side - side.mean()) ** 2).sum() for side in (ours, theirs))
        variance = squares / (len(left) - 2) + grain**2 / 12
        return (ours.mean() - theirs.mean()) / math.sqrt(variance * (1 / len(ours) + 1 / len(theirs)))

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
    for heads, side in ((labelings(5, 5), 5), (sample, 12)):
        assert list(heads[0]) == [0] * side + [1] * side, "the observed labeling is the first"
    labelings.cache_clear()
    assert (labelings(12, 12) == sample).all()


def test_runs_that_tie_for_being_dropped_do_so_on_both_sides_alike():
    """A clock with few ticks: which of the equal runs comes first in the table says nothing about its side."""
    base, head = np.array([[1.0, 2, 3, 3, 3]]).T, np.array([[1.0, 3, 3, 3, 2]]).T
    grain = np.full(1, GRAIN)
    shuffled = [
        np.concatenate([base, head])[order]
        for order in ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 1, 0, 2, 3, 8, 9, 5, 6, 7])
    ]
    found = [permutation.largest_t(values, labelings(5, 5), grain)[0, 0] for values in shuffled]
    assert found[0] == pytest.approx(found[1])


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
    """5 against 5, 20 metrics, 2,000 times: with an error of 0.008 more than 30 alarms come once in 1,000 times."""
    rng = np.random.default_rng(11)
    grain = np.full(20, GRAIN)
    alarms = sum(adjusted_p(draw(rng, (5, 20)), draw(rng, (5, 20)), grain).min() <= FAMILY_ERROR for _ in range(2000))
    assert alarms <= 30


def test_growth_of_one_metric_among_many_is_named():
    rng = np.random.default_rng(12)
    hits = 0
    for _ in range(20):
        base, head = normal(rng, (8, 30)), normal(rng, (8, 30))
        head[:, 7] += math.log(1.15)
        p = adjusted_p(base, head, np.full(30, GRAIN))
        hits += p[7] <= FAMILY_ERROR and (np.delete(p, 7) > FAMILY_ERROR).all()
    assert hits >= 19


@pytest.mark.parametrize("counts", [(5, 5), (8, 8), (8, 5), (12, 12)])
@pytest.mark.parametrize("draw", [normal, heavy_tailed])
def test_each_end_of_the_interval_misses_the_true_change_as_seldom_as_it_says(counts, draw):
    rng = np.random.default_rng(13)
    metrics = 20_000  # each one a trial
    low, estimate, high = shift_interval(draw(rng, (counts[0], metrics)), draw(rng, (counts[1], metrics)) + 0.1)
    for missed in ((low > 0.1).mean(), (high < 0.1).mean()):
        assert 0.02 <= missed <= 0.055
    assert (low <= estimate).all()
    assert (estimate <= high).all()
    assert np.median(estimate) == pytest.approx(0.1, abs=4e-3)  # a quarter of 5 is 1, of 8 it is 2


def test_the_interval_is_cut_where_the_counts_of_all_labelings_say():
    """Of 5 and 5 runs: how many pairs are the wrong way round, of all and without the slowest of each, in loops."""
    wrong = {0: [], 2: []}
    for chosen in itertools.combinations(range(10), 5):
        rest = [i for i in range(10) if i not in chosen]
        for eighths, dropped in ((0, 0), (2, 1)):
            head, base = list(chosen)[: 5 - dropped], rest[: 5 - dropped]
            wrong[eighths].append(sum(h < b for h in head for b in base))
    counts = {eighths: np.array(numbers) for eighths, numbers in wrong.items()}
    below, above = permutation._cuts(5, 5)
    assert above == max(number for number in range(16) if np.mean(counts[2] <= number) <= 0.05)

    def missed(cuts: dict[int, int]) -> float:
        return np.mean(np.any([counts[eighths] <= cut for eighths, cut in cuts.items()], axis=0))

    cuts = dict(below)
    assert missed(cuts) <= 0.05 < missed({eighths: cut + 1 for eighths, cut in cuts.items()})


@pytest.mark.parametrize(("side", "num_slow"), [("base", 3), ("head", 2)])
def test_runs_that_went_astray_do_not_move_their_end_of_the_interval(side, num_slow):
    """Slow runs of base would hide a growth, those of head would look like one."""
    rng = np.random.default_rng(14)
    sides = {"base": normal(rng, (8, 1)), "head": normal(rng, (8, 1)) + 0.1}
    slowest = np.argsort(sides[side], axis=0)[-num_slow:]
    clean = shift_interval(sides["base"], sides["head"])
    np.put_along_axis(sides[side], slowest, 5.0, axis=0)
    astray = shift_interval(sides["base"], sides["head"])
    if side == "head":
        assert astray[2] == clean[2]
    else:  # one of the lower ends drops them
        assert astray[0] == pytest.approx(clean[0], abs=0.02)

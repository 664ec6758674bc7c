"""The test against chance: excess against plain loops, noise that shows nothing, and patterns that are found."""

from __future__ import annotations

import numpy as np
import pytest

from tracekern.analysis.why.chance import Finding, Measure, beside_peers, patterns, search
from tracekern.analysis.why.incidents import find_incident

CORRELATION = 0.7


def noise(kind: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    """[num_members, num_iterations] of standard deviation 1, all members alike."""
    rng = np.random.default_rng([seed, *shape])
    if kind == "heavy":
        return rng.standard_t(3, shape) / 3**0.5
    drawn = rng.standard_normal(shape)
    for iteration in range(1, shape[1] if kind == "persistent" else 0):
        kept = CORRELATION * drawn[:, iteration - 1]
        drawn[:, iteration] = kept + drawn[:, iteration] * (1 - CORRELATION**2) ** 0.5
    return drawn


def found(excess: np.ndarray) -> Finding | None:
    seen = search(Measure("work", beside_peers(excess), 0.001))
    return seen if seen is not None and seen.stands_out else None


@pytest.mark.parametrize("shape", [(2, 5), (3, 4), (6, 3), (7, 2)])
def test_excess_is_what_is_more_than_the_median_of_the_others(shape):
    values = np.random.default_rng(1).integers(0, 5, shape).astype(float)  # with ties
    for member in range(shape[0]):
        others = np.median(np.delete(values, member, axis=0), axis=0)
        assert beside_peers(values)[member] == pytest.approx(values[member] - others)


@pytest.mark.parametrize("kind", ["normal", "heavy", "persistent"])
@pytest.mark.parametrize("shape", [(2, 8), (8, 10), (4, 30)])
def test_members_that_are_alike_show_nothing(kind, shape):
    named = sum(found(noise(kind, seed, shape)) is not None for seed in range(40))
    assert named <= 2  # of 40; in 600 it is 1 % where noise persists, and 0.1 % elsewhere


@pytest.mark.parametrize("num_slow", [1, 3])
def test_each_pattern_is_found_with_its_members(num_slow):
    slow = np.sort(np.random.default_rng(2).permutation(9)[:num_slow])
    for seed, pattern in enumerate(patterns(24)):
        excess = noise("normal", seed, (9, 24))
        excess[np.ix_(slow, pattern.hits)] += 12.0
        seen = found(excess)
        assert seen is not None, pattern
        assert seen.members.tolist() == slow.tolist()
        assert np.array_equal(seen.pattern.hits, pattern.hits)
        assert 10 < seen.excess_ns < 14 > seen.alike_ns


def test_few_iterations_have_one_pattern_and_more_have_those_that_repeat():
    assert len(patterns(19)) == 1
    strides = {pattern.stride: pattern.hits for pattern in patterns(20)}
    assert set(strides) == {1, 2, 3, 4, 5}
    assert min(pattern.hits.sum() for pattern in patterns(20)) == 3


def test_the_ranks_of_a_node_are_found_as_one_though_they_are_half():
    excess = noise("normal", 5, (8, 12))
    excess[4:] += 10.0
    group = np.arange(4, 8)
    seen = search(Measure("work", beside_peers(excess), 0.001, (np.arange(4), group)))
    assert seen.stands_out
    assert seen.members.tolist() == group.tolist()


def test_what_happens_up_to_three_times_is_an_incident_and_no_habit():
    for hits in ((3,), (3, 11), (3, 11, 17)):
        excess = noise("normal", 6, (8, 24))
        excess[2, list(hits)] += 100.0
        seen = find_incident([Measure("work", beside_peers(excess), 0.001)])
        assert (seen.members.tolist(), tuple(np.flatnonzero(seen.pattern.hits))) == ([2], hits)
    excess[2, 20] += 100.0
    assert find_incident([Measure("work", beside_peers(excess), 0.001)]) is None
    assert find_incident([Measure("work", beside_peers(noise("normal", 7, (8, 24))), 0.001)]) is None

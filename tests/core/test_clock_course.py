"""The course of one clock beside another, against curves that do the worst that is assumed of clocks."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern.timeline.clocks.course import Course, through_anchors

SECOND = 10**9


@given(
    st.lists(st.tuples(st.integers(1, 2**40), st.floats(-2, 1000)), min_size=2, max_size=6),
    st.integers(-(2**60), 2**60),
    st.lists(st.floats(-2, 3), max_size=20),
)
def test_a_time_goes_by_the_slope_of_its_piece_and_beyond_all_by_the_outer_ones(steps, base, shares):
    at = [base + int(step) for step in np.cumsum([step for step, _ in steps])]
    to = [-base + int(step) for step in np.cumsum([int(step * slope) for step, slope in steps])]
    times = [at[0] + int(share * (at[-1] - at[0])) for share in shares] + at
    found = through_anchors(at, to, np.array(times, np.int64))
    for time, mapped in zip(times, found.tolist(), strict=True):
        piece = max(sum(anchor <= time for anchor in at[:-1]) - 1, 0)
        slope = Fraction(to[piece + 1] - to[piece], at[piece + 1] - at[piece])
        exact = to[piece] + (time - at[piece]) * slope
        assert abs(mapped - exact) <= 0.5 + abs(exact - to[piece]) * Fraction(1, 2**51)


def curve(time, wander, slope=3e-6):
    return slope * time + wander / 2 * time**2


def rate(time, wander, slope=3e-6):
    return slope + wander * time


def map_of(course, times):
    """[n] the piecewise linear map and its slope, by the anchors."""
    at, offset = course.anchors()
    piece = np.clip(np.searchsorted(at, times, "right") - 1, 0, len(at) - 2)
    slope = (np.diff(offset) / np.diff(at))[piece]
    return offset[piece] + slope * (times - at[piece]), slope


@given(
    gap=st.floats(1e6, 2e10),
    error=st.floats(1, 1e5),
    window=st.tuples(st.floats(-2, 3), st.floats(-2, 3)).map(sorted),
    wander=st.floats(0, 1e-14),
)
def test_the_bound_between_and_beyond_two_rounds_is_reached_and_never_passed(gap, error, window, wander):
    first, last = (gap * share for share in window)
    # The middle of the piece is where the wander between the rounds is worst, the ends are where a slope is.
    times = np.unique(np.clip(np.append(np.linspace(first, last, 50), [0, gap / 2, gap]), first, last))
    rounds = np.array([0.0, gap])
    worst, worst_rate = 0.0, 0.0
    for signs, bend in itertools.product(itertools.product((-1, 1), repeat=2), (-wander, wander)):
        course = Course(rounds, curve(rounds, bend) + error * np.array(signs), np.full(2, error), 10.0, wander)
        mapped, slope = map_of(course, times)
        worst = max(worst, np.abs(mapped - curve(times, bend)).max())
        worst_rate = max(worst_rate, np.abs(slope - rate(times, bend)).max())
    assert course.error_within(first, last) == pytest.approx(worst, rel=1e-6)
    if first <= 0 or last >= gap:  # inside, a piece has one bound for all its slopes
        assert course.rate_error_within(first, last) == pytest.approx(worst_rate, rel=1e-6)


@given(
    steps=st.lists(st.floats(1e6, 5e9), min_size=0, max_size=5),
    errors=st.lists(st.floats(0.1, 1e5), min_size=6, max_size=6),
    shares=st.lists(st.floats(-1, 1), min_size=6, max_size=6),
    window=st.tuples(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5)).map(sorted),
    wander=st.floats(-1e-14, 1e-14),
    baseline=st.sampled_from([0.0, 1e9]),
)
def test_the_truth_lies_within_the_bound_of_any_rounds(steps, errors, shares, window, wander, baseline):
    rounds = np.append(0.0, np.cumsum(steps))
    first, last = (share * (rounds[-1] + SECOND) for share in window)
    times = np.linspace(first, last, 60)
    max_rate = np.abs(rate(np.append(times, rounds), wander)).max()
    error = np.array(errors[: len(rounds)])
    offset = curve(rounds, wander) + error * np.array(shares[: len(rounds)])
    course = Course(rounds, offset, error, max_rate, abs(wander), baseline)
    mapped, slope = map_of(course, times)
    assert np.abs(mapped - curve(times, wander)).max() <= course.error_within(first, last) * (1 + 1e-9) + 1e-3
    if first < last:  # one moment has no rate
        assert np.abs(slope - rate(times, wander)).max() <= course.rate_error_within(first, last) * (1 + 1e-9) + 1e-12


def test_beyond_the_rounds_it_goes_on_as_from_the_nearest_that_is_far_enough():
    rounds = np.array([0.0, 0.4, 1.2, 5.0, 6.7, 7.0]) * SECOND
    offset = np.array([0.0, 90_000.0, 12_000.0, 20_000.0, 37_000.0, -50_000.0])
    course = Course(rounds, offset, np.full(6, 10.0), 20e-6, 0.0, min_baseline=SECOND)
    assert course.outer_slope(first=True)[0] == pytest.approx(12_000 / (1.2 * SECOND))
    assert course.outer_slope(first=False) == (0.0, 20e-6), "what joins 5 s and 7 s is steeper than two clocks drift"
    level = Course(rounds, np.append(offset[:-1], 30_000.0), course.error, 20e-6, 0.0, min_baseline=SECOND)
    assert level.outer_slope(first=False) == (pytest.approx(5e-6), pytest.approx(10e-9))

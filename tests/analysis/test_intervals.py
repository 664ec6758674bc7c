"""Bisection of many slices at once, against a loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern.timeline.intervals import bisect_right

SMALL = st.integers(0, 4)


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
        patch.setattr("tracekern.timeline.intervals._BLOCK", 3)
        found = bisect_right(values, starts[which], stops[which], wanted)
    for place, number, value in zip(found.tolist(), which.tolist(), wanted.tolist(), strict=True):
        assert place == starts[number] + sum(other <= value for other in slices[number])

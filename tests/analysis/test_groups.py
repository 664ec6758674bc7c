"""Grouping rows by several numbers against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern.analysis.groups import group_rows, median_of_groups

NEAR = st.integers(-3, 3)
FAR = st.sampled_from([-(1 << 61), -1, 0, 1 << 40, (1 << 61) + 1])


@pytest.mark.parametrize("numbers", [NEAR, st.integers(0, 5000), FAR], ids=["near", "some way", "far"])
@given(data=st.data(), num_columns=st.integers(0, 4))
def test_groups_are_those_of_plain_loops(numbers: st.SearchStrategy[int], data: st.DataObject, num_columns: int):
    rows = data.draw(st.lists(st.tuples(*[numbers] * num_columns, st.integers(0, 9)), max_size=12))
    keys, values = [row[:-1] for row in rows], np.array([row[-1] for row in rows], np.int64)
    columns = [np.array([key[i] for key in keys], np.int64) for i in range(num_columns)]
    groups = group_rows(len(rows), *columns)
    distinct = sorted(set(keys)) if num_columns else [()]
    assert len(groups) == len(distinct)
    assert list(zip(*(column.tolist() for column in groups.columns), strict=True)) == (distinct if num_columns else [])
    assert [distinct[number] for number in groups.group] == keys
    members = [[int(value) for key, value in zip(keys, values, strict=True) if key == one] for one in distinct]
    assert groups.sum(values).tolist() == [sum(own) for own in members]
    assert groups.count().tolist() == [len(own) for own in members]
    if rows:
        assert groups.largest(values).tolist() == [max(own) for own in members]


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9)), max_size=12))
def test_medians_are_those_of_each_group_alone(rows: list[tuple[int, int]]):
    group, values = (np.array([row[column] for row in rows], np.int64) for column in range(2))
    wanted = [np.median(own) if len(own := values[group == number]) else np.nan for number in range(4)]
    np.testing.assert_array_equal(median_of_groups(group, values, 4), wanted)

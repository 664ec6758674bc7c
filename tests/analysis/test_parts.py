"""Windows of whole calls: what questions find in each adds up to what they find in the whole run, by `==`."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import Case, LateHost, MoreWork, Shape, SlowWork, simulate

import tracekern
from tests.paths import TRACES
from tracekern.analysis.part import Part, PartSums
from tracekern.analysis.partial import add
from tracekern.timeline.model import Timeline
from tracekern.timeline.windows import channels_of_kernels, find_cuts, parts_of

CAPTURES = sorted(path.parent.name for path in TRACES.glob("*/capture.json"))
WINDOWS = {"h200_resident": 4, "h200x4_late_host": 6, "h200x4_two_hop": 6, "h200_groups": 10, "h200x2_late_rank": 20}
"""How many calls of kept captures may be told apart."""


def are_equal(one: Any, other: Any) -> bool:
    """Whether two partial results say the same, to the last bit."""
    if isinstance(one, np.ndarray):
        return one.dtype.kind == other.dtype.kind and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and are_equal(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def assert_parts_add_up(timeline: Timeline, at_most: int) -> int:
    """Returns the number of windows. at_most: spans of one."""
    size = np.bincount(timeline.spans.launch[timeline.spans.launch >= 0], minlength=len(timeline.launches))
    windows = find_cuts(timeline, channels_of_kernels(timeline)).windows(size, at_most)
    parts = parts_of(timeline, windows)
    assert sum(len(part.spans) for part in parts) == len(timeline.spans)
    assert sum(len(part.flows) for part in parts) == len(timeline.flows)
    for window in (None, middle_half(timeline)):
        sums = [PartSums(Part(part, window)) for part in parts]
        for name, whole in PartSums(Part(timeline, window)).items():
            assert are_equal(functools.reduce(add, [of_part[name] for of_part in sums]), whole), name
    return len(windows)


def middle_half(timeline: Timeline) -> tuple[int, int]:
    first, last = int(timeline.spans.start.min()), int(timeline.spans.end.max())
    return first + (last - first) // 4, last - (last - first) // 4


@pytest.mark.parametrize("name", CAPTURES)
def test_parts_of_a_kept_capture_add_up(name: str):
    timeline = tracekern.load(TRACES / name)
    assert assert_parts_add_up(timeline, 1) >= WINDOWS.get(name, 0)
    assert_parts_add_up(timeline, len(timeline.spans) // 3)


@given(st.data())
def test_parts_of_any_run_add_up(data: st.DataObject):
    shape = data.draw(st.sampled_from(list(Shape)))
    case = Case(
        shape=shape,
        num_ranks=data.draw(st.integers(2, 6)),
        iterations=data.draw(st.integers(2, 8)),
        injections=data.draw(
            st.sampled_from([(), (SlowWork(9_000, rank=1),), (MoreWork(rank=1),), (LateHost(9_000),)])
        ),
        noise=0.2,
        is_persistent=shape is not Shape.STREAMS and data.draw(st.booleans()),
        has_host_lane=data.draw(st.booleans()),
        has_host_jitter=data.draw(st.booleans()),
        ranks_per_node=data.draw(st.sampled_from([0, 2])),
    )
    with tempfile.TemporaryDirectory() as directory:
        timeline = tracekern.load(simulate(case, data.draw(st.integers(0, 99)), Path(directory)).directory)
    assert_parts_add_up(timeline, data.draw(st.integers(1, len(timeline.spans))))

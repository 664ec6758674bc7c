"""Windows of whole calls: what questions find in each adds up to what they find in the whole run, by `==`."""

from __future__ import annotations

import dataclasses
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
from tracekern.analysis.findings import Findings
from tracekern.analysis.kept_parts import KeptParts, Workers
from tracekern.analysis.part import Part, SumsOfParts
from tracekern.analysis.parts import HeldParts
from tracekern.analysis.scratch import scratch_of
from tracekern.cli.commands.report import as_data
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.model import Int64, Timeline, TrackKind
from tracekern.timeline.select import Window, take_spans
from tracekern.timeline.windows import channels_of_kernels, find_cuts, parts_of
from tracekern.viewers.report.headlines import headlines

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
    windows = find_cuts(timeline, channels_of_kernels(timeline)).windows(size_of_launches(timeline), at_most)
    parts = parts_of(timeline, windows)
    assert sum(len(part.spans) for part in parts) == len(timeline.spans)
    assert sum(len(part.flows) for part in parts) == len(timeline.flows)
    for window in (None, middle_half(timeline)):
        sums = SumsOfParts(HeldParts([Part(part, window) for part in parts]))
        for name, whole in SumsOfParts(HeldParts([Part(timeline, window)])).items():
            assert are_equal(sums[name], whole), name
    return len(windows)


def assert_reports_are_equal(timeline: Timeline, at_most: int, window: Window | None = None) -> None:
    """at_most: spans of a window."""
    cuts = find_cuts(timeline, channels_of_kernels(timeline)).between(launch_iterations(timeline).of_launch)
    windows = cuts.windows(size_of_launches(timeline), at_most)
    of_none = np.zeros(len(timeline.launches), bool)
    divided = zip(parts_of(timeline, windows), [of_none, *windows], strict=True)
    parts = [Part(part, window, launches) for part, launches in divided]
    lanes = take_spans(timeline, ~timeline.tracks_of(TrackKind.DEVICE)[timeline.spans.track])
    whole = Findings(timeline, None, window)
    told = as_data(whole, headlines(whole))
    with tempfile.TemporaryDirectory() as folder, Workers(1) as workers:
        scratch = scratch_of(Path(folder))
        for table in (timeline.ranks, timeline.tracks, timeline.events, timeline.launches, timeline.problems):
            scratch.share(table)
        kept = KeptParts.make(scratch, workers, parts.__getitem__, len(parts))
        found = Findings(lanes, None, window, kept)
        for name, other in as_data(found, headlines(found)).items():
            assert told[name] == other, name


def size_of_launches(timeline: Timeline) -> Int64:
    """[num_launches] spans"""
    launch = timeline.spans.launch
    return np.bincount(launch[launch >= 0], minlength=len(timeline.launches))


def middle_half(timeline: Timeline) -> tuple[int, int]:
    first, last = int(timeline.spans.start.min()), int(timeline.spans.end.max())
    return first + (last - first) // 4, last - (last - first) // 4


@pytest.mark.parametrize("name", CAPTURES)
def test_parts_of_a_kept_capture_add_up(name: str):
    timeline = tracekern.load(TRACES / name)
    assert assert_parts_add_up(timeline, 1) >= WINDOWS.get(name, 0)
    assert_parts_add_up(timeline, len(timeline.spans) // 3)
    if can_be_cut(timeline):
        assert_reports_are_equal(timeline, len(timeline.spans) // 6)
        assert_reports_are_equal(timeline, len(timeline.spans) // 2, middle_half(timeline))


def can_be_cut(timeline: Timeline) -> bool:
    return not (timeline.spans.is_open.any() or timeline.tracks_of(TrackKind.ENGINE).any())


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
    at_most = data.draw(st.integers(1, len(timeline.spans)))
    assert_parts_add_up(timeline, at_most)
    assert_reports_are_equal(timeline, at_most, data.draw(st.sampled_from([None, middle_half(timeline)])))

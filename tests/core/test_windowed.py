"""A capture read window by window is what load() returns, cut into the same windows: by `==`, column by column."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import TRACES
from tracekern.timeline.load import load
from tracekern.timeline.model import Timeline, TrackKind
from tracekern.timeline.select import take_spans
from tracekern.timeline.windowed import WindowedRun, load_windows
from tracekern.timeline.windows import parts_of

CAPTURES = sorted(path.parent.name for path in TRACES.glob("*/capture.json"))
TABLES = (
    *("unit", "ranks", "tracks", "events", "launches", "host_names", "problems", "origin_ns", "title", "aligned"),
)


@contextlib.contextmanager
def windowed(paths: Any, scratch: Path, at_most: int, **options: Any) -> Iterator[WindowedRun]:
    run = load_windows(paths, scratch, at_most, **options)
    with contextlib.closing(run):
        yield run
    assert not list(scratch.iterdir())


def assert_equal(one: Timeline, other: Timeline) -> None:
    for name in TABLES:
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name
    for name in ("spans", "marks", "flows"):
        columns = vars(getattr(other, name))
        for column, values in vars(getattr(one, name)).items():
            assert values.dtype == columns[column].dtype, (name, column)
            assert np.array_equal(values, columns[column]), (name, column)


def lanes_of(timeline: Timeline) -> Timeline:
    is_kept = (timeline.spans.launch < 0) | timeline.tracks_of(TrackKind.LAUNCH)[timeline.spans.track]
    return take_spans(timeline, is_kept).replace(marks=timeline.marks.take(timeline.marks.launch < 0))


def assert_same_parts(paths: Any, scratch: Path, at_most: int, **options: Any) -> int:
    """Returns the number of windows."""
    timeline = load(paths, **options)
    with windowed(paths, scratch, at_most, **options) as run:
        assert_equal(run.skeleton, lanes_of(timeline))
        for number, part in enumerate(parts_of(timeline, run.windows)):
            assert_equal(run.part(number), part)
        return len(run.windows)


@pytest.mark.parametrize("name", CAPTURES)
def test_windows_of_a_kept_capture_are_those_of_the_whole(tmp_path: Path, name: str):
    num_spans = len(load(TRACES / name).spans)
    many = assert_same_parts(TRACES / name, tmp_path, 1)
    assert assert_same_parts(TRACES / name, tmp_path, num_spans // 3) <= many
    assert_same_parts(TRACES / name, tmp_path, 1, unaligned=True)

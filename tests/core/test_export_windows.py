"""Files that are written window by window hold what files hold that are written at once."""

from __future__ import annotations

import contextlib
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Case, LateHost, MoreWork, Shape, SlowWork, simulate
from trace_processor import TraceProcessor, assert_no_loss, slices_of

from tests.damaged_cases import damage_capture, make_bases
from tests.paths import TRACES
from tracekern.errors import BadInput
from tracekern.export.format import TrackDetail
from tracekern.export.windows import Windows
from tracekern.export.write import save, save_windows
from tracekern.timeline.load import load
from tracekern.timeline.windowed import WindowedRun, load_windows

CAPTURES = sorted(path.parent.name for path in TRACES.glob("*/capture.json"))


@contextlib.contextmanager
def windowed(paths: Path, at_most: int, **how: Any) -> Iterator[WindowedRun]:
    with tempfile.TemporaryDirectory() as scratch:
        yield load_windows(paths, Path(scratch), at_most, **how)


def write_both(
    paths: Path,
    folder: Path,
    suffix: str,
    at_most: int,
    window: tuple[int, int] | None = None,
    tracks: TrackDetail = "warp",
    **how: Any,
) -> tuple[Path, Path, int]:
    """Returns the file that was written of the whole, that of windows, and how many these were. how: to load it."""
    whole, parts = folder / f"whole{suffix}", folder / f"parts{suffix}"
    told = save(load(paths, **how), whole, window=window, tracks=tracks)
    with windowed(paths, at_most, **how) as run:
        done: list[tuple[int, int]] = []
        stats = save_windows(Windows(run, window), parts, tracks=tracks, progress=lambda *spans: done.append(spans))
        for name in ("spans", "marks", "flows", "spans_left_out", "flows_left_out", "part"):
            assert getattr(stats, name) == getattr(told, name), name
        assert stats.bytes == parts.stat().st_size
        assert not stats.spans or done[-1] == (stats.spans, stats.spans)
        return whole, parts, len(run.windows)


def assert_same_table(whole: Path, parts: Path) -> None:
    one, other = pl.read_parquet(whole), pl.read_parquet(parts)
    assert pl.read_parquet_metadata(whole) == pl.read_parquet_metadata(parts)
    assert one.schema == other.schema
    spans = pl.col("span").is_not_null()
    assert one.filter(spans).equals(other.filter(spans).sort("span"))
    marks = (Counter(map(repr, table.filter(~spans).rows())) for table in (one, other))
    assert next(marks) == next(marks)


def rows_of(processor: TraceProcessor) -> dict[int, tuple[str, ...]]:
    """Track id -> names from the root down."""
    parents = {row[0]: row[1:] for row in processor.query("select id, parent_id, name from track")}

    def names(track: int | None) -> tuple[str, ...]:
        return () if track is None else (*names(parents[track][0]), parents[track][1])

    return {track: names(track) for track in parents}


def picture(path: Path) -> dict[str, Any]:
    """Slices, with their rows, depths and arguments; arrows between slices; points of counters."""
    processor = TraceProcessor(path)
    assert_no_loss(processor)
    rows = rows_of(processor)
    found = slices_of(processor, arguments="args." if ".json" in path.name else "debug.", where="1")
    at = {
        row[0]: (rows[row[1]], *row[2:]) for row in processor.query("select id, track_id, depth, category from slice")
    }
    slices = {number: (*at[number], *found[number]) for number in found}
    arrows = ((slices[one], slices[other]) for one, other in processor.query("select slice_out, slice_in from flow"))
    points = processor.query("select track_id, ts, cast(value as int) from counter")
    return {
        "slices": Counter(slices.values()),
        "arrows": Counter(arrows),
        "points": Counter((rows[track], *point) for track, *point in points),
    }


def assert_same_picture(whole: Path, parts: Path) -> None:
    one, other = picture(whole), picture(parts)
    for what, drawn in one.items():
        assert drawn == other[what], what


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *((name, ".pftrace.gz") for name in ("h200_resident", "h200x4_late_host", "h200x2_late_rank", "h200_groups")),
        *((name, ".json") for name in ("cpu_8_ranks", "h200_resident")),
    ],
)
def test_a_picture_of_a_kept_capture(tmp_path: Path, name: str, suffix: str):
    whole, parts, num_windows = write_both(TRACES / name, tmp_path, suffix, 1)
    assert num_windows > 1
    assert_same_picture(whole, parts)


@pytest.mark.parametrize("name", CAPTURES)
def test_tables_of_a_kept_capture(tmp_path: Path, name: str):
    assert_same_table(*write_both(TRACES / name, tmp_path, ".parquet", 1)[:2])


def draw_case(data: st.DataObject) -> Case:
    shape = data.draw(st.sampled_from(list(Shape)))
    injections = [(), (SlowWork(9_000, rank=0),), (MoreWork(rank=0),), (LateHost(9_000, rank=0),)]
    return Case(
        shape=shape,
        num_ranks=data.draw(st.integers(2, 4)),
        iterations=data.draw(st.integers(1, 6)),
        injections=data.draw(st.sampled_from(injections)),
        noise=0.2,
        has_host_lane=data.draw(st.booleans()),
        has_host_jitter=data.draw(st.booleans()),
        ranks_per_node=data.draw(st.sampled_from([0, 2])),
    )


@settings(max_examples=10)
@given(st.data())
def test_a_table_of_any_run(data: st.DataObject):
    with tempfile.TemporaryDirectory() as directory:
        paths = simulate(draw_case(data), data.draw(st.integers(0, 99)), Path(directory) / "capture").directory
        spans = load(paths).spans
        first, last = sorted(data.draw(st.lists(st.integers(0, int(spans.end.max())), min_size=2, max_size=2)))
        window = data.draw(st.sampled_from([None, (first, last + 1)]))
        at_most = data.draw(st.integers(1, len(spans)))
        assert_same_table(*write_both(paths, Path(directory), ".parquet", at_most, window)[:2])


@settings(max_examples=10)
@given(st.data())
def test_a_picture_of_any_run(data: st.DataObject):
    with tempfile.TemporaryDirectory() as directory:
        paths = simulate(draw_case(data), data.draw(st.integers(0, 99)), Path(directory) / "capture").directory
        spans = load(paths).spans
        first, last = sorted(data.draw(st.lists(st.integers(0, int(spans.end.max())), min_size=2, max_size=2)))
        window = data.draw(st.sampled_from([None, (first, last + 1)]))
        tracks = data.draw(st.sampled_from(["warp", "block"]))
        suffix, at_most = data.draw(st.sampled_from([".pftrace", ".json"])), data.draw(st.integers(1, len(spans)))
        assert_same_picture(*write_both(paths, Path(directory), suffix, at_most, window, tracks)[:2])


def test_tables_of_damaged_captures(tmp_path: Path):
    """With spans that never ended, lost launches and clocks that cannot be."""
    warnings.simplefilter("ignore")  # numbers that are damaged run over
    bases, num_open, num_windows = make_bases(tmp_path), 0, 0
    for case in range(60):
        draw, directory = random.Random(case), tmp_path / f"case_{case}"
        damage_capture(draw, draw.choice(bases), directory)
        try:
            spans = load(directory, unaligned=case % 2 == 0, partial=True).spans
        except BadInput:
            continue
        window = (int(spans.start.min()), int(np.median(spans.start)) + 1) if len(spans) and case % 3 == 0 else None
        whole, parts, count = write_both(
            directory, tmp_path, ".parquet", 1, window, unaligned=case % 2 == 0, partial=True
        )
        assert_same_table(whole, parts)
        num_open += bool(spans.is_open.any())
        num_windows += count > 1
    assert num_open > 5
    assert num_windows > 5

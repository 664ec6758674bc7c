"""A capture read window by window is what load() returns, cut into the same windows: by `==`, column by column."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Case, LateHost, MoreWork, Shape, SlowWork, simulate

from tests.captures import CaptureSpec, write_capture
from tests.damaged_cases import damage_capture, make_bases
from tests.paths import TRACES
from tracekern.errors import BadInput
from tracekern.timeline.checks import finish, join_and_check
from tracekern.timeline.clocks.flow_bounds import last_event_ns
from tracekern.timeline.join.flows import calls_of, find_astray
from tracekern.timeline.load import load
from tracekern.timeline.model import Flows, Timeline, TrackKind
from tracekern.timeline.run_rows import RunRows
from tracekern.timeline.select import take_spans
from tracekern.timeline.windowed import WindowedRun, load_windows
from tracekern.timeline.windows import channels_of_kernels, find_cuts, parts_of

CAPTURES = sorted(path.parent.name for path in TRACES.glob("*/capture.json"))
WINDOWS = {"h200_resident": 4, "h200x4_late_host": 6, "h200x4_two_hop": 3, "h200_groups": 10, "h200x2_late_rank": 20}
"""How many calls of kept captures may be told apart."""
TABLES = ("unit", "ranks", "tracks", "events", "launches", "host_names", "problems", "origin_ns", "title", "aligned")


@contextlib.contextmanager
def windowed(paths: Any, scratch: Path, at_most: int, **options: Any) -> Iterator[WindowedRun]:
    run = load_windows(paths, scratch, at_most, **options)
    with contextlib.closing(run):
        yield run
    assert not list(scratch.iterdir())


def assert_equal(one: Timeline, other: Timeline) -> None:
    for name in TABLES:
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name  # nan equals nan there
    for name in ("spans", "marks", "flows"):
        columns = vars(getattr(other, name))
        for column, values in vars(getattr(one, name)).items():
            assert values.dtype == columns[column].dtype, (name, column)
            assert np.array_equal(values, columns[column]), (name, column)


def lanes_of(timeline: Timeline) -> Timeline:
    is_kept = (timeline.spans.launch < 0) | timeline.tracks_of(TrackKind.LAUNCH)[timeline.spans.track]
    return take_spans(timeline, is_kept).replace(marks=timeline.marks.take(timeline.marks.launch < 0))


def assert_same_parts(timeline: Timeline, paths: Any, scratch: Path, at_most: int, **options: Any) -> int:
    """Returns the number of windows. timeline: what load() returns."""
    with windowed(paths, scratch, at_most, **options) as run:
        assert_equal(run.skeleton, lanes_of(timeline))
        for number, part in enumerate(parts_of(timeline, run.windows)):
            assert_equal(run.part(number), part)
        assert not run.why_whole or len(run.windows) == 1
        return len(run.windows)


@pytest.mark.parametrize("name", CAPTURES)
def test_windows_of_a_kept_capture_are_those_of_the_whole(tmp_path: Path, name: str):
    timeline = load(TRACES / name)
    assert assert_same_parts(timeline, TRACES / name, tmp_path, 1) >= WINDOWS.get(name, 0)
    assert assert_same_parts(timeline, TRACES / name, tmp_path, len(timeline.spans) // 3) <= 5
    assert_same_parts(load(TRACES / name, unaligned=True), TRACES / name, tmp_path, 1, unaligned=True)


@settings(max_examples=20)
@given(st.data())
def test_windows_of_any_run_are_those_of_the_whole(data: st.DataObject):
    shape = data.draw(st.sampled_from(list(Shape)))
    case = Case(
        shape=shape,
        num_ranks=data.draw(st.integers(2, 6)),
        iterations=data.draw(st.integers(1, 8)),
        injections=data.draw(
            st.sampled_from([(), (SlowWork(9_000, rank=0),), (MoreWork(rank=0),), (LateHost(9_000, rank=0),)])
        ),
        noise=0.2,
        is_persistent=shape is not Shape.STREAMS and data.draw(st.booleans()),
        has_host_lane=data.draw(st.booleans()),
        has_host_jitter=data.draw(st.booleans()),
        jump_ns=data.draw(st.sampled_from([0, 5_000])),
        ranks_per_node=data.draw(st.sampled_from([0, 2])),
    )
    with tempfile.TemporaryDirectory() as directory:
        paths = simulate(case, data.draw(st.integers(0, 99)), Path(directory) / "capture").directory
        timeline = load(paths)
        at_most = data.draw(st.integers(1, len(timeline.spans)))
        assert_same_parts(timeline, paths, Path(directory) / "scratch", at_most)


def outcome(reader: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """(what it returns, "") or (None, why it refused)"""
    try:
        return reader(*arguments, **options), ""
    except BadInput as error:
        return None, str(error)


def test_windows_of_damaged_captures_are_those_of_the_whole(tmp_path: Path):
    """What load() refuses is refused in the same words."""
    bases, found = make_bases(tmp_path), Counter[str]()
    warnings.simplefilter("ignore")  # numbers that are damaged run over
    for case in range(60):
        draw = random.Random(case)
        directory, scratch = tmp_path / f"case_{case}", tmp_path / "scratch"
        damage_capture(draw, draw.choice(bases), directory)
        options = {"unaligned": draw.random() < 0.2, "partial": draw.random() < 0.3, "strict": draw.random() < 0.1}
        timeline, refused = outcome(load, directory, **options)
        if timeline:
            found[f"{min(2, assert_same_parts(timeline, directory, scratch, 1, **options))} windows"] += 1
            continue
        assert outcome(load_windows, directory, scratch, 1, **options) == (None, refused)
        assert not scratch.exists() or not list(scratch.iterdir())
        found["refused"] += 1
    assert found["refused"] >= 10
    assert found["2 windows"] >= 5


def as_of_a_group(timeline: Timeline) -> Timeline:
    """The timeline as if its ranks had captured alone, and two others had been in the run."""
    about = {"ranks": [rank.rank for rank in timeline.ranks], "num_ranks": len(timeline.ranks) + 2}
    ranks = (dataclasses.replace(rank, metadata=rank.metadata | about) for rank in timeline.ranks)
    return timeline.replace(ranks=tuple(ranks))


def spoilt(timeline: Timeline, draw: np.random.Generator) -> Timeline:
    """The timeline without flows, with keys that come again, waits that end early, other epochs, lost spans."""
    spans, launches = timeline.spans, list(timeline.launches)
    begin_payload, start, end = spans.begin_payload.copy(), spans.start.copy(), spans.end.copy()
    ends = np.flatnonzero(np.array([event.channel is not None for event in timeline.events])[spans.event])
    again = draw.choice(ends, draw.integers(0, 20))
    for row in again.tolist():
        alike = np.flatnonzero((spans.event == spans.event[row]) & (spans.track == spans.track[row]))
        begin_payload[row] = begin_payload[draw.choice(alike)]
    early = draw.choice(ends, draw.integers(0, 20))
    end[early] = start[early]
    moved = timeline.track_ranks()[spans.track] == draw.choice(len(timeline.ranks))
    by = int(draw.choice([0, 0, 20_000]))
    start[moved] += by
    end[moved & ~spans.is_open] += by
    for idx in draw.choice(len(launches), draw.integers(0, 3)).tolist():
        launches[idx] = dataclasses.replace(launches[idx], epoch=launches[idx].epoch + int(draw.integers(0, 3)))
    if draw.random() < 0.2:
        launches = [dataclasses.replace(launch, epoch=0) for launch in launches]
    if draw.random() < 0.1:
        launches[0] = dataclasses.replace(launches[0], records_lost=1)
    if draw.random() < 0.2:
        timeline = as_of_a_group(timeline)
    spans = dataclasses.replace(spans, begin_payload=begin_payload, start=start, end=end)
    timeline = timeline.replace(launches=tuple(launches), spans=spans, flows=Flows(), problems=())
    return take_spans(timeline, (draw.random(len(spans)) > draw.choice([0, 0.01])) | (spans.launch < 0))


def test_what_does_not_fit_adds_up_over_windows():
    timelines = [load(TRACES / name) for name in ("h200_groups", "h200x4_late_host", "h200x4_two_hop")]
    kinds = Counter[str]()
    for case in range(24):
        draw = np.random.default_rng(case)
        timeline = spoilt(timelines[case % len(timelines)], draw)
        size = np.bincount(timeline.spans.launch + 1, minlength=len(timeline.launches) + 1)[1:]
        windows = find_cuts(timeline, channels_of_kernels(timeline)).windows(size, int(draw.choice([1, 9_000])))
        joined, checks = join_and_check(timeline, {})
        whole = finish(joined, checks, find_astray(timeline, checks.misfits.lacking), strict=False)
        calls, last_ns = calls_of(timeline), last_event_ns(timeline)
        parts = parts_of(timeline, windows)
        found = [join_and_check(part, calls, last_ns) for part in parts]
        for (part, _), same in zip(found, parts_of(joined, windows), strict=True):
            assert_equal(part, same)
        total = functools.reduce(operator.add, (of_part for _, of_part in found))
        lacking = total.misfits.lacking
        astray = [find_astray(part, lacking) for part in parts]
        is_astray = {channel: np.any([of_part[channel] for of_part in astray], axis=0) for channel in lacking}
        assert_equal(finish(joined, total, is_astray, strict=False), whole)
        kinds.update(problem.kind for problem in whole.problems)
        kinds["astray"] += sum("of those would have one" in problem.text for problem in whole.problems)
    wanted = {"unmatched_wait", "duplicate_signal", "backwards_flow", "contradicting_flows", "astray", "outside_rank"}
    assert wanted <= {kind for kind, number in kinds.items() if number}


def test_kernels_that_share_channels_with_engines_are_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timeline = load(TRACES / "two_hosts")
    assert_same_parts(timeline, TRACES / "two_hosts", tmp_path, 1)
    of_engine = timeline.tracks_of(TrackKind.ENGINE)
    assert (timeline.marks.launch[of_engine[timeline.marks.track]] == -1).all()
    monkeypatch.setattr(RunRows, "why_whole", lambda _: "told so")
    with windowed(TRACES / "two_hosts", tmp_path, 1) as run:
        assert run.why_whole == "told so"
    assert assert_same_parts(timeline, TRACES / "two_hosts", tmp_path, 1) == 1


def test_calls_that_cannot_be_cut_are_one_window(tmp_path: Path):
    with windowed(TRACES / "h200_int4_ring", tmp_path, 1) as run:
        assert run.why_whole.startswith("at no time")
    with windowed(TRACES / "h200_int4_ring", tmp_path, 10**9) as run:
        assert not run.why_whole, "nobody asked for more"


def test_a_scratch_folder_without_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    capture, scratch = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2)), tmp_path / "scratch"
    scratch.write_text("a file")
    with pytest.raises(BadInput, match="cannot be written .*name another scratch folder"):
        load_windows(capture, scratch, 1)
    scratch.unlink()

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_room)
    with pytest.raises(BadInput, match="No space left on device.*with more room"):
        load_windows(capture, scratch, 1)
    assert not list(scratch.iterdir())

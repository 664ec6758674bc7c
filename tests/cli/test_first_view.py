"""What `tracekern open` draws of a large capture: some blocks whole, all launches and host lanes, the longest waits."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opening import longest_waits
from timelines import timelines
from trace_processor import TraceProcessor, assert_no_loss
from typer.testing import CliRunner

from tests.paths import TRACES
from tracekern.cli.app import app
from tracekern.cli.commands import open_trace
from tracekern.export import labels
from tracekern.export.drawing import prepare
from tracekern.export.first_view import first_view
from tracekern.export.first_waits import first_waits
from tracekern.export.formats.chrome import write_chrome
from tracekern.export.formats.perfetto import FLOWS_SQL, write_perfetto
from tracekern.export.overview import Overview
from tracekern.timeline.load import load
from tracekern.timeline.model import EventClass, Timeline, TrackKind
from tracekern.viewers import perfetto_ui, queries

KEPT = TRACES / "h200x4_late_host"
MAX_SPANS = 8_000
"""A first view of at most so many spans; the capture has more than 20,000, of 16 blocks on each of 4 ranks."""


@pytest.fixture(scope="module")
def whole() -> Timeline:
    return load(KEPT)


@pytest.fixture(scope="module")
def sought(whole) -> list[int]:
    return open_trace._on_critical_path(whole)


@pytest.fixture(scope="module")
def view(whole, sought, tmp_path_factory) -> TraceProcessor:
    path = tmp_path_factory.mktemp("view") / "trace.pftrace.gz"
    stats = write_perfetto(whole, path, max_spans=MAX_SPANS, sought=sought)
    assert stats.spans + stats.spans_left_out == len(whole.spans)
    processor = TraceProcessor(path)
    assert_no_loss(processor)
    processor.query(queries.definitions())
    return processor


def kept_tracks(drawing) -> set[int]:
    return set(drawing.timeline.spans.track.tolist())


def test_blocks_are_drawn_whole_and_launches_and_host_lanes_all(whole, sought, view):
    part = first_view(prepare(whole), MAX_SPANS, sought)
    spans, tracks = whole.spans, np.array(sorted(kept_tracks(part)))
    assert MAX_SPANS * 0.8 < len(part.timeline.spans) <= MAX_SPANS
    drawn = view.query(
        "select name, count(*) from slice where category is not null and category not in ('flow') group by 1"
    )
    events = Counter(whole.events[event].name for event in spans.event[np.isin(spans.track, tracks)])
    of_kernels = {"work", "wait", "signal", "sync"}
    wanted = {e.name: events[e.name] for e in whole.events if e.event_class.value in of_kernels and events[e.name]}
    assert {name: number for name, number in drawn if name in wanted} == wanted, "whole tracks"
    lanes = {i for i, track in enumerate(whole.tracks) if track.kind is not TrackKind.DEVICE}
    assert lanes & set(spans.track.tolist()) <= set(tracks.tolist())
    blocks = {(whole.tracks[i].rank, whole.tracks[i].block) for i in tracks} - {(rank, -1) for rank in range(4)}
    warps = {i for i, t in enumerate(whole.tracks) if (t.rank, t.block) in blocks} & set(spans.track.tolist())
    assert warps | lanes >= set(tracks.tolist()) >= warps, "all warps of a block"
    numbers = [{block for of, block in blocks if of == rank} for rank in range(4)]
    assert {0, 5, 10, 15} <= set.intersection(*numbers), "the same blocks of all ranks"


def test_the_longest_waits_and_the_critical_path_are_in_it(whole, sought, view):
    """As `open` selects and names them."""
    part, drawn = first_view(prepare(whole), MAX_SPANS, sought), prepare(whole)
    assert labels.describe_first_waits(Overview.total([part])) == labels.describe_first_waits(Overview.total([drawn]))
    assert "outlier_wait" in labels.describe_first_waits(Overview.total([part]))
    assert labels.marks_of_longest_wait(Overview.total([part])) == labels.marks_of_longest_wait(Overview.total([drawn]))
    assert sought[0] in kept_tracks(part)
    typical, longest = longest_waits(whole)
    spans, shift = whole.spans, max(0, -int(whole.spans.start.min()))
    arrows = set(
        view.query(
            f"select s.ts, w.ts from ({FLOWS_SQL}) join slice s on s.id = signal_id join slice w on w.id = wait_id"
        )
    )
    for wait, signal in (typical, longest):
        assert (int(spans.start[signal]) + shift, int(spans.start[wait]) + shift) in arrows


def test_arrows_between_drawn_spans_stay_and_words_for_all(whole, sought, view):
    """What released a wait is said also where the signal is not drawn."""
    drawing = prepare(whole)
    tracks = list(kept_tracks(first_view(drawing, MAX_SPANS, sought)))
    spans, flows = drawing.timeline.spans, drawing.timeline.flows
    is_drawn = np.isin(spans.track, tracks)
    both = drawing.flow_drawable & is_drawn[flows.signal] & is_drawn[flows.wait]
    assert view.scalar("select count(*) from flow") == both.sum() > 0
    texts, which = labels.describe_releasers(drawing)
    wanted = Counter(texts[text] for text in which[is_drawn & (which >= 0)].tolist())
    assert (
        dict(view.query("select released_by, count(*) from tk_wait where released_by is not null group by 1")) == wanted
    )
    assert sum(wanted.values()) > len(np.unique(flows.wait[both]))


def test_json_is_a_first_view_too(whole, tmp_path):
    path = tmp_path / "trace.json"
    stats = write_chrome(whole, path, max_spans=MAX_SPANS)
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    (about,) = (event for event in slices if event["cat"] == "about")
    assert len(slices) - 1 == stats.spans <= MAX_SPANS
    assert f"drawn: {stats.part}" in about["name"]
    assert perfetto_ui.count_spans(path) == stats.spans


def test_of_a_block_that_is_too_large_what_is_near_the_longest_wait_is_drawn(whole):
    """One block a rank, over all iterations: none fits whole."""
    tracks = tuple(dataclasses.replace(t, block=min(t.block, 0)) for t in whole.tracks)
    drawing = prepare(whole.replace(tracks=tracks))
    part = first_view(drawing, 2_000)
    assert len(part.timeline.spans) == 2_000
    assert labels.describe_first_waits(Overview.total([part])) == labels.describe_first_waits(Overview.total([drawing]))
    assert part.part.startswith("all blocks, of these what is nearest in time to the longest wait: 2,000 of ")
    spans = part.timeline.spans
    device = part.timeline.tracks_of(TrackKind.DEVICE)[spans.track]
    around = [np.abs(part.draw_end - part.draw_end[of]) < 20_000 for of in first_waits(part).indices]
    assert (around[0] | around[1])[device].mean() > 0.5


@given(timelines(), st.integers(4, 40))
def test_it_is_never_larger_than_asked_for(timeline, max_spans):
    drawing = prepare(timeline)
    part = first_view(drawing, max_spans)
    drawn = len(part.timeline.spans) + len(part.timeline.marks)
    assert drawn == min(len(timeline.spans) + len(timeline.marks), max_spans) or (part.part and drawn < max_spans)
    assert bool(part.part) == (drawn < len(timeline.spans) + len(timeline.marks))


def test_open_draws_a_first_view_and_with_all_everything(tmp_path, monkeypatch):
    capture = tmp_path / "large"
    shutil.copytree(KEPT, capture, ignore=shutil.ignore_patterns("*.pftrace.gz"))
    monkeypatch.setattr(perfetto_ui, "MAX_SPANS", MAX_SPANS)
    shown = []
    monkeypatch.setattr(open_trace, "_show", lambda file, *_: shown.append((file, perfetto_ui.count_spans(file))))

    def run(*options: str) -> tuple[str, Path, int]:
        result = CliRunner().invoke(app, ["open", *options, str(capture)])
        assert result.exit_code == 0, result.output
        return result.stderr, *shown.pop()

    said, view, num_spans = run()
    assert view.name == "large-first-view.pftrace.gz"
    assert 0.8 * MAX_SPANS < num_spans <= MAX_SPANS
    assert re.search(
        rf"drawn: blocks 0, .* others with .*: {num_spans:,} of 20,842 spans, and [\d,]+ of 3,712 arrows", said
    )
    assert f"open --all {capture}" in said
    assert not view.exists()
    assert not (capture / "trace.pftrace.gz").exists()
    for options, wanted in ((["--all"], 20_842), ([], num_spans)):
        assert run(*options)[2] == wanted
    assert perfetto_ui.count_spans(capture / "trace.pftrace.gz") == 20_842


def test_no_wait_of_start_up_is_what_a_reader_sees_first():
    """However long it was: the barrier before the first iteration, which here begins 50 ms earlier."""
    timeline = load(TRACES / "h200x4")
    in_barrier = np.append([launch.name == "rank_barrier" for launch in timeline.launches], False)[
        timeline.spans.launch
    ]
    start = timeline.spans.start - 50_000_000 * (in_barrier & timeline.events_of(EventClass.WAIT)[timeline.spans.event])
    drawing = prepare(timeline.replace(spans=dataclasses.replace(timeline.spans, start=start)))
    found = first_waits(drawing)
    assert found.outlier is None
    assert timeline.launches[found.longest.launch].name == "dispatch_send"

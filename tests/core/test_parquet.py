"""Parquet export: every span and mark as a row, read back with polars and compared with the Timeline."""

from __future__ import annotations

from pathlib import Path

import expected
import numpy as np
import polars as pl
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from timelines import HOST, HOST_NAMES, LAUNCH, WAIT, make_timeline, timelines

from tracekern.export.formats.parquet import _COLUMNS, write_parquet
from tracekern.timeline.model import OPEN_END, EventClass, Timeline


def load(timeline: Timeline, path: Path) -> list[dict]:
    write_parquet(timeline, path)
    return pl.read_parquet(path).to_dicts()


def expected_fields(timeline: Timeline, span: int) -> dict[str, int]:
    """The fields under their column names: those that meet a base column or each other carry where they stand."""
    kind = timeline.events[timeline.spans.event[span]]
    if kind.event_class is EventClass.LAUNCH:  # has columns of its own for what its fields say
        return {}
    begin = expected.unpack(kind.begin_fields, int(timeline.spans.begin_payload[span]))
    at_end = {field.name for field in kind.end_fields}
    names = ["begin_" + field.name if field.name in at_end else field.name for field in kind.begin_fields]
    result = dict(zip(names, begin, strict=True))
    if timeline.spans.end[span] != OPEN_END:
        end = expected.unpack(kind.end_fields, int(timeline.spans.end_payload[span]))
        for field, value in zip(kind.end_fields, end, strict=True):
            result["end_" + field.name if field.name == "epoch" else field.name] = value
    return result


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeline=timelines())
def test_every_span_is_a_row(tmp_path: Path, timeline: Timeline):
    rows = load(timeline, tmp_path / "trace.parquet")
    by_span = {row["span"]: row for row in rows if row["span"] is not None}
    marks = [row for row in rows if row["span"] is None]
    assert len(by_span) == len(timeline.spans)
    assert len(marks) == len(timeline.marks)
    fields = {"peer", "slot", "delta", "value", "seen", "begin_peer", "wide", "end_epoch"}
    wanted, got = [], []
    for index in range(len(timeline.spans)):
        end = int(timeline.spans.end[index])
        start = int(timeline.spans.start[index])
        is_open = end == OPEN_END
        name = expected.span_slice(timeline, index)[0]
        track = timeline.tracks[timeline.spans.track[index]]
        span = (
            track.rank,
            track.name,
            name,
            start,
            None if is_open else end,
            None if is_open else end - start,
            is_open,
        )
        wanted.append((*span, tuple(sorted(expected_fields(timeline, index).items()))))
    for row in by_span.values():
        keys = ("rank", "track", "name", "start_ns", "end_ns", "duration_ns", "open")
        known = {name: row[name] for name in fields if row[name] is not None}
        got.append((*(row[key] for key in keys), tuple(sorted(known.items()))))
    assert sorted(got, key=repr) == sorted(wanted, key=repr)
    joined = zip(timeline.flows.signal, timeline.flows.wait, strict=True)
    edges = sorted(((wanted[signal], wanted[wait]) for signal, wait in joined), key=repr)
    place = dict(zip(by_span, got, strict=True))
    targets = [(place[span], place[wait]) for span, row in by_span.items() for wait in row["flow_targets"] or ()]
    sources = [(place[signal], place[span]) for span, row in by_span.items() for signal in row["flow_sources"] or ()]
    assert sorted(targets, key=repr) == sorted(sources, key=repr) == edges


def test_columns_read_well(tmp_path: Path):
    timeline = make_timeline()
    rows = load(timeline, tmp_path / "trace.parquet")
    copy = next(row for row in rows if row["event"] == "copy_token" and row["warp"] == 1)
    assert {key: value for key, value in copy.items() if value is not None} == {
        "span": copy["span"],
        "rank": 0,
        "node": "node-a",
        "track": "block 0 warp 1",
        "kind": "device",
        "block": 0,
        "warp": 1,
        "role": "sender",
        "event": "copy_token",
        "name": "copy_token",
        "class": "work",
        "ends_at": "issue",
        "launch": "dispatch",
        "sequence": 0,
        "epoch": 7,
        "peer_node": "node-a",
        "start_ns": 1000,
        "end_ns": 1500,
        "duration_ns": 500,
        "open": False,
        "peer": 1,
        "slot": 0,
        "delta": 5,
    }
    host = next(row for row in rows if row["event"] == timeline.events[HOST].name)
    assert host["name"] == HOST_NAMES[0]
    assert host["launch"] is None
    assert host["epoch"] is None
    launch = next(row for row in rows if row["event"] == timeline.events[LAUNCH].name)
    assert launch["name"] == "dispatch"
    assert set(copy) - {"peer", "slot", "delta", "value", "seen", "begin_peer", "wide", "end_epoch"} == _COLUMNS


def test_flow_numbers_are_span_numbers(tmp_path: Path):
    timeline = make_timeline(num_ranks=3)
    rows = {row["span"]: row for row in load(timeline, tmp_path / "trace.parquet")}
    assert len(timeline.flows) == 12
    for signal, wait in zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True):
        assert rows[signal]["flow_targets"] == [wait]
        assert rows[wait]["flow_sources"] == [signal]
        assert rows[wait]["event"] == timeline.events[WAIT].name


def test_metadata_stands_in_the_schema(tmp_path: Path):
    path = tmp_path / "trace.parquet"
    write_parquet(make_timeline(aligned=False), path)
    metadata = pyarrow.parquet.read_schema(path).metadata
    assert metadata[b"run_id"] == b"run-17"
    assert metadata[b"aligned"].startswith(b"UNALIGNED")


def test_row_groups_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timeline = make_timeline(num_ranks=4)
    whole = load(timeline, tmp_path / "whole.parquet")
    monkeypatch.setattr("tracekern.export.formats.parquet._ROWS_AT_A_TIME", 7)
    assert load(timeline, tmp_path / "pieces.parquet") == whole
    assert pyarrow.parquet.ParquetFile(tmp_path / "pieces.parquet").num_row_groups > 5


def test_an_empty_timeline_keeps_its_columns(tmp_path: Path):
    timeline = make_timeline()
    nothing = np.zeros(len(timeline.spans), bool)
    empty = timeline.replace(spans=timeline.spans.take(nothing), flows=type(timeline.flows)())
    assert load(empty, tmp_path / "trace.parquet") == []
    assert "peer" in pyarrow.parquet.read_schema(tmp_path / "trace.parquet").names

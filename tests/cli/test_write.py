"""The suffix picks the format; what cannot be written is told in one line."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import polars as pl
import pytest
from timelines import make_timeline
from trace_processor import TraceProcessor

from tracekern.errors import BadInput
from tracekern.export import write
from tracekern.export.write import ManySpansWarning, formats, save
from tracekern.timeline.model import Marks, Problem, Spans


def marks_of(spans: Spans) -> Marks:
    """One where each third span begins."""
    some = spans.take(slice(0, None, 3))
    return Marks(some.track, some.event, some.launch, some.start, some.begin_payload)


@pytest.mark.parametrize("suffix", [".pftrace", ".pftrace.gz", ".json", ".json.gz"])
def test_pictures_by_suffix(tmp_path: Path, suffix: str):
    timeline = make_timeline()
    timeline = timeline.replace(marks=marks_of(timeline.spans))
    path = tmp_path / f"trace{suffix}"
    stats = save(timeline, path)
    assert (stats.spans, stats.marks) == (len(timeline.spans), len(timeline.marks))
    assert stats.flows == len(timeline.flows)
    assert stats.bytes == path.stat().st_size
    assert TraceProcessor(path).scalar("select count(*) from flow") == len(timeline.flows)


@pytest.mark.parametrize(
    ("suffix", "rows"),
    [
        (".pftrace", ["longest wait: rank 0 · warp 00", "rank 1 ±800 ns", "rank 1 ±800 ns", "tracekern: moe dispatch"]),
        (".json", ["block 000 warp 00", "problems", "problems", "problems"]),
    ],
)
def test_problems_are_drawn_where_they_were_met(tmp_path: Path, suffix: str, rows: list[str]):
    """At the end of their track, or at the start of all, there one after the other."""
    places = ((0, 2), (1, -1), (1, -1), (-1, -1))
    problems = tuple(Problem("error", "fault", *place, f"problem {idx}") for idx, place in enumerate(places))
    path = tmp_path / f"trace{suffix}"
    save(make_timeline(problems=problems), path)
    drawn = TraceProcessor(path).query(
        "select s.name, coalesce(h.name, t.name), s.ts from slice s join track t on t.id = s.track_id "
        "left join thread_track k on k.id = t.id left join thread h using (utid) "
        "where s.category = 'problem' order by 1"
    )
    assert drawn == [(f"problem {idx}", row, (3000, 500, 501, 502)[idx]) for idx, row in enumerate(rows)]


def test_parquet_by_suffix_and_by_name(tmp_path: Path):
    timeline = make_timeline()
    for name, format_name in (("trace.parquet", None), ("trace.table", "parquet")):
        save(timeline, tmp_path / name, format_name)
        assert pl.read_parquet(tmp_path / name).height == len(timeline.spans)


def test_a_part_is_written(tmp_path: Path):
    timeline = make_timeline(num_ranks=3)
    stats = save(timeline, tmp_path / "trace.parquet", ranks=[1], window=(0, 1200))
    rows = pl.read_parquet(tmp_path / "trace.parquet")
    assert stats.spans == rows.height
    assert set(rows["rank"]) == {1}
    assert rows["start_ns"].max() == 1100


def test_progress_ends_at_the_total(tmp_path: Path):
    timeline = make_timeline()
    for name in ("a.pftrace.gz", "a.json", "a.parquet"):
        steps: list[tuple[int, int]] = []
        save(timeline, tmp_path / name, progress=lambda done, total, steps=steps: steps.append((done, total)))
        assert steps[-1] == (len(timeline.spans), len(timeline.spans))


@pytest.mark.parametrize("suffix", [".pftrace", ".json"])
def test_one_row_per_block_and_role(tmp_path: Path, suffix: str):
    timeline = make_timeline()
    timeline = timeline.replace(tracks=tuple(dataclasses.replace(track, role="") for track in timeline.tracks))
    path = tmp_path / f"trace{suffix}"
    stats = save(timeline, path, tracks="block")
    drawn = "select count(*) from slice where category in ('work', 'wait', 'signal')"
    assert TraceProcessor(path).scalar(drawn) == 12
    assert stats.spans_left_out == 12  # 2 ranks x 2 blocks x 1 warp x 3 spans
    assert stats.spans == len(timeline.spans) - 12
    assert (stats.flows, stats.flows_left_out) == (4, 4)


def test_many_spans_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "MANY_SPANS", 10)
    with pytest.warns(ManySpansWarning, match="--window, --ranks or --tracks block"):
        save(make_timeline(), tmp_path / "trace.pftrace")


def test_a_table_of_many_spans_does_not_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write, "MANY_SPANS", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ManySpansWarning)
        save(make_timeline(), tmp_path / "trace.parquet")


@pytest.mark.parametrize("name", ["trace.perfetto", "trace", "trace.gz"])
def test_unknown_suffix(tmp_path: Path, name: str):
    with pytest.raises(BadInput, match=r"\.pftrace, \.pftrace\.gz, \.json, \.json\.gz, \.parquet"):
        save(make_timeline(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_names_and_suffixes_belong_to_one_format():
    names = [entry.name for entry in formats()]
    suffixes = [suffix for entry in formats() for suffix in entry.suffixes]
    assert names == ["perfetto", "chrome", "parquet"]
    assert len(suffixes) == len(set(suffixes))


@pytest.mark.parametrize(("options", "words"), [({"format": "csv"}, "csv"), ({"tracks": "lane"}, "warp or block")])
def test_unknown_options(tmp_path: Path, options: dict, words: str):
    with pytest.raises(BadInput, match=words):
        save(make_timeline(), tmp_path / "trace.json", **options)


@pytest.mark.parametrize("suffix", [".pftrace", ".pftrace.gz", ".json", ".parquet"])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, suffix: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write .*; nothing was left there"):
        save(make_timeline(), tmp_path / "file" / f"out{suffix}")


@pytest.mark.parametrize("suffix", [".pftrace", ".json", ".parquet"])
def test_ticks_are_refused_and_nothing_is_left(tmp_path: Path, suffix: str):
    with pytest.raises(BadInput, match="ticks"):
        save(make_timeline(unit="ticks"), tmp_path / f"trace{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".pftrace", ".json"])
def test_a_host_span_without_its_name_is_refused(tmp_path: Path, suffix: str):
    with pytest.raises(BadInput, match=r"a host span has name \d+, the timeline has 0 host names"):
        save(make_timeline().replace(host_names=()), tmp_path / f"trace{suffix}")
    assert list(tmp_path.iterdir()) == []

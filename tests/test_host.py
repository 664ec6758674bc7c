"""Host lanes: ranges of the capture, and what torch.profiler writes, sound and damaged."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.captures import GROUP_NS, CaptureSpec, fill_segment, write_capture
from tracekern.dump.format import torch_profile_file_name
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.export.write import save
from tracekern.record.session import capture
from tracekern.segment.pack import write_dump
from tracekern.timeline.host import host_lanes, torch_lanes
from tracekern.timeline.load import load
from tracekern.timeline.model import TrackKind

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 7, "ts": 10.5, "dur": 2.25}


def write_trace(path: Path, *events: dict[str, Any], base: Any = 10**18) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events), "baseTimeNanoseconds": base}))
    return path


def test_times_count_from_the_profilers_base(tmp_path: Path):
    (lane,) = torch_lanes(write_trace(tmp_path / "t.json", EVENT))
    assert (lane.start.tolist(), lane.end.tolist(), lane.labels) == (
        [10**18 + 10_500],
        [10**18 + 12_750],
        ("aten::mm",),
    )


def test_times_since_1970_are_exact(tmp_path: Path):
    """Without a base; as floats of microseconds they would be up to 128 ns off."""
    event = '{"ph": "X", "name": "k", "pid": 1, "tid": 1, "ts": 1795364000123456.%d00, "dur": 0.100}'
    (tmp_path / "t.json").write_text('{"traceEvents": [' + ",".join(event % i for i in range(10)) + "]}")
    (lane,) = torch_lanes(tmp_path / "t.json")
    assert lane.start.tolist() == [1795364000123456000 + 100 * i for i in range(10)]
    assert lane.end.tolist() == [1795364000123456000 + 100 * i for i in range(1, 11)]


def test_each_thread_is_a_lane_with_parents_before_children(tmp_path: Path):
    inner = {**EVENT, "name": "inner"}
    outer = {**EVENT, "name": "outer", "dur": 9}
    other = {**EVENT, "name": "other", "tid": 8}
    noise = [
        {"ph": "M", "name": "process_name"},
        {"ph": "i", "ts": 1},
        {**EVENT, "cat": "Trace", "name": "PyTorch Profiler"},
    ]
    lanes = torch_lanes(write_trace(tmp_path / "t.json", *noise, inner, outer, other))
    assert [lane.labels for lane in lanes] == [("outer", "inner"), ("other",)]


def test_a_stream_of_a_gpu_is_a_lane_beside_the_thread_of_its_number(tmp_path: Path):
    kernel = {**EVENT, "cat": "kernel", "name": "dispatch_send", "pid": 0}
    copy = {**kernel, "cat": "gpu_memcpy", "name": "copy", "ts": 30}
    lanes = torch_lanes(write_trace(tmp_path / "t.json", {**EVENT, "pid": 0}, kernel, copy))
    assert [(lane.name, lane.labels) for lane in lanes] == [
        ("torch thread 7", ("aten::mm",)),
        ("torch stream 7", ("dispatch_send", "copy")),
    ]


def test_a_real_profile_lies_where_the_host_was(tmp_path: Path):
    torch = pytest.importorskip("torch")
    before = time.time_ns()
    with torch.profiler.profile() as profiler:
        torch.ones(64, 64) @ torch.ones(64, 64)
    after = time.time_ns()
    profiler.export_chrome_trace(str(tmp_path / "t.json.gz"))
    rows = [
        row
        for lane in torch_lanes(tmp_path / "t.json.gz")
        for row in zip(lane.labels, lane.start, lane.end, strict=True)
    ]
    found = [(start, end) for label, start, end in rows if label == "aten::matmul"]
    assert len(found) == 1
    # The profiler turns its own clock into wall time: good to a millisecond.
    assert before - 10**6 <= found[0][0] <= found[0][1] <= after + 10**6


def test_ranges_of_several_threads_and_ranks(tmp_path: Path):
    write_capture(tmp_path, CaptureSpec(num_ranks=2, host_spans=3))
    (lane,) = host_lanes(read_dump(tmp_path / "rank_00001.tkdump"))
    assert lane.labels == ("step 0", "step 1", "step 2")
    trace = write_trace(tmp_path / "outside.json", EVENT, base=10**15)
    timeline = load(tmp_path, host=[(1, trace)])
    lanes = [(track.rank, track.name) for track in timeline.tracks if track.kind == TrackKind.HOST]
    assert lanes == [(0, "python"), (1, "python"), (1, "torch thread 7")]
    row = np.flatnonzero(timeline.spans.track == len(timeline.tracks) - 1)
    assert timeline.host_names[int(timeline.spans.begin_payload[row[0]])] == "aten::mm"
    assert timeline.origin_ns + timeline.spans.start[row[0]] == 10**15 + 10_500
    with pytest.raises(BadInput, match="is for rank 5"):
        load(tmp_path, host=[(5, trace)])


def test_an_export_of_our_own_is_no_profile(tmp_path: Path):
    capture = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=1))
    save(load(capture), tmp_path / "e.json")
    with pytest.raises(BadInput, match=r"e\.json: was written by tracekern itself"):
        load(capture, host=[(0, tmp_path / "e.json")])


def test_a_profile_is_drawn_once(tmp_path: Path):
    write_capture(tmp_path, CaptureSpec(num_ranks=2))
    outside = write_trace(tmp_path / "outside.json", EVENT, base=10**15)
    inside = write_trace(tmp_path / torch_profile_file_name(1), EVENT, base=10**15)
    (tmp_path / "link.json").symlink_to(outside)
    for host in ([(0, outside), (0, tmp_path / "link.json")], [(0, outside), (1, outside)], [(1, inside)]):
        with pytest.raises(BadInput, match=r"is there for rank \d already; name a profile once"):
            load(tmp_path, host=host)


def test_a_range_during_which_the_wall_clock_was_set_back_takes_no_time(tmp_path: Path):
    segment = fill_segment(CaptureSpec(num_ranks=1, host_spans=2), 0)
    try:
        segment.host_spans()["end_ns"][0] -= GROUP_NS  # 1 ns before its start: what stands for "never ended"
        write_dump(tmp_path / "rank_00000.tkdump", segment)
    finally:
        segment.unlink()
        segment.close()
    timeline = load(tmp_path)
    host = timeline.spans.launch < 0
    assert (timeline.spans.end - timeline.spans.start)[host].tolist() == [0, GROUP_NS - 1]


def test_names_that_are_no_text_get_a_mark_in_their_place(tmp_path: Path):
    (lane,) = torch_lanes(write_trace(tmp_path / "t.json", {**EVENT, "name": "aten::\udcff", "tid": "\ud800"}))
    assert (lane.name, lane.labels) == ("torch thread ?", ("aten::?",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Chrome trace"),
        (b"{", "not a Chrome trace"),
        (b"[" * 100_000, "not a Chrome trace"),
        (b"\x1f\x8b\x00", "not a Chrome trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "not a Chrome trace"),
        (b"[1, 2]", "no traceEvents"),
        (b'{"traceEvents": 3}', "no traceEvents"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "soon"}', "baseTimeNanoseconds"),
        (b'{"traceEvents": [{"ph": "X"}]}', "has no time"),
        (b'{"traceEvents": [{"ph": "X", "ts": "x"}]}', "has no time"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1e300}]}', "impossible time"),
        (
            b'{"traceEvents": [{"ph":"X", "ts":-1e300}], "baseTimeNanoseconds": 4611686018427387903}',
            "impossible time",
        ),
        (b'{"traceEvents": [{"ph": "X", "ts": 1e99999999999999999999}]}', "not a Chrome trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": NaN}]}', "has no time"),
        (b'{"traceEvents": [{"ph": "X", "ts": 5, "dur": -1}]}', "impossible time"),
    ],
)
def test_damaged_traces_are_one_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as refused:
        torch_lanes(path)
    assert "\n" not in str(refused.value)
    with capture(tmp_path / "capture") as session, pytest.raises(BadInput, match=message):
        session.add_torch_profile(path)
    assert load(tmp_path / "capture").problems == ()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_gzip_never_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    content = bytearray(gzip.compress(json.dumps({"traceEvents": [EVENT] * 20}).encode(), mtime=0))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("gz") / "t.json.gz"
    path.write_bytes(bytes(content))
    try:
        lanes = torch_lanes(path)
    except BadInput:
        return
    assert [len(lane.labels) for lane in lanes] == [20]

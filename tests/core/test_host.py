"""Host lanes: ranges of the capture, and what torch.profiler writes, sound and damaged."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.captures import GROUP_NS, START_NS, CaptureSpec, fill_segment, removed_after, write_capture
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.summary import summarize
from tracekern.dump.format import MAX_NS, torch_profile_file_name
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.export.labels import about
from tracekern.export.write import save
from tracekern.record.session import capture
from tracekern.segment.pack import write_dump
from tracekern.timeline.join.host_lanes import HostLane, host_lanes, is_torch_lane, torch_lanes
from tracekern.timeline.load import load
from tracekern.timeline.model import Timeline, TrackKind
from tracekern.viewers.report.headlines import headlines

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 7, "ts": 10.5, "dur": 2.25}


def lanes_of(path: Path) -> list[HostLane]:
    """Of a profile of a single rank, whatever its times."""
    return torch_lanes(path, 0, 1, (0, MAX_NS))[0]


def write_trace(path: Path, *events: dict[str, Any], base: Any = 10**18) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events), "baseTimeNanoseconds": base}))
    return path


def test_times_since_1970_are_exact(tmp_path: Path):
    """Without a base; as floats of microseconds they would be up to 128 ns off."""
    event = '{"ph": "X", "name": "k", "pid": 1, "tid": 1, "ts": 1795364000123456.%d00, "dur": 0.100}'
    (tmp_path / "t.json").write_text('{"traceEvents": [' + ",".join(event % i for i in range(10)) + "]}")
    (lane,) = lanes_of(tmp_path / "t.json")
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
    lanes = lanes_of(write_trace(tmp_path / "t.json", *noise, inner, outer, other))
    assert [lane.labels for lane in lanes] == [("outer", "inner"), ("other",)]


def test_a_stream_of_a_gpu_is_a_lane_beside_the_thread_of_its_number(tmp_path: Path):
    kernel = {**EVENT, "cat": "kernel", "name": "dispatch_send", "pid": 0}
    copy = {**kernel, "cat": "gpu_memcpy", "name": "copy", "ts": 30}
    lanes = lanes_of(write_trace(tmp_path / "t.json", {**EVENT, "pid": 0}, kernel, copy))
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
        row for lane in lanes_of(tmp_path / "t.json.gz") for row in zip(lane.labels, lane.start, lane.end, strict=True)
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
    with removed_after(fill_segment(CaptureSpec(num_ranks=1, host_spans=2), 0)) as segment:
        segment.host_spans()["end_ns"][0] -= GROUP_NS  # 1 ns before its start: what stands for "never ended"
        write_dump(tmp_path / "rank_00000.tkdump", segment)
    timeline = load(tmp_path)
    host = timeline.spans.launch < 0
    assert (timeline.spans.end - timeline.spans.start)[host].tolist() == [0, GROUP_NS - 1]


def test_names_that_are_no_text_get_a_mark_in_their_place(tmp_path: Path):
    (lane,) = lanes_of(write_trace(tmp_path / "t.json", {**EVENT, "name": "aten::\udcff", "tid": "\ud800"}))
    assert (lane.name, lane.labels) == ("torch thread ?", ("aten::?",))


def lanes_of_torch(timeline: Timeline) -> list[tuple[str, int]]:
    """Name and number of spans of each lane of torch.profiler."""
    counts = np.bincount(timeline.spans.track, minlength=len(timeline.tracks)).tolist()
    return [(track.name, number) for track, number in zip(timeline.tracks, counts, strict=True) if is_torch_lane(track)]


LATE, EARLY, ZERO = ({**EVENT, "ts": ts} for ts in (86_400e6, -86_400e6, -(10**9)))
"""A day after the capture, a day before, and in 1970, where the base is a capture's START_NS."""


@pytest.mark.parametrize("outside", [LATE, EARLY, ZERO, {**EVENT, "ts": 1e300}, {**EVENT, "dur": -3}])
def test_events_outside_the_capture_are_left_out_and_counted(tmp_path: Path, outside: dict[str, Any]):
    """An axis of 24 hours, or of 57 years, shows nothing. A profile with half its times 0 was met in the field."""
    write_capture(tmp_path, CaptureSpec(num_ranks=2))
    axis_ns = summarize(load(tmp_path)).duration_ns
    trace = write_trace(tmp_path / "t.json", EVENT, outside, {**outside, "tid": 8}, base=START_NS)
    timeline = load(tmp_path, host=[(1, trace)])
    assert lanes_of_torch(timeline) == [("torch thread 7", 1)]
    assert summarize(timeline).duration_ns < axis_ns + 10**6
    (problem,) = timeline.problems
    assert (problem.severity, problem.kind, problem.rank, problem.count) == ("warning", "left_out_profile_event", 1, 2)
    assert problem.text.startswith("rank 1: 2 of 3 events of t.json lie outside the capture and are left out: they are")
    assert problem.text in headline_of(timeline, "trust")
    assert "2 left out profile events" in about(timeline)["problems"]


@pytest.mark.parametrize("base", [0, 1_790_857_026 * 10**9])
def test_a_profile_of_another_day_or_without_its_base_says_so(tmp_path: Path, base: int):
    """All of it is left out, and that is an error: what was asked for is missing."""
    write_capture(tmp_path, CaptureSpec(num_ranks=1))
    trace = write_trace(tmp_path / "t.json", EVENT, {**EVENT, "ts": 30}, base=base)
    timeline = load(tmp_path, host=[(0, trace)])
    assert lanes_of_torch(timeline) == []
    (problem,) = timeline.problems
    assert (problem.severity, problem.count) == ("error", 2)
    date = "1970-01-01 00:00:00" if base == 0 else "2026-10-01 12:17:06"
    assert problem.text == (
        f"rank 0: no event of t.json lies within the capture, all 2 are left out: they are of {date} to {date}, the "
        "capture of 1970-01-12 13:46:39 to 1970-01-12 13:46:40 UTC; exported by another run, or without its base time?"
    )
    assert problem.text in headline_of(timeline, "trust")


def headline_of(timeline: Timeline, word: str) -> str:
    return next(line.text for line in headlines(analyze(timeline)) if line.word == word)


@pytest.mark.parametrize(
    ("about_ranks", "is_refused"),
    [
        ({"rank": 1, "world_size": 2}, True),
        ({"rank": 1}, True),
        ({"rank": 0, "world_size": 2}, False),
        ({"rank": 1, "world_size": 8}, False),  # another numbering: each rank of a job of 8 captures in its own way
        ({"rank": "one"}, False),
        ([1], False),
    ],
)
def test_a_profile_of_another_rank_is_refused(tmp_path: Path, about_ranks: Any, is_refused: bool):
    write_capture(tmp_path, CaptureSpec(num_ranks=2))
    trace = tmp_path / "t.json"
    content = {"traceEvents": [EVENT], "baseTimeNanoseconds": START_NS, "distributedInfo": about_ranks}
    trace.write_text(json.dumps(content))
    if not is_refused:
        assert lanes_of_torch(load(tmp_path, host=[(0, trace)])) == [("torch thread 7", 1)]
        return
    with pytest.raises(BadInput, match=r"t\.json: is of rank 1 .* given for rank 0; give it for rank 1"):
        load(tmp_path, host=[(0, trace)])
    trace.rename(tmp_path / torch_profile_file_name(0))
    with pytest.raises(BadInput, match=r"rank_00000\.torch\.json\.gz: is of rank 1"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (b"caf\xe9", "caf\ufffd"),
        (b"a\tb\x01c", "a\tb\x01c"),
        (b"\xf0\x9f", "\ufffd"),
        ("Rückwärts".encode(), "Rückwärts"),
    ],
)
def test_names_of_any_bytes_are_read(tmp_path: Path, name: bytes, read: str):
    path = write_trace(tmp_path / "t.json", {**EVENT, "name": "NAME"})
    path.write_bytes(path.read_bytes().replace(b"NAME", name))
    (lane,) = lanes_of(path)
    assert lane.labels == (read,)


def of_other_profilers(start_ns: int) -> dict[str, tuple[object, int]]:
    """Three spans of 1 ms, one each 2 ms, as other profilers write them, and how many of them can be placed."""
    times = [(start_ns + number * 2_000_000, start_ns + number * 2_000_000 + 1_000_000) for number in range(3)]

    def at(ns: int, base: int = start_ns) -> float:
        return (ns - base) / 1e3

    about = {"name": "step", "pid": 1, "tid": 1}
    whole = [{**about, "ph": "X", "ts": at(begin), "dur": 1000} for begin, _ in times]
    pairs = [{**about, "ph": ph, "ts": at(ns)} for both in times for ph, ns in zip("BE", both, strict=True)]
    lines = [
        {"coll_perf": {"coll": "AllReduce", "coll_exec_time_us": 1000, "dump_timestamp_us": end // 1000}}
        for _, end in times
    ]
    in_1970 = [{**about, "ph": "X", "ts": begin / 1e3, "dur": 1000} for begin, _ in times]
    return {
        "proton": ({"displayTimeUnit": "us", "baseTimeNanoseconds": start_ns, "traceEvents": whole}, 3),
        "viztracer": ({"traceEvents": whole, "viztracer_metadata": {"baseTimeNanoseconds": start_ns}}, 3),
        "array": (in_1970, 3),
        "begins and ends": ({"baseTimeNanoseconds": start_ns, "traceEvents": pairs}, 3),
        "inspector": ("\n".join(map(json.dumps, lines)), 3),
        "cut off": (json.dumps({"baseTimeNanoseconds": start_ns, "traceEvents": whole})[:-30], 2),
        "monotonic": ({"traceEvents": whole}, 0),
    }


@pytest.mark.parametrize("kind", of_other_profilers(0))
def test_traces_of_other_profilers_are_read_and_what_is_left_out_is_told(tmp_path: Path, kind: str):
    with capture(tmp_path / "capture") as session, session.range("all"):
        start_ns = time.time_ns()
        time.sleep(0.01)
    content, num_placed = of_other_profilers(start_ns)[kind]
    path = tmp_path / "t.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    timeline = load(tmp_path / "capture", host=[(0, path)])
    spans = [row for row in range(len(timeline.spans)) if is_torch_lane(timeline.tracks[timeline.spans.track[row]])]
    assert len(spans) == num_placed
    slewed_ns = 500  # of a wall clock that is set right by up to 500 ppm meanwhile
    assert all(abs(timeline.spans.end[row] - timeline.spans.start[row] - 1_000_000) <= slewed_ns for row in spans)
    told = [problem.text for problem in timeline.problems]
    if kind == "cut off":
        assert told == ["rank 0: t.json: left out: the end of the file, which is cut off"]
    elif num_placed == 0:
        assert "export it with its base time (baseTimeNanoseconds)" in told[0]
    else:
        assert told == []


def test_begins_without_ends_and_asynchronous_spans_are_counted(tmp_path: Path):
    about = {"name": "a", "pid": 1, "tid": 1}
    events = [{**about, "ph": phase, "ts": ts} for ts, phase in enumerate("BBEEEBb")]
    path = write_trace(tmp_path / "t.json", *events)
    write_capture(tmp_path, CaptureSpec(num_ranks=1))
    told = [problem.text.partition("left out: ")[2] for problem in load(tmp_path, host=[(0, path)]).problems]
    assert {"1 asynchronous span", "1 end without a begin", "1 begin without an end"} <= set(told)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a Chrome trace"),
        (b"[" * 100_000, "not a Chrome trace"),
        (b"\x1f\x8b\x00", "not a Chrome trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "not a Chrome trace"),
        (b"[1, 2]", "no traceEvents"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "soon"}', "baseTimeNanoseconds"),
        (b'{"traceEvents": [{"ph": "X"}]}', "has no time"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1e99999999999999999999}]}', "not a Chrome trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": NaN}]}', "has no time"),
    ],
)
def test_damaged_traces_are_one_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as refused:
        lanes_of(path)
    assert "\n" not in str(refused.value)
    with capture(tmp_path / "capture") as session, pytest.raises(BadInput, match=message):
        session.add_torch_profile(path)
    assert load(tmp_path / "capture").problems == ()


@given(data=st.data())
def test_a_damaged_gzip_never_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    content = bytearray(gzip.compress(json.dumps({"traceEvents": [EVENT] * 20}).encode(), mtime=0))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("gz") / "t.json.gz"
    path.write_bytes(bytes(content))
    try:
        lanes = lanes_of(path)
    except BadInput:
        return
    assert [len(lane.labels) for lane in lanes] == [20]

"""Tracks that count cycles of the core clock: where their spans stand, how right they are, who measured the rate."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from devices import require_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from toolchains import NVCC, ROOT, compile_cached, program

from tests.captures import EVENT_TABLE, CaptureSpec, metadata, reserve_launch
from tracekern.dump import format as fmt
from tracekern.dump.format import RecordKind
from tracekern.dump.reader import read_dump
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.model import OPEN_END, Timeline, TrackKind

COPY = 1
TICK_NS = 32
GHZ = 1.755  # of an H200
SIMULATED_GHZ = 0.755
BASE_NS = 10**15


@dataclass(frozen=True)
class CycleTrack:
    """Spans of one writer in true ns since the start of the capture."""

    start_ns: float
    end_ns: float
    spans: tuple[tuple[float, float], ...]
    ghz: float = GHZ
    finished: bool = True
    counts_cycles: bool = True

    def ticks(self, time_ns: float) -> int:
        return int(BASE_NS + time_ns) // TICK_NS * TICK_NS

    def stamp(self, time_ns: float) -> int:
        return int((time_ns - self.start_ns) * self.ghz) if self.counts_cycles else self.ticks(time_ns)


def decode_regions(path: Path, headers: np.ndarray, records: np.ndarray, events: dict | None = None) -> Timeline:
    """[num_tracks] headers and [num_tracks, records_per_track] records through a real segment and dump."""
    about = metadata(CaptureSpec(num_ranks=1, run_id="cycles"), 0)
    about["clock"] = {"name": "simulated", "ticks_per_second": 10**9, "resolution_ticks": TICK_NS, "shift": 5}
    segment = SegmentWriter.create(f"cycles-{os.getpid()}", 0, about, records.nbytes + headers.nbytes + (1 << 20))
    try:
        plan = LaunchPlan(
            name="kernel",
            num_blocks=len(headers),
            warps_per_block=1,
            records_per_track=records.shape[1],
            blocks=range(len(headers)),
            events=json.dumps(events or EVENT_TABLE).encode(),
        )
        assert reserve_launch(segment, plan) is not None
        entry = segment.launches()[-1]
        segment.track_headers(entry)[:] = headers
        segment.records(entry)[:] = records
        segment.header["state"] = fmt.SegmentState.CLOSED
        write_dump(path, segment)
    finally:
        segment.unlink()
        segment.close()
    return decode(read_dump(path))


def decode_tracks(path: Path, tracks: list[CycleTrack]) -> Timeline:
    """What a reader makes of the tracks; the track of number i is block i."""
    headers = np.zeros(len(tracks), fmt.TRACK_HEADER)
    records = np.zeros((len(tracks), 2 * max(len(track.spans) for track in tracks) + 1), fmt.WIDE_RECORD)
    for number, track in enumerate(tracks):
        header = headers[number]
        header["start_ticks"] = track.ticks(track.start_ns)
        header["started"] = fmt.STARTED_CYCLES if track.counts_cycles else fmt.STARTED
        if not track.counts_cycles:
            in_units = [tuple(track.stamp(time_ns) >> 5 & 0xFFFFFFFF for time_ns in span) for span in track.spans]
            rows = [(end, 0, begin, RecordKind.SPAN | COPY << fmt.EVENT_SHIFT) for begin, end in in_units]
            records[number, : len(rows)] = np.array(rows, fmt.SPAN_RECORD).view(fmt.WIDE_RECORD)
        for column, time_ns in enumerate(time for span in track.spans for time in span if track.counts_cycles):
            kind = (RecordKind.BEGIN, RecordKind.END)[column % 2]
            records[number, column] = (track.stamp(time_ns), 0, kind | COPY << fmt.EVENT_SHIFT)
        if track.finished:
            header["end_ticks"] = track.ticks(track.end_ns)
            header["written"] = header["attempted"] = len(track.spans) * (2 if track.counts_cycles else 1)
            header["elapsed_cycles"] = track.stamp(track.end_ns) if track.counts_cycles else 0
    return decode_regions(path, headers, records)


def spans_of(timeline: Timeline, block: int) -> tuple[np.ndarray, np.ndarray]:
    """([n] start, end) in ns since BASE_NS."""
    tracks = [i for i, t in enumerate(timeline.tracks) if t.kind is TrackKind.DEVICE and t.block == block]
    mine = np.isin(timeline.spans.track, tracks)
    return timeline.spans.start[mine] - BASE_NS, timeline.spans.end[mine] - BASE_NS


def told(timeline: Timeline, kind: str) -> str:
    (problem,) = [problem for problem in timeline.problems if problem.kind == kind]
    return problem.text


def short_spans(start_ns: float, count: int = 200) -> tuple[tuple[float, float], ...]:
    """Spans of 5 to 30 ns, 5 to 30 ns apart."""
    lengths = 5 + np.arange(2 * count) * 7.3 % 25
    times = start_ns + 40 + np.cumsum(lengths)
    return tuple(zip(times[::2].tolist(), times[1::2].tolist(), strict=True))


def test_spans_below_a_tick_are_told_apart(tmp_path: Path):
    track = CycleTrack(1_000.0, 25_000.0, short_spans(1_000.0))
    coarse = dataclasses.replace(track, counts_cycles=False)
    timeline = decode_tracks(tmp_path / "rank_00000.tkdump", [track, coarse])
    truth = np.array(track.spans)
    start, end = spans_of(timeline, 0)
    assert np.abs((end - start) - (truth[:, 1] - truth[:, 0])).max() < 2
    assert np.abs(np.diff(start) - np.diff(truth[:, 0])).max() < 2
    # The same spans on the realtime clock: 0 or 32 ns.
    start, end = spans_of(timeline, 1)
    assert set((end - start).tolist()) == {0, TICK_NS}
    text = told(timeline, "cycle_clock")
    assert "rank 0: the clock of 1 track counts cycles, 1,75" in text
    assert "right to 1 ns and 0.74%" in text  # 32 ns and 256 cycles of 24 us
    assert "too short" not in text


@settings(max_examples=80, deadline=None)
@given(
    ghz=st.floats(0.4, 3.0),
    start_ns=st.floats(0, 1e12),
    length_ns=st.floats(40_000, 1e9),
    places=st.lists(st.floats(0, 1), min_size=2, max_size=20),
)
def test_a_track_is_right_within_a_tick_and_its_durations_within_what_is_stated(
    tmp_path_factory, ghz, start_ns, length_ns, places
):
    times = sorted(start_ns + place * length_ns for place in places)[: len(places) // 2 * 2]
    spans = tuple(zip(times[::2], times[1::2], strict=True))
    track = CycleTrack(start_ns, start_ns + length_ns, spans, ghz)
    timeline = decode_tracks(tmp_path_factory.mktemp("cycles") / "rank_00000.tkdump", [track])
    start, end = spans_of(timeline, 0)
    truth = np.array(spans)
    found = np.stack([np.sort(start), np.sort(end)], axis=1)  # no two of them overlap
    # A reading of the realtime clock stands for any moment of its tick; a cycle is up to 2.5 ns, rounded to ns.
    late = truth - found
    assert late.min() > -2
    assert late.max() < TICK_NS + 5
    stated = TICK_NS / (length_ns - TICK_NS)
    length = truth[:, 1] - truth[:, 0]
    assert np.all(np.abs(found[:, 1] - found[:, 0] - length) <= length * stated + 1 + 1 / ghz)


def test_a_track_too_short_to_measure_takes_the_rate_of_the_others(tmp_path: Path):
    long = CycleTrack(0.0, 50_000.0, short_spans(0.0, 3))
    short = CycleTrack(60_000.0, 60_100.0, ((60_010.0, 60_040.0), (60_050.0, 60_080.0)))
    hung = dataclasses.replace(
        long, start_ns=70_000.0, spans=((70_100.0, 70_120.0), (72_000.0, 72_030.0)), finished=False
    )
    timeline = decode_tracks(tmp_path / "rank_00000.tkdump", [long, short, hung])
    for block in (1, 2):
        start, end = spans_of(timeline, block)
        truth = np.array([short, hung][block - 1].spans)
        assert np.abs(end - start - (truth[:, 1] - truth[:, 0])).max() < 2
        assert 0 <= (truth[:, 0] - start).max() < TICK_NS + 5
    text = told(timeline, "cycle_clock")
    assert "clock of 3 tracks counts cycles" in text
    assert "2 of them, too short to measure it or never ended, take that of the others together" in text


@settings(max_examples=80, deadline=None)
@given(
    ghz=st.lists(st.floats(0.4, 3.0), min_size=2, max_size=5),
    lengths_ns=st.lists(st.floats(200, 50_000), min_size=5, max_size=5),
    start_ns=st.floats(0, 1e9),
)
def test_records_are_off_by_no_more_than_their_launch_says(tmp_path_factory, ghz, lengths_ns, start_ns):
    """Short tracks take the rate of longer ones, whose core ran at another."""
    tracks = [
        CycleTrack(start_ns, start_ns + length, ((start_ns + length / 4, start_ns + 0.99 * length),), rate)
        for rate, length in zip(ghz, lengths_ns, strict=False)
    ]
    timeline = decode_tracks(tmp_path_factory.mktemp("cycles") / "rank_00000.tkdump", tracks)
    (launch,) = timeline.launches
    for block, track in enumerate(tracks):
        start, end = spans_of(timeline, block)
        assert abs(start[0] - track.spans[0][0]) <= launch.stamp_error_ns
        assert abs(end[0] - track.spans[0][1]) <= launch.stamp_error_ns


def test_no_track_that_ended_leaves_the_rate_unknown_but_the_order_right(tmp_path: Path):
    hung = CycleTrack(0.0, 0.0, ((100.0, 110.0), (120.0, 150.0)), finished=False)
    timeline = decode_tracks(tmp_path / "rank_00000.tkdump", [hung])
    start, end = spans_of(timeline, 0)
    assert start[0] < end[0] < start[1] < end[1]
    assert "at an unknown rate" in told(timeline, "cycle_rate_unknown")


def test_nonsense_in_a_header_stays_within_bounds(tmp_path: Path):
    headers = np.zeros(2, fmt.TRACK_HEADER)
    records = np.zeros((2, 2), fmt.WIDE_RECORD)
    headers["started"] = fmt.STARTED_CYCLES
    headers["start_ticks"], headers["end_ticks"] = (1 << 61, 5), (1 << 62, 1)
    headers["elapsed_cycles"] = (1, (1 << 64) - 1)
    headers["written"] = headers["attempted"] = 2
    records["ticks"] = 1 << 62
    records["word"] = (RecordKind.BEGIN | COPY << fmt.EVENT_SHIFT, RecordKind.END | COPY << fmt.EVENT_SHIFT)
    spans = decode_regions(tmp_path / "rank_00000.tkdump", headers, records).spans
    assert (spans.start >= 0).all()
    assert (spans.end[spans.end != OPEN_END] <= 1 << 62).all()


def recorded(scenario: str, num_records: int) -> tuple[np.ndarray, np.ndarray]:
    """([tracks] headers, [tracks, num_records] records) of the test kernel's body that counts cycles."""
    command = [program("recorder", "-O1"), scenario, str(num_records), "cycles=1"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    headers = np.frombuffer(raw, fmt.TRACK_HEADER, 8)
    records = np.frombuffer(raw, fmt.WIDE_RECORD, 8 * num_records, 9 * fmt.TRACK_HEADER.itemsize)
    return headers, records.reshape(8, num_records)


def described() -> dict:
    return json.loads(subprocess.run([program("recorder", "-O1"), "describe"], capture_output=True, check=True).stdout)


def test_the_recorder_writes_cycles_since_its_start_and_both_clocks_at_both_ends():
    headers, records = recorded("many", 200)
    assert set(headers["started"]) == {fmt.STARTED_CYCLES}
    elapsed_ns = (headers["end_ticks"] - headers["start_ticks"]).astype(float)
    measured = headers["elapsed_cycles"] > 0
    assert measured.any()
    doubt_ns = TICK_NS + fmt.MAX_ANCHOR_CYCLES / SIMULATED_GHZ + 1
    assert np.all(np.abs(headers["elapsed_cycles"] / SIMULATED_GHZ - elapsed_ns)[measured] <= doubt_ns)
    for header, track in zip(headers, records, strict=True):
        stamps = track["ticks"][: header["written"]].astype(np.int64)
        assert header["written"] > 100
        assert stamps[0] > 0
        assert np.all(np.diff(stamps) >= 0)
        if header["elapsed_cycles"]:
            assert stamps[-1] <= header["elapsed_cycles"]
        assert np.any(np.diff(stamps) % int(TICK_NS * SIMULATED_GHZ))


def test_a_real_run_is_read_on_the_realtime_clock(tmp_path: Path):
    headers, records = recorded("many", 200)
    timeline = decode_regions(tmp_path / "rank_00000.tkdump", headers, records, described())
    spans = timeline.spans
    on_device = np.array([track.kind is TrackKind.DEVICE for track in timeline.tracks])[spans.track]
    assert on_device.sum() == 8 * 60
    for track in np.unique(spans.track[on_device]):
        mine = spans.track == track
        header = headers[timeline.tracks[track].block]
        assert header["start_ticks"] <= spans.start[mine].min()
        # This program's tracks are too short: they share a rate that each of them measured to 5 %.
        assert spans.end[mine].max() <= header["end_ticks"] + 0.2 * (header["end_ticks"] - header["start_ticks"])
    assert "8 tracks counts cycles" in told(timeline, "cycle_clock")


def test_a_hang_leaves_cycles_readable(tmp_path: Path):
    headers, records = recorded("hang", 64)
    timeline = decode_regions(tmp_path / "rank_00000.tkdump", headers, records, described())
    names = [timeline.events[event].name for event in timeline.spans.event.tolist()]
    assert "wait_full" in names
    assert (timeline.spans.end == OPEN_END).any()


@pytest.mark.compilers
def test_the_gpu_program_compiles():
    text = compile_cached((*NVCC, "-ptx"), ROOT / "tests" / "cpp" / "cycle_spans.cu", ".ptx").read_text()
    kernel = text[text.index(".entry") :]
    clocks = re.findall(r"mov\.u64 \S+, %(globaltimer|clock64);", kernel)
    # Its own loop reads the realtime clock twice, the recorder once at each end, between two readings of the counter;
    # its start stands there three times, for most launches, for those in a graph, and for what is rare in both.
    assert clocks.count("globaltimer") == 2 + 4
    assert clocks.count("clock64") == 2 * 4 + 2 * 8


@pytest.mark.gpu
def test_durations_on_a_gpu_grow_as_the_arithmetic_does(tmp_path: Path):
    require_gpu()
    done = subprocess.run(
        [compile_cached(NVCC, ROOT / "tests" / "cpp" / "cycle_spans.cu", "")], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    headers = np.frombuffer(done.stdout, fmt.TRACK_HEADER, 8)
    records = np.frombuffer(done.stdout, fmt.WIDE_RECORD, 8 * 16, headers.nbytes).reshape(8, 16)
    events = {
        "name": "CycleEvent",
        "events": [
            {
                "name": "multiply",
                "class": "work",
                "ends_at": "completion",
                "channel": "",
                "begin_fields": "steps:16",
                "end_fields": "",
            }
        ],
    }
    timeline = decode_regions(tmp_path / "rank_00000.tkdump", headers, records, events)
    on_device = np.array([track.kind is TrackKind.DEVICE for track in timeline.tracks])[timeline.spans.track]
    length = (timeline.spans.end - timeline.spans.start)[on_device].reshape(8, 8)
    # 8 dependent multiply-adds more in each span: some 16 ns, the same from each to the next. In the first one the
    # compiler also lays the constants ready: 6 ns.
    grown = np.diff(length[:, 1:], axis=1)
    assert (grown > 0).all()
    assert np.abs(grown - np.median(grown)).max() <= 5

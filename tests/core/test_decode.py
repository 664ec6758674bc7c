"""Decoding against slow and obvious decoders, sound and torn tracks: of rings, two records a span, and of spans."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.captures import EPOCH, EVENT_TABLE, ROLES, CaptureSpec, fill_segment, metadata, removed_after, reserve_launch
from tracekern.dump import format as fmt
from tracekern.dump.format import RecordKind
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.decode.event_tables import doubtful_events, parse_event_table
from tracekern.timeline.model import OPEN_END, Timeline, TrackKind, unpack_field

BEGIN, END, MARK = RecordKind.BEGIN, RecordKind.END, RecordKind.MARK
WORK, BEGIN_BITS, END_BITS = (0, 1), (22, 32, 32, 32), (0, 0, 23, 23)
"""Of EVENT_TABLE."""


@dataclass
class Run:
    """What one writer did: (kind, event, ticks since its start, payload)."""

    start: int = 1 << 40
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    finished: bool = True
    is_span: bool = False
    """One record a span: begins and ends of its steps match, and the payload of an end is that of end fields."""


def encode(run: Run, shift: int = 0) -> np.ndarray:
    """The records that the recorder writes for a run."""
    if run.is_span:
        return encode_spans(run, shift)
    rows: list[tuple[int, ...]] = []
    for kind, event, offset, payload in run.steps:
        ticks = run.start + offset
        word = kind | event << fmt.EVENT_SHIFT | (payload & (1 << fmt.PAYLOAD_LOW_BITS) - 1) << fmt.PAYLOAD_SHIFT
        rows.append((ticks, payload >> fmt.PAYLOAD_LOW_BITS, word))
    return np.array(rows, fmt.WIDE_RECORD)


def encode_spans(run: Run, shift: int) -> np.ndarray:
    """SPAN_RECORDs, as WIDE_RECORD: open waits and signals of an unfinished run are there, open work is not."""
    rows: list[list[int]] = []
    stack: list[int] = []
    for kind, event, offset, payload in run.steps:
        now = run.start + offset >> shift & 0xFFFFFFFF
        if kind == END:
            rows[stack.pop()][:2] = [now, payload << fmt.PAYLOAD_BITS - END_BITS[event]]
            continue
        if kind == BEGIN:
            stack.append(len(rows))
        end = now - 1 & 0xFFFFFFFF if kind == BEGIN else now
        rows.append([end, 0, now, payload, RecordKind.SPAN if kind == BEGIN else MARK, event])
    records = np.zeros(len(rows), fmt.SPAN_RECORD)
    for place, (end, end_payload, begin, payload, kind, event) in enumerate(rows):
        if place in stack and not run.finished and event in WORK:
            continue
        whole = payload | end_payload
        word = kind | event << fmt.EVENT_SHIFT | (whole & (1 << fmt.PAYLOAD_LOW_BITS) - 1) << fmt.PAYLOAD_SHIFT
        records[place] = (end, whole >> fmt.PAYLOAD_LOW_BITS, begin, word)
    return records.view(fmt.WIDE_RECORD)


def decode_runs(path: Path, launches: list[list[Run]], shift: int = 0) -> Timeline:
    """Through a real segment and dump: one launch per list, one track per run."""
    encoded = [[encode(run, shift) for run in launch] for launch in launches]
    about = metadata(CaptureSpec(num_ranks=1, run_id="decode"), 0)
    about["clock"] |= {"shift": shift}
    with removed_after(SegmentWriter.create(f"decode-{os.getpid()}", 0, about, 1 << 22)) as segment:
        for runs, rows in zip(launches, encoded, strict=True):
            plan = LaunchPlan(
                name="kernel",
                num_blocks=len(runs),
                warps_per_block=1,
                records_per_track=1 << max(len(row) for row in rows).bit_length(),
                blocks=range(len(runs)),
                events=json.dumps(EVENT_TABLE).encode(),
            )
            assert reserve_launch(segment, plan) is not None
            entry = segment.launches()[-1]
            headers, records = segment.track_headers(entry), segment.records(entry)
            for track, (run, row) in enumerate(zip(runs, rows, strict=True)):
                records[track, : len(row)] = row
                headers[track]["start_ticks"] = run.start
                headers[track]["started"] = fmt.STARTED if run.is_span else fmt.STARTED_RING
                if run.finished:
                    headers[track]["written"] = headers[track]["attempted"] = len(row)
                    headers[track]["end_ticks"] = run.start + (run.steps[-1][2] if run.steps else 0)
        segment.header["state"] = fmt.SegmentState.CLOSED
        write_dump(path, segment)
    return decode(read_dump(path))


def reference(run: Run) -> tuple[list[tuple[int, int, int, int, int]], list[tuple[int, int, int]], int]:
    """(spans, marks, orphan ends) of a run with a stack, one record after the other."""
    spans: list[list[int]] = []
    marks = []
    stack: list[int] = []
    orphans = 0
    for kind, event, offset, payload in run.steps:
        ticks = run.start + offset
        if kind == BEGIN:
            stack.append(len(spans))
            spans.append([event, ticks, OPEN_END, payload, 0])
        elif kind == MARK:
            marks.append((event, ticks, payload))
        elif any(spans[idx][0] == event for idx in stack):
            while spans[stack[-1]][0] != event:
                stack.pop()
            spans[stack.pop()][2::2] = [ticks, payload]
        else:
            orphans += 1
    return [tuple(span) for span in spans], marks, orphans  # type: ignore[misc]


def device_rows(timeline: Timeline, block: int) -> tuple[list, list]:
    tracks = [t for t, track in enumerate(timeline.tracks) if track.kind == TrackKind.DEVICE and track.block == block]
    spans = timeline.spans.take(np.isin(timeline.spans.track, tracks))
    marks = timeline.marks.take(np.isin(timeline.marks.track, tracks))
    columns = (spans.event, spans.start, spans.end, spans.begin_payload, spans.end_payload)
    return (
        list(zip(*(column.tolist() for column in columns), strict=True)),
        list(zip(*(column.tolist() for column in (marks.event, marks.time, marks.payload)), strict=True)),
    )


@st.composite
def runs(draw: st.DrawFn, any_order: bool) -> Run:
    """A run; `any_order` draws begins and ends that need not match."""
    run = Run(start=draw(st.sampled_from([1 << 40, (1 << 40) - 5, 0xFFFFFFF0])), finished=draw(st.booleans()))
    stack: list[int] = []
    offset = 0
    for _ in range(draw(st.integers(0, 30))):
        offset += draw(st.sampled_from([0, 1, 7, 1 << 31, 1 << 33]))
        kind = draw(st.sampled_from([BEGIN, END, MARK]))
        event = draw(st.integers(0, 3))
        if kind == END and not any_order:
            if not stack:
                continue
            event = stack.pop()
        elif kind == BEGIN:
            stack.append(event)
        payload = draw(st.integers(0, (1 << fmt.PAYLOAD_BITS) - 1))
        run.steps.append((kind, event, offset, payload))
    return run


@given(data=st.data())
def test_decode_agrees_with_the_obvious_decoder(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    any_order = data.draw(st.booleans())
    launch = data.draw(st.lists(runs(any_order), min_size=1, max_size=4))
    timeline = decode_runs(tmp_path_factory.mktemp("decode") / "rank_00000.tkdump", [launch])
    orphans = 0
    for block, run in enumerate(launch):
        spans, marks, run_orphans = reference(run)
        assert device_rows(timeline, block) == (spans, marks)
        orphans += run_orphans
    assert sum(p.count for p in timeline.problems if p.kind == "orphan_end") == orphans
    opened = sum(p.count for p in timeline.problems if p.kind == "open_span" and "stream" not in p.text)
    assert opened == sum(end == OPEN_END for run in launch for _, _, end, _, _ in reference(run)[0])


@st.composite
def span_runs(draw: st.DrawFn, shift: int) -> Run:
    """A run of at most 2^32 units, some of whose spans never end."""
    start = draw(st.sampled_from([1 << 40, (1 << 40) - 32, 0xFFFFFFF0 & ~31, 0xFFFFFFF0 << shift]))
    run = Run(start, finished=draw(st.booleans()), is_span=True)
    stack: list[int] = []
    offset = 0
    for _ in range(draw(st.integers(0, 30))):
        offset += draw(st.sampled_from([0, 32, 64, 1 << 20])) + (
            draw(st.sampled_from([0, 1 << 31])) if not offset else 0
        )
        kind = draw(st.sampled_from([BEGIN, END, MARK]))
        if kind == END and not stack:
            continue
        event = stack.pop() if kind == END else draw(st.integers(0, 3))
        if kind == BEGIN:
            stack.append(event)
        bits = END_BITS[event] if kind == END else BEGIN_BITS[event]
        run.steps.append((kind, event, offset, draw(st.integers(0, (1 << bits) - 1))))
    return run


@given(data=st.data())
def test_spans_are_decoded_as_they_were_recorded(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    shift = data.draw(st.sampled_from([0, 5]))
    launch = data.draw(st.lists(span_runs(shift), min_size=1, max_size=4))
    timeline = decode_runs(tmp_path_factory.mktemp("decode") / "rank_00000.tkdump", [launch], shift)
    num_held = 0
    for block, run in enumerate(launch):
        spans, marks, _ = reference(run)
        is_held = [end == OPEN_END and event in WORK and not run.finished for event, _, end, _, _ in spans]
        assert device_rows(timeline, block) == ([s for s, held in zip(spans, is_held, strict=True) if not held], marks)
        stored = (encode(run, shift)["word"] != 0).tolist()
        num_held += sum(not step for step in stored[: len(stored) - stored[::-1].index(True)]) if any(stored) else 0
    assert sum(problem.count for problem in timeline.problems if problem.kind == "open_work") == num_held


@pytest.mark.parametrize("shift", [0, 5])
def test_a_track_that_may_have_lasted_too_long_is_told(tmp_path: Path, shift: int):
    unit = 1 << shift
    steps = [
        (BEGIN, 1, 32, 0),
        (END, 1, 3 << 31 + shift, 0),
        (BEGIN, 1, 5 << 31 + shift, 0),
        (END, 1, 6 << 31 + shift, 0),
    ]
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1 << 40, steps, is_span=True)]], shift)
    rows = timeline.spans.take(timeline.spans.track == 0)
    assert [problem.kind for problem in timeline.problems] == ["ambiguous_time"]
    assert f"more than {(1 << 32) * unit / 1e9:.0f} s" in timeline.problems[0].text
    # The shortest times that fit the order of begins: 5 << 31 is 1 << 31 behind a wrap, and so is 3 << 31.
    assert (rows.start - (1 << 40)).tolist() == [32, 1 << 31 + shift]
    assert (rows.end - (1 << 40)).tolist() == [1 << 31 + shift, 1 << 32 + shift]


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([(BEGIN, 1, 96, 0), (END, 1, 128, 0), (BEGIN, 1, 64, 0), (END, 1, 80, 0)], [(96, 128), (96, 112)]),
        ([(BEGIN, 1, 32, 0), (END, 1, 64, 0), (BEGIN, 1, -5, 0), (END, 1, 96, 0)], [(32, 64), (32, 133)]),
    ],
)
def test_times_of_spans_that_cannot_be_are_told(tmp_path: Path, steps: list, wanted: list):
    """A begin before another that stands before it; one before its track."""
    steps.append((MARK, 1, 200, 0))
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1 << 40, steps, is_span=True)]])
    rows = timeline.spans.take(timeline.spans.track == 0)
    assert list(zip((rows.start - (1 << 40)).tolist(), (rows.end - (1 << 40)).tolist(), strict=True)) == wanted
    assert [(problem.kind, problem.track) for problem in timeline.problems] == [("torn_track", 0)]


def test_launches_of_one_stream_share_their_tracks(tmp_path: Path):
    span = [(BEGIN, 1, 0, 5), (END, 1, 10, 0)]
    launches = [[Run(1000, span), Run(1000, span)], [Run(2000, span), Run(2000, span)], [Run(3000, span)]]
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", launches)
    device = [track for track in timeline.tracks if track.kind == TrackKind.DEVICE]
    assert [track.block for track in device] == [0, 1]
    rows = timeline.spans.take(timeline.spans.track == 0)
    assert (rows.start.tolist(), rows.launch.tolist()) == ([1000, 2000, 3000], [0, 1, 2])
    assert timeline.problems == ()


def test_launches_that_overlap_on_one_stream_get_lanes(tmp_path: Path):
    span = [(BEGIN, 1, 0, 0), (END, 1, 1500, 0)]
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1000, span)], [Run(2000, span)], [Run(2500, span)]])
    assert [track.name for track in timeline.tracks] == [
        "block 0 warp 0",
        "block 0 warp 0 lane 2",
        "stream 0",
        "stream 0 lane 2",
    ]
    assert timeline.spans.take(timeline.spans.track == 0).start.tolist() == [1000, 2500]
    assert [p.kind for p in timeline.problems] == ["overlapping_launches"]


def test_blocks_that_overlap_get_lanes_of_their_own(tmp_path: Path):
    span = [(BEGIN, 1, 0, 0), (END, 1, 1500, 0)]
    launches = [[Run(1000, span), Run(1000, span)], [Run(2500, span), Run(2000, span)]]
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", launches)
    names = [track.name for track in timeline.tracks if track.kind == TrackKind.DEVICE]
    assert names == ["block 0 warp 0", "block 1 warp 0", "block 1 warp 0 lane 2"]


def test_an_event_that_the_table_does_not_have_is_kept(tmp_path: Path):
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1000, [(BEGIN, 60, 0, 1), (END, 60, 5, 0)])]])
    assert timeline.events[timeline.spans.event[0]].name == "unknown_event_60"


def test_time_that_falls_is_raised_and_told(tmp_path: Path):
    steps = [(BEGIN, 1, 100, 0), (END, 1, 40, 0), (BEGIN, 1, 120, 0), (END, 1, 130, 0)]
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1000, steps)]])
    rows = timeline.spans.take(timeline.spans.track == 0)
    assert (rows.start.tolist(), rows.end.tolist()) == ([1100, 1120], [1100, 1130])
    assert [(p.kind, p.track) for p in timeline.problems] == [("torn_track", 0)]
    assert timeline.problems[0].text.endswith(": 1 step back in time; raised to the time before")


def test_nesting_far_beyond_any_kernel_is_still_right(tmp_path: Path):
    depth = 5000
    steps = [(BEGIN, 1, i, i) for i in range(depth)] + [(END, 1, depth + i, 0) for i in range(depth)]
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1000, steps)]])
    rows = timeline.spans.take(timeline.spans.track == 0)
    assert (rows.start - 1000).tolist() == list(range(depth))
    assert (rows.end - 1000).tolist() == list(range(2 * depth - 1, depth - 1, -1))


def test_a_dump_without_launches_decodes_to_nothing(tmp_path: Path):
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [])
    assert (len(timeline.spans), len(timeline.marks), timeline.problems) == (0, 0, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "idle"}, "wanted one of work, wait, signal, sync"),
        ({"ends_at": "later"}, "wanted issue or completion"),
        ({"begin_fields": "peer:99"}, "wanted name:bits"),
        ({"end_fields": "seen:24"}, "'peer:10 slot:22' and end fields 'seen:24' need more than 55 bits together"),
        (
            {"class": "wait", "begin_fields": "", "end_fields": "seen:33"},
            "end fields 'seen:33' need more than the 32 bits that a wait has at its end",
        ),
        ({"channel": "token"}, "'name data|credit|count|barrier|group|grid|immediate key-fields'"),
        ({"channel": "token data place"}, "channel key 'place' is no field"),
    ],
)
def test_a_bad_event_table_is_refused(change: dict[str, str], message: str):
    event = {**EVENT_TABLE["events"][1], **change}
    with pytest.raises(BadInput) as refused:
        parse_event_table("r0.tkdump", {"name": "T", "events": [event]})
    assert message in str(refused.value)
    assert "copy_token" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({}, ""),
        ({"class": "signal", "channel": "row credit", "begin_fields": "value:8"}, ""),
        ({"class": "wait", "channel": "row credit", "end_fields": "wanted:8"}, ""),
        ({"begin_fields": "row:8 row:8"}, "field row is there twice"),
        ({"begin_fields": "row:8", "end_fields": "line:8 line:8"}, "field line is there twice"),
        ({"channel": "row data"}, "channel row joins signals and waits, this is class work"),
        ({"class": "signal", "channel": "row credit"}, "credit channel row without a field value"),
        ({"class": "wait", "channel": "row credit"}, "credit channel row without a field wanted"),
    ],
)
def test_what_a_table_hardly_means_is_warned_of(change: dict[str, str], doubt: str):
    event = {**EVENT_TABLE["events"][1], **change}
    problems = doubtful_events(3, parse_event_table("r3.tkdump", {"name": "T", "events": [event]}))
    assert [problem.kind for problem in problems] == ["event_table"] * bool(doubt)
    assert all(problem.text.startswith(f"rank 3 event copy_token: {doubt}") for problem in problems)


def test_doubts_about_a_table_stand_beside_the_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = [{**event, "begin_fields": "peer:10 slot:11 slot:11"} for event in EVENT_TABLE["events"]]
    monkeypatch.setitem(EVENT_TABLE, "events", table)
    timeline = decode_runs(tmp_path / "rank_00000.tkdump", [[Run(1000, [(BEGIN, 1, 0, 1), (END, 1, 5, 0)])]])
    assert {problem.kind for problem in timeline.problems} == {"event_table"}
    assert len(timeline.problems) == len(table)


@pytest.mark.parametrize("sequence", [1 << 23, (1 << 32) - 1])
def test_a_launch_tells_its_sequence_however_many_came_before(tmp_path: Path, sequence: int):
    with removed_after(fill_segment(CaptureSpec(num_ranks=1, run_id="late"), 0)) as segment:
        segment.launches()[0]["sequence"] = sequence
        write_dump(tmp_path / "late.tkdump", segment)
    timeline = decode(read_dump(tmp_path / "late.tkdump"))
    (lane,) = np.flatnonzero([timeline.tracks[track].kind == TrackKind.LAUNCH for track in timeline.spans.track])
    fields = timeline.events[timeline.spans.event[lane]].begin_fields
    payload = timeline.spans.begin_payload[lane : lane + 1]
    assert {field.name: int(unpack_field(fields, field.name, payload)[0]) for field in fields} == {
        "epoch": EPOCH,
        "sequence": sequence,
    }


def test_a_launch_has_the_roles_and_the_epoch_that_its_tracks_tell(tmp_path: Path):
    """A warp that had several roles has them all; a replay of a graph has another epoch than the launch captured."""
    with removed_after(fill_segment(CaptureSpec(num_ranks=1, num_blocks=1, launches=2, run_id="told"), 0)) as segment:
        headers = segment.track_headers(segment.launches()[1])
        headers["role"], headers["epoch"] = [1, 1], [99, 99]
        write_dump(tmp_path / "told.tkdump", segment)
    timeline = decode(read_dump(tmp_path / "told.tkdump"))
    assert [track.role for track in timeline.tracks if track.kind == TrackKind.DEVICE] == [
        f"{ROLES[0]}/{ROLES[1]}",
        ROLES[1],
    ]
    assert [launch.epoch for launch in timeline.launches] == [EPOCH, 99]

"""Segments: what a launch is given, and what happens where shared memory ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.captures import EVENT_TABLE, CaptureSpec, make_segment, metadata, plan, removed_after, reserve_launch
from tests.kernels import memory
from tests.paths import ROOT
from tracekern.dump import format as fmt
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.segment import writer as segment_module
from tracekern.segment.names import list_segments
from tracekern.segment.pack import write_dump
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.load import load


@pytest.fixture
def segment() -> Iterator[SegmentWriter]:
    with removed_after(make_segment("segment-test", 1 << 20)) as segment:
        yield segment


def test_a_fault_in_a_segment_from_before_it_had_a_version_is_packed(segment: SegmentWriter, tmp_path: Path):
    segment.header["fault_bytes"] = 0
    assert segment.fault_record.nbytes == 64
    for field, number in {"cause": 1, "rank": 0, "peer": 1, "waited_ns": 10**9}.items():
        segment.fault_record[field] = number
    segment._bytes[int(segment.header["fault_offset"]) + 64 :][:64] = 0xFF  # was the arena
    write_dump(tmp_path / "dump", segment)
    fault = read_dump(tmp_path / "dump").metadata["fault"]
    assert (fault["peer"], "ring" in fault) == (1, False)


def test_the_descriptor_leads_to_zeroed_aligned_memory_of_its_own(segment: SegmentWriter):
    addresses = [reserve_launch(segment, plan(stream=-1, epoch=(1 << 32) + 3)) for _ in range(2)]
    first, second = (memory(address, fmt.LAUNCH_DESCRIPTOR)[0] for address in addresses if address)
    assert [int(first[key]) for key in ("block_first", "block_stop", "block_step")] == [1, 8, 3]
    num_tracks = 3 * 2
    for launch in (first, second):
        headers = memory(int(launch["headers"]), fmt.TRACK_HEADER, num_tracks)
        records = memory(int(launch["records"]), fmt.SPAN_RECORD, num_tracks * 5)
        assert not headers.tobytes().strip(b"\0")
        assert not records.tobytes().strip(b"\0")
        assert int(launch["headers"]) % 64 == int(launch["records"]) % 64 == 0
        assert int(launch["records"]) == int(launch["headers"]) + headers.nbytes
    assert int(first["records"]) + num_tracks * 5 * fmt.RECORD_BYTES <= addresses[1]
    assert segment.launches()["stream"].tolist() == [-1, -1]
    assert segment.launches()["epoch"].tolist() == [3, 3]
    assert segment.launches()["launch_idx"].tolist() == [0, 1]


def test_what_the_kernel_writes_is_what_the_segment_reads(segment: SegmentWriter):
    address = reserve_launch(segment, plan())
    assert address is not None
    descriptor = memory(address, fmt.LAUNCH_DESCRIPTOR)[0]
    memory(int(descriptor["headers"]), fmt.TRACK_HEADER, 6)["block"] = range(6)
    memory(int(descriptor["records"]), fmt.WIDE_RECORD, 30)["ticks"] = range(30)
    outside = SegmentView.attach(segment.name)
    entry = outside.launches()[0]
    assert outside.track_headers(entry)["block"].tolist() == list(range(6))
    assert outside.records(entry)["ticks"].ravel().tolist() == list(range(30))
    assert outside.events(entry) == EVENT_TABLE
    with pytest.raises(ValueError, match="read-only"):
        outside.records(entry)["ticks"] = 0


def test_a_table_is_stored_once(segment: SegmentWriter):
    used = []
    for _ in range(3):
        reserve_launch(segment, plan(records_per_track=0))
        used.append(int(segment.header["arena_cursor"]))
    assert used[2] - used[1] < used[0]
    assert len(set(segment.launches()["events_offset"].tolist())) == 1


def test_beyond_the_cap_a_launch_is_refused_and_counted(segment: SegmentWriter):
    assert reserve_launch(segment, plan(records_per_track=20_000)) is None
    assert reserve_launch(segment, plan()) is not None
    assert (int(segment.header["launches_refused"]), len(segment.launches())) == (1, 1)


@pytest.mark.parametrize("table", ["events", "roles"])
def test_a_launch_whose_table_finds_no_room_is_refused(segment: SegmentWriter, table: str):
    reserve_launch(segment, plan())
    wanted = plan(**{table: json.dumps(["x" * (1 << 20)]).encode()})
    assert reserve_launch(segment, wanted) is None
    assert reserve_launch(segment, plan()) is not None


def test_beyond_the_last_row_of_the_directory_launches_are_refused(monkeypatch):
    monkeypatch.setattr(segment_module, "_CARRY_BYTES", 1 << 60)  # a multiple of 4 GiB inside makes a batch smaller
    with removed_after(make_segment("segment-rows", 1 << 23)) as segment:
        empty, rows = plan(blocks=range(0)), int(segment.header["launches_capacity"])
        assert len(segment.reserve_regions(empty, rows - 1)) == rows - 1
        assert len(segment.reserve_regions(empty, 4)) == 1
        assert segment.reserve_regions(empty, 4) == []
        assert segment.arena_room > 4 * empty.region_bytes


def test_a_launch_that_reserves_its_own_region_leaves_what_one_that_found_it_ready_leaves(segment: SegmentWriter):
    wanted = plan(stream=77, flags=fmt.ENTRY_MIRRORED)
    mirror_offset = 1 << 40
    (ready,) = segment.reserve_regions(wanted, 1, mirror_offset)
    segment.start_launch(ready, 5, 6, "a key")
    rows = segment.rows_of(wanted, mirror_offset)
    new = segment.start_new(rows, 5, 6, "a key")
    assert segment.start_new(rows, 7, 8) is not None
    first, second, third = segment.launches().copy()
    assert (third["sequence"], third["epoch"], third["key"]) == (7, 8, b""), "the rows are used again"
    assert 0 <= int(second["host_ns"]) - int(first["host_ns"]) < 60e9
    assert (new.headers - ready.headers, new.records - ready.records) == (wanted.region_bytes,) * 2
    for row, idx in ((first, 0), (second, 1)):
        assert (row["launch_idx"], row["order"]) == (idx, idx)
        assert row["headers_offset"] - (ready, new)[idx].offset == fmt.LAUNCH_DESCRIPTOR.itemsize
    for field in ("launch_idx", "order", "host_ns", "headers_offset", "records_offset", "waited_ns"):
        first[field] = second[field] = 0
    assert first == second
    before, after = segment.descriptor(ready.offset).copy(), segment.descriptor(new.offset).copy()
    for field in ("headers", "records"):
        assert after[field] - before[field] == wanted.region_bytes
        before[field] = after[field] = 0
    assert before == after


def test_a_launch_that_reserves_its_own_region_is_refused_where_others_are(segment: SegmentWriter):
    rows = segment.rows_of(plan(records_per_track=4000))
    taken = 0
    while segment.start_new(rows, 0, 0) is not None:
        taken += 1
    assert taken == len(segment.launches()) > 0
    assert segment.reserve_regions(plan(records_per_track=4000), 1) == []
    assert segment.start_new(segment.rows_of(plan()), 0, 0) is not None


@pytest.mark.parametrize("is_alone", [False, True], ids=["ahead", "alone"])
@pytest.mark.parametrize("room", [0, 64, 500, 4000, 10**6])
def test_no_region_lies_across_a_multiple_of_4_gib(segment: SegmentWriter, room: int, is_alone: bool):
    """Where kernels write is `room` bytes below such a place when the first region is laid."""
    wanted = plan(records_per_track=20)
    reserve_launch(segment, wanted)  # the tables are stored, too
    first = segment.address + int(segment.header["arena_offset"]) + int(segment.header["arena_cursor"])
    mirror_offset = -(first + room) % (1 << 32)
    if is_alone:
        rows = segment.rows_of(wanted, mirror_offset)
        regions = [segment.start_new(rows, 0, 0) for _ in range(8)]
    else:
        regions = segment.reserve_regions(wanted, 4, mirror_offset) + segment.reserve_regions(wanted, 4, mirror_offset)
    assert len(regions) >= 4
    for region in regions:
        descriptor = segment.descriptor(region.offset)
        start = int(descriptor["records"])
        stop = start + 6 * 20 * fmt.RECORD_BYTES
        assert start >> 32 == stop + 63 >> 32, "the last two places in front of a border stay free"
        assert region.offset + wanted.region_bytes <= int(segment.header["total_bytes"])
        headers_at = region.offset + fmt.LAUNCH_DESCRIPTOR.itemsize
        assert int(descriptor["headers"]) == segment.address + headers_at + mirror_offset


def test_where_only_such_a_place_is_left_a_launch_is_refused(segment: SegmentWriter):
    wanted = plan(records_per_track=4000)
    reserve_launch(segment, wanted)
    first = segment.address + int(segment.header["arena_offset"]) + int(segment.header["arena_cursor"])
    in_the_middle = -(first + segment.arena_room // 2) % (1 << 32)
    assert wanted.region_bytes < segment.arena_room < 2 * wanted.region_bytes
    assert segment.reserve_regions(wanted, 1, in_the_middle) == []


def test_what_is_too_large_takes_no_room_from_what_is_not(segment: SegmentWriter):
    first = segment.address + int(segment.header["arena_offset"]) + int(segment.header["arena_cursor"])
    behind_the_arena = -(first + segment.arena_room + 64) % (1 << 32)
    assert segment.reserve_regions(plan(records_per_track=20_000), 1, behind_the_arena) == []
    assert segment.reserve_regions(plan(), 1, behind_the_arena)


def test_what_an_earlier_launch_left_in_a_region_is_not_read(segment: SegmentWriter, tmp_path: Path):
    """Of the second launch track 0 ended, track 1 hangs, and the others never began."""
    (region,) = segment.reserve_regions(plan(), 1)
    headers = memory(int(segment.descriptor(region.offset)["headers"]), fmt.TRACK_HEADER, 6)
    for generation, tracks in ((0, slice(0, 6)), (1, slice(0, 2))):
        segment.start_launch(region, sequence=generation, epoch=generation)
        headers["start_ticks"][tracks] = 1000 * generation + 100
        headers["started"][tracks] = fmt.STARTED_RING | int(segment.descriptor(region.offset)["generation"])
        stop = 1 if generation else 6
        headers["end_ticks"][:stop] = 1000 * generation + 900
        headers["attempted"][:stop] = headers["written"][:stop] = 3 + generation
    segment.header["state"] = fmt.SegmentState.CLOSED
    write_dump(tmp_path / "dump", segment)
    packed = read_dump(tmp_path / "dump")
    found = packed.track_headers(packed.launches[0])
    assert packed.launches[0].sequence == 1
    assert found["started"].tolist() == [fmt.STARTED_RING] * 2 + [0] * 4
    assert found["finished"].tolist() == [1, 0, 0, 0, 0, 0]
    assert found["attempted"].tolist() == [4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("started", "kept"), [(fmt.STARTED, [0, 0]), (fmt.STARTED_CYCLES, [0, 5])], ids=["span", "cycles"]
)
def test_records_of_a_track_that_hangs_are_not_mixed_with_an_earlier_launchs(segment, tmp_path, started, kept):
    """In a region used before, by a kernel that has no ring: track 0 hangs after two records, track 1 is through.

    The body of spans stores nothing in such a region.
    """
    (region,) = segment.reserve_regions(plan(), 1)
    descriptor = segment.descriptor(region.offset)
    headers = memory(int(descriptor["headers"]), fmt.TRACK_HEADER, 6)
    records = memory(int(descriptor["records"]), fmt.WIDE_RECORD, 30).reshape(6, 5)
    for generation, counts in ((0, [5] * 6), (1, [2, 5, 0, 0, 0, 0])):
        segment.start_launch(region, sequence=generation, epoch=generation)
        for track, count in enumerate(counts):
            if count:
                headers[track] = 0
                headers["start_ticks"][track] = 1000 * generation + 100
                headers["started"][track] = started | int(segment.descriptor(region.offset)["generation"])
            records["ticks"][track, :count] = 1000 * generation + 200
            records["word"][track, :count] = fmt.RecordKind.MARK
    headers["end_ticks"][1], headers["written"][1], headers["attempted"][1] = 1900, kept[1], 5
    segment.header["state"] = fmt.SegmentState.CLOSED
    write_dump(tmp_path / "dump", segment)
    packed = read_dump(tmp_path / "dump")
    assert packed.track_headers(packed.launches[0])["written"].tolist() == [*kept, 0, 0, 0, 0]


def test_a_ring_whose_records_did_not_all_arrive_had_no_second_recorder(segment: SegmentWriter, tmp_path: Path):
    """Fewer are kept than it has slots, and none of the slots is empty."""
    (region,) = segment.reserve_regions(plan(records_per_track=4), 1)
    segment.start_launch(region, 0, epoch=0)
    descriptor = segment.descriptor(region.offset)
    records = memory(int(descriptor["records"]), fmt.WIDE_RECORD, 24).reshape(6, 4)
    records["word"] = fmt.RecordKind.MARK
    records["ticks"] = 1 << fmt.LAP_SHIFT | 200
    records["ticks"][:, 2] = 100  # of the lap before: the newer one is missing
    headers = memory(int(descriptor["headers"]), fmt.TRACK_HEADER, 6)
    headers["started"], headers["start_ticks"], headers["end_ticks"], headers["attempted"] = (
        fmt.STARTED_RING,
        50,
        300,
        8,
    )
    segment.header["state"] = fmt.SegmentState.CLOSED
    write_dump(tmp_path / "dump", segment)
    packed = read_dump(tmp_path / "dump")
    (launch,) = packed.launches
    assert packed.track_headers(launch)["missing"].tolist() == [1] * 6
    assert (launch.records_count, launch.shared_tracks) == (18, 0)


def test_a_region_that_is_none_is_told_as_damage(segment: SegmentWriter):
    segment.reserve_regions(plan(flags=fmt.ENTRY_IN_GRAPH), 1)
    for offset, place in ((0, "-64..0"), (1 << 40, f"{(1 << 40) - 64}..{1 << 40}")):
        segment.launches()["headers_offset"] = offset
        with pytest.raises(BadInput, match=f"part at {place} is outside its .* damaged"):
            segment.recorded_launches()


def test_after_16384_launches_a_region_is_still_known_as_used_before(segment: SegmentWriter, tmp_path: Path):
    """Generations are counted modulo 2^14: what the launch before left looked like a second recorder of the track."""
    (region,) = segment.reserve_regions(plan(), 1)
    for sequence in range((1 << 14) + 1):
        segment.start_launch(region, sequence, epoch=0)
    descriptor = segment.descriptor(region.offset)
    records = memory(int(descriptor["records"]), fmt.WIDE_RECORD, 30).reshape(6, 5)
    records["word"], records["ticks"] = fmt.RecordKind.MARK, 200
    headers = memory(int(descriptor["headers"]), fmt.TRACK_HEADER, 6)
    headers["start_ticks"], headers["end_ticks"], headers["written"], headers["attempted"] = 100, 300, 2, 2
    headers["started"] = fmt.STARTED | int(descriptor["generation"])
    segment.header["state"] = fmt.SegmentState.CLOSED
    write_dump(tmp_path / "dump", segment)
    (launch,) = read_dump(tmp_path / "dump").launches
    assert (launch.records_count, launch.shared_tracks) == (12, 0)


def test_host_spans_beyond_their_room_are_counted():
    with removed_after(make_segment("segment-host", 1 << 16, host_spans=2)) as segment:
        for idx in range(5):
            segment.append_host_span("x" * 200, 1, idx, idx + 1)
        assert (len(segment.host_spans()), int(segment.header["host_spans_lost"])) == (2, 3)


def test_clock_samples_beyond_their_room_are_counted(segment: SegmentWriter):
    room = int(segment.header["samples_capacity"])
    for count in (room - 1, 2, 3, 1):
        segment.append_clock_samples(np.ones(count, fmt.CLOCK_SAMPLE))
    assert (len(segment.clock_samples()), int(segment.header["samples_lost"])) == (room, 5)
    assert len(segment.host_spans()) == 0


def test_segments_of_a_run_are_not_those_of_its_namesakes():
    names = [("r1", 0), ("r1", 11), ("r1.2", 0), ("r10", 0), ("r1-0", 0)]
    segments = [SegmentWriter.create(run_id, rank, metadata(CaptureSpec(), 0), 4096) for run_id, rank in names]
    try:
        assert list_segments("r1") == ["tracekern-r1-0", "tracekern-r1-11", "tracekern-r1.2-0"]
    finally:
        for segment in segments:
            segment.unlink()


def test_a_file_that_is_no_segment_is_refused():
    path = Path("/dev/shm/tracekern-nothing-0")
    cut = np.zeros(1, fmt.SEGMENT_HEADER)
    cut["magic"], cut["total_bytes"] = fmt.SEGMENT_MAGIC, 8192
    for content, message in (
        (b"", "its rank died early"),
        (bytes(4096), "its rank ended before it recorded anything"),
        (b"x" * 4096, "magic"),
        (cut.tobytes(), "256 bytes, its header says 8192; damaged"),
    ):
        path.write_bytes(content)
        try:
            with pytest.raises(BadInput, match=message):
                SegmentView.attach(path.name)
        finally:
            path.unlink()


def run_in_small_shared_memory(num_bytes: int, program: str) -> str:
    """Run Python where /dev/shm holds `num_bytes` only: a mount of its own, which needs user namespaces."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    mount = f"mount -t tmpfs -o size={num_bytes} tmpfs /dev/shm"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this container may not mount a small /dev/shm")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_full_shared_memory_costs_launches_and_never_the_run(tmp_path: Path):
    program = f"""
from tests.captures import EVENT_TABLE
from tests.kernels import run_kernel
from tracekern.record.session import capture
with capture({str(tmp_path)!r}, records_per_track=10_000) as session:
    for _ in range(6):
        launch = session.launch("k", grid=2, warps=4, events=EVENT_TABLE)
        if launch.traced:
            run_kernel(launch.descriptor, 2, 4, 5_000)
        print(launch.traced)
"""
    traced = run_in_small_shared_memory(6 << 20, program).split()
    assert traced == ["True"] * 4 + ["False"] * 2
    timeline = load(tmp_path)
    assert len(timeline.spans) == 4 * (8 * 5_000 + 1)
    assert [(problem.kind, problem.count) for problem in timeline.problems] == [("launch_not_recorded", 2)]


def test_no_shared_memory_at_all_is_one_clear_line(tmp_path: Path):
    program = f"""
from tracekern.errors import BadInput
from tracekern.record.session import capture
open("/dev/shm/filler", "wb").write(bytes(65536))
try:
    with capture({str(tmp_path)!r}):
        print("opened")
except BadInput as refused:
    print(refused)
"""
    text = run_in_small_shared_memory(65536, program)
    assert "no room in /dev/shm (No space left on device); lower max_bytes or records_per_track, or make it" in text
    assert "docker run --shm-size=" in text


def test_a_full_shared_memory_loses_what_comes_and_counts_it():
    """A row of the directory, clock samples, host spans: they find no page, which would be a SIGBUS met too late."""
    program = """
import numpy as np
from tests.captures import CaptureSpec, metadata
from tests.captures import plan
from tracekern.dump import format as fmt
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter
segment = SegmentWriter.create("full", 0, metadata(CaptureSpec(), 0), 1 << 16)
tiny = plan(blocks=range(0))
segment.reserve_regions(tiny, 1)
with open("/dev/shm/filler", "wb", buffering=0) as filler:
    while True:
        try:
            filler.write(bytes(4096))
        except OSError:
            break
print(sum(len(segment.reserve_regions(tiny, 1)) for _ in range(300)))
segment.append_clock_samples(np.zeros(2, fmt.CLOCK_SAMPLE))
segment.append_host_span("name", 1, 2, 3)
print(segment.header["samples_lost"], segment.header["host_spans_lost"])
"""
    rows = segment_module._ROWS_AT_ONCE
    assert run_in_small_shared_memory(1 << 20, program).split() == [str(rows - 1), "2", "1"]

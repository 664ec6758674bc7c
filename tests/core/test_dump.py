"""Dumps at the door: what is sound reads back; what is not is one clear line, whatever was done to the bytes."""

from __future__ import annotations

import copy
import functools
import json
import resource
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.captures import EVENT_TABLE, CaptureSpec, fill_segment, removed_after, write_capture
from tests.kernels import run_kernel
from tracekern.dump import format as fmt
from tracekern.dump.reader import peek_metadata, read_dump
from tracekern.errors import BadInput
from tracekern.record.session import capture
from tracekern.segment.pack import pack, write_dump
from tracekern.segment.view import SegmentView
from tracekern.timeline.decode.decoder import decode

HEADER_BYTES = fmt.DUMP_HEADER.itemsize


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    spec = CaptureSpec(groups=2, num_blocks=1, launches=2, host_spans=1)
    directory = write_capture(tmp_path_factory.mktemp("sound"), spec)
    return (directory / "rank_00000.tkdump").read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "rank_00000.tkdump"


def refuse(path: Path, data: bytes) -> str:
    """The line with which a dump of these bytes is refused; sound bytes decode."""
    path.write_bytes(data)
    with pytest.raises(BadInput) as refused:
        decode(read_dump(path))
    text = str(refused.value)
    assert "\n" not in text
    assert path.name in text
    return text


def complaint(path: Path) -> str:
    """Why a dump is refused, "" when it decodes; any other exception is a fault of the reader."""
    try:
        decode(read_dump(path))
    except BadInput as refused:
        return str(refused)
    return ""


def metadata_of(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", data, 16)
    return json.loads(data[HEADER_BYTES : HEADER_BYTES + size])


def rebuild(data: bytes, metadata: Any, payload: bytes | None = None) -> bytes:
    """A dump with other contents whose checksums are right: damage that only the schema can find."""
    (size,) = struct.unpack_from("<Q", data, 16)
    payload = data[fmt.align_up(HEADER_BYTES + size) :] if payload is None else payload
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    start = fmt.align_up(HEADER_BYTES + len(text))
    sizes = (fmt.DUMP_VERSION, HEADER_BYTES, len(text), len(payload), zlib.crc32(text), zlib.crc32(payload))
    header = fmt.DUMP_MAGIC + struct.pack("<IIQQIIQ16x", *sizes, start + len(payload))
    return header + text + bytes(start - HEADER_BYTES - len(text)) + payload


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump says when it was packed."""
    monkeypatch.setattr("tracekern.segment.pack.time", SimpleNamespace(monotonic_ns=lambda: 10**15))


@pytest.mark.usefixtures("stopped_clock")
def test_pack_and_write_give_the_same_bytes(tmp_path: Path):
    with removed_after(fill_segment(CaptureSpec(host_spans=3), 1)) as segment:
        size = write_dump(tmp_path / "rank_00001.tkdump", segment)
        data = (tmp_path / "rank_00001.tkdump").read_bytes()
        assert bytes(pack(segment)) == data
        assert len(data) == size
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00001.tkdump"]


def test_a_dump_holds_what_was_written(tmp_path: Path):
    spec = CaptureSpec(groups=3, launches=2, host_spans=2, records_per_track=500)
    write_capture(tmp_path, spec)
    dump = read_dump(tmp_path / "rank_00001.tkdump")
    assert (dump.rank, dump.run_id, dump.metadata["state"]) == (1, "test", "closed")
    assert [launch.records_count for launch in dump.launches] == [4 * 30] * 2
    assert len(dump.clock_samples()) == 18
    assert [name.decode() for name in dump.host_spans()["name"]] == ["step 0", "step 1"]
    assert dump.path.stat().st_size < 20_000  # not the 500 records a track that were reserved
    assert peek_metadata(dump.path) == dump.metadata


def test_warps_that_recorded_nothing_take_next_to_no_room_and_are_all_there(tmp_path: Path):
    with capture(tmp_path, records_per_track=1) as session:
        handle = session.launch("idle", grid=100, warps=16, events=json.dumps(EVENT_TABLE))
        run_kernel(handle.descriptor, 100, 16, 0)
        in_segment = session.segment.track_headers(session.segment.launches()[0]).copy()
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    headers = dump.all_track_headers()
    assert len(headers) == 1600
    assert dump.path.stat().st_size < 1600 * fmt.TRACK_HEADER.itemsize // 5
    for field in ("start_ticks", "end_ticks", "sm", "role", "attempted"):
        assert (headers[field] == in_segment[field]).all()
    assert (headers["start_ticks"] > 0).all()
    assert headers["finished"].all()
    assert (headers["block"] * 16 + headers["warp"] == np.arange(1600)).all()


def test_a_dump_of_version_3_whose_headers_are_as_they_were_is_read(sound: bytes, scratch: Path):
    scratch.write_bytes(sound)
    dump = read_dump(scratch)
    metadata, payload = copy.deepcopy(dump.metadata), dump.payload.tobytes()
    del metadata["packed_headers"]
    for entry, launch in zip(metadata["launches"], dump.launches, strict=True):
        entry["headers_offset"] = len(payload)
        payload += dump.track_headers(launch).tobytes()
    as_version_3 = bytearray(rebuild(sound, metadata, payload))
    struct.pack_into("<I", as_version_3, 8, 3)
    scratch.write_bytes(as_version_3)
    older = read_dump(scratch)
    assert older.all_track_headers().tobytes() == dump.all_track_headers().tobytes()
    for launch, of_older in zip(dump.launches, older.launches, strict=True):
        assert older.track_headers(of_older).tobytes() == dump.track_headers(launch).tobytes()


def test_headers_that_are_not_those_of_the_launches_are_refused(sound: bytes, scratch: Path):
    scratch.write_bytes(sound)
    dump = read_dump(scratch)
    metadata, payload = metadata_of(sound), bytearray(dump.payload)
    packed = metadata["packed_headers"]
    place = slice(packed["offset"], packed["offset"] + packed["bytes"])

    def told(stream: bytes) -> str:
        changed = metadata | {"packed_headers": {"offset": fmt.align_up(len(payload)), "bytes": len(stream)}}
        return refuse(
            scratch, rebuild(sound, changed, bytes(payload).ljust(fmt.align_up(len(payload)), b"\0") + stream)
        )

    stream = bytes(payload[place])
    planes = zlib.decompress(stream)
    assert "headers of tracks cannot be unpacked" in told(b"\x00" + stream[1:])
    assert f"{len(planes)} bytes of headers, its launches have {len(planes)}; damaged" in told(stream[:-4])
    assert f"{len(planes) + 1} bytes of headers" in told(zlib.compress(planes + bytes(999)))
    assert f"{len(planes) - 1} bytes of headers" in told(zlib.compress(planes[:-1]))
    metadata["launches"][1]["headers_offset"] = 0
    assert "headers_offset 0, wanted " in told(stream)


@pytest.mark.usefixtures("stopped_clock")
def test_a_segment_reads_the_same_from_outside():
    with removed_after(fill_segment(CaptureSpec(killed_rank=0), 0)) as segment:
        other = SegmentView.attach(segment.name)
        assert bytes(pack(other)) == bytes(pack(segment))
        assert metadata_of(bytes(pack(other)))["state"] == "salvaged"
    with pytest.raises(BadInput, match="cannot be opened"):
        SegmentView.attach(segment.name)


def test_the_name_of_a_segment_is_taken_once():
    with removed_after(fill_segment(CaptureSpec(), 0)), pytest.raises(BadInput, match="already there"):
        fill_segment(CaptureSpec(), 0)


def test_truncation_at_and_around_every_border(sound: bytes, scratch: Path):
    metadata = metadata_of(sound)
    payload = len(sound) - struct.unpack_from("<Q", sound, 24)[0]
    offsets = [metadata[key]["offset"] for key in ("clock_samples", "host_spans", "packed_headers")]
    offsets += [launch["records_offset"] for launch in metadata["launches"]]
    borders = {0, 8, 12, 16, 24, 32, 40, HEADER_BYTES, payload, len(sound), *(payload + offset for offset in offsets)}
    for cut in sorted({border + step for border in borders for step in (-1, 0, 1)}):
        if 0 <= cut < len(sound):
            refuse(scratch, sound[:cut])
    refuse(scratch, sound + b"\0")


@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4, unique=True)
)
def test_flipped_bits_are_always_found(sound: bytes, scratch: Path, flips: list[tuple[float, int]]):
    data = bytearray(sound)
    for place, bit in flips:
        data[int(place * len(sound))] ^= 1 << bit
    # Padding and reserved bytes carry nothing.
    metadata_end = HEADER_BYTES + struct.unpack_from("<Q", sound, 16)[0]
    unused = [*range(48, HEADER_BYTES), *range(metadata_end, fmt.align_up(metadata_end))]
    if all(data[place] == sound[place] for place in range(len(sound)) if place not in unused):
        return
    refuse(scratch, bytes(data))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (7, "version 7, this reader knows 3, 4 and 5"),
        (2, "knows 3, 4 and 5 (2 has two records a span); read it with the tracekern that made"),
    ],
)
def test_other_versions_name_both(sound: bytes, scratch: Path, version: int, said: str):
    data = bytearray(sound)
    struct.pack_into("<I", data, 8, version)
    assert said in refuse(scratch, bytes(data))


def test_text_that_is_no_text_gets_a_mark_in_its_place(sound: bytes, scratch: Path):
    """As in sys.argv, for bytes that are no UTF-8."""
    strange = {"command": "train \udcff \U0001f680", "settings": {"name": "\ud800"}}
    scratch.write_bytes(rebuild(sound, metadata_of(sound) | strange))
    metadata = read_dump(scratch).metadata
    assert (metadata["command"], metadata["settings"]) == ("train ? \U0001f680", {"name": "?"})


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("settings",), [1], "metadata field settings is [1], wanted dict"),
        (("rank",), 2, "metadata field rank is 2, wanted 0..1"),
        (("num_ranks",), True, "metadata field num_ranks is True, wanted int"),
        (("state",), "gone", "metadata field state is 'gone', wanted one of"),
        (("roles",), "sender", "roles are not a list of names"),
        (("event_tables", 0, "left_out"), "wait_grid", "left_out are not a list of names"),
        (("clock", "ticks_per_second"), 0, "metadata field ticks_per_second is 0, wanted 1000.."),
        (("overhead_ns",), {"4": -1}, "metadata field overhead_ns is {'4': -1}, wanted ns by warps per SM"),
        (("sinks",), ["host"], "metadata field sinks is ['host'], wanted 'host' or 'device' by kernel"),
        (("event_tables", 0, "events"), [{}] * 65, "has 65 events, wanted at most 64"),
        (("launches", 0, "event_table"), 1, "launch 0 names table 1 of 1 event_tables"),
        (("launches", 0, "headers_offset"), 8, "headers_offset 8 with "),
        (("launches", 0, "num_tracks"), 1 << 40, "does not fit the payload of "),
        (("launches", 1, "records_offset"), 0, "records of launch 1 overlap those before it"),
        (("launches", 1, "records_count"), 1, "launch 1 has 1 records, its tracks say "),
        (("host_spans", "count"), 1 << 40, "host_spans "),
    ],
)
def test_a_field_that_cannot_be_is_named(sound: bytes, scratch: Path, path: tuple, value: Any, said: str):
    metadata = metadata_of(sound)
    *parents, key = path
    functools.reduce(lambda table, parent: table[parent], parents, metadata)[key] = value
    assert said in refuse(scratch, rebuild(sound, metadata))


def test_other_files_are_told_apart(scratch: Path, sound: bytes):
    assert "not a tracekern dump" in refuse(scratch, b"\x7fELF" + bytes(100))
    assert "0 bytes" in refuse(scratch, b"")
    with pytest.raises(BadInput, match="cannot be read"):
        read_dump(scratch.parent / "missing.tkdump")
    with pytest.raises(BadInput, match="cannot be read"):
        read_dump(scratch.parent)


def walk(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths to everything in a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [inner for key, child in children for inner in walk(child, (*path, key))]


@given(data=st.data())
def test_metadata_of_any_other_shape_reads_or_is_refused(sound: bytes, scratch: Path, data: st.DataObject):
    """Right checksums around wrong contents: never another exception, never memory beyond the file's own size."""
    metadata = metadata_of(sound)
    path = data.draw(st.sampled_from([path for path in walk(metadata) if path]))
    wild = st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=4),
        st.floats(),
        st.integers(-(1 << 70), 1 << 70),
        st.integers(0, 300),
        st.just([]),
        st.just({}),
    )
    parent = metadata
    for key in path[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[path[-1]] = data.draw(wild)
    else:
        del parent[path[-1]]
    scratch.write_bytes(rebuild(sound, metadata))
    assert "\n" not in complaint(scratch)


@given(data=st.data())
def test_a_payload_of_any_other_content_reads_or_is_refused(sound: bytes, scratch: Path, data: st.DataObject):
    size = struct.unpack_from("<Q", sound, 16)[0]
    payload = np.frombuffer(sound[fmt.align_up(HEADER_BYTES + size) :], np.uint8).copy()
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(payload) // 4 - 1))
        payload.view("<u4")[place] = data.draw(st.one_of(st.integers(0, 9), st.integers(0, 0xFFFFFFFF)))
    scratch.write_bytes(rebuild(sound, metadata_of(sound), payload.tobytes()))
    assert "\n" not in complaint(scratch)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path):
    """A file may grow to half a dump only; and a directory that is a file takes none."""
    with removed_after(fill_segment(CaptureSpec(), 0)) as segment:
        (tmp_path / "file").write_text("")
        with pytest.raises(BadInput, match="cannot write"):
            write_dump(tmp_path / "file" / "rank_00000.tkdump", segment)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(pack(segment)) // 2, before[1]))
        try:
            with pytest.raises(BadInput, match=r"cannot write .*: File too large"):
                write_dump(tmp_path / "rank_00000.tkdump", segment)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

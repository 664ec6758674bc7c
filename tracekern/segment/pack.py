"""Packs a segment, dead or alive, into a dump: for the rank that closes it, or the launcher that salvages it."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.fault import describe_fault, parse_fault
from tracekern.dump.reader import LaunchSection, Part
from tracekern.errors import BadInput
from tracekern.files import atomic_file
from tracekern.segment.lacking import lacking_bodies
from tracekern.segment.unrecorded import why_only_counted, why_refused
from tracekern.segment.view import SegmentView

_PACK_RECORDS = 1 << 20


def pack(segment: SegmentView) -> memoryview:
    """Returns the bytes of a segment's dump. The segment must not change meanwhile."""
    buffer = BytesIO()
    _write(segment, buffer)
    return buffer.getbuffer()


def write_dump(path: Path | str, segment: SegmentView, killed_by: str = "") -> int:
    """Write the dump of a segment; the file appears whole or not at all. Returns its size in bytes.

    killed_by: what killed its rank, where that is known. Raises BadInput if the directory cannot hold it.
    """
    with file_of_capture(Path(path)) as file:
        return _write(segment, file, killed_by)


@contextlib.contextmanager
def file_of_capture(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` if the block ends without an error. Makes the directory if it is missing.

    A link of that name is replaced: the user named only the directory. Raises BadInput if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}; nothing was left there") from None
    with atomic_file(path, through_link=False) as file:
        yield file


def _bytes_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns the memory of whole rows as a flat array."""
    return rows.view(np.uint8).reshape(-1) if rows.size else np.empty(0, np.uint8)


def _chunks(records: npt.NDArray[Any]) -> Iterator[slice]:
    """Yields slices of some tracks at a time, to bound memory."""
    step = max(1, _PACK_RECORDS // max(1, records.shape[1]))
    return (slice(first, first + step) for first in range(0, len(records), step))


def is_of_launch(entry: Any, headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Returns which tracks of a launch's region the launch wrote, [num_tracks]; an earlier launch left the others."""
    return np.asarray(headers["started"] >> fmt.GENERATION_SHIFT << fmt.GENERATION_SHIFT == entry["generation"])


def _complete(entry: Any, headers: npt.NDArray[Any]) -> None:
    """Clear what an earlier launch left, and set the fields that the host knows, which kernels do not write."""
    warps_run = _warps_run(entry, headers)
    headers[~is_of_launch(entry, headers)] = 0
    headers["started"] &= (1 << fmt.GENERATION_SHIFT) - 1
    is_older = headers["end_ticks"] < headers["start_ticks"]
    for field in ("end_ticks", "written", "attempted", "elapsed_cycles", "epoch"):
        headers[field][is_older] = 0
    index = np.arange(len(headers))
    warps = max(int(entry["warps_per_block"]), 1)
    headers["block"] = int(entry["block_first"]) + index // warps * int(entry["block_step"])
    headers["warp"] = index % warps
    headers["launch_idx"] = entry["launch_idx"]
    headers["finished"] = headers["end_ticks"] != 0
    headers["warps_run"] = warps_run


def _blocks_run(entry: Any, headers: npt.NDArray[Any]) -> int:
    """Returns the number of blocks that the kernel left in the headers; 0: as many as the host expected."""
    is_its_own = len(headers) and headers["launch_idx"][0] == entry["generation"]
    return int(headers["block"][0]) if is_its_own else 0


def _warps_run(entry: Any, headers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the number of warps of each block, in the block's first track; 0: as many as the host expected."""
    told = headers["warps_run"]
    return np.where(told >> 16 == entry["generation"], told & 0xFFFF, 0)


def _count_shared(entry: Any, headers: npt.NDArray[Any]) -> int:
    """Returns the number of tracks that several recorders started, by headers as kernels leave them.

    A ring's second recorder says so when it ends. Until then an end before its start is that of another one.
    """
    generation, shift = int(entry["generation"]), fmt.GENERATION_SHIFT
    starts = headers["finished"].astype(np.uint32) << 16 | headers["warp"]
    is_cut = (headers["end_ticks"] != 0) & (headers["end_ticks"] < headers["start_ticks"])
    was_ended = is_cut & (headers["written"] >> shift << shift == generation)
    is_ring = headers["started"] & ((1 << shift) - 1) == fmt.STARTED_RING
    again_in_ring = is_of_launch(entry, headers) & ((starts == generation | fmt.STARTED_AGAIN) | was_ended)
    return int(np.where(is_ring, again_in_ring, (starts > 1) & (generation == 0)).sum())


@dataclass(frozen=True)
class _Packed:
    entry: Any
    headers: npt.NDArray[Any]
    blocks_run: int
    """Number of blocks that ran, if more than the host expected; else 0."""
    shared_tracks: int
    """Number of tracks that several recorders started."""

    @property
    def optional(self) -> dict[str, Any]:
        """What is written unless it is 0 or empty."""
        key = self.entry["key"].decode(errors="replace")
        by_host = int(bool(self.entry["flags"] & fmt.ENTRY_BY_HOST))
        return {"blocks_run": self.blocks_run, "shared_tracks": self.shared_tracks, "key": key, "by_host": by_host}

    @property
    def num_records(self) -> int:
        return int(self.headers["written"].sum(dtype=np.int64))

    def records(self, segment: SegmentView) -> Iterator[npt.NDArray[Any]]:
        """Yields the written records, track after track, some tracks at a time to bound memory."""
        from tracekern import _core

        records = segment.records(self.entry)
        for rows in _chunks(records):
            yield _core.copy_records(_bytes_of(self.headers[rows]), _bytes_of(records[rows]))


def _metadata(
    segment: SegmentView, rows: dict[str, npt.NDArray[Any]], launches: list[_Packed], num_lost: int, headers: bytes
) -> tuple[dict[str, Any], int]:
    """Returns a dump's metadata and the bytes of its payload.

    num_lost: launches with records lost with the device. headers: those of all launches, compressed.
    """
    tables: dict[str, list[Any]] = {"event": [], "role": []}
    cursor = 0

    def place(num_bytes: int) -> int:
        nonlocal cursor
        offset, cursor = cursor, fmt.align_up(cursor + num_bytes)
        return offset

    def index_of(kind: str, table: Any) -> int:
        if table not in tables[kind]:
            tables[kind].append(table)
        return tables[kind].index(table)

    parts = {key: Part(place(of_key.nbytes), len(of_key)) for key, of_key in rows.items()}
    packed_headers = {"offset": place(len(headers)), "bytes": len(headers)}
    headers_at = itertools.accumulate((packed.headers.nbytes for packed in launches), initial=0)
    sections = []
    for packed, headers_offset in zip(launches, headers_at, strict=False):
        entry, count = packed.entry, packed.num_records
        section = {key: int(entry[key]) for key in LaunchSection.entry_keys()}
        section |= {
            "name": entry["name"].decode(errors="replace"),
            "event_table": index_of("event", segment.events(entry)),
            "role_table": index_of("role", segment.roles(entry)),
            "headers_offset": headers_offset,
            "records_offset": place(count * fmt.RECORD_BYTES),
            "records_count": count,
        }
        sections.append(section | {key: value for key, value in packed.optional.items() if value})
    fault = parse_fault(segment.fault_record.tobytes(), segment.metadata.get("fault_names", {}))
    counted = int((segment.launches()["flags"] & fmt.ENTRY_COUNTED_ONLY != 0).sum())
    only_counted = counted and not (launches or num_lost or segment.header["launches_refused"])
    only_live = ("directory", "fault_names")
    metadata = {key: value for key, value in segment.metadata.items() if key not in only_live} | {
        "packed_ns": time.monotonic_ns() + segment.anchor_ns,
        "died_ns": int(segment.header["died_ns"]),
        "state": fmt.STATE_NAMES[fmt.SegmentState(int(segment.header["state"]))],
        "fault": fault,
        "fault_text": describe_fault(fault) if fault else "",
        "settings": _settings_of_launches(tables["event"]) | segment.metadata.get("settings", {}),
        "event_tables": tables["event"],
        "role_tables": tables["role"],
        "launches": sections,
        "packed_headers": packed_headers,
        "sinks": _sinks(launches),
        "launches_counted": counted,
        "counted_text": why_only_counted(counted) if only_counted else "",
        "launches_lost": num_lost,
        **_not_recorded(segment),
        **{key: part.as_json() for key, part in parts.items()},
    }
    return metadata, cursor


def _not_recorded(segment: SegmentView) -> dict[str, Any]:
    return {
        "launches_refused": int(segment.header["launches_refused"]),
        "refused_bytes": int(segment.header["refused_bytes"]),
        "refused_text": why_refused(segment.header, str(segment.metadata.get("keep"))),
        "lacking_bodies": lacking_bodies(segment),
        "host_spans_lost": int(segment.header["host_spans_lost"]),
        "clock_samples_lost": int(segment.header["samples_lost"]),
    }


def _compress_headers(launches: list[_Packed]) -> bytes:
    """Returns the headers of all launches: in a kernel of thousands of warps most of them have recorded nothing."""
    packer = zlib.compressobj(1)
    parts = [packer.compress(fmt.pack_planes(packed.headers).data) for packed in launches if packed.headers.size]
    return b"".join([*parts, packer.flush()])


def _settings_of_launches(event_tables: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the settings that tables tell of their launches; a list of values where they differ."""
    found: dict[str, list[Any]] = {}
    for table in event_tables:
        for name, value in table.get("settings", {}).items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _sinks(launches: list[_Packed]) -> dict[str, list[str]]:
    """Returns, by kernel, the memories that its records went to: "host", "device" or both."""
    found: dict[str, set[str]] = {}
    for packed in launches:
        mirrored = int(packed.entry["flags"]) & fmt.ENTRY_MIRRORED
        found.setdefault(packed.entry["name"].decode(errors="replace"), set()).add("device" if mirrored else "host")
    return {name: sorted(sinks) for name, sinks in found.items()}


def _write(segment: SegmentView, file: BinaryIO, killed_by: str = "") -> int:
    from tracekern import _core

    launches, num_lost = [], 0
    for entry in segment.recorded_launches():
        if int(entry["flags"]) & fmt.ENTRY_MIRRORED and not segment.header["collected"]:
            num_lost += 1
            continue
        of_launch = segment.track_headers(entry).copy()
        blocks_run, shared_tracks = _blocks_run(entry, of_launch), _count_shared(entry, of_launch)
        _complete(entry, of_launch)
        records = segment.records(entry)
        _core.find_records(_bytes_of(of_launch), _bytes_of(records), bool(entry["generation"]))
        launches.append(_Packed(entry, of_launch, blocks_run, shared_tracks))
    # Read once, because another thread may append to them meanwhile.
    rows = {"clock_samples": segment.clock_samples(), "host_spans": segment.host_spans()}
    headers = _compress_headers(launches)
    metadata, payload_bytes = _metadata(segment, rows, launches, num_lost, headers)
    text = json.dumps(metadata | {"killed_by": killed_by}).encode()
    file.write(bytes(fmt.DUMP_HEADER.itemsize))
    file.write(text)
    file.write(bytes(-len(text) % fmt.ALIGNMENT))
    crc = 0

    def put(parts: Iterator[npt.NDArray[Any]]) -> None:
        nonlocal crc
        num_bytes = 0
        for part in parts:
            raw = np.ascontiguousarray(part).view(np.uint8).data
            crc = zlib.crc32(raw, crc)
            num_bytes += file.write(raw)
        padding = bytes(-num_bytes % fmt.ALIGNMENT)
        crc = zlib.crc32(padding, crc)
        file.write(padding)

    for of_key in rows.values():
        put(iter([of_key]))
    put(iter([np.frombuffer(headers, np.uint8)]))
    for packed in launches:
        put(packed.records(segment))
    header = np.zeros(1, fmt.DUMP_HEADER)
    file_bytes = fmt.align_up(fmt.DUMP_HEADER.itemsize + len(text)) + payload_bytes
    values = (np.void(fmt.DUMP_MAGIC), fmt.DUMP_VERSION, fmt.DUMP_HEADER.itemsize, len(text), payload_bytes)
    header[0] = (*values, zlib.crc32(text), crc, file_bytes, np.void(bytes(16)))
    file.seek(0)
    file.write(header.tobytes())
    file.flush()
    return file_bytes

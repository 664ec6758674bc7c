"""The segment: POSIX shared memory that one rank records into, readable from outside at any moment, dead or alive.

Everything is bump-allocated and never reused, so a region is zero when its launch starts. A count in the header grows
only after what it counts is complete: a reader that attaches after SIGKILL finds no half-written entry. Pages are
reserved with posix_fallocate before anybody writes to them, because a full /dev/shm is otherwise met as SIGBUS inside
a kernel.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.record import format as fmt

SHM_DIR = Path("/dev/shm")
MAX_LAUNCHES = 1 << 16
MAX_CLOCK_SAMPLES = 1 << 16
_NAME_BYTES = 95


@dataclass(frozen=True)
class LaunchPlan:
    """One launch as the host knows it before the kernel starts."""

    name: str
    num_blocks: int
    warps_per_block: int
    records_per_track: int
    """0: count only."""
    stream: int = 0
    sequence: int = 0
    epoch: int = 0
    blocks: range = range(0)
    """Blocks that are recorded; one track per block and warp."""
    event_mask: int = (1 << 64) - 1
    role_mask: int = (1 << 32) - 1
    events: bytes = b""
    """The kernel's event table, JSON as describe_events() gives it."""
    roles: bytes = b"[]"
    """JSON list of role names."""
    counted_only: bool = False

    @property
    def num_tracks(self) -> int:
        return len(self.blocks) * self.warps_per_block

    def region_bytes(self, record_bytes: int) -> int:
        """Arena bytes of descriptor, headers and records."""
        headers = self.num_tracks * fmt.TRACK_HEADER.itemsize
        records = self.num_tracks * self.records_per_track * record_bytes
        return fmt.LAUNCH_DESCRIPTOR.itemsize + headers + fmt.align_up(records)


class Segment:
    """A mapped segment. `create` maps for writing, `attach` for reading only."""

    def __init__(self, name: str, file_descriptor: int, size: int, writable: bool) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.name = name
        self._fd = file_descriptor
        self._bytes = np.frombuffer(mmap.mmap(file_descriptor, size, access=access), np.uint8)
        self._texts: dict[bytes, int] = {}
        self.header: Any = self._bytes[: fmt.SEGMENT_HEADER.itemsize].view(fmt.SEGMENT_HEADER)[0]
        self._record_dtype: np.dtype[Any] | None = None

    @classmethod
    def create(
        cls, run_id: str, rank: int, metadata: dict[str, Any], arena_bytes: int, host_spans: int = 10_000
    ) -> Segment:
        """A new segment, state open.

        Pages cost memory only once reserved. Raises BadInput where /dev/shm cannot hold it.
        """
        name = fmt.segment_name(run_id, rank)
        text = json.dumps(metadata).encode()
        layout = _layout(len(text), host_spans, arena_bytes)
        try:
            fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise BadInput(f"segment {name}: already there from another run; remove {SHM_DIR / name}") from None
        except OSError as error:
            raise BadInput(
                f"segment {name}: {SHM_DIR} cannot be written ({error.strerror}); mount a tmpfs there"
            ) from None
        try:
            os.ftruncate(fd, layout["total_bytes"])
            os.posix_fallocate(fd, 0, layout["launches_offset"])
            segment = cls(name, fd, layout["total_bytes"], writable=True)
        except OSError as error:
            os.close(fd)
            os.unlink(SHM_DIR / name)
            raise BadInput(f"segment {name}: no room in {SHM_DIR} ({error.strerror}); remove what fills it") from None
        offset = layout["metadata_offset"]
        segment._bytes[offset : offset + len(text)] = np.frombuffer(text, np.uint8)
        for key, value in layout.items():
            segment.header[key] = value
        segment.header["pid"] = os.getpid()
        segment.header["state"] = fmt.SegmentState.OPEN
        segment.header["magic"] = fmt.SEGMENT_MAGIC
        return segment

    @classmethod
    def attach(cls, name: str) -> Segment:
        """A segment of another process, read only. Raises BadInput when it is missing or not a segment."""
        try:
            fd = os.open(SHM_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadInput(f"segment {name}: cannot be opened ({error.strerror}); is the run over?") from None
        size = os.fstat(fd).st_size
        if size < fmt.SEGMENT_HEADER.itemsize:
            os.close(fd)
            raise BadInput(
                f"segment {name}: {size} bytes, wanted at least {fmt.SEGMENT_HEADER.itemsize}; it died at birth"
            )
        segment = cls(name, fd, size, writable=False)
        segment._check(size)
        return segment

    def unlink(self) -> None:
        """Remove the name; the memory goes when the last mapping does."""
        remove_segment(self.name)

    def close(self) -> None:
        """Give the file descriptor back. The mapping lives as long as arrays into it do."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @property
    def address(self) -> int:
        """Where the segment is mapped in this process."""
        return int(self._bytes.ctypes.data)

    @property
    def metadata(self) -> dict[str, Any]:
        offset, length = int(self.header["metadata_offset"]), int(self.header["metadata_bytes"])
        return self._json(offset, length)  # type: ignore[no-any-return]

    @property
    def record_dtype(self) -> np.dtype[Any]:
        if self._record_dtype is None:
            self._record_dtype = fmt.SEGMENT_DTYPES[self.metadata["record_format"]]
        return self._record_dtype

    @property
    def footprint_bytes(self) -> int:
        """Memory that the capture holds now."""
        parts = (("launches", fmt.LAUNCH_ENTRY), ("samples", fmt.CLOCK_SAMPLE), ("host_spans", fmt.HOST_SPAN))
        used = sum(int(self.header[f"num_{part}"]) * dtype.itemsize for part, dtype in parts)
        return int(self.header["launches_offset"]) + used + int(self.header["arena_cursor"])

    def back_arena(self) -> tuple[int, int]:
        """Gives the whole arena real pages; its address and bytes. Raises BadInput when /dev/shm is too full for it."""
        offset, num_bytes = int(self.header["arena_offset"]), int(self.header["arena_bytes"])
        if not self._back(offset, num_bytes):
            raise BadInput(f"segment {self.name}: {num_bytes} bytes do not fit {SHM_DIR}; lower max_bytes")
        return self.address + offset, num_bytes

    def reserve_launch(self, plan: LaunchPlan) -> int | None:
        """Address of the LaunchDescriptor of a zeroed region for `plan`, or None when there is no room (counted)."""
        idx = int(self.header["num_launches"])
        entry_at = int(self.header["launches_offset"]) + idx * fmt.LAUNCH_ENTRY.itemsize
        events_at, roles_at = self._store_text(plan.events), self._store_text(plan.roles)
        region = self._allocate(plan.region_bytes(self.record_dtype.itemsize))
        has_entry = idx < int(self.header["launches_capacity"]) and self._back(entry_at, fmt.LAUNCH_ENTRY.itemsize)
        if region is None or events_at is None or roles_at is None or not has_entry:
            self.header["launches_refused"] += 1
            self.header["refused_bytes"] += plan.region_bytes(self.record_dtype.itemsize)
            return None
        headers_at = region + fmt.LAUNCH_DESCRIPTOR.itemsize
        records_at = headers_at + plan.num_tracks * fmt.TRACK_HEADER.itemsize
        shared: dict[str, int] = {
            "launch_idx": idx,
            "epoch": plan.epoch & 0xFFFFFFFF,
            "warps_per_block": plan.warps_per_block,
            "block_first": plan.blocks.start,
            "block_stop": plan.blocks.stop,
            "block_step": plan.blocks.step,
            "records_per_track": plan.records_per_track,
            "role_mask": plan.role_mask,
            "event_mask": plan.event_mask,
            "first_lap": 0,
        }
        descriptor = self._view(region, fmt.LAUNCH_DESCRIPTOR, 1)
        _fill(descriptor, shared | {"headers": self.address + headers_at, "records": self.address + records_at})
        only_host_knows: dict[str, Any] = {
            "name": plan.name.encode()[:_NAME_BYTES],
            "sequence": plan.sequence,
            "stream": plan.stream,
            "num_blocks": plan.num_blocks,
            "num_tracks": plan.num_tracks,
            "flags": fmt.ENTRY_COUNTED_ONLY if plan.counted_only else 0,
            "headers_offset": headers_at,
            "records_offset": records_at,
            "events_offset": events_at,
            "events_bytes": len(plan.events),
            "roles_offset": roles_at,
            "roles_bytes": len(plan.roles),
        }
        _fill(self._view(entry_at, fmt.LAUNCH_ENTRY, 1), shared | only_host_knows)
        self.header["num_launches"] = idx + 1
        return self.address + region

    def append_clock_samples(self, samples: npt.NDArray[Any]) -> None:
        """Append rows of dtype CLOCK_SAMPLE; what finds no room is counted."""
        self._append("samples", samples.astype(fmt.CLOCK_SAMPLE, copy=False))

    def append_host_span(self, name: str, thread: int, start_ns: int, end_ns: int) -> None:
        """Append one range of the host, CLOCK_REALTIME ns; what finds no room is counted."""
        span = np.zeros(1, fmt.HOST_SPAN)
        _fill(span, {"name": name.encode()[:_NAME_BYTES], "thread": thread, "start_ns": start_ns, "end_ns": end_ns})
        self._append("host", span)

    def launches(self) -> npt.NDArray[Any]:
        """[num_launches] LAUNCH_ENTRY, those that were only counted included."""
        return self._view(int(self.header["launches_offset"]), fmt.LAUNCH_ENTRY, int(self.header["num_launches"]))

    def clock_samples(self) -> npt.NDArray[Any]:
        return self._view(int(self.header["samples_offset"]), fmt.CLOCK_SAMPLE, int(self.header["num_samples"]))

    def host_spans(self) -> npt.NDArray[Any]:
        return self._view(int(self.header["host_offset"]), fmt.HOST_SPAN, int(self.header["num_host_spans"]))

    def track_headers(self, entry: Any) -> npt.NDArray[Any]:
        """[num_tracks] TRACK_HEADER of a launch."""
        return self._view(int(entry["headers_offset"]), fmt.TRACK_HEADER, int(entry["num_tracks"]))

    def records(self, entry: Any) -> npt.NDArray[Any]:
        """[num_tracks, records_per_track] records of a launch."""
        num_tracks, per_track = int(entry["num_tracks"]), int(entry["records_per_track"])
        flat = self._view(int(entry["records_offset"]), self.record_dtype, num_tracks * per_track)
        return flat.reshape(num_tracks, per_track)

    def events(self, entry: Any) -> Any:
        """The event table of a launch, parsed."""
        return self._json(int(entry["events_offset"]), int(entry["events_bytes"]))

    def roles(self, entry: Any) -> Any:
        return self._json(int(entry["roles_offset"]), int(entry["roles_bytes"]))

    def _append(self, part: str, rows: npt.NDArray[Any]) -> None:
        count_key, lost_key = (
            ("num_samples", "samples_lost") if part == "samples" else ("num_host_spans", "host_spans_lost")
        )
        count = int(self.header[count_key])
        offset = int(self.header[f"{part}_offset"]) + count * rows.itemsize
        room = int(self.header[f"{part}_capacity"]) - count
        if len(rows) > room or not self._back(offset, rows.nbytes):
            self.header[lost_key] += len(rows)
            return
        self._view(offset, rows.dtype, len(rows))[:] = rows
        self.header[count_key] = count + len(rows)

    def _store_text(self, text: bytes) -> int | None:
        if text not in self._texts:
            offset = self._allocate(len(text))
            if offset is None:
                return None
            self._bytes[offset : offset + len(text)] = np.frombuffer(text, np.uint8)
            self._texts[text] = offset
        return self._texts[text]

    def _allocate(self, num_bytes: int) -> int | None:
        cursor = int(self.header["arena_cursor"])
        stop = cursor + fmt.align_up(num_bytes)
        offset = int(self.header["arena_offset"]) + cursor
        if stop > int(self.header["arena_bytes"]) or not self._back(offset, num_bytes):
            return None
        self.header["arena_cursor"] = stop
        return offset

    def _back(self, offset: int, num_bytes: int) -> bool:
        """Give the range real pages; False when /dev/shm is full."""
        try:
            if num_bytes:
                os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return True

    def _view(self, offset: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        stop = offset + count * dtype.itemsize
        if stop > len(self._bytes):
            raise BadInput(
                f"segment {self.name}: part at {offset}..{stop} is outside its {len(self._bytes)} bytes; damaged"
            )
        return self._bytes[offset:stop].view(dtype)

    def _json(self, offset: int, length: int) -> Any:
        try:
            return json.loads(self._view(offset, np.dtype(np.uint8), length).tobytes())
        except (ValueError, RecursionError) as error:
            raise BadInput(f"segment {self.name}: text at {offset} is not JSON ({error}); damaged") from None

    def _check(self, size: int) -> None:
        header = self.header
        if bytes(header["magic"]) != fmt.SEGMENT_MAGIC:
            raise BadInput(f"segment {self.name}: magic {bytes(header['magic'])!r}, wanted {fmt.SEGMENT_MAGIC!r}")
        if int(header["total_bytes"]) != size:
            raise BadInput(f"segment {self.name}: {size} bytes, its header says {header['total_bytes']}; damaged")


def remove_segment(name: str) -> None:
    """Remove a segment's name from /dev/shm, whatever it holds."""
    (SHM_DIR / name).unlink(missing_ok=True)


def list_segments(run_id: str) -> list[str]:
    """Names of the segments in /dev/shm that belong to a run, its second and later captures (RUN.1, RUN.2) included."""
    of_run = re.compile(re.escape(f"tracekern-{run_id}") + r"(\.\d+)?-\d+")
    return sorted(path.name for path in SHM_DIR.glob("tracekern-*") if of_run.fullmatch(path.name))


def _layout(metadata_bytes: int, host_spans: int, arena_bytes: int) -> dict[str, int]:
    """Header fields: where each part of the segment stands."""
    page = mmap.PAGESIZE
    layout = {"metadata_offset": fmt.SEGMENT_HEADER.itemsize, "metadata_bytes": metadata_bytes}
    cursor = layout["metadata_offset"] + metadata_bytes
    parts = (
        ("launches", MAX_LAUNCHES, fmt.LAUNCH_ENTRY),
        ("samples", MAX_CLOCK_SAMPLES, fmt.CLOCK_SAMPLE),
        ("host", host_spans, fmt.HOST_SPAN),
    )
    for part, capacity, dtype in parts:
        cursor = fmt.align_up(cursor, page)
        layout |= {f"{part}_offset": cursor, f"{part}_capacity": capacity}
        cursor += capacity * dtype.itemsize
    arena_offset = fmt.align_up(cursor, page)
    arena_bytes = fmt.align_up(arena_bytes, page)
    return layout | {
        "arena_offset": arena_offset,
        "arena_bytes": arena_bytes,
        "total_bytes": arena_offset + arena_bytes,
    }


def _fill(row: npt.NDArray[Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        row[key] = value

"""The segment: POSIX shared memory that one rank records into, readable from outside at any moment, dead or alive.

Everything is bump-allocated, so a region is zero when its first launch starts. A count in the header grows only after
what it counts is complete: a reader that attaches after SIGKILL finds no half-written entry. Pages are reserved with
posix_fallocate before they are written to, because a full /dev/shm would otherwise raise SIGBUS inside a kernel.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.fault import FAULT_RECORD
from tracekern.errors import BadInput
from tracekern.segment.file_lock import FileLock
from tracekern.segment.launch_plan import LaunchPlan, Region
from tracekern.segment.names import MAKE_ROOM, SHM_DIR, own_segment
from tracekern.segment.view import SegmentView

MAX_LAUNCHES = 1 << 16
MAX_CLOCK_SAMPLES = 1 << 16


def segment_layout(metadata_bytes: int, host_spans: int, arena_bytes: int) -> dict[str, int]:
    """Returns the header fields that place each part of the segment."""
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
        "arena_cursor": FAULT_RECORD.itemsize,
        "fault_offset": arena_offset,
        "fault_bytes": FAULT_RECORD.itemsize,
        "total_bytes": arena_offset + arena_bytes,
    }


def _word_of(dtype: Any, field: str) -> int:
    return int(dtype.fields[field][1]) // 4


_DESCRIPTOR_WARPS_GENERATION = _word_of(fmt.LAUNCH_DESCRIPTOR, "warps_per_block")
_DESCRIPTOR_REPLAY = _word_of(fmt.LAUNCH_DESCRIPTOR, "replay")
_ENTRY_WORDS = fmt.LAUNCH_ENTRY.itemsize // 4
_FLAGS, _GENERATION, _ORDER, _SEQUENCE, _EPOCH, _HOST_NS, _WAITED_NS, _KEY = (
    _word_of(fmt.LAUNCH_ENTRY, field)
    for field in ("flags", "generation", "order", "sequence", "epoch", "host_ns", "waited_ns", "key")
)
_KEY_BYTES = fmt.LAUNCH_ENTRY["key"].itemsize
_CARRY_BYTES = 1 << 32
"""Regions do not cross multiples of this: kernels count up only the low word of an address (csrc/platform/device.h)."""
_KEPT_FREE = fmt.ALIGNMENT
"""Bytes in front of such a multiple that no region takes: the count of a full track stays there."""


class SegmentWriter(SegmentView):
    """A segment that this process writes to: its rank's own, which create() makes, or one that attach() maps."""

    _access = mmap.ACCESS_WRITE
    _open_flags = os.O_RDWR

    def __init__(self, name: str, file_descriptor: int, size: int) -> None:
        super().__init__(name, file_descriptor, size)
        self._owner_lock: FileLock | None = None
        self._is_arena_backed = False
        self._num_started = 0
        self._texts: dict[bytes, int] = {}

    @classmethod
    def create(
        cls, run_id: str, rank: int, metadata: dict[str, Any], arena_bytes: int, host_spans: int = 10_000
    ) -> SegmentWriter:
        """Creates a segment in state open.

        Pages cost memory only once reserved. Raises BadInput if /dev/shm cannot hold it.
        """
        name = fmt.segment_name(run_id, rank)
        text = json.dumps(metadata).encode()
        layout = segment_layout(len(text), host_spans, arena_bytes)
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
            os.posix_fallocate(fd, layout["fault_offset"], FAULT_RECORD.itemsize)
            segment = cls(name, fd, layout["total_bytes"])
        except OSError as error:
            os.close(fd)
            os.unlink(SHM_DIR / name)
            raise BadInput(f"segment {name}: no room in {SHM_DIR} ({error.strerror}); {MAKE_ROOM}") from None
        offset = layout["metadata_offset"]
        segment._bytes[offset : offset + len(text)] = np.frombuffer(text, np.uint8)
        for key, value in layout.items():
            segment.header[key] = value
        segment._owner_lock = own_segment(name)
        segment.header["pid"] = os.getpid()
        segment.header["state"] = fmt.SegmentState.OPEN
        segment.header["magic"] = fmt.SEGMENT_MAGIC
        return segment

    @classmethod
    def empty_like(cls, other: SegmentView) -> SegmentWriter:
        """Creates an empty private segment as large as `other`; only what is written takes memory."""
        fd = os.memfd_create(other.name)
        os.ftruncate(fd, len(other._bytes))
        return cls(other.name, fd, len(other._bytes))

    def close(self) -> None:
        """Give the file descriptor back; who made the segment owns it no more."""
        super().close()
        if self._owner_lock is not None:
            self._owner_lock.close()

    def copy_from(self, other: SegmentView, offset: int, num_bytes: int) -> None:
        """Copies a part of another segment of the same size to the same offset."""
        self._check_inside(offset, offset + num_bytes)
        self._bytes[offset : offset + num_bytes] = other._bytes[offset : offset + num_bytes]

    def back_arena(self) -> tuple[int, int]:
        """Reserves pages for the whole arena. Returns its address and bytes. Raises BadInput without room."""
        offset, num_bytes = int(self.header["arena_offset"]), int(self.header["arena_bytes"])
        if not self._back(offset, num_bytes):
            raise BadInput(f"segment {self.name}: {num_bytes} bytes do not fit {SHM_DIR}; {MAKE_ROOM}")
        self._is_arena_backed = True
        return self.address + offset, num_bytes

    def refuse(self, plan: LaunchPlan) -> None:
        """Counts a launch that runs unrecorded."""
        self.header["launches_refused"] += 1
        self.header["refused_bytes"] = min(int(self.header["refused_bytes"]) + plan.region_bytes, (1 << 63) - 1)

    def reserve_regions(self, plan: LaunchPlan, count: int, mirror_offset: int = 0) -> list[Region]:
        """Reserves zeroed regions for up to `count` launches of `plan`, as many as there is room for.

        Until start_launch() a region is unused and does not appear in a dump. mirror_offset: what to add, modulo 2^64,
        to an address in the arena to get the address that kernels write to.
        """
        events_at, roles_at = self._store_text(plan.events), self._store_text(plan.roles)
        region_bytes = plan.region_bytes
        first_idx = int(self.header["num_launches"])
        count = min(count, self._clear_of_carry(region_bytes, mirror_offset))
        count = min(count, self.arena_room // region_bytes, int(self.header["launches_capacity"]) - first_idx)
        if events_at is None or roles_at is None or count < 1:
            return []
        entries_at = int(self.header["launches_offset"]) + first_idx * fmt.LAUNCH_ENTRY.itemsize
        if not self._back(entries_at, count * fmt.LAUNCH_ENTRY.itemsize):
            return []
        first_at = self._allocate(count * region_bytes)
        if first_at is None:
            return []
        offsets = first_at + np.arange(count, dtype=np.uint64) * np.uint64(region_bytes)
        entries = np.frombuffer(bytearray(plan.entry * count), fmt.LAUNCH_ENTRY)
        entries["launch_idx"] = np.arange(first_idx, first_idx + count)
        entries["order"] = self._num_started & 0xFFFFFFFF
        entries["headers_offset"] = headers_at = offsets + np.uint64(fmt.LAUNCH_DESCRIPTOR.itemsize)
        entries["records_offset"] = records_at = headers_at + np.uint64(plan.num_tracks * fmt.TRACK_HEADER.itemsize)
        entries["events_offset"], entries["roles_offset"] = events_at, roles_at
        descriptors = np.frombuffer(bytearray(plan.descriptor * count), fmt.LAUNCH_DESCRIPTOR)
        written_at = np.uint64((self.address + mirror_offset) % (1 << 64))
        descriptors["headers"], descriptors["records"] = written_at + headers_at, written_at + records_at
        # Copied as bytes, because numpy copies rows field by field, which takes several times as long.
        whole = np.ndarray((count, len(plan.descriptor)), np.uint8, self._bytes.data, first_at, (region_bytes, 1))
        whole[:] = descriptors.view(np.uint8).reshape(whole.shape)
        self._bytes[entries_at : entries_at + entries.nbytes] = entries.view(np.uint8)
        self.header["num_launches"] = first_idx + count
        places = offsets, descriptors["headers"], descriptors["records"]
        return list(map(Region, range(first_idx, first_idx + count), *(place.tolist() for place in places)))

    def start_launch(self, region: Region, sequence: int, epoch: int, key: str = "", waited_ns: int = 0) -> None:
        """Gives the region to a launch of its plan: the first one, or the next one of a flight recorder.

        waited_ns: how long the launch waited for the region. A long key is cut.
        """
        words, entry = self.words, self._entries_word + region.launch_idx * _ENTRY_WORDS
        flags = words[entry + _FLAGS]
        if not flags & fmt.ENTRY_RESERVED:
            # Set first, so that a process that packs the segment from outside never sees a half-written entry.
            flags |= fmt.ENTRY_RESERVED
            words[entry + _FLAGS] = flags
            generation = self._next_generation(entry)
            descriptor = region.offset // 4 + _DESCRIPTOR_WARPS_GENERATION
            words[descriptor] = words[descriptor] & 0xFFFF | generation << 16
        words[entry + _ORDER] = self._num_started & 0xFFFFFFFF
        self._num_started += 1
        words[entry + _SEQUENCE] = sequence & 0xFFFFFFFF
        words[entry + _EPOCH] = epoch & 0xFFFFFFFF
        words[entry + _WAITED_NS] = min(waited_ns, 0xFFFFFFFF)
        if key or words[entry + _KEY]:  # that of an earlier launch
            key_at = 4 * (entry + _KEY)
            self._bytes[key_at : key_at + _KEY_BYTES] = np.frombuffer(
                fmt.cut_name(key).ljust(_KEY_BYTES, b"\0"), np.uint8
            )
        host_ns = time.time_ns()
        words[entry + _HOST_NS], words[entry + _HOST_NS + 1] = host_ns & 0xFFFFFFFF, host_ns >> 32
        words[entry + _FLAGS] = flags ^ fmt.ENTRY_RESERVED

    def renew_region(self, region: Region) -> int:
        """Prepares the region for one more replay of a graph. Returns its new generation."""
        # Cleared first: the region belongs to no replay until one takes it.
        self.words[region.offset // 4 + _DESCRIPTOR_REPLAY] = 0
        entry = self._entries_word + region.launch_idx * _ENTRY_WORDS
        self.words[entry + _ORDER] = self._num_started & 0xFFFFFFFF
        return self._next_generation(entry)

    def _next_generation(self, entry: int) -> int:
        one = 1 << fmt.GENERATION_SHIFT
        generation = (self.words[entry + _GENERATION] + one) & 0xFFFF or one  # 0 always means the region's first launch
        self.words[entry + _GENERATION] = generation
        return generation

    def append_clock_samples(self, samples: npt.NDArray[Any]) -> None:
        """Append rows of dtype CLOCK_SAMPLE; rows that find no room are counted as lost."""
        self._append("samples", samples.astype(fmt.CLOCK_SAMPLE, copy=False))

    def append_host_span(self, name: str, thread: int, start_ns: int, end_ns: int) -> None:
        """Append one host span, in CLOCK_REALTIME ns.

        Without room it is counted as lost; in a flight recorder, whose last spans stay, the oldest one gives its place.
        """
        span = np.zeros(1, fmt.HOST_SPAN)
        _fill(span, {"name": fmt.cut_name(name), "thread": thread, "start_ns": start_ns, "end_ns": end_ns})
        spans = self.host_spans()
        if self.metadata.get("keep") == "last" and 0 < len(spans) == int(self.header["host_capacity"]):
            spans[int(self.header["host_spans_lost"]) % len(spans)] = span[0]
            self.header["host_spans_lost"] += 1
        else:
            self._append("host", span)

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

    def _clear_of_carry(self, region_bytes: int, mirror_offset: int) -> int:
        """Moves the cursor past a multiple of 4 GiB that the next region would cross.

        Returns how many regions fit before the next multiple.
        """
        offset = int(self.header["arena_offset"]) + int(self.header["arena_cursor"])
        at = (self.address + offset + mirror_offset) % _CARRY_BYTES
        usable = _CARRY_BYTES - _KEPT_FREE
        if at + region_bytes > usable >= region_bytes:
            if _CARRY_BYTES - at > self.arena_room:
                return 0
            self.header["arena_cursor"] += _CARRY_BYTES - at
            at = 0
        return max((usable - at) // region_bytes, 1)

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
        if stop > int(self.header["arena_bytes"]):
            return None
        if not self._is_arena_backed and not self._back(offset, num_bytes):
            return None
        self.header["arena_cursor"] = stop
        return offset

    def _back(self, offset: int, num_bytes: int) -> bool:
        """Reserve pages for the range. Returns False if /dev/shm is full."""
        try:
            if num_bytes:
                os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                return False
            raise
        return True


def _fill(row: npt.NDArray[Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        row[key] = value

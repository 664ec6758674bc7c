"""The segment: POSIX shared memory that one rank records into, readable from outside at any moment, dead or alive.

Everything is bump-allocated, so a region is zero when its first launch starts. A count in the header grows only after
what it counts is complete: a reader that attaches after SIGKILL finds no half-written entry. Pages are reserved with
posix_fallocate before they are written to, because a full /dev/shm would otherwise raise SIGBUS inside a kernel.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import time
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.fault import FAULT_RECORD
from tracekern.errors import BadInput
from tracekern.files import removed_afterwards, temporary_neighbour
from tracekern.host_clock import anchor
from tracekern.segment.file_lock import FileLock
from tracekern.segment.launch_plan import LaunchPlan, Region
from tracekern.segment.names import MAKE_ROOM, NO_ROOM, SHM_DIR, own_segment
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


def _number_of(field: str) -> int:
    return int(fmt.SEGMENT_HEADER.fields[field][1]) // 8  # type: ignore[index]


_NUM_LAUNCHES, _CAPACITY, _CURSOR, _ARENA_OFFSET, _ARENA_BYTES = map(
    _number_of, ("num_launches", "launches_capacity", "arena_cursor", "arena_offset", "arena_bytes")
)
_DESCRIPTOR_REPLAY = _word_of(fmt.LAUNCH_DESCRIPTOR, "replay")
_ENTRY_WORDS = fmt.LAUNCH_ENTRY.itemsize // 4
_FLAGS, _GENERATION, _ORDER = (_word_of(fmt.LAUNCH_ENTRY, field) for field in ("flags", "generation", "order"))
_ENTRY_TEXTS = int(fmt.LAUNCH_ENTRY.fields["events_offset"][1])  # type: ignore[index]
_ALL_BITS = (1 << 64) - 1
_NUM_STARTED, _ARENA_BACKED, _ENTRIES_BACKED, _SPANS_BACKED, _ANCHOR, _IS_OPEN = range(_NUM_HOST_WORDS := 6)
"""Places in SegmentWriter.host_words."""
_WORD, _PAIR = struct.Struct("<I"), struct.Struct("<QQ")
_DESCRIPTOR_BYTES, _ENTRY_BYTES = fmt.LAUNCH_DESCRIPTOR.itemsize, fmt.LAUNCH_ENTRY.itemsize
_ROWS_AT_ONCE = 256
"""Launch entries, or spans of the host, whose pages are reserved together."""
_ARENA_AT_ONCE = 1 << 18
"""Bytes of the arena whose pages are reserved together, where they are not all reserved as the capture opens."""
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
        self.host_words: Any = memoryview(bytearray(8 * _NUM_HOST_WORDS)).cast("Q")
        """HostWords of csrc/apis/launches.cpp."""
        self.host_words[_ANCHOR] = anchor().ns & _ALL_BITS
        self.lock = threading.Lock()
        """Held by who writes with the calls of this class."""
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
        temporary = temporary_neighbour(SHM_DIR / name)
        with contextlib.ExitStack() as undo:
            try:
                fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, fd)
                with removed_afterwards(temporary):
                    segment = cls._lay_out(name, fd, layout, text)
                    lock = undo.enter_context(contextlib.closing(own_segment(temporary.name)))
                    os.link(temporary, SHM_DIR / name)  # owned from its first moment: nobody takes it for a dead rank's
            except FileExistsError:
                raise BadInput(f"segment {name}: already there from another run; remove {SHM_DIR / name}") from None
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise BadInput(f"segment {name}: no room in {SHM_DIR} ({error.strerror}); {MAKE_ROOM}") from None
                why = f"{SHM_DIR} cannot be written ({error.strerror}); mount a tmpfs there"
                raise BadInput(f"segment {name}: {why}") from None
            undo.pop_all()
        segment._owner_lock = lock
        return segment

    @classmethod
    def _lay_out(cls, name: str, fd: int, layout: dict[str, int], metadata: bytes) -> SegmentWriter:
        os.ftruncate(fd, layout["total_bytes"])
        os.posix_fallocate(fd, 0, layout["launches_offset"])
        os.posix_fallocate(fd, layout["fault_offset"], FAULT_RECORD.itemsize)
        segment = cls(name, fd, layout["total_bytes"])
        offset = layout["metadata_offset"]
        segment._bytes[offset : offset + len(metadata)] = np.frombuffer(metadata, np.uint8)
        for key, value in layout.items():
            segment.header[key] = value
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
        self.host_words[_ARENA_BACKED] = num_bytes
        return self.address + offset, num_bytes

    def refuse(self, num_launches: int, num_bytes: int) -> None:
        """Counts launches that run unrecorded. num_bytes: what their regions would have taken."""
        self.header["launches_refused"] += num_launches
        self.header["refused_bytes"] = min(int(self.header["refused_bytes"]) + num_bytes, (1 << 63) - 1)

    @property
    def is_recording(self) -> bool:
        """Whether finish() was not called yet."""
        return bool(self.header["state"] == fmt.SegmentState.OPEN)

    def finish(self, num_given_up: int = 0) -> None:
        """Ends the recording. num_given_up: launches that ran unrecorded because recording had failed."""
        if num_given_up:
            self.header["failed"] = 1
            self.refuse(num_given_up, 0)
        self.header["state"] = fmt.SegmentState.CLOSED

    def mark_saved(self) -> None:
        """Tells `salvage` that a dump holds all records."""
        self.header["saved"] = 1

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
        if not self._back_entries(first_idx + count):
            return []
        first_at = self._allocate(count * region_bytes)
        if first_at is None:
            return []
        offsets = first_at + np.arange(count, dtype=np.uint64) * np.uint64(region_bytes)
        entries = np.frombuffer(bytearray(plan.entry * count), fmt.LAUNCH_ENTRY)
        entries["launch_idx"] = np.arange(first_idx, first_idx + count)
        entries["order"] = self.host_words[_NUM_STARTED] & 0xFFFFFFFF
        entries["headers_offset"] = headers_at = offsets + np.uint64(fmt.LAUNCH_DESCRIPTOR.itemsize)
        entries["records_offset"] = records_at = headers_at + np.uint64(plan.num_tracks * fmt.TRACK_HEADER.itemsize)
        entries["events_offset"], entries["roles_offset"] = events_at, roles_at
        descriptors = np.frombuffer(bytearray(plan.descriptor * count), fmt.LAUNCH_DESCRIPTOR)
        written_at = np.uint64((self.address + mirror_offset) % (1 << 64))
        descriptors["headers"], descriptors["records"] = written_at + headers_at, written_at + records_at
        # Copied as bytes, because numpy copies rows field by field, which takes several times as long.
        whole = np.ndarray((count, len(plan.descriptor)), np.uint8, self._bytes.data, first_at, (region_bytes, 1))
        whole[:] = descriptors.view(np.uint8).reshape(whole.shape)
        entries_at = int(self.header["launches_offset"]) + first_idx * _ENTRY_BYTES
        self._bytes[entries_at : entries_at + entries.nbytes] = entries.view(np.uint8)
        self.header["num_launches"] = first_idx + count
        places = offsets, descriptors["headers"], descriptors["records"]
        return list(map(Region, range(first_idx, first_idx + count), *(place.tolist() for place in places)))

    @cached_property
    def host(self) -> Any:
        """What writes launches and spans of the host where there is room: SegmentHost of csrc/apis/launches.cpp."""
        from tracekern import _core

        keeps_last = self.metadata.get("keep") == "last"
        return _core.SegmentHost(self.address, self.host_words, self.lock.locked, keeps_last)

    def open_short_way(self, is_open: bool) -> None:
        """Lets `host` write what launch() and range() are asked for, or no more."""
        self.host_words[_IS_OPEN] = is_open

    def rows_of(self, plan: LaunchPlan, mirror_offset: int = 0) -> Any:
        """Returns the RegionPlan that start_new() takes; None without room for one region. mirror_offset: as above."""
        if plan.region_bytes > self.arena_room:
            return None
        events_at, roles_at = self._store_text(plan.events), self._store_text(plan.roles)
        if events_at is None or roles_at is None:
            return None
        entry = bytearray(plan.entry)
        _WORD.pack_into(entry, 4 * _FLAGS, plan.flags)
        _PAIR.pack_into(entry, _ENTRY_TEXTS, events_at, roles_at)
        from tracekern import _core

        return _core.RegionPlan(
            region_bytes=plan.region_bytes,
            records_in_region=_DESCRIPTOR_BYTES + plan.num_tracks * fmt.TRACK_HEADER.itemsize,
            mirror_offset=mirror_offset & _ALL_BITS,
            arena_address=(self._address + self._numbers[_ARENA_OFFSET] + mirror_offset) & _ALL_BITS,
            entry=bytes(entry),
            descriptor=plan.descriptor,
        )

    def start_new(self, rows: Any, sequence: int, epoch: int, key: str = "") -> Region | None:
        """Does what reserve_regions() and start_launch() do for one launch, in less time. Returns None without room.

        rows: of rows_of().
        """
        waited_ns = 0
        if not self.host.has_room(rows):
            asked_ns = time.monotonic_ns()
            if not self._make_room(rows.region_bytes, rows.mirror_offset):
                return None
            waited_ns = min(time.monotonic_ns() - asked_ns, 0xFFFFFFFF)
        return Region(*self.host.start_new(rows, sequence & 0xFFFFFFFF, epoch & 0xFFFFFFFF, key, waited_ns))

    def _make_room(self, region_bytes: int, mirror_offset: int) -> bool:
        """Moves the cursor to where a region fits, and reserves its pages. Returns False without room."""
        if not self._clear_of_carry(region_bytes, mirror_offset):
            return False
        stop = self._numbers[_CURSOR] + region_bytes
        is_backed = stop <= self.host_words[_ARENA_BACKED] or self._back_arena_to(stop)
        return is_backed and self._back_entries(self._numbers[_NUM_LAUNCHES] + 1)

    def start_launch(self, region: Region, sequence: int, epoch: int, key: str = "") -> None:
        """Gives the region to a launch of its plan: the first one, or the next one of a flight recorder.

        A long key is cut.
        """
        told = sequence & 0xFFFFFFFF, epoch & 0xFFFFFFFF, key
        self.host.start_again(region.launch_idx, region.offset, *told)

    def renew_region(self, region: Region) -> int:
        """Prepares the region for one more replay of a graph. Returns its new generation."""
        # Cleared first: the region belongs to no replay until one takes it.
        self.words[region.offset // 4 + _DESCRIPTOR_REPLAY] = 0
        entry = self._entries_word + region.launch_idx * _ENTRY_WORDS
        self.words[entry + _ORDER] = self.host_words[_NUM_STARTED] & 0xFFFFFFFF
        return self._next_generation(entry)

    def _next_generation(self, entry: int) -> int:
        one = 1 << fmt.GENERATION_SHIFT
        generation = (self.words[entry + _GENERATION] + one) & 0xFFFF or one  # 0 always means the region's first launch
        self.words[entry + _GENERATION] = generation
        return generation

    def append_clock_samples(self, samples: npt.NDArray[Any]) -> None:
        """Append rows of dtype CLOCK_SAMPLE; rows that find no room are counted as lost."""
        rows = samples.astype(fmt.CLOCK_SAMPLE, copy=False)
        count, capacity = int(self.header["num_samples"]), int(self.header["samples_capacity"])
        offset = int(self.header["samples_offset"]) + count * rows.itemsize
        if len(rows) > capacity - count or not self._back(offset, rows.nbytes):
            self.header["samples_lost"] += len(rows)
            return
        self._view(offset, rows.dtype, len(rows))[:] = rows
        self.header["num_samples"] = count + len(rows)

    def append_host_span(self, name: str, thread: int, start_ns: int, end_ns: int) -> None:
        """Append one host span, in host time.

        Without room it is counted as lost; in a flight recorder, whose last spans stay, the oldest one gives its place.
        """
        span = np.zeros(1, fmt.HOST_SPAN)
        _fill(span, {"name": fmt.cut_name(name), "thread": thread, "start_ns": start_ns, "end_ns": end_ns})
        count, capacity = int(self.header["num_host_spans"]), int(self.header["host_capacity"])
        is_full = count == capacity and self.metadata.get("keep") == "last" and capacity > 0
        place = int(self.header["host_spans_lost"]) % capacity if is_full else count
        offset, row_bytes = int(self.header["host_offset"]), fmt.HOST_SPAN.itemsize
        if is_full or self._back_rows(_SPANS_BACKED, offset, row_bytes, count + 1, capacity):
            self._view(offset + place * row_bytes, fmt.HOST_SPAN, 1)[:] = span
            self.header["num_host_spans"] += not is_full
            self.header["host_spans_lost"] += is_full
        else:
            self.header["host_spans_lost"] += 1

    def _clear_of_carry(self, region_bytes: int, mirror_offset: int) -> int:
        """Moves the cursor past a multiple of 4 GiB that the next region would cross.

        Returns how many regions fit before the next multiple.
        """
        numbers, usable = self._numbers, _CARRY_BYTES - _KEPT_FREE
        at = (self._address + numbers[_ARENA_OFFSET] + numbers[_CURSOR] + mirror_offset) % _CARRY_BYTES
        if at + region_bytes > usable >= region_bytes:
            if _CARRY_BYTES - at > self.arena_room:
                return 0
            numbers[_CURSOR] += _CARRY_BYTES - at
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
        numbers = self._numbers
        cursor = numbers[_CURSOR]
        stop = cursor + fmt.align_up(num_bytes)
        if stop > self.host_words[_ARENA_BACKED] and not self._back_arena_to(stop):
            return None
        numbers[_CURSOR] = stop
        return numbers[_ARENA_OFFSET] + cursor

    def _back_arena_to(self, stop: int) -> bool:
        """Reserves pages up to `stop` of the arena, and some more where there is room. Returns False without room."""
        offset, arena_bytes = self._numbers[_ARENA_OFFSET], self._numbers[_ARENA_BYTES]
        if stop > arena_bytes:
            return False
        backed = self.host_words[_ARENA_BACKED]
        for upto in (min(stop + _ARENA_AT_ONCE, arena_bytes), stop):
            if self._back(offset + backed, upto - backed):
                self.host_words[_ARENA_BACKED] = upto
                return True
        return False

    def _back_entries(self, count: int) -> bool:
        """Reserves pages of the first `count` launch entries, and of some more. Returns False without room."""
        offset = 4 * self._entries_word
        return self._back_rows(_ENTRIES_BACKED, offset, _ENTRY_BYTES, count, self._numbers[_CAPACITY])

    def _back_rows(self, backed: int, offset: int, row_bytes: int, count: int, capacity: int) -> bool:
        first = self.host_words[backed]
        if count <= first or count > capacity:
            return count <= capacity
        for upto in (min(fmt.align_up(count, _ROWS_AT_ONCE), capacity), count):
            if self._back(offset + first * row_bytes, (upto - first) * row_bytes):
                self.host_words[backed] = upto
                return True
        return False

    def _back(self, offset: int, num_bytes: int) -> bool:
        """Reserve pages for the range. Returns False if /dev/shm is full."""
        try:
            if num_bytes:
                os.posix_fallocate(self._fd, offset, num_bytes)
        except OSError as error:
            if error.errno in NO_ROOM:
                return False
            raise
        return True


def _fill(row: npt.NDArray[Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        row[key] = value

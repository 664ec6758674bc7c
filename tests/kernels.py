"""A kernel in Python: writes records where a LaunchDescriptor says, in the order of csrc/trace/recorder.h."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import numpy as np

from tracekern.dump import format as fmt


def memory(address: int, dtype: np.dtype, count: int = 1) -> np.ndarray:
    """A view of this process's memory."""
    raw = (ctypes.c_uint8 * (dtype.itemsize * count)).from_address(address)
    return np.frombuffer(raw, dtype)


def descriptor_of(launch: int) -> np.ndarray:
    """What Launch.descriptor names: its lowest bit asks for the body of a ring, bit 62 says that one may be missing."""
    return memory(launch & ~(1 | 1 << 62), fmt.LAUNCH_DESCRIPTOR)[0]


@dataclass
class TrackWriter:
    """One warp, ticks of CLOCK_MONOTONIC: as Launch.descriptor asks, a ring, or records of spans, all stored when they
    begin.
    """

    descriptor: int
    block: int
    warp: int
    role: int = 0

    def __post_init__(self) -> None:
        launch = descriptor_of(self.descriptor)
        track = (self.block - int(launch["block_first"])) // int(launch["block_step"]) * int(launch["warps_per_block"])
        self.capacity = int(launch["records_per_track"])
        self.attempted = 0
        self.open: list[int] = []
        """Places of spans that have not ended; -1: found no room."""
        headers = int(launch["headers"]) + (track + self.warp) * fmt.TRACK_HEADER.itemsize
        records = int(launch["records"]) + (track + self.warp) * self.capacity * fmt.RECORD_BYTES
        self.header = memory(headers, fmt.TRACK_HEADER)
        self.is_ring = bool(self.descriptor & 1)
        self.records = memory(records, fmt.WIDE_RECORD if self.is_ring else fmt.SPAN_RECORD, self.capacity)
        if int(launch["generation"]) and not self.is_ring:
            self.capacity = 0  # as csrc/trace/span_recorder.h does in a region that was used before
        self.event_mask = int(launch["event_mask"])
        self.header["role"] = self.role
        self.generation, self.found = int(launch["generation"]), int(self.header["warp"][0])  # TrackHeader::starts
        self.header["warp"] = self.generation | 1 if self.is_ring else self.found + 1
        self.header["start_ticks"] = time.monotonic_ns()
        self.header["started"] = (fmt.STARTED_RING if self.is_ring else fmt.STARTED) | int(launch["generation"])

    def begin(self, event: int, payload: int = 0, ticks: int = 0) -> None:
        if self.is_ring:
            self._put(fmt.RecordKind.BEGIN, event, payload)
        elif self.event_mask >> event & 1:
            now = low_units(ticks or time.monotonic_ns())
            self.open.append(self._store(fmt.RecordKind.SPAN, event, payload, now, now - 1 & 0xFFFFFFFF))

    def end(self, event: int, ticks: int = 0) -> None:
        if self.is_ring:
            self._put(fmt.RecordKind.END, event, 0)
        elif self.event_mask >> event & 1 and (place := self.open.pop()) >= 0:
            self.records["end"][place] = low_units(ticks or time.monotonic_ns())

    def mark(self, event: int, payload: int = 0) -> None:
        if self.is_ring:
            self._put(fmt.RecordKind.MARK, event, payload)
        elif self.event_mask >> event & 1:
            now = low_units(time.monotonic_ns())
            self._store(fmt.RecordKind.MARK, event, payload, now, now)

    def span(self, event: int, payload: int = 0) -> None:
        self.begin(event, payload)
        self.end(event)

    def finish(self) -> None:
        self.header["end_ticks"] = time.monotonic_ns()
        written = self.generation if self.is_ring else min(self.attempted, self.capacity)
        self.header["written"], self.header["attempted"] = written, self.attempted
        again = self.generation | fmt.STARTED_AGAIN
        if self.is_ring and self.found and self.found | fmt.STARTED_AGAIN == again:
            self.header["warp"] = again

    def _store(self, kind: fmt.RecordKind, event: int, payload: int, begin: int, end: int) -> int:
        self.attempted += 1
        if self.attempted > self.capacity:
            return -1
        self.records[self.attempted - 1] = (end, payload >> fmt.PAYLOAD_LOW_BITS, begin, word_of(kind, event, payload))
        return self.attempted - 1

    def _put(self, kind: fmt.RecordKind, event: int, payload: int) -> None:
        if self.event_mask >> event & 1:
            lap, slot = divmod(self.attempted, self.capacity)
            ticks = time.monotonic_ns() & (1 << fmt.LAP_SHIFT) - 1 | lap << fmt.LAP_SHIFT
            self.records[slot] = (ticks, payload >> fmt.PAYLOAD_LOW_BITS, word_of(kind, event, payload))
            self.attempted += 1


def word_of(kind: fmt.RecordKind, event: int, payload: int) -> int:
    low = payload & (1 << fmt.PAYLOAD_LOW_BITS) - 1
    return kind | event << fmt.EVENT_SHIFT | low << fmt.PAYLOAD_SHIFT


def low_units(ticks: int) -> int:
    """A time as a record of a span holds it; HostClock's shift is 5."""
    return ticks >> 5 & 0xFFFFFFFF


def run_kernel(descriptor: int, grid: int, warps: int, spans: int) -> None:
    """Every warp of the recorded blocks records `spans` spans of event 1."""
    launch = descriptor_of(descriptor)
    for block in range(int(launch["block_first"]), min(grid, int(launch["block_stop"])), int(launch["block_step"])):
        for warp in range(warps):
            writer = TrackWriter(descriptor, block, warp)
            for payload in range(spans):
                writer.span(1, payload)
            writer.finish()

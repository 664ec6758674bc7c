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
    """What Launch.descriptor names: its lowest bit asks for the body of a ring."""
    return memory(launch & ~1, fmt.LAUNCH_DESCRIPTOR)[0]


@dataclass
class TrackWriter:
    """One warp: wide records, ticks of CLOCK_MONOTONIC."""

    descriptor: int
    block: int
    warp: int
    role: int = 0

    def __post_init__(self) -> None:
        launch = descriptor_of(self.descriptor)
        track = (self.block - int(launch["block_first"])) // int(launch["block_step"]) * int(launch["warps_per_block"])
        self.capacity = int(launch["records_per_track"])
        self.attempted = self.written = 0
        headers = int(launch["headers"]) + (track + self.warp) * fmt.TRACK_HEADER.itemsize
        records = int(launch["records"]) + (track + self.warp) * self.capacity * fmt.WIDE_RECORD.itemsize
        self.header = memory(headers, fmt.TRACK_HEADER)
        self.records = memory(records, fmt.WIDE_RECORD, self.capacity)
        self.event_mask = int(launch["event_mask"])
        self.header["role"] = self.role
        self.header["start_ticks"] = time.monotonic_ns()
        self.header["started"] = fmt.STARTED | int(launch["generation"])

    def record(self, kind: fmt.RecordKind, event: int, payload: int = 0) -> None:
        if not self.event_mask >> event & 1:
            return
        self.attempted += 1
        if self.written < self.capacity:
            low = payload & ((1 << fmt.PAYLOAD_LOW_BITS) - 1)
            word = kind | event << fmt.EVENT_SHIFT | low << fmt.PAYLOAD_SHIFT
            self.records[self.written] = (time.monotonic_ns(), payload >> fmt.PAYLOAD_LOW_BITS, word)
            self.written += 1

    def span(self, event: int, payload: int = 0) -> None:
        self.record(fmt.RecordKind.BEGIN, event, payload)
        self.record(fmt.RecordKind.END, event)

    def finish(self) -> None:
        self.header["end_ticks"] = time.monotonic_ns()
        self.header["written"], self.header["attempted"] = self.written, self.attempted


def run_kernel(descriptor: int, grid: int, warps: int, spans: int) -> None:
    """Every warp of the recorded blocks records `spans` spans of event 1."""
    launch = descriptor_of(descriptor)
    for block in range(int(launch["block_first"]), min(grid, int(launch["block_stop"])), int(launch["block_step"])):
        for warp in range(warps):
            writer = TrackWriter(descriptor, block, warp)
            for payload in range(spans):
                writer.span(1, payload)
            writer.finish()

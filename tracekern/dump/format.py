"""The numpy mirror of csrc/trace/record.h and segment.h, and the layouts around them (docs/architecture.md).

Every dtype here is a file format: little endian, no implicit padding. test_format.py compares it with these two.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

DUMP_MAGIC = b"TKDUMP\r\n"
DUMP_VERSION = 5
READABLE_VERSIONS = (3, 4, 5)
SEGMENT_MAGIC = b"TKSEGMT1"
CAPTURE_FORMAT = "tracekern-capture"
CAPTURE_VERSION = 1
MANIFEST_NAME = "capture.json"
TRACE_NAME = "trace.pftrace.gz"
"""File name of the merged trace that `run moe` writes beside a capture's dumps."""
MAX_NS = 1 << 62
"""Largest time in a sound dump, from the 0 of its clock. The sum of two times still fits an int64."""
ALIGNMENT = 64
"""Sections of a dump and regions of a segment start at multiples of this."""

KIND_BITS = 3
EVENT_BITS = 6
PAYLOAD_LOW_BITS = 32 - KIND_BITS - EVENT_BITS
PAYLOAD_BITS = 32 + PAYLOAD_LOW_BITS
MAX_EVENTS = 1 << EVENT_BITS
MAX_ROLES = 32
KIND_MASK = (1 << KIND_BITS) - 1
EVENT_MASK = MAX_EVENTS - 1
EVENT_SHIFT = KIND_BITS
PAYLOAD_SHIFT = KIND_BITS + EVENT_BITS
LAP_SHIFT = 48
"""First bit of the lap in the ticks of a ring's record."""
STARTED, STARTED_RING, STARTED_CYCLES = 1, 2, 3
"""Values of TrackHeader.started: one record a span; two a span, of a ring; two a span, in cycles of the core."""
RECORD_FORMATS = ("span", "ring", "cycles")
"""Formats of a track's records by number."""
GENERATION_SHIFT = 2
"""First bit of the launch's generation in TrackHeader.started; a dump has none."""
STARTED_AGAIN = 3
"""Below the generation in TrackHeader.starts of a ring: several recorders started it. A dump has `warp` and `finished`
there."""
ADDRESS_BITS = 48
"""Bits of the headers' address in a REGION of a graph's replay; the generation is in the bits above."""

MAX_ANCHOR_CYCLES = 256
"""Most cycles between the two readings of the cycle counter around a realtime reading, at either end of a track."""


class RecordKind(enum.IntEnum):
    EMPTY = 0
    BEGIN = 1
    END = 2
    MARK = 3
    SPAN = 4


class SegmentState(enum.IntEnum):
    OPEN = 1
    CLOSED = 2
    RUNNING = 3  # a copy, whose rank recorded on


STATE_NAMES = {SegmentState.OPEN: "salvaged", SegmentState.CLOSED: "closed", SegmentState.RUNNING: "running"}
"""The dump's `state` for each state of its segment. A segment is left open if its rank was killed or crashed."""


class SampleKind(enum.IntEnum):
    PING_PONG = 1
    HOST_BRACKET = 2
    WALL_CLOCK = 3


NAME_BYTES = 95
"""Longest name of a launch or a host span, and longest key of a launch."""
ALIGN = "align"
"""Name of launches that hold back every rank until all are there. No cost counts what lies before their end."""
RANK_BARRIER = "rank_barrier"
"""Name of launches in which a communicator's `barrier()` waits for all ranks."""

ENTRY_COUNTED_ONLY = 1
"""Bit of LaunchEntry.flags: a launch inside `capture.counting()`; it is left out of the dump."""
ENTRY_RESERVED = 2
"""No launch has this region yet; it is left out of the dump."""
ENTRY_IN_GRAPH = 4
"""The region is for the graph replay that its descriptor names; it is left out of the dump if none took it."""
ENTRY_MIRRORED = 8
"""Recorded in device memory; the region in the arena is filled when the mirror is collected."""
ENTRY_BY_HOST = 16
"""No launch: its tracks are written by threads of the host, in host time. A dump's `by_host` says so."""
HOST_CLOCK = {"ticks_per_second": 10**9, "resolution_ticks": 32, "shift": 5}
"""That of such tracks."""

SPAN_RECORD = np.dtype([("end", "<u4"), ("payload_high", "<u4"), ("begin", "<u4"), ("word", "<u4")])
"""A span, or an instant; its times are low words of the clock in units of 2^shift ticks."""
WIDE_RECORD = np.dtype([("ticks", "<u8"), ("payload_high", "<u4"), ("word", "<u4")])
"""The begin or the end of a span, or an instant, in a ring (whose laps a dump omits) or a track of cycles."""
RECORD_BYTES = 16
"""Size of a record in either format."""

TRACK_HEADER = np.dtype(
    [
        ("start_ticks", "<u8"),
        ("sm", "<u4"),
        ("started", "<u2"),
        ("role", "<u2"),
        ("end_ticks", "<u8"),
        ("written", "<u4"),
        ("attempted", "<u4"),
        ("elapsed_cycles", "<u8"),
        ("epoch", "<u4"),
        ("missing", "<u4"),
        ("block", "<u4"),
        ("launch_idx", "<u4"),
        ("warp", "<u2"),
        ("finished", "<u2"),
        ("warps_run", "<u4"),
    ]
)

REGION = np.dtype([("headers", "<u8"), ("records", "<u8")])

LAUNCH_DESCRIPTOR = np.dtype(
    [
        *REGION.descr,
        ("event_mask", "<u8"),
        ("of_replay", "<u8"),
        ("records_per_track", "<u4"),
        ("warps_per_block", "<u2"),
        ("generation", "<u2"),
        ("block_first", "<u4"),
        ("block_stop", "<u4"),
        ("block_step", "<u4"),
        ("role_mask", "<u4"),
        ("num_blocks", "<u4"),
        ("replay", "<u4"),
    ]
)

LACKS_BODY = 1 << 31
"""Bit of LaunchDescriptor.replay outside graphs: with_recorder() had no body with all that was asked for. Below it lies
the level of the body that ran, 0: the untraced one; above LACKED_FORMAT_SHIFT bits the format that was asked for."""
LACKED_FORMAT_SHIFT = 8

LAUNCH_ENTRY = np.dtype(
    [
        ("name", "S96"),
        ("launch_idx", "<u4"),
        ("sequence", "<u4"),
        ("stream", "<i8"),
        ("epoch", "<u4"),
        ("num_blocks", "<u4"),
        ("warps_per_block", "<u4"),
        ("block_first", "<u4"),
        ("block_stop", "<u4"),
        ("block_step", "<u4"),
        ("num_tracks", "<u4"),
        ("records_per_track", "<u4"),
        ("role_mask", "<u4"),
        ("flags", "<u4"),
        ("event_mask", "<u8"),
        ("headers_offset", "<u8"),  # this and the offsets below count from the segment's start
        ("records_offset", "<u8"),
        ("events_offset", "<u8"),
        ("roles_offset", "<u8"),
        ("events_bytes", "<u4"),
        ("roles_bytes", "<u4"),
        ("generation", "<u4"),  # the descriptor's
        ("order", "<u4"),  # launches that started before it; of a graph's region, before it was reserved
        ("host_ns", "<u8"),  # host time when the host asked for it, before the kernel's launch; 0 in a graph
        ("waited_ns", "<u4"),  # how long the host waited for its region to be reserved
        ("reserved", "V36"),
        ("key", "S96"),
    ]
)
"""Facts of a launch that the host knows before it starts; `events` and `roles` are JSON in the arena."""

CLOCK_SAMPLE = np.dtype(
    [
        ("kind", "<u4"),
        ("round_idx", "<u4"),
        ("initiator", "<i4"),
        ("responder", "<i4"),
        ("t0", "<i8"),
        ("t1", "<i8"),
        ("t2", "<i8"),
        ("t3", "<i8"),
    ]
)

HOST_SPAN = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("thread", "<i8"), ("reserved", "<i8"), ("name", "S96")])

SEGMENT_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("state", "<u4"),
        ("pid", "<u4"),
        ("total_bytes", "<u8"),
        ("metadata_offset", "<u8"),
        ("metadata_bytes", "<u8"),
        ("launches_offset", "<u8"),
        ("launches_capacity", "<u8"),
        ("num_launches", "<u8"),
        ("samples_offset", "<u8"),
        ("samples_capacity", "<u8"),
        ("num_samples", "<u8"),
        ("samples_lost", "<u8"),
        ("host_offset", "<u8"),
        ("host_capacity", "<u8"),
        ("num_host_spans", "<u8"),
        ("host_spans_lost", "<u8"),
        ("arena_offset", "<u8"),
        ("arena_bytes", "<u8"),
        ("arena_cursor", "<u8"),
        ("launches_refused", "<u8"),  # found no room: they ran unrecorded
        ("refused_bytes", "<u8"),
        ("ready_launch", "<u8"),  # these three: how ranks agree on when to sample clocks (record/sampling_schedule.py)
        ("decision", "<u8"),  # of rank 0: its launch, and in the upper half the last one that all sample before
        ("due_ns", "<u8"),  # of rank 0: CLOCK_MONOTONIC
        ("fault_offset", "<u8"),  # of the fault record (csrc/comm/fault.h), from the segment's start
        ("leaving", "<u8"),  # 1: this rank closes its capture, 2: with an error, or without its device
        ("collected", "<u8"),  # 1: the arena holds what was recorded in device memory
        ("saved", "<u8"),  # 1: its dump was written when it closed; a later capture may have replaced it
        ("died_ns", "<u8"),  # host time when its process was seen to end before it closed; 0: not known
        ("failed", "<u8"),  # 1: recording failed and was given up: launches_refused counts those after that, too
        ("fault_bytes", "<u8"),  # of the fault record; 0: 64
        ("reserved", "V8"),
    ]
)

DUMP_HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("metadata_bytes", "<u8"),
        ("payload_bytes", "<u8"),
        ("metadata_crc32", "<u4"),
        ("payload_crc32", "<u4"),
        ("file_bytes", "<u8"),
        ("reserved", "V16"),
    ]
)


def align_up(value: int, alignment: int = ALIGNMENT) -> int:
    return -(-value // alignment) * alignment


def cut_name(name: str) -> bytes:
    """Returns the name in UTF-8, cut to what an entry holds, between characters."""
    return name.encode()[:NAME_BYTES].decode(errors="ignore").encode()


def segment_name(run_id: str, rank: int) -> str:
    """Returns the name of a rank's POSIX shared memory, which is a file of this name in /dev/shm."""
    return f"tracekern-{run_id}-{rank}"


def run_name(run_id: str) -> str:
    """Returns the name that captures one after the other have in common: RUN of RUN.1, and RUN.g01234567 of
    RUN.g01234567.2, which are of a group of the ranks. Another group may capture at the same time.
    """
    return re.sub(r"\.\d+$", "", run_id)


def ranks_of(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the ranks of the capture that a dump's metadata are of: all of the run, or those of a group."""
    return list(metadata.get("ranks") or range(metadata["num_ranks"]))


def dump_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.tkdump"


def torch_profile_file_name(rank: int) -> str:
    return f"rank_{rank:05d}.torch.json.gz"


def pack_planes(headers: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns [TRACK_HEADER] byte by byte: the first of all rows, then the second ... Most are equal, and compress."""
    return np.ascontiguousarray(headers.view(np.uint8).reshape(-1, TRACK_HEADER.itemsize).T)

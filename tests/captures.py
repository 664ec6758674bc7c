"""Builds captures whose content is known, through the real segment and packer: 8 ranks x 500,000 spans in seconds.

Every track repeats one group of ten spans: `process_group` around seven `copy_token`, one `signal_token` to the next
rank and one `wait_token` for the rank before. Slots are unique in a rank, so each wait has exactly one signal.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tracekern.dump import format as fmt
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter

EVENT_TABLE: dict[str, Any] = {
    "name": "DemoEvent",
    "events": [
        {
            "name": name,
            "class": event_class,
            "ends_at": ends_at,
            "channel": channel,
            "begin_fields": begin_fields,
            "end_fields": end_fields,
        }
        for name, event_class, ends_at, channel, begin_fields, end_fields in (
            ("process_group", "work", "completion", "", "group:22", ""),
            ("copy_token", "work", "issue", "", "peer:10 slot:22", ""),
            ("signal_token", "signal", "completion", "token data slot", "peer:10 slot:22", "value:23"),
            ("wait_token", "wait", "completion", "token data slot", "peer:10 slot:22", "seen:23"),
        )
    ],
}
ROLES = ["sender", "receiver"]
SPANS_PER_GROUP = 10
VALUE_BITS = 23
"""Bits of the end fields of a signal and a wait."""
GROUP_NS = 2000
START_NS = 10**15
EPOCH = 7
SIGNAL_OFFSETS = (400, 440)  # begin and end of the signal in its group, ns
WAIT_OFFSETS = (500, 900)


@dataclass(frozen=True)
class CaptureSpec:
    """What to build."""

    num_ranks: int = 2
    num_blocks: int = 2
    warps_per_block: int = 2
    groups: int = 5
    """Groups of ten spans in each track of each launch."""
    launches: int = 1
    clock_offset_ns: int = 100_000
    """Clock c is this times c ahead."""
    clocks: tuple[int, ...] = ()
    """The clock that each rank reads, called after the lowest of them; without it each rank has its own, as in old
    dumps, and none is told."""
    clock_samples: bool = True
    path_ns: int = 400
    """How long a ping-pong takes each way."""
    host_spans: int = 0
    records_per_track: int | None = None
    """None: exactly as many as needed."""
    run_id: str = "test"
    directory: str = ""
    """Where the capture goes; for a segment that is salvaged."""
    killed_rank: int = -1
    """This rank never finishes its last launch nor closes: it hangs in the wait of its last group."""

    @property
    def num_tracks(self) -> int:
        return self.num_blocks * self.warps_per_block

    def clock_of(self, rank: int) -> int:
        return self.clocks[rank] if self.clocks else rank

    @property
    def spans_per_rank(self) -> int:
        return self.num_tracks * self.groups * SPANS_PER_GROUP * self.launches

    @property
    def flows_per_rank(self) -> int:
        return self.num_tracks * self.groups * self.launches


def metadata(spec: CaptureSpec, rank: int) -> dict[str, Any]:
    """What a capture knows when it opens."""
    return {
        "run_id": spec.run_id,
        "rank": rank,
        "num_ranks": spec.num_ranks,
        "node": "testhost",
        "pid": 1000 + rank,
        "created": "1970-01-12T13:46:39+00:00",
        "tracekern": "0.1.0",
        "backend": "cpu",
        "device": "synthetic",
        "command": "tests/captures.py",
        "note": "synthetic",
        "clock": {"name": "synthetic", "ticks_per_second": 10**9, "resolution_ticks": 1, "shift": 0}
        | ({"id": f"clock {spec.clock_of(rank)}"} if spec.clocks else {}),
        "directory": spec.directory,
        "settings": {"groups": spec.groups},
    }


def write_capture(directory: Path, spec: CaptureSpec) -> Path:
    """Dumps of all ranks in `directory`, without a manifest. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(spec.num_ranks):
        packed_ns = START_NS + spec.launches * spec.groups * GROUP_NS + 10**6
        clock = mock.patch("tracekern.segment.pack.time", SimpleNamespace(monotonic_ns=lambda at=packed_ns: at))
        with removed_after(fill_segment(spec, rank)) as segment, clock:
            write_dump(directory / fmt.dump_file_name(rank), segment)
    return directory


def make_segment(name: str, arena_bytes: int, **options: int) -> SegmentWriter:
    """An empty one, whose name no other process has."""
    return SegmentWriter.create(f"{name}-{os.getpid()}", 0, metadata(CaptureSpec(), 0), arena_bytes, **options)


@contextlib.contextmanager
def removed_after(segment: SegmentWriter) -> Iterator[SegmentWriter]:
    """Unlinks and closes a segment behind the block."""
    try:
        yield segment
    finally:
        segment.unlink()
        segment.close()


def reserve_launch(segment: SegmentWriter, plan: LaunchPlan) -> int | None:
    """Address of the LaunchDescriptor of a launch of `plan`, or None when there is no room."""
    regions = segment.reserve_regions(plan, 1)
    if not regions:
        segment.refuse(1, plan.region_bytes)
        return None
    segment.start_launch(regions[0], plan.sequence, plan.epoch)
    return segment.address + regions[0].offset


def fill_segment(spec: CaptureSpec, rank: int) -> SegmentWriter:
    """A segment as a rank leaves it. The caller unlinks it."""
    pattern = _group_records(spec, rank)
    needed = spec.groups * len(pattern)
    plans = [launch_plan(spec, sequence, spec.records_per_track or needed) for sequence in range(spec.launches)]
    arena_bytes = sum(plan.region_bytes for plan in plans) + (1 << 16)
    segment = SegmentWriter.create(
        f"{spec.run_id}-{os.getpid()}", rank, metadata(spec, rank), arena_bytes, max(1, spec.host_spans)
    )
    for sequence, plan in enumerate(plans):
        address = reserve_launch(segment, plan)
        assert address is not None
        killed = rank == spec.killed_rank and sequence == spec.launches - 1
        _write_launch(spec, rank, segment, segment.launches()[sequence], pattern, killed)
    if spec.clock_samples:
        segment.append_clock_samples(clock_samples(spec, rank))
    for idx in range(spec.host_spans):
        segment.append_host_span(f"step {idx}", 1, START_NS + idx * GROUP_NS, START_NS + (idx + 1) * GROUP_NS - 1)
    if rank != spec.killed_rank:
        segment.header["state"] = fmt.SegmentState.CLOSED
    return segment


def clock_samples(spec: CaptureSpec, rank: int) -> np.ndarray:
    """Symmetric ping-pong of rank 0 with this rank, before and after, and one bracket of the host clock.

    No ping-pong with a rank after which no clock is called.
    """
    rows = []
    offset = spec.clock_offset_ns * spec.clock_of(rank)
    duration = spec.launches * spec.groups * GROUP_NS
    for round_idx, base in enumerate((START_NS - 100_000, START_NS + duration + 100_000)):
        for repeat in range(8 if rank and spec.clock_of(rank) == rank else 0):
            t0 = base + repeat * 5 * spec.path_ns
            t1 = t0 + spec.path_ns
            rows.append(
                (
                    fmt.SampleKind.PING_PONG,
                    round_idx,
                    0,
                    rank,
                    t0,
                    t1 + offset,
                    t1 + 100 + offset,
                    t1 + 100 + spec.path_ns,
                )
            )
        rows.append(
            (
                fmt.SampleKind.HOST_BRACKET,
                round_idx,
                rank,
                rank,
                base,
                base + 50 + offset,
                base + 50 + offset,
                base + 100,
            )
        )
    return np.array(rows, fmt.CLOCK_SAMPLE)


def launch_plan(spec: CaptureSpec, sequence: int, records_per_track: int) -> LaunchPlan:
    return LaunchPlan(
        name="demo_kernel",
        num_blocks=spec.num_blocks,
        warps_per_block=spec.warps_per_block,
        records_per_track=records_per_track,
        sequence=sequence,
        epoch=EPOCH + sequence,
        blocks=range(spec.num_blocks),
        events=json.dumps(EVENT_TABLE).encode(),
        roles=json.dumps(ROLES).encode(),
    )


def _group_records(spec: CaptureSpec, rank: int) -> list[tuple[int, int, int, str, str]]:
    """(event, begin and end in ns in the group, begin and end payload) of one group; _write_launch fills them in."""
    rows = [(0, 0, 1000, "group", "")]
    rows += [(1, 10 + copy * 50, 50 + copy * 50, "next", "") for copy in range(7)]
    return [*rows, (2, *SIGNAL_OFFSETS, "next", "value"), (3, *WAIT_OFFSETS, "previous", "value")]


def _write_launch(
    spec: CaptureSpec, rank: int, segment: SegmentWriter, entry: Any, pattern: list[Any], killed: bool
) -> None:
    sequence, per_track = int(entry["sequence"]), int(entry["records_per_track"])
    start = START_NS + sequence * spec.groups * GROUP_NS + spec.clock_of(rank) * spec.clock_offset_ns
    groups = np.arange(spec.groups, dtype=np.uint64)
    tracks = np.arange(spec.num_tracks, dtype=np.uint64)
    slot = (tracks[:, None] * np.uint64(spec.groups) + groups)[:, :, None]
    events, begins, ends = (np.array([row[column] for row in pattern], np.uint64) for column in range(3))
    group_start = np.uint64(start) + groups[:, None] * np.uint64(GROUP_NS)
    payload = np.zeros((spec.num_tracks, spec.groups, len(pattern)), np.uint64)
    peers = {"next": (rank + 1) % spec.num_ranks, "previous": (rank - 1) % spec.num_ranks}
    for column, row in enumerate(pattern):
        if row[3] in peers:
            payload[:, :, column] = np.uint64(peers[row[3]]) | slot[:, :, 0] << np.uint64(10)
        elif row[3] == "group":
            payload[:, :, column] = groups
        if row[4] == "value":
            payload[:, :, column] |= np.uint64(EPOCH + sequence) << np.uint64(fmt.PAYLOAD_BITS - VALUE_BITS)
    word = np.uint64(fmt.RecordKind.SPAN) | events << np.uint64(fmt.EVENT_SHIFT)
    word = word | (payload & np.uint64((1 << fmt.PAYLOAD_LOW_BITS) - 1)) << np.uint64(fmt.PAYLOAD_SHIFT)
    flat = np.zeros((spec.num_tracks, spec.groups * len(pattern)), fmt.SPAN_RECORD)
    flat["word"] = word.reshape(flat.shape)
    flat["payload_high"] = (payload >> np.uint64(fmt.PAYLOAD_LOW_BITS)).reshape(flat.shape)
    for name, offsets in (("begin", begins), ("end", ends)):
        low = (group_start + offsets & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        flat[name] = np.broadcast_to(low, payload.shape).reshape(flat.shape)
    if killed:  # in the wait of the last group, which is not stored: it is work
        flat[:, -len(pattern)] = 0
        flat["end"][:, -1] = flat["begin"][:, -1] - 1
        flat["payload_high"][:, -1] &= (1 << 32 - VALUE_BITS) - 1
    written = min(per_track, flat.shape[1])
    segment.records(entry).view(fmt.SPAN_RECORD)[:, :written] = flat[:, :written]
    headers = segment.track_headers(entry)
    headers["start_ticks"], headers["started"] = start, 1
    headers["role"] = np.arange(spec.num_tracks) % spec.warps_per_block % len(ROLES)
    if not killed:
        headers["epoch"] = entry["epoch"]
        headers["end_ticks"] = start + spec.groups * GROUP_NS - 1
        headers["written"], headers["attempted"] = written, flat.shape[1]


def plan(**changes) -> LaunchPlan:
    wanted = {
        "name": "kernel",
        "num_blocks": 10,
        "warps_per_block": 2,
        "records_per_track": 5,
        "blocks": range(1, 8, 3),
        "events": json.dumps(EVENT_TABLE).encode(),
    }
    return LaunchPlan(**{**wanted, **changes})

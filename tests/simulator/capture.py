"""Writes what happened as a capture: real dumps, by clocks that each have an offset and a rate of their own."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from clock_exchanges import SECOND, WALL_NS, Clock, exchange

from simulator.cases import Case
from simulator.engine import Kernel, Record, Run
from tracekern.dump import format as fmt
from tracekern.record.clock_samples import choose_pairs
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter

START_NS = 0.5 * SECOND
"""When the first kernel can begin; clocks are sampled before, from 0 on."""
_KEYS = ("name", "class", "ends_at", "channel", "begin_fields", "end_fields")
_ROWS = (
    ("compute", "work", "completion", "", "", ""),
    ("copy_token", "work", "completion", "", "", ""),
    ("signal_token", "signal", "completion", "token data slot", "peer:10 slot:22", ""),
    ("wait_token", "wait", "completion", "token data slot", "peer:10 slot:22", ""),
    ("signal_room", "signal", "completion", "room credit", "peer:10 value:32", ""),
    ("wait_room", "wait", "completion", "room credit", "peer:10 wanted:32", ""),
    ("signal_meeting", "signal", "completion", "meeting barrier round", "peer:10 round:16", ""),
    ("wait_meeting", "wait", "completion", "meeting barrier round", "round:16", ""),
    ("wait_block", "wait", "completion", "", "", ""),
    ("signal_count", "signal", "completion", "count data slot", "peer:10 slot:22", ""),
    ("wait_count", "wait", "completion", "count data slot", "peer:10 slot:22", ""),
)
_FINER = ("wait_block",)
"""Events of level 2."""
_EVENTS = {
    "name": "SimulatedEvent",
    "events": [dict(zip(_KEYS, row, strict=True)) | {"level": "2" if row[0] in _FINER else "1"} for row in _ROWS],
}
_NUMBER = {row[0]: idx for idx, row in enumerate(_ROWS)}
_FIELDS = {row[0]: [entry.split(":") for entry in row[4].split()] for row in _ROWS}
_ROUND_TRIPS = 24
"""That a pair keeps of a round: a segment has room for those of 512 ranks."""
_PAIR_NS = 0.2e6
"""What the round trips of a pair take, one pair after the other: 512 ranks are through before the first kernel."""


def write_capture(
    case: Case, run: Run, seed: int, directory: Path, groups: Mapping[int, Mapping[str, Any]] | None = None
) -> None:
    """A dump for each rank. groups: rank -> the communicator of its kernels; without, that of all ranks."""
    rng = np.random.default_rng([seed, 1 << 30])
    clocks = {rank: Clock.draw(rng) for rank in range(case.num_ranks)}
    last = max(kernel.end_ns for kernels in run.kernels.values() for kernel in kernels)
    if case.jump_ns:
        middle, rank = (START_NS + last) / 2, case.num_ranks - 1
        clocks[rank] = dataclasses.replace(clocks[rank], event_at=middle, jump_ns=case.jump_ns)
    samples = _sample_clocks(case, rng, clocks, (0.0, last + 0.1 * SECOND))
    records: dict[int, list[Record]] = defaultdict(list)
    for record in sorted(run.records, key=lambda record: (record.kernel, record.warp)):
        if case.detail == "work" or record.event not in _FINER:
            records[record.warp.rank].append(record)
    for rank, clock in clocks.items():
        mine = samples[samples["initiator"] == rank]
        about = _metadata(case, rank, seed)
        events = json.dumps(_EVENTS | ({"communicator": groups[rank]} if groups else {})).encode()
        segment = _fill_segment(about, events, case.has_host_lane, clock, run.kernels[rank], records[rank], mine)
        try:
            write_dump(directory / fmt.dump_file_name(rank), segment)
        finally:
            segment.unlink()
            segment.close()


def _sample_clocks(
    case: Case, rng: np.random.Generator, clocks: dict[int, Clock], times: tuple[float, ...]
) -> np.ndarray:
    """Rounds of ping-pongs, each with brackets of the host's clock."""
    rows, pairs = [], choose_pairs([f"clock {rank}" for rank in clocks])
    for round_idx, start in enumerate(times):
        for step, (one, other) in enumerate(pairs):
            at = start + step * _PAIR_NS
            path_ns = 700.0 if case.node(one) == case.node(other) else 3_000.0
            rows.append(exchange(rng, clocks, one, other, round_idx, at, _ROUND_TRIPS, path_ns, quiet=1.0))
        for rank, clock in clocks.items():
            bracket = np.zeros(4, fmt.CLOCK_SAMPLE)
            read = start + 1e6 * np.arange(4) + rng.uniform(0, 1000, 4)
            bracket["kind"], bracket["round_idx"] = fmt.SampleKind.HOST_BRACKET, round_idx
            bracket["initiator"] = bracket["responder"] = rank
            bracket["t0"], bracket["t3"] = WALL_NS + read, WALL_NS + read + 800
            bracket["t1"] = bracket["t2"] = clock.ticks(read + 400)
            rows.append(bracket)
    return np.concatenate(rows)


def _metadata(case: Case, rank: int, seed: int) -> dict[str, Any]:
    return {
        "run_id": f"simulated_{seed}",
        "rank": rank,
        "num_ranks": case.num_ranks,
        "node": f"node-{case.node(rank)}",
        "pid": 1000 + rank,
        "created": "2026-01-01T00:00:00+00:00",
        "tracekern": "0.1.0",
        "backend": case.backend,
        "device": "simulated",
        "command": "tests/simulator",
        "note": "simulated",
        "clock": {"name": "globaltimer", "ticks_per_second": SECOND, "resolution_ticks": 32, "shift": 0}
        | {"id": f"clock {rank}"},
        "detail": case.detail,
        "directory": "",
        "settings": {},
    }


def _fill_segment(
    about: dict[str, Any],
    events: bytes,
    has_host_lane: bool,
    clock: Clock,
    kernels: list[Kernel],
    records: list[Record],
    samples: np.ndarray,
) -> SegmentWriter:
    """A segment as the rank leaves it, which the caller unlinks.

    about: its metadata. events: its kernels' table. records: by kernel and warp.
    """
    counts = Counter((record.kernel, record.warp.number) for record in records)
    plans = _plans(events, kernels, counts)
    arena_bytes = sum(plan.region_bytes for plan in plans) + (1 << 16)
    segment = SegmentWriter.create(f"simulated-{os.getpid()}", about["rank"], about, arena_bytes, max(1, len(kernels)))
    rows, ends = _span_rows(clock, records), clock.ticks(np.array([record.end_ns for record in records]))
    starts, first = clock.ticks(np.array([kernel.start_ns for kernel in kernels])), 0
    for number, (plan, kernel) in enumerate(zip(plans, kernels, strict=True)):
        region = segment.reserve_regions(plan, 1)[0]
        segment.start_launch(region, plan.sequence, plan.epoch)
        entry = segment.launches()[number]
        room, headers = segment.records(entry).view(fmt.SPAN_RECORD), segment.track_headers(entry)
        headers["started"], headers["epoch"], headers["start_ticks"] = fmt.STARTED, plan.epoch, starts[number]
        for idx, warp in enumerate(kernel.warps):
            count = counts[number, warp]
            mine = slice(first, first + count)
            room[idx, :count] = rows[mine]
            headers["written"][idx] = headers["attempted"][idx] = count
            headers["end_ticks"][idx] = ends[mine].max(initial=starts[number])
            first += count
        if has_host_lane:
            launched = WALL_NS + int(kernel.enqueued_ns), WALL_NS + int(kernel.start_ns)
            segment.append_host_span(f"launch {kernel.name}", 1 + kernel.stream, *launched)
    segment.append_clock_samples(samples)
    segment.header["state"] = fmt.SegmentState.CLOSED
    return segment


def _plans(events: bytes, kernels: list[Kernel], counts: Mapping[tuple[int, int], int]) -> list[LaunchPlan]:
    """counts: how many records each kernel has of each of its warps."""
    sequences, plans = Counter[str](), []
    for number, kernel in enumerate(kernels):
        plans.append(
            LaunchPlan(
                name=kernel.name,
                num_blocks=1,
                warps_per_block=len(kernel.warps),
                records_per_track=max(counts[number, warp] for warp in kernel.warps),
                stream=kernel.stream,
                sequence=sequences[kernel.name],
                epoch=1,
                blocks=range(1),
                events=events,
                roles=b'["worker"]',
            )
        )
        sequences[kernel.name] += 1
    return plans


def _span_rows(clock: Clock, records: list[Record]) -> np.ndarray:
    rows = np.zeros(len(records), fmt.SPAN_RECORD)
    payload = np.array([_payload(record) for record in records], np.uint64)
    event = np.array([_NUMBER[record.event] for record in records], np.uint64)
    word = np.uint64(fmt.RecordKind.SPAN) | event << np.uint64(fmt.EVENT_SHIFT)
    word = word | (payload & np.uint64((1 << fmt.PAYLOAD_LOW_BITS) - 1)) << np.uint64(fmt.PAYLOAD_SHIFT)
    rows["word"], rows["payload_high"] = word, payload >> np.uint64(fmt.PAYLOAD_LOW_BITS)
    for name, times in (("begin", [r.begin_ns for r in records]), ("end", [r.end_ns for r in records])):
        rows[name] = clock.ticks(np.array(times)) & 0xFFFFFFFF
    return rows


def _payload(record: Record) -> int:
    payload, shift = 0, 0
    for name, bits in _FIELDS[record.event]:
        payload |= record.fields[name] << shift
        shift += int(bits)
    return payload

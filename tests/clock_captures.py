"""Captures of clocks that jump, step or wander, through the real segment, dumps and merge, with their truth beside.

The clocks and exchanges are those of clock_exchanges.py; a launch is a kernel of one warp a rank in which every rank
signals every other, or works alone where flows shall say nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from captures import VALUE_BITS, CaptureSpec, launch_plan, metadata, removed_after, reserve_launch
from clock_exchanges import SECOND, Clock, exchange

from tracekern.dump import format as fmt
from tracekern.record.clock_samples import _leading
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter

NUM_RANKS = 4
GAP_S = (3.0, 3.3)
"""Between two rounds: as a capture takes them."""
PATH_NS = 450.0
"""One way between two H200."""
WORK, _, SIGNAL, WAIT = range(4)


@dataclass(frozen=True)
class Case:
    """What happens to the clock of one rank, at a time drawn between the first round and the last."""

    jump_ns: float = 0.0
    rate_step: float = 0.0
    wander: float = 1.2e-7
    """Of every clock: the rate swings by +- so much, in 40 s."""
    slower_ns: float = 0.0
    """By so much longer is the way of samples from that rank to others than the way back."""
    flows: bool = False


@dataclass(frozen=True)
class Truth:
    """What happened to which rank when, and [n] events of each rank, all at the same true times, in ns."""

    rank: int
    event_at: float
    first_ns: float
    """The first event of the trace."""
    ticks: dict[int, np.ndarray]
    bases_ns: dict[int, int]
    reading_ns: dict[int, np.ndarray]
    """What each clock would read, since its base."""

    def errors_ns(self, rank: int, reference: int, axis_ns: np.ndarray) -> np.ndarray:
        """[n] by how many ns events of a rank are off their true place on the axis of a reference."""
        return axis_ns - self.bases_ns[reference] - self.reading_ns[reference]


def write_case(directory: Path, case: Case, seed: int, num_rounds: int) -> Truth:
    """Dumps of all ranks in `directory`. Sign, rank and time of what happens are drawn from the seed."""
    rng = np.random.default_rng(seed)
    rounds = np.append(0, np.cumsum(rng.uniform(*GAP_S, num_rounds - 1))) * SECOND
    at, rank, sign = rng.uniform(0, rounds[-1]), int(rng.integers(NUM_RANKS)), rng.choice((-1, 1))
    clocks = {number: Clock.draw(rng, wander=case.wander) for number in range(NUM_RANKS)}
    clocks[rank] = dataclasses.replace(
        clocks[rank], event_at=at, jump_ns=sign * case.jump_ns, rate_step=sign * case.rate_step
    )
    samples = [_round(rng, clocks, index, start, rank, case.slower_ns) for index, start in enumerate(rounds)]
    launches = np.sort(np.append(rng.uniform(0, rounds[-1], 12), [at - 1e6, at + 1e6]))
    kernels = [_kernel(rng, time, case.flows) for time in np.clip(launches, 1e5, None)]
    directory.mkdir(parents=True, exist_ok=True)
    for number in clocks:
        rows = np.concatenate(samples)
        _write_rank(directory, number, clocks[number], kernels, rows[rows["initiator"] == number])
    times = {number: np.concatenate([kernel[number][:, 2] for kernel in kernels]) for number in clocks}
    everywhere = np.unique(np.concatenate(list(times.values())))
    return Truth(
        rank,
        at,
        everywhere[0],
        {number: clock.ticks(everywhere) for number, clock in clocks.items()},
        {number: clock.base_ns for number, clock in clocks.items()},
        {number: clock.ns(everywhere) for number, clock in clocks.items()},
    )


def _round(
    rng: np.random.Generator, clocks: dict[int, Clock], index: int, start: float, slow: int, slower_ns: float
) -> np.ndarray:
    """All pairs, one after the other, and of each the round trips that a capture keeps."""
    kept = []
    for step, (one, other) in enumerate(itertools.combinations(clocks, 2)):
        pair = (one, other) if (one + other) % 2 else (other, one)
        rows = exchange(rng, clocks, *pair, index, start + step * 1e6, count=100, path_ns=PATH_NS, quiet=1.0)
        # From every rank: what `slow` sends takes longer.
        for column in ("t1", "t2") if pair[0] == slow else ():
            rows[column] += int(slower_ns)
        rows["t3"] += int(slower_ns) if slow in pair else 0
        kept.append(_leading(rows))
    return np.concatenate(kept)


def _kernel(rng: np.random.Generator, start: float, flows: bool) -> dict[int, np.ndarray]:
    """rank -> [n, 5] rows of event, begin, end (true ns), peer and slot of its spans."""
    begin = start + rng.uniform(0, 2_000, NUM_RANKS)
    kernels = {rank: [(WORK, begin[rank], begin[rank] + 300, 0, 0)] for rank in range(NUM_RANKS)}
    if not flows:
        return {rank: np.array(rows) for rank, rows in kernels.items()}
    sent = {}
    for rank in kernels:
        for place, peer in enumerate(other for other in kernels if other != rank):
            sent[rank, peer] = begin[rank] + 320 + place * 40
            kernels[rank].append((SIGNAL, sent[rank, peer], sent[rank, peer] + 20, peer, rank))
    for rank in kernels:
        end = begin[rank] + 500
        for peer in sorted((other for other in kernels if other != rank), key=lambda other: sent[other, rank]):
            opens, end = end + 10, max(end + 30, sent[peer, rank] + 600 + rng.exponential(300))
            kernels[rank].append((WAIT, opens, end, peer, peer))
    return {rank: np.array(rows) for rank, rows in kernels.items()}


def _write_rank(
    directory: Path, rank: int, clock: Clock, kernels: list[dict[int, np.ndarray]], samples: np.ndarray
) -> None:
    spec = CaptureSpec(num_ranks=NUM_RANKS, num_blocks=1, warps_per_block=1, launches=len(kernels), run_id="clocks")
    about = metadata(spec, rank)
    about["clock"]["resolution_ticks"] = clock.resolution_ticks
    plans = [launch_plan(spec, sequence, len(kernel[rank])) for sequence, kernel in enumerate(kernels)]
    arena_bytes = sum(plan.region_bytes for plan in plans) + (1 << 16)
    with removed_after(SegmentWriter.create(f"{spec.run_id}-{os.getpid()}", rank, about, arena_bytes, 1)) as segment:
        for sequence, plan in enumerate(plans):
            assert reserve_launch(segment, plan) is not None
            _fill(segment, segment.launches()[sequence], clock, kernels[sequence][rank])
        segment.append_clock_samples(samples.astype(fmt.CLOCK_SAMPLE))
        segment.header["state"] = fmt.SegmentState.CLOSED
        write_dump(directory / fmt.dump_file_name(rank), segment)


def _fill(segment: SegmentWriter, entry: np.void, clock: Clock, rows: np.ndarray) -> None:
    """The records of the only track of a launch."""
    event, peer, slot = (rows[:, column].astype(np.uint64) for column in (0, 3, 4))
    begin, end = clock.ticks(rows[:, 1]), clock.ticks(rows[:, 2])
    payload = np.where(event == WORK, np.uint64(0), peer | slot << np.uint64(10))
    value = np.uint64(int(entry["epoch"])) << np.uint64(fmt.PAYLOAD_BITS - VALUE_BITS)
    payload |= np.where(event == WORK, np.uint64(0), value)
    word = np.uint64(fmt.RecordKind.SPAN) | event << np.uint64(fmt.EVENT_SHIFT)
    word |= (payload & np.uint64((1 << fmt.PAYLOAD_LOW_BITS) - 1)) << np.uint64(fmt.PAYLOAD_SHIFT)
    records = np.zeros(len(rows), fmt.SPAN_RECORD)
    records["begin"], records["end"] = begin & 0xFFFFFFFF, end & 0xFFFFFFFF
    records["word"], records["payload_high"] = word, payload >> np.uint64(fmt.PAYLOAD_LOW_BITS)
    segment.records(entry).view(fmt.SPAN_RECORD)[0, : len(rows)] = records
    header = segment.track_headers(entry)
    header["start_ticks"], header["end_ticks"], header["started"] = begin.min(), end.max(), 1
    header["epoch"], header["written"], header["attempted"] = entry["epoch"], len(rows), len(rows)

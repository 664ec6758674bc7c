"""Captures of any size as real dumps: calls of four kernels in which each warp sends to other ranks and waits for them.

    python benchmarks/large_captures.py DIR --ranks 64 --spans 12

Work and gaps are drawn, what waits is computed. The kernels of rank 3 work longer, those of rank 5 begin later. One
call is worked on at a time, and its records go to a file of each rank until its dump is packed: memory does not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from clock_exchanges import SECOND, WALL_NS, Clock, exchange

from tracekern.dump import format as fmt
from tracekern.record.clock_samples import choose_pairs
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter

Int64 = npt.NDArray[np.int64]

TOKENS, SEE_NS, FOUND_NS, MEET_NS, GAP_NS = 8, 400, 60, 100, 3_000
SLOW_RANK, LATE_RANK = 3, 5
START_NS = 0.5 * SECOND
STAGES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
SPANS_A_CALL = 2 * TOKENS * 3 + TOKENS + TOKENS // 4 * 2
"""Spans that a warp records in a call."""
_KEYS = ("name", "class", "ends_at", "channel", "begin_fields", "end_fields")
_ROWS = (
    ("copy_token", "work", "issue", "", "peer:10 slot:22", ""),
    ("signal_token", "signal", "completion", "token data slot", "peer:10 slot:22", ""),
    ("wait_token", "wait", "completion", "token data slot", "peer:10 slot:22", ""),
    ("receive_token", "work", "issue", "", "peer:10 slot:22", ""),
    ("send_result", "work", "issue", "", "peer:10 slot:22", ""),
    ("signal_result", "signal", "completion", "result data slot", "peer:10 slot:22", ""),
    ("wait_result", "wait", "completion", "result data slot", "peer:10 slot:22", ""),
    ("wait_block", "wait", "completion", "", "", ""),
    ("reduce_token", "work", "issue", "", "token:32", ""),
)
_NUMBER = {row[0]: idx for idx, row in enumerate(_ROWS)}
_TABLE = {"name": "LargeCaptureEvent", "events": [dict(zip(_KEYS, row, strict=True)) for row in _ROWS]}


@dataclass(frozen=True)
class Size:
    ranks: int
    calls: int
    blocks: int = 16
    warps: int = 4

    @classmethod
    def of(cls, ranks: int, spans: float) -> Size:
        """The size with about so many spans."""
        return cls(ranks, max(2, round(spans / (ranks * cls.blocks * cls.warps * SPANS_A_CALL))))

    @property
    def tracks(self) -> int:
        return self.blocks * self.warps

    @property
    def spans(self) -> int:
        return self.ranks * self.tracks * self.calls * SPANS_A_CALL


class _Kernel:
    """One launch on all ranks: [ranks, tracks] when each warp is through with what it did so far."""

    def __init__(self, rng: np.random.Generator, size: Size, start: Int64, slower: npt.NDArray[np.float64]) -> None:
        self._rng, self._slower = rng, slower
        self.now = np.repeat(start[:, None], size.tracks, axis=1)
        self.spans: list[tuple[int, Int64, Int64, npt.NDArray[np.uint64]]] = []

    def span(self, event: str, until: Int64, payload: npt.NDArray[Any] | int = 0) -> Int64:
        """Returns when it ends."""
        self.spans.append((_NUMBER[event], self.now, until, np.broadcast_to(payload, until.shape).astype(np.uint64)))
        self.now = until
        return until

    def work(self, event: str, mean_ns: float, payload: npt.NDArray[Any] | int = 0) -> None:
        drawn = mean_ns * self._rng.lognormal(-0.1, 0.4, self.now.shape) * self._slower[:, None]
        self.span(event, self.now + drawn.astype(np.int64) + 20, payload)


def _run_call(rng: np.random.Generator, size: Size, number: int, ended: Int64) -> list[tuple[Int64, _Kernel]]:
    """(when it begins on each rank, the kernel) of each stage. ended: [ranks] when the call before was over."""
    rank, warp = np.ogrid[: size.ranks, : size.tracks]
    slower = np.where(np.arange(size.ranks) == SLOW_RANK, 1.3, 1.0)
    sent: dict[tuple[str, int], Int64] = {}
    kernels = []
    for stage, name in enumerate(STAGES):
        gap = GAP_NS + rng.exponential(6_000, size.ranks)
        gap[LATE_RANK : LATE_RANK + 1] += 15_000 * (stage == 0)
        start = ended + gap.astype(np.int64)
        kernel = _Kernel(rng, size, start, slower)
        half, sends = ("token", "copy_token") if stage < 2 else ("result", "send_result")
        for token in range(TOKENS):
            hop = 1 + (warp + token + number) % (size.ranks - 1)
            peer = (rank - hop if name.endswith("send") else rank + hop) % size.ranks
            payload = peer | (warp * TOKENS + token) << 10
            if name.endswith("send"):
                kernel.work(sends, 900, payload)
                kernel.work(f"signal_{half}", 300, payload)
                sent[half, token] = kernel.now
                continue
            arrived = sent[half, token][peer, np.broadcast_to(warp, peer.shape)] + SEE_NS
            kernel.span(f"wait_{half}", np.maximum(kernel.now + FOUND_NS, arrived), payload)
            if half == "token":
                kernel.work("receive_token", 700, payload)
            elif token % 4 == 3:
                of_block = kernel.now.reshape(size.ranks, size.blocks, size.warps).max(axis=2) + MEET_NS
                kernel.span("wait_block", np.repeat(of_block, size.warps, axis=1))
                kernel.work("reduce_token", 800, token)
        kernels.append((start, kernel))
        ended = kernel.now.max(axis=1)
    return kernels


def write_capture(directory: Path, size: Size, seed: int = 7) -> Path:
    """Writes a dump for each rank into the directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    clocks = {rank: Clock.draw(rng) for rank in range(size.ranks)}
    launches = np.empty((size.calls, len(STAGES), size.ranks), np.int64)
    ended = np.full(size.ranks, int(START_NS))
    spools = [directory / f".spool_{rank}" for rank in range(size.ranks)]
    with contextlib.ExitStack() as open_files:
        files = [open_files.enter_context(spool.open("wb")) for spool in spools]
        for number in range(size.calls):
            for stage, (start, kernel) in enumerate(_run_call(rng, size, number, ended)):
                launches[number, stage] = start
                _spool(files, clocks, kernel)
                ended = kernel.now.max(axis=1)
    times = (0.0, float(ended.max()) + 0.1 * SECOND)
    samples = np.concatenate([_round(rng, clocks, number, at) for number, at in enumerate(times)])
    for rank, spool in enumerate(spools):
        mine = samples[samples["initiator"] == rank]
        _pack(
            directory, size, rank, clocks[rank].ticks(launches[:, :, rank]), np.fromfile(spool, fmt.SPAN_RECORD), mine
        )
        spool.unlink()
    return directory


def _spool(files: list[BinaryIO], clocks: dict[int, Clock], kernel: _Kernel) -> None:
    event = np.array([entry[0] for entry in kernel.spans], np.uint64)
    begin, end, payload = (np.stack([entry[column] for entry in kernel.spans], axis=2) for column in (1, 2, 3))
    word = np.uint64(fmt.RecordKind.SPAN) | event << np.uint64(fmt.EVENT_SHIFT)
    word = word | (payload & np.uint64((1 << fmt.PAYLOAD_LOW_BITS) - 1)) << np.uint64(fmt.PAYLOAD_SHIFT)
    for rank, file in enumerate(files):
        rows = np.zeros(begin.shape[1:], fmt.SPAN_RECORD)
        rows["word"], rows["payload_high"] = word[rank], payload[rank] >> np.uint64(fmt.PAYLOAD_LOW_BITS)
        rows["begin"], rows["end"] = (clocks[rank].ticks(times[rank]) & 0xFFFFFFFF for times in (begin, end))
        rows.tofile(file)


def _round(rng: np.random.Generator, clocks: dict[int, Clock], number: int, start: float) -> npt.NDArray[Any]:
    """Clock samples of all ranks at one time."""
    pairs = choose_pairs([f"clock {rank}" for rank in clocks])
    rows = [
        exchange(rng, clocks, one, other, number, start + step * 0.2e6, 24, 700.0, quiet=1.0)
        for step, (one, other) in enumerate(pairs)
    ]
    for rank, clock in clocks.items():
        bracket = np.zeros(1, fmt.CLOCK_SAMPLE)
        bracket["kind"], bracket["round_idx"] = fmt.SampleKind.HOST_BRACKET, number
        bracket["initiator"] = bracket["responder"] = rank
        bracket["t0"], bracket["t3"] = WALL_NS + start, WALL_NS + start + 800
        bracket["t1"] = bracket["t2"] = clock.ticks(np.array([start + 400]))
        rows.append(bracket)
    return np.concatenate(rows)


def _pack(
    directory: Path, size: Size, rank: int, starts: Int64, rows: npt.NDArray[Any], samples: npt.NDArray[Any]
) -> None:
    """starts: [calls, stages] ticks. rows: of all launches, one after the other."""
    segment, first = None, 0
    counts = [2 * TOKENS, 2 * TOKENS, 2 * TOKENS, TOKENS + TOKENS // 4 * 2]
    plans = [
        LaunchPlan(
            name=name,
            num_blocks=size.blocks,
            warps_per_block=size.warps,
            records_per_track=count,
            stream=0,
            sequence=call,
            epoch=call + 1,
            blocks=range(size.blocks),
            events=json.dumps(_TABLE).encode(),
            roles=b'["worker"]',
        )
        for call in range(size.calls)
        for name, count in zip(STAGES, counts, strict=True)
    ]
    arena_bytes = sum(plan.region_bytes for plan in plans) + (1 << 16)
    segment = SegmentWriter.create(f"large-{os.getpid()}", rank, _about(size, rank), arena_bytes, len(plans))
    try:
        for number, (plan, start) in enumerate(zip(plans, starts.ravel().tolist(), strict=True)):
            segment.start_launch(segment.reserve_regions(plan, 1)[0], plan.sequence, plan.epoch)
            entry, count = segment.launches()[number], plan.records_per_track
            mine = rows[first : first + size.tracks * count].reshape(size.tracks, count)
            headers, first = segment.track_headers(entry), first + mine.size
            segment.records(entry).view(fmt.SPAN_RECORD)[:, :count] = mine
            headers["started"], headers["epoch"], headers["start_ticks"] = fmt.STARTED, plan.epoch, start
            headers["written"] = headers["attempted"] = count
            headers["end_ticks"] = start + (mine["end"][:, -1].astype(np.int64) - start & 0xFFFFFFFF)
        segment.append_clock_samples(samples)
        segment.header["state"] = fmt.SegmentState.CLOSED
        write_dump(directory / fmt.dump_file_name(rank), segment)
    finally:
        segment.unlink()
        segment.close()


def _about(size: Size, rank: int) -> dict[str, Any]:
    clock = {"name": "globaltimer", "ticks_per_second": SECOND, "resolution_ticks": 32, "shift": 0}
    return {
        "run_id": "large",
        "rank": rank,
        "num_ranks": size.ranks,
        "node": f"node-{rank // 8}",
        "pid": 1000 + rank,
        "created": "2026-01-01T00:00:00+00:00",
        "tracekern": "0.1.0",
        "backend": "cuda",
        "device": "synthetic",
        "command": "benchmarks/large_captures.py",
        "note": "synthetic",
        "clock": clock | {"id": f"clock {rank}"},
        "detail": "work",
        "directory": "",
        "settings": {"hidden": 7168, "dtype": "bf16", "experts": 64},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--spans", type=float, default=1.0, help="in millions")
    options = parser.parse_args()
    size = Size.of(options.ranks, options.spans * 1e6)
    write_capture(options.directory, size)
    print(f"{options.directory}: {size.ranks} ranks, {size.calls} calls, {size.spans / 1e6:.2f} M spans")


if __name__ == "__main__":
    main()

"""What tracing costs the bundled pipeline on GPUs: device time of a call, untraced and traced in turns.

    python benchmarks/overhead_pipeline.py [--ranks 1] [--tokens 1 16 64 256 1024 4096] [--calls 100]
    python benchmarks/overhead_pipeline.py --ranks 8 --resident      # all of them side by side on one GPU

Every token has its spans. Records go to device memory, to the memory that the flight recorder chooses, and to host
memory; where nothing is selected the traced kernels run and record nothing. A call is queued behind a sleeping GPU and
a barrier of all ranks on the device, so that the device time of the call is all that is measured: CUDA events right
before and behind it, the slowest rank of each call. Untraced and traced go in pairs, the untraced one first, on the
same tensors each time: what of them fits stays in the caches. "pairs" is the median of the pairs' ratios, "on/off" the
ratio of the medians, which is judged. Also prints the host's time to queue a call. Exits with 1 where a traced call ran
unrecorded, or far too long.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, counted_launches, require_gpus, write_results
from pairs import SLEEP_CYCLES
from ranks import Row, directory_of_all, placement, print_row, run_ranks, this_rank

SHAPE = {"num_experts": 256, "topk": 8, "hidden": 7168, "dtype": "bf16"}
MODES: dict[str, dict[str, Any]] = {
    "device": {"sink": "device"},
    "flight recorder": {"keep": "last"},
    "host": {"sink": "host"},
    "nothing selected": {"sink": "device", "roles": ()},
}
"""How a call is traced -> options of the capture. The flight recorder takes the sink that counting() leads to."""
GOALS = {"device": 1.02, "flight recorder": 1.03}
"""Of on/off: the first at every number of tokens, the second at FLIGHT_TOKENS."""
FLIGHT_TOKENS = 256
FAR_OFF = 1.2
"""Of on/off in these modes: a traced body that slow was compiled badly (one took 1.45, 2 H200, 2026-11-22)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096], help="of each rank")
    parser.add_argument("--calls", type=int, default=100, help="timed pairs of each mode; fewer from 512 tokens on")
    parser.add_argument("--variant", default="balanced")
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    options = parser.parse_args()
    require_gpus(1 if options.resident else options.ranks)
    samples = run_ranks(f"{Path(__file__).stem}:measure", options)
    rows = [summarise(of_all) for of_all in zip(*samples, strict=True)]
    print_table(options, rows)
    about = {"shape": SHAPE, "ranks": options.ranks, "variant": options.variant, "calls": options.calls}
    about["placement"] = placement(options)
    name = f"overhead_pipeline_{options.ranks}" + (f"_{options.variant}" if options.variant != "balanced" else "")
    name += "_resident" if options.resident else ""
    write_results(name, {**about, "rows": rows}, 1 if options.resident else options.ranks)
    wrong = complaints(rows)
    for text in wrong:
        print(f"overhead_pipeline: {text}")
    return 1 if wrong else 0


def complaints(rows: list[Row]) -> list[str]:
    """What makes rows of summarise() no measurement, or one of something broken."""
    found = []
    unrecorded = sum(row["unrecorded"] for row in rows)
    if unrecorded:
        found.append(f"{unrecorded} traced launches found no room and ran unrecorded: not a measurement")
    for row in rows:
        if row["mode"] in GOALS and row["pair_ratio"] > FAR_OFF:
            what = f"{row['tokens']} tokens, {row['mode']}: traced calls take {row['pair_ratio']:.2f}x"
            found.append(f"{what}; compare the machine code of the two bodies")
    return found


def measure() -> None:
    """One rank: prints a row for each number of tokens and mode."""
    with this_rank() as (options, group):
        measure_rank(options, group)


def measure_rank(options: argparse.Namespace, group: Any) -> None:
    from tracekern.moe.experts import draw_experts
    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    shape = MoeShape(num_ranks=options.ranks, max_tokens=max(options.tokens), **SHAPE)
    num_residents = options.ranks if options.resident else 1
    grid = {"num_blocks": 128 // num_residents, "warps_per_block": 16}
    pipeline = P2PPipeline(group, shape, options.variant, backend="cuda", **grid)
    experts = draw_experts(shape).to("cuda")
    for tokens in options.tokens:
        drawn = MoeShape(num_ranks=options.ranks, max_tokens=tokens, **SHAPE)
        batch = draw_batch(drawn, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False).to("cuda")
        tensors = (batch.x, batch.topk_idx, batch.topk_weights, experts)
        for mode, how in MODES.items():
            row = measure_mode(pipeline, tensors, how, options.calls, num_residents * SLEEP_CYCLES)
            print_row(group.rank, {"tokens": tokens, "mode": mode, **row})


def measure_mode(
    pipeline: Any, tensors: tuple[Any, ...], how: dict[str, Any], num_calls: int, sleep_cycles: int
) -> Row:
    """Pairs of untraced and traced calls under one capture."""
    import torch

    from tracekern.dump.format import ENTRY_MIRRORED
    from tracekern.record.session import capture

    out = torch.empty_like(tensors[0])
    num_calls = min(num_calls, max(20, 25_600 // len(out)))  # many tokens spread less, and leave large captures
    max_bytes = (1 << 28) + 4000 * len(out) * (num_calls + 4)  # what the calls record; of the flight recorder, the last

    def timed_us(session: Any) -> tuple[float, float]:
        pipeline.comm.barrier()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(sleep_cycles)
        pipeline.comm.native.barrier(stream=torch.cuda.current_stream().cuda_stream)
        start.record()
        began = time.perf_counter()
        pipeline(*tensors, out=out, capture=session)
        queued_us = (time.perf_counter() - began) * 1e6
        stop.record()
        pipeline.synchronize()
        return start.elapsed_time(stop) * 1e3, queued_us

    with (
        directory_of_all(pipeline.comm.group) as directory,
        capture(directory, device=pipeline.comm.device, clocks=False, max_bytes=max_bytes, **how) as session,
    ):
        with session.counting():
            pipeline(*tensors, out=out, capture=session)
            pipeline.synchronize()
        pairs = [(timed_us(None), timed_us(session)) for _ in range(num_calls + 3)][3:]
        pipeline.synchronize()
        session.device.memory.collect(session.segment)  # so that records of the device sink can be counted here
        launches = session.segment.recorded_launches()
        mirrored = sum(bool(entry["flags"] & ENTRY_MIRRORED) for entry in launches)
        records = records_per_call(session.segment)
        unrecorded = int(session.segment.header["launches_refused"])
    return {
        "off_us": [off for (off, _), _ in pairs],
        "on_us": [on for _, (on, _) in pairs],
        "off_queue_us": statistics.median(queue for (_, queue), _ in pairs),
        "on_queue_us": statistics.median(queue for _, (_, queue) in pairs),
        "records_per_call": records,
        "launches_in_device_memory": mirrored / len(launches),
        "unrecorded": unrecorded,
    }


def records_per_call(segment: Any) -> int:
    """Of each kernel the mean of the launches that are still there (a flight recorder has the last ones, of one kernel
    more than of another), as often as one call launches it: a call was counted."""
    written: dict[bytes, list[int]] = {}
    for entry in segment.recorded_launches():
        written.setdefault(bytes(entry["name"]), []).append(int(segment.track_headers(entry)["written"].sum()))
    return round(sum(statistics.mean(written[bytes(entry["name"])]) for entry in counted_launches(segment)))


def summarise(ranks: tuple[Row, ...]) -> Row:
    """One row of all ranks: medians, spread, and the median of the ratios of neighbouring calls."""
    off, on = ([max(times) for times in zip(*(row[key] for row in ranks), strict=True)] for key in ("off_us", "on_us"))
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    off, on = sorted(off), sorted(on)
    tenth = len(off) // 10
    return {
        "tokens": ranks[0]["tokens"],
        "mode": ranks[0]["mode"],
        "launches_in_device_memory": ranks[0]["launches_in_device_memory"],
        "off_us": statistics.median(off),
        "off_p10_us": off[tenth],
        "off_p90_us": off[-1 - tenth],
        "on_us": statistics.median(on),
        "on_p10_us": on[tenth],
        "on_p90_us": on[-1 - tenth],
        "on_over_off": statistics.median(on) / statistics.median(off),
        "pair_ratio": statistics.median(ratios),
        "pair_ratio_p10": ratios[tenth],
        "pair_ratio_p90": ratios[-1 - tenth],
        "off_queue_us": max(row["off_queue_us"] for row in ranks),
        "on_queue_us": max(row["on_queue_us"] for row in ranks),
        "records_per_call": max(row["records_per_call"] for row in ranks),
        "records_per_s": max(row["records_per_call"] for row in ranks) / statistics.median(on) * 1e6,
        "unrecorded": sum(row["unrecorded"] for row in ranks),
    }


def print_table(options: argparse.Namespace, rows: list[Row]) -> None:
    columns = ["tokens", "mode", "off us", "p10..p90", "on us", "p10..p90", "on/off", "pairs", "p10..p90"]
    columns += ["M records/s", "in device memory", "queue off us", "on", "goal"]
    title = f"{options.variant} on {options.ranks} ranks, {placement(options)}, device time of the slowest"
    table = Table(title, columns)
    for row in rows:
        goal = goal_of(row)
        table.add(
            str(row["tokens"]),
            row["mode"],
            f"{row['off_us']:.1f}",
            f"{row['off_p10_us']:.1f}..{row['off_p90_us']:.1f}",
            f"{row['on_us']:.1f}",
            f"{row['on_p10_us']:.1f}..{row['on_p90_us']:.1f}",
            f"{row['on_over_off']:.3f}",
            f"{row['pair_ratio']:.3f}",
            f"{row['pair_ratio_p10']:.3f}..{row['pair_ratio_p90']:.3f}",
            f"{row['records_per_s'] / 1e6:.0f}",
            f"{row['launches_in_device_memory']:.0%}",
            f"{row['off_queue_us']:.0f}",
            f"{row['on_queue_us']:.0f}",
            "" if goal is None else "met" if row["on_over_off"] <= goal else f"missed {goal:.2f}",
        )
    table.print()
    judged = [(row["on_over_off"], goal) for row in rows if (goal := goal_of(row)) is not None]
    print(f"goals: {sum(ratio > goal for ratio, goal in judged)} of {len(judged)} missed")


def goal_of(row: Row) -> float | None:
    """None: that row has none."""
    at_any = row["mode"] != "flight recorder" or row["tokens"] == FLIGHT_TOKENS
    return GOALS.get(row["mode"]) if at_any else None


if __name__ == "__main__":
    sys.exit(main())

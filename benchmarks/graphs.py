"""Replays of a traced CUDA graph back to back on one GPU: time of a replay off and on, GB/s recorded, what was lost.

    python benchmarks/graphs.py [--tokens 1 16 64 256 1024] [--replays 50] [--rounds 5] [--slots 1024]

A time is the mean of a row of replays, the median of several, untraced and traced ones by turns; host: until the last
of a row is asked for. The first traced row stands apart: while it runs, regions are reserved in growing batches. GB/s:
the bytes that kernels store in a replay (records, and what tracks store in their headers), through the time of a traced
one. The rate up to which nothing is lost is the highest GB/s of rows that lost nothing. The last result is checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, bytes_counted, require_gpus, write_results

SHAPE = {"num_ranks": 1, "num_experts": 256, "topk": 8, "hidden": 7168, "dtype": "bf16"}

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=1024)
    options = parser.parse_args()
    require_gpus(1)
    rows = measure(options)
    costs = ["off us", "min..max", "on us", "min..max", "on/off", "first on us", "host off us", "on"]
    columns = ["tokens", "sink", *costs, "KB/replay", "GB/s", "lost", "results"]
    table = Table(f"{options.rounds} rows of {options.replays} replays back to back, {options.slots} slots", columns)
    for row in rows:
        table.add(
            str(row["tokens"]),
            row["sink"],
            f"{row['off_us']:.1f}",
            f"{row['off_min_us']:.1f}..{row['off_max_us']:.1f}",
            f"{row['on_us']:.1f}",
            f"{row['on_min_us']:.1f}..{row['on_max_us']:.1f}",
            f"{row['on_us'] / row['off_us']:.3f}",
            f"{row['first_on_us']:.1f}",
            f"{row['host_off_us']:.1f}",
            f"{row['host_on_us']:.1f}",
            f"{row['bytes_per_replay'] / 1e3:.0f}",
            f"{row['gb_per_s']:.2f}",
            str(row["lost_replays"]),
            "right" if row["right"] else "WRONG",
        )
    table.print()
    lossless = max((row["gb_per_s"] for row in rows if not row["lost_replays"]), default=0.0)
    print(f"nothing lost up to {lossless:.2f} GB/s")
    results = {"shape": SHAPE, **{key: getattr(options, key) for key in ("replays", "rounds", "slots")}, "rows": rows}
    write_results("graphs", {**results, "lossless_gb_per_s": lossless}, num_gpus=1)
    return 0 if all(row["right"] for row in rows) else 1


def measure(options: argparse.Namespace) -> list[Row]:
    from tracekern.comm.ranks.group import Group
    from tracekern.moe.experts import draw_experts
    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    shape = MoeShape(max_tokens=max(options.tokens), **SHAPE)
    pipeline = P2PPipeline(Group.discover(), shape, "balanced", backend="cuda", num_blocks=128, warps_per_block=16)
    experts = draw_experts(shape).to("cuda")
    rows = []
    for tokens in options.tokens:
        drawn = MoeShape(max_tokens=tokens, **SHAPE)
        batch = draw_batch(drawn, seed=1, rank=0, iteration=0, routing="uniform", uneven=False).to("cuda")
        for sink in ("host", "device"):
            row = measure_sink(pipeline, (batch.x, batch.topk_idx, batch.topk_weights, experts), sink, options)
            rows.append({"tokens": tokens, "sink": sink, **row})
    return rows


def measure_sink(pipeline: Any, tensors: tuple[Any, ...], sink: str, options: argparse.Namespace) -> Row:
    import torch

    from tracekern.record.session import capture

    out = torch.empty_like(tensors[0])
    pipeline(*tensors, out=out)
    pipeline.synchronize()
    expected = out.clone()

    def replay_us(graph: Any, traced: bool) -> tuple[float, float]:
        """Device and host time of a replay."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        for _ in range(options.replays):
            graph.replay(traced=traced)
        host_us = (time.perf_counter() - began) * 1e6
        stop.record()
        pipeline.synchronize()
        return start.elapsed_time(stop) * 1e3 / options.replays, host_us / options.replays

    with (
        tempfile.TemporaryDirectory() as directory,
        capture(directory, device=pipeline.comm.device, sink=sink, max_bytes=4 << 30) as session,
    ):
        with session.counting():
            pipeline(*tensors, out=out, capture=session)
            pipeline.synchronize()
        num_bytes = bytes_counted(session.segment)
        graph = session.graph(
            lambda: pipeline(*tensors, out=out, capture=session), name="pipeline", slots=options.slots
        )
        replay_us(graph, False)
        first_on_us, _ = replay_us(graph, True)
        turns = [(replay_us(graph, False), replay_us(graph, True)) for _ in range(options.rounds)]
        right = bool(torch.equal(out, expected))
    times = {}
    for mode, rows in zip(("off", "on"), zip(*turns, strict=True), strict=True):
        device_us, host_us = zip(*rows, strict=True)
        times |= {f"{mode}_us": statistics.median(device_us), f"host_{mode}_us": statistics.median(host_us)}
        times |= {f"{mode}_min_us": min(device_us), f"{mode}_max_us": max(device_us)}
    return {
        **times,
        "first_on_us": first_on_us,
        "bytes_per_replay": num_bytes,
        "gb_per_s": num_bytes / times["on_us"] / 1e3,
        "lost_replays": graph.lost_replays,
        "lost_records": graph.lost_records,
        "right": right,
    }


if __name__ == "__main__":
    sys.exit(main())

"""Replays of a traced CUDA graph back to back on one GPU: time of a replay off and on, GB/s recorded, what was lost.

    python benchmarks/graphs.py [--tokens 1 16 64 256 1024] [--replays 150] [--slots 1024]

A time is the mean of one row of replays, untraced ones first; neither is repeated. GB/s: the bytes that kernels store
in a replay (records, and what tracks store in their headers), through the time of a traced one. The rate up to which
nothing is lost is the highest GB/s of a row that lost nothing. The last result is checked.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--replays", type=int, default=150)
    parser.add_argument("--slots", type=int, default=1024)
    options = parser.parse_args()
    require_gpus(1)
    rows = measure(options)
    columns = ["tokens", "sink", "off us", "on us", "on/off", "host us", "KB/replay", "GB/s", "lost", "results"]
    table = Table(f"{options.replays} replays back to back, {options.slots} slots", columns)
    for row in rows:
        table.add(
            str(row["tokens"]),
            row["sink"],
            f"{row['off_us']:.1f}",
            f"{row['on_us']:.1f}",
            f"{row['on_us'] / row['off_us']:.3f}",
            f"{row['host_us']:.1f}",
            f"{row['bytes_per_replay'] / 1e3:.0f}",
            f"{row['gb_per_s']:.2f}",
            str(row["lost_replays"]),
            "right" if row["right"] else "WRONG",
        )
    table.print()
    lossless = max((row["gb_per_s"] for row in rows if not row["lost_replays"]), default=0.0)
    print(f"nothing lost up to {lossless:.2f} GB/s")
    results = {"shape": SHAPE, "replays": options.replays, "slots": options.slots, "rows": rows}
    write_results("graphs", {**results, "lossless_gb_per_s": lossless}, num_gpus=1)
    return 0 if all(row["right"] for row in rows) else 1


def measure(options: argparse.Namespace) -> list[Row]:
    from tracekern.moe.pipeline import P2PPipeline
    from tracekern.moe.routing import draw_batch, draw_expert_scale
    from tracekern.moe.shape import MoeShape
    from tracekern.record.group import Group

    shape = MoeShape(max_tokens=max(options.tokens), **SHAPE)
    pipeline = P2PPipeline(Group.discover(), shape, "balanced", backend="cuda", num_blocks=128, warps_per_block=16)
    scale = draw_expert_scale(shape).cuda()
    rows = []
    for tokens in options.tokens:
        drawn = MoeShape(max_tokens=tokens, **SHAPE)
        batch = draw_batch(drawn, seed=1, rank=0, iteration=0, routing="uniform", uneven=False).to("cuda")
        for sink in ("host", "device"):
            row = measure_sink(pipeline, (batch.x, batch.topk_idx, batch.topk_weights, scale), sink, options)
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
        capture(directory, device=pipeline.comm.device, sink=sink, max_bytes=1 << 30) as session,
    ):
        with session.counting():
            pipeline(*tensors, out=out, capture=session)
            pipeline.synchronize()
        num_bytes = bytes_counted(session.segment)
        graph = session.graph(
            lambda: pipeline(*tensors, out=out, capture=session), name="pipeline", slots=options.slots
        )
        replay_us(graph, False)
        off_us, _ = replay_us(graph, False)
        on_us, host_us = replay_us(graph, True)
        right = bool(torch.equal(out, expected))
    return {
        "off_us": off_us,
        "on_us": on_us,
        "host_us": host_us,
        "bytes_per_replay": num_bytes,
        "gb_per_s": num_bytes / on_us / 1e3,
        "lost_replays": graph.lost_replays,
        "lost_records": graph.lost_records,
        "right": right,
    }


if __name__ == "__main__":
    sys.exit(main())

"""Triton Proton's intra-kernel mode around regions like recorder.cu's, for recorder.py: one JSON object a line.

Each configuration is timed without and with instrumentation, by events around the launch. Proton copies and parses its
buffer behind every launch; `launch_ms` is the host's time from one launch to the next.
"""

# ruff: noqa: ANN001, ANN201 (triton.jit reads annotations)

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
import triton.profiler as proton
import triton.profiler.language as pl

STEPS = 125


@triton.jit
def plain_regions(sink, num_regions, num_steps, factor, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(sink + offsets)
    for _ in range(num_regions):
        for _ in range(num_steps):
            x = x * factor + factor
    tl.store(sink + offsets, x)


@triton.jit
def traced_regions(sink, num_regions, num_steps, factor, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(sink + offsets)
    for _ in range(num_regions):
        pl.enter_scope("region")
        for _ in range(num_steps):
            x = x * factor + factor
        pl.exit_scope("region")
    tl.store(sink + offsets, x)


def launch_times(kernel, sink, blocks, warps, launches, regions) -> tuple[list[float], float]:
    """Milliseconds of each launch by events, and from launch to launch on the host."""
    times = []
    began = time.perf_counter()
    for _ in range(launches):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        kernel[(blocks,)](sink, regions, STEPS, 0.5, SIZE=warps * 32, num_warps=warps)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return times, (time.perf_counter() - began) * 1e3 / launches


def main() -> None:
    launches, regions = int(sys.argv[1]), int(sys.argv[2])
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.zeros(blocks * 1024, device="cuda")
    plain = {}
    for warps in (4, 16, 32):
        launch_times(plain_regions, sink, blocks, warps, 3, regions)
        plain[warps] = statistics.median(launch_times(plain_regions, sink, blocks, warps, launches, regions)[0])
    pl.enable_semantic("triton")
    with tempfile.TemporaryDirectory() as folder:
        proton.start(str(Path(folder) / "regions"), data="trace", backend="instrumentation")
        for warps in (4, 16, 32):
            launch_times(traced_regions, sink, blocks, warps, 2, regions)
            times, launch_ms = launch_times(traced_regions, sink, blocks, warps, launches, regions)
            added_ns = (statistics.median(times) - plain[warps]) * 1e6 / regions
            row = {
                "probe": "proton",
                "triton": triton.__version__,
                "warps_per_sm": warps,
                "fmas": STEPS,
                "region_ns": round(plain[warps] * 1e6 / regions, 1),
                "added_ns": round(added_ns, 2),
                "launch_ms": round(launch_ms, 2),
                "launches": launches,
            }
            print(json.dumps(row), flush=True)
        proton.finalize()


if __name__ == "__main__":
    main()

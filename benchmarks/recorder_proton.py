"""Triton Proton's intra-kernel mode around regions like recorder.cu's, for recorder.py: one JSON object a line.

Each configuration is timed without and, when all were, with instrumentation, not in turns, by the kernel itself: from
the first thread's start to the last thread's end on the GPU's clock. Events around the launch would not do: behind
every launch Proton waits for the GPU, copies its buffer and parses it; `launch_ms` is the host's time from one launch
to the next.
"""

# ruff: noqa: ANN001, ANN201 (triton.jit reads annotations)

from __future__ import annotations

import itertools
import json
import re
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

REGIONS = tuple(itertools.product((125, 1000), (4, 16, 32)))
"""FMAs of a region and warps of an SM."""


@triton.jit
def clock_behind(x):
    """Each thread's ns on the GPU's clock, behind what makes its x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [bits], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def plain_regions(sink, times, num_regions, num_steps, factor, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(sink + offsets)
    tl.store(times + 2 * offsets, clock_behind(x))
    for _ in range(num_regions):
        for _ in range(num_steps):
            x = x * factor + factor
    tl.store(times + 2 * offsets + 1, clock_behind(x))
    tl.store(sink + offsets, x)


@triton.jit
def traced_regions(sink, times, num_regions, num_steps, factor, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(sink + offsets)
    tl.store(times + 2 * offsets, clock_behind(x))
    for _ in range(num_regions):
        pl.enter_scope("region")
        for _ in range(num_steps):
            x = x * factor + factor
        pl.exit_scope("region")
    tl.store(times + 2 * offsets + 1, clock_behind(x))
    tl.store(sink + offsets, x)


def run(kernel, blocks: int, steps: int, warps: int, launches: int, regions: int) -> tuple[float, float]:
    """ns of the median launch by the kernel's own clock, and ms from launch to launch on the host."""
    sink = torch.zeros(blocks * warps * 32, device="cuda")
    times = torch.zeros((len(sink), 2), dtype=torch.int64, device="cuda")
    took_ns = []
    began = time.perf_counter()
    for _ in range(launches):
        kernel[(blocks,)](sink, times, regions, steps, 0.5, SIZE=warps * 32, num_warps=warps)
        took_ns.append(int(times[:, 1].max() - times[:, 0].min()))
    return statistics.median(took_ns), (time.perf_counter() - began) * 1e3 / launches


def main() -> None:
    launches, regions = int(sys.argv[1]), int(sys.argv[2])
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    plain_ns = {}
    for steps, warps in REGIONS:
        run(plain_regions, blocks, steps, warps, 3, regions)
        plain_ns[steps, warps], _ = run(plain_regions, blocks, steps, warps, launches, regions)
    pl.enable_semantic("triton")
    with tempfile.TemporaryDirectory() as folder:
        proton.start(str(Path(folder) / "regions"), data="trace", backend="instrumentation")
        for steps, warps in REGIONS:
            run(traced_regions, blocks, steps, warps, 2, regions)
            traced_ns, launch_ms = run(traced_regions, blocks, steps, warps, launches, regions)
            row = {
                "probe": "proton",
                "triton": triton.__version__,
                "warps_per_sm": warps,
                "fmas": steps,
                "region_ns": round(plain_ns[steps, warps] / regions, 1),
                "added_ns": round((traced_ns - plain_ns[steps, warps]) / regions, 2),
                "launch_ms": round(launch_ms, 2),
                "launches": launches,
            }
            print(json.dumps(row), flush=True)
        proton.finalize()
        left = list(Path(folder).iterdir())
        if not any(re.search(rb"\bregion\b", path.read_bytes()) for path in left):
            raise SystemExit(f"Proton recorded no region; it left {[path.name for path in left]}")


if __name__ == "__main__":
    main()

"""Device time with a cold L2, and how fast a GPU reads weights that nothing is done with: for int4_sparse.py."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

FLUSH_BYTES = 256 << 20
SLEEP_CYCLES = 1_000_000
WARM_UP = 2
BLOCKS_OF_SM = (4, 8, 16)
THREADS = 256

# Compiled by torch through NVRTC: machines with a GPU need no nvcc for it.
READ_ALL = """
extern "C" __global__ void read_all(const uint4* words, int count, unsigned* sink) {
    unsigned all = 0;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 8 * stride) {
        uint4 own[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const long long at = i + k * stride;
            own[k] = at < count ? __ldcs(words + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) all ^= own[k].x ^ own[k].y ^ own[k].z ^ own[k].w;
    }
    if (all == 42) *sink = all;
}
"""


@functools.cache
def _flushed() -> Any:
    import torch

    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def timed_us(start: Callable[[], object]) -> float:
    """Device time of what `start` queues, behind a sleeping GPU and a write of more than L2 holds."""
    import torch

    cuda: Any = torch.cuda
    before, behind = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(SLEEP_CYCLES)
    _flushed().zero_()
    before.record()
    start()
    behind.record()
    behind.synchronize()
    return float(before.elapsed_time(behind) * 1e3)


def in_turns(starts: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    """Times of each, one of each after the other, without those of the first rounds."""
    rounds = [{name: timed_us(start) for name, start in starts.items()} for _ in range(WARM_UP + calls)]
    return {name: [times[name] for times in rounds[WARM_UP:]] for name in starts}


def spread(key: str, times: Sequence[float]) -> dict[str, float]:
    """Median, and the tenth from both ends, as fields of a row."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return {key: statistics.median(ordered), f"{key}_p10": ordered[tenth], f"{key}_p90": ordered[-1 - tenth]}


def ways_to_read(words: Any) -> dict[str, Callable[[], object]]:
    """Kernels that read all of `words`, by name: sums by torch, and loads of 16 bytes in a kernel of our own.

    Where torch cannot compile that there are sums alone.
    """
    import torch

    flat = words.view(-1)
    ways: dict[str, Callable[[], object]] = {
        "sum of int64": flat.sum,
        "sum of fp32": flat.view(torch.float32).sum,
        "largest of int32": flat.view(torch.int32).amax,
    }
    try:
        kernel = torch.cuda._compile_kernel(READ_ALL, "read_all")
    except (AssertionError, AttributeError, ImportError, OSError, RuntimeError) as error:
        print(f"int4_sparse: no kernel that only reads, sums stand for it: {str(error).strip().splitlines()[0]}")
        return ways
    sink = torch.zeros(1, dtype=torch.int32, device=words.device)
    count = flat.numel() * flat.element_size() // 16
    multiprocessors = torch.cuda.get_device_properties(words.device).multi_processor_count
    for blocks in BLOCKS_OF_SM:
        grid = (blocks * multiprocessors, 1, 1)
        ways[f"read_all x{blocks}"] = functools.partial(kernel, grid, (THREADS, 1, 1), [flat, count, sink])
    return ways


def fastest_read(words: Any, calls: int) -> tuple[Callable[[], object], dict[str, Any]]:
    """The way that takes least, and how long each took."""
    ways = ways_to_read(words)
    read_us = {name: statistics.median(times) for name, times in in_turns(ways, calls).items()}
    name = min(read_us, key=lambda way: read_us[way])
    num_bytes = words.numel() * words.element_size()
    about = {"way": name, "read_us": read_us[name], "bytes": num_bytes, "ways_us": read_us}
    return ways[name], about | {"gb_per_s": num_bytes / 1e3 / read_us[name]}

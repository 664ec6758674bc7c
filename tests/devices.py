"""CUDA devices that a test asks for, and a pipeline on one of them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tracekern.comm.ranks.group import Group
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape


def require_gpu() -> None:
    """Skips the test where no CUDA device answers, and initialises the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no CUDA driver")
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        pytest.skip("no CUDA device")


def require_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, {torch.cuda.device_count()} are here")


def one_rank() -> tuple[P2PPipeline, tuple[torch.Tensor, ...]]:
    """A pipeline of this process alone, and what to call it with."""
    shape = MoeShape(1, 64, 8, 4, 1024, "bf16")
    pipeline = P2PPipeline(Group(0, 1), shape, "balanced", backend="cuda", num_blocks=32, warps_per_block=8)
    batch = draw_batch(shape, seed=1, rank=0, iteration=0, routing="uniform", uneven=False).to("cuda")
    return pipeline, (batch.x, batch.topk_idx, batch.topk_weights, draw_experts(shape).to("cuda"))

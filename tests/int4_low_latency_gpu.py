"""Functions that test_int4_low_latency_gpu.py launches as resident ranks. Each returns how much was wrong."""

from __future__ import annotations

import sys

import torch

from tests.int4_experts import draw_words
from tracekern.comm.ranks.group import Group
from tracekern.moe.gemm import fused_moe_apply
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.low_latency.pipeline import DISPATCH_DTYPES, LowLatencyPipeline
from tracekern.moe.low_latency.reference import cast_to_fp8, dequantise
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape

TOKENS, HIDDEN, INTERMEDIATE, TOPK = 33, 1024, 384, 4
NUM_CALLS = 6
REPLAYS = 200


class Work:
    """A pipeline, experts and batches for one rank."""

    def __init__(self, dtype: str) -> None:
        self.group = Group.discover()
        self.shape = MoeShape(self.group.num_ranks, TOKENS, 8 * self.group.num_ranks, TOPK, HIDDEN, "bf16")
        self.dtype, experts = dtype, self.shape.num_experts
        w13, w2 = draw_words(experts, HIDDEN, 2 * INTERMEDIATE, seed=3), draw_words(experts, INTERMEDIATE, HIDDEN)
        self.experts = Int4Experts.of(w13, w2).to("cuda")
        self.pipeline = LowLatencyPipeline(
            self.group, self.shape, backend="cuda", dispatch_dtype=DISPATCH_DTYPES.index(dtype) + 1
        )
        self.batches = [self.draw(number) for number in range(NUM_CALLS)]

    def draw(self, number: int) -> Batch:
        """Now and then no tokens. Many choose expert 5, none expert 2, and some choices are of no expert."""
        generator = torch.Generator().manual_seed(100 * number + self.group.rank)
        num_tokens = (TOKENS, 0, 1, 17)[(number + self.group.rank) % 4]
        liking = torch.rand((num_tokens, self.shape.num_experts), generator=generator)
        liking[:, 5], liking[:, 2] = liking[:, 5] + 0.7, 0
        topk_idx = liking.argsort(dim=1, descending=True)[:, :TOPK].int().contiguous()
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.1] = -1
        x = torch.randn((num_tokens, HIDDEN), generator=generator).bfloat16()
        return Batch(x, topk_idx, torch.rand((num_tokens, TOPK), generator=generator)).to("cuda")

    def call(self, batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.pipeline(batch.x, batch.topk_idx, batch.topk_weights, self.experts, out=out)

    def differs(self, batch: Batch, out: torch.Tensor) -> int:
        """Whether `out` has other bits than the layer on one device, of the rows that experts see."""
        x = dequantise(*cast_to_fp8(batch.x)) if self.dtype == "fp8" else batch.x
        wanted = fused_moe_apply(x, batch.topk_idx, batch.topk_weights, self.experts.w13, self.experts.w2)
        return int((out.view(torch.int16) != wanted.view(torch.int16)).any())

    def end(self, wrong: int) -> int:
        sys.stdout.write(f"rank {self.group.rank}: {wrong} wrong\n")
        self.group.barrier()
        return wrong


def calls() -> int:
    """Back to back, with memory that is NaN until it is written to."""
    wrong = 0
    for dtype in DISPATCH_DTYPES:
        work = Work(dtype)
        torch.use_deterministic_algorithms(True, warn_only=True)
        outs = [work.call(batch) for batch in work.batches]
        work.pipeline.synchronize()
        wrong += sum(map(work.differs, work.batches, outs))
        work.group.barrier()
    return work.end(wrong)


def graph() -> int:
    """One rank replays a graph of a call for each batch."""
    wrong = 0
    for dtype in DISPATCH_DTYPES:
        work = Work(dtype)
        outs = [torch.empty_like(batch.x) for batch in work.batches]
        for batch, out in zip(work.batches, outs, strict=True):
            work.call(batch, out)
        work.pipeline.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for batch, out in zip(work.batches, outs, strict=True):
                work.call(batch, out)
        for replay in range(REPLAYS):
            captured.replay()
            if replay % 50 == 0:
                work.pipeline.synchronize()
                wrong += sum(map(work.differs, work.batches, outs))
                for out in outs:
                    out.fill_(torch.nan)
        work.pipeline.synchronize()
    return work.end(wrong)

"""Calls of the P2P pipeline with random shapes, grids, variants and captures, each result compared bit by bit.

    python tests/random_calls.py BACKEND RANKS COUNT [--resident] [--seed 1] [--first 0]

--resident: the ranks are threads of one process, on one GPU side by side. Their grids are such that all have room.
Case i of a seed is the same in every run on GPUs with as many SMs: --first i and a COUNT of 1 repeat it alone. Calls of
a case follow each other with nothing in between, on GPUs of their own also as replays of a CUDA graph. Prints how many
cases are right; exits with 1 unless all are.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import random_ranks
import torch

from tracekern.comm.ranks.group import Group
from tracekern.moe.experts import Experts, draw_experts
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline
from tracekern.moe.p2p.reference import REDUCING, rank_reduced_reference
from tracekern.moe.routing import Batch, torch_dtype
from tracekern.moe.shape import MAX_TOPK, MoeShape
from tracekern.record.session import Capture, capture

NUM_CALLS = 24
NUM_BATCHES = 5
MAX_BYTES = 200_000_000
"""Of the rows that one rank may be sent; of all ranks together where they are resident."""
ARENA_BYTES = 1 << 27
"""Of a resident rank's records: all of it is pinned in every case."""
WARPS_PER_SM = 16
"""Of any kernel: that of the pipelined variant then has all registers of an SM."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "tokens": (1, 2, 7, 16, 33, 128, 300, 900, 2500),
        "hidden": (1, 3, 8, 40, 255, 256, 1000, 2048, 7168),
        "blocks": (1, 2, 3, 8, 32, 100, 132),
        "warps": (1, 2, 3, 4, 8, 16),
    },
    "cpu": {"tokens": (1, 2, 7, 16), "hidden": (1, 3, 8, 40, 255), "blocks": (1, 2, 3, 8), "warps": (1, 2, 3, 4)},
}
TRACED: tuple[dict[str, Any] | None, ...] = (
    None,
    {"sink": "device"},
    {"sink": "host"},
    {"sink": "device", "every": 3},
    {"keep": "last"},
    {"roles": ()},
)


@dataclass(frozen=True)
class Case:
    """The same on all ranks."""

    index: int
    variant: str
    shape: MoeShape
    grid: dict[str, int]
    tracing: dict[str, Any] | None
    routing: str
    counts_first: bool
    is_graph: bool
    is_slow: bool
    traced: tuple[bool, ...]
    """Of each call."""

    @classmethod
    def draw(cls, index: int, seed: int, ranks: int, backend: str, num_residents: int = 1) -> Case:
        draw = random.Random(seed * 1_000_003 + index)
        sizes = SIZES[backend]
        variant = draw.choice(list(STAGES))
        experts = ranks * draw.choice([1, 2, 3, 8, 17, 32, 64])
        tokens, hidden = draw.choice(sizes["tokens"]), draw.choice(sizes["hidden"])
        topk = draw.randint(1, min(MAX_TOPK, experts))
        while tokens * topk * hidden * 4 > MAX_BYTES // num_residents:
            tokens //= 2
        grid = {"num_blocks": draw.choice(sizes["blocks"]), "warps_per_block": draw.choice(sizes["warps"])}
        if backend == "cuda" and num_residents > 1:
            room = num_sms() * (WARPS_PER_SM // grid["warps_per_block"])
            grid["num_blocks"] = min(grid["num_blocks"], room // num_residents)
        if variant in ("pipelined", "overlapped"):
            grid["partitions"] = draw.choice([0, 2, 3, 5, 16])
        tracing = draw.choice(TRACED)
        if tracing and backend == "cpu":
            tracing = {name: value for name, value in tracing.items() if name != "sink"}
        return cls(
            index,
            variant,
            MoeShape(ranks, tokens, experts, topk, hidden, draw.choice(["bf16", "bf16", "fp16", "fp32"])),
            grid,
            tracing,
            draw.choice(["any expert", "one rank", "three experts", "one expert"]),
            counts_first=draw.random() < 0.5,
            is_graph=backend == "cuda" and num_residents == 1 and tracing is not None and draw.random() < 0.25,
            is_slow=draw.random() < 0.5,
            traced=tuple(draw.random() < 0.6 for _ in range(NUM_CALLS)),
        )


def num_sms() -> int:
    return int(torch.cuda.get_device_properties().multi_processor_count)


def draw_batch(draw: random.Random, case: Case) -> Batch:
    """Often no token at all, experts that repeat within a token, and choices of nobody."""
    shape = case.shape
    num_tokens = 0 if draw.random() < 0.15 else draw.randint(1, shape.max_tokens)
    torch_draw = torch.Generator().manual_seed(draw.randrange(1 << 40))
    first, count = {
        "any expert": (0, shape.num_experts),
        "one rank": (draw.randrange(shape.num_ranks) * shape.num_local_experts, shape.num_local_experts),
        "three experts": (0, min(3, shape.num_experts)),
        "one expert": (draw.randrange(shape.num_experts), 1),
    }[case.routing]
    topk_idx = first + torch.randint(0, count, (num_tokens, shape.topk), generator=torch_draw, dtype=torch.int32)
    topk_idx[torch.rand(topk_idx.shape, generator=torch_draw) < 0.06] = -1
    x = torch.randn((num_tokens, shape.hidden), generator=torch_draw).to(torch_dtype(shape))
    return Batch(x, topk_idx, torch.rand((num_tokens, shape.topk), generator=torch_draw))


def plain_reference(batch: Batch, experts: Experts) -> torch.Tensor:
    """What reference() computes, all tokens at once."""
    total = torch.zeros(batch.x.shape, device=batch.x.device)
    for choice in range(batch.topk_idx.shape[1]):
        expert = batch.topk_idx[:, choice, None].long()
        result = (batch.x.float() * experts.scale[expert.clamp(min=0)]).to(batch.x.dtype).float()
        total = torch.where(expert >= 0, total + batch.topk_weights[:, choice, None] * result, total)
    return total.to(batch.x.dtype)


class Work:
    """One rank's part of a case."""

    def __init__(self, case: Case, group: Group, seed: int, backend: str) -> None:
        self.case, self.backend = case, backend
        self.draw = random.Random(f"{seed} {case.index} {group.rank}")
        self.pipeline = P2PPipeline(group, case.shape, case.variant, backend=backend, timeout_s=120.0, **case.grid)
        self.experts = draw_experts(case.shape).to(backend)
        self.batches = [draw_batch(self.draw, case).to(backend) for _ in range(NUM_BATCHES)]
        self.outs: list[torch.Tensor] = []

    def call(self, batch: Batch, out: torch.Tensor, session: Capture | None) -> None:
        self.pipeline(batch.x, batch.topk_idx, batch.topk_weights, self.experts, out=out, capture=session)

    def run(self, session: Capture | None) -> list[Batch]:
        """The batch of each call; self.outs has what came of it."""
        if session is not None and self.case.counts_first:
            with session.counting():
                self.call(self.batches[0], torch.empty_like(self.batches[0].x), session)
                self.pipeline.synchronize()
        if self.case.is_graph and session is not None:
            batches = self.batches[:1] * NUM_CALLS
            self.replay(batches[0], session)
        else:
            batches = [self.batches[call % NUM_BATCHES] for call in range(NUM_CALLS)]
            for batch, traced in zip(batches, self.case.traced, strict=True):
                self.outs.append(torch.full_like(batch.x, torch.nan))
                self.call(batch, self.outs[-1], session if traced else None)
                self.delay()
        self.pipeline.synchronize()
        return batches

    def replay(self, batch: Batch, session: Capture) -> None:
        out = torch.empty_like(batch.x)
        self.call(batch, out, session)
        self.pipeline.synchronize()
        graph = session.graph(lambda: self.call(batch, out, session))
        for traced in self.case.traced:
            out.fill_(torch.nan)
            graph.replay(traced)
            self.outs.append(out.clone())

    def delay(self) -> None:
        """Now and then this rank is late by up to 0.2 ms."""
        if self.backend == "cuda" and self.case.is_slow and self.draw.random() < 0.2:
            torch.cuda._sleep(self.draw.randrange(400_000))

    def wrong_calls(self, batches: list[Batch]) -> list[int]:
        wanted = {id(batch): self.reference(batch).view(torch.uint8) for batch in self.batches}
        pairs = enumerate(zip(batches, self.outs, strict=True))
        return [call for call, (batch, out) in pairs if not torch.equal(out.view(torch.uint8), wanted[id(batch)])]

    def reference(self, batch: Batch) -> torch.Tensor:
        if self.case.variant in REDUCING:
            return rank_reduced_reference(batch, self.experts, self.case.shape)
        return plain_reference(batch, self.experts)


def run_case(index: int, group: Group, options: argparse.Namespace) -> bool:
    """Whether all calls of a case are right on all ranks. Collective."""
    case = Case.draw(index, options.seed, options.ranks, options.backend, group.num_residents)
    work = Work(case, group, options.seed, options.backend)
    with tempfile.TemporaryDirectory() as directory:
        how = {"device": work.pipeline.comm.device, "clocks": False, **(case.tracing or {})}
        if group.num_residents > 1:
            how["max_bytes"] = ARENA_BYTES
        recording = nullcontext() if case.tracing is None else capture(Path(directory) / "capture", **how)
        with recording as session:
            batches = work.run(session)
    wrong = work.wrong_calls(batches)
    if wrong:
        sys.stdout.write(f"rank {group.rank}: wrong: calls {wrong} of {asdict(case)}\n")
    # All ranks are through here. Only now memory of the case is freed, for which the device waits for all kernels.
    return not any(group.all_gather(wrong))


def run_rank() -> int:
    """One rank; started by main()."""
    return random_ranks.run_rank(run_case)


if __name__ == "__main__":
    sys.exit(random_ranks.main("random_calls", __doc__))

"""Low latency calls of random shapes, grids, dtypes and orders, each row and each result compared bit by bit.

    python tests/random_low_latency.py BACKEND RANKS COUNT [--resident] [--seed 1] [--first 0]

--resident: the ranks are threads of one process, on one GPU side by side. Case i of a seed is the same in every run:
--first i and a COUNT of 1 repeat it alone. Calls follow each other with nothing in between: dispatch and combine in one
launch each or in two, of one handle or two, which are combined in either order. Prints how many cases are right; exits
with 1 unless all are.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import random_ranks
import torch
from low_latency_check import Received, find_faults, same_bits

from tracekern.comm.ranks.group import Group
from tracekern.moe.experts import Experts, draw_experts
from tracekern.moe.gemm.experts import draw_int4_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.handle import Handle
from tracekern.moe.low_latency.reference import low_latency_reference
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape

MAX_HEAP_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Of all ranks together."""
MAX_RESIDENT_EXPERTS = 200
NUM_PAIRS = 3
"""Pairs of dispatches of a case."""
HIDDEN = {"cuda": (512, 640, 1024, 2048, 7168, 8192), "cpu": (512, 640, 1024, 7168, 8192)}
INTERMEDIATE = 128
"""Of int4 experts."""
MAX_INT4_NUMBERS = {"cuda": 1 << 40, "cpu": 1 << 16}
"""Of the rows that int4 experts see in a call: the CPU backend emulates each multiplication."""
TOKENS = {"cuda": (1, 2, 7, 33, 128, 200), "cpu": (1, 2, 7, 16)}


@dataclass(frozen=True)
class Case:
    """The same on all ranks."""

    index: int
    shape: MoeShape
    use_fp8: bool
    has_long_ids: bool
    routing: str
    grid: dict[str, int]
    orders: tuple[str, ...]
    """How each pair of dispatches is run."""
    has_int4_experts: bool

    @classmethod
    def draw(cls, index: int, seed: int, ranks: int, backend: str, num_residents: int) -> Case:
        draw = random.Random(seed * 1_000_003 + index)
        experts = ranks * draw.choice([1, 2, 3, 8, 9, 17, 28, 36])
        if num_residents > 1 and experts > MAX_RESIDENT_EXPERTS:
            experts = ranks * 8
        use_fp8, tokens = draw.random() < 0.6, draw.choice(TOKENS[backend])
        hidden = draw.choice(HIDDEN[backend]) + (0 if use_fp8 else draw.choice([0, 8, 24]))
        while ranks * Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts) > MAX_HEAP_BYTES[backend]:
            tokens, hidden = max(1, tokens // 2), hidden if tokens > 1 else 512
        topk = draw.randint(1, min(11, experts))
        return cls(
            index,
            MoeShape(ranks, tokens, experts, topk, hidden, "bf16"),
            use_fp8,
            draw.random() < 0.5,
            draw.choice(["any expert", "any expert", "one rank", "few experts"]),
            {"num_max_warp_groups": draw.choice([0, 0, 20, 24])} if backend == "cuda" and experts < 64 else {},
            tuple(draw.choice(["fused", "hooks", "two", "two hooks", "swapped"]) for _ in range(NUM_PAIRS)),
            hidden % 128 == 0 and ranks * tokens * topk * hidden <= MAX_INT4_NUMBERS[backend] and draw.random() < 0.5,
        )

    def draw_experts(self) -> Experts:
        return draw_int4_experts(self.shape, INTERMEDIATE) if self.has_int4_experts else draw_experts(self.shape)


def draw_batch(case: Case, seed: int, rank: int, call: int) -> Batch:
    """Often no token at all, experts that nobody chose, and choices of nobody; each expert once in a token."""
    shape, draw = case.shape, random.Random(f"{seed} {case.index} {rank} {call}")
    num_tokens = 0 if draw.random() < 0.15 else draw.randint(1, shape.max_tokens)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 40))
    liking = torch.rand((num_tokens, shape.num_experts), generator=generator)
    first, number = {
        "any expert": (0, shape.num_experts),
        "one rank": (shape.num_local_experts * (call % shape.num_ranks), shape.num_local_experts),
        "few experts": (0, min(3, shape.num_experts)),
    }[case.routing]
    liking[:, first : first + number] += 1
    topk_idx = liking.argsort(dim=1, descending=True)[:, : shape.topk].contiguous()
    if case.routing != "any expert":
        topk_idx[(topk_idx < first) | (topk_idx >= first + number)] = -1
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.06] = -1
    x = torch.randn((num_tokens, shape.hidden), generator=generator).to(torch.bfloat16)
    weights = torch.rand((num_tokens, shape.topk), generator=generator)
    return Batch(x, topk_idx.to(torch.int64 if case.has_long_ids else torch.int32), weights)


@dataclass
class Call:
    """One dispatch and its combine on this rank."""

    batch: Batch
    rows: torch.Tensor
    handle: Handle | None = None
    recv: Any = None
    hook: Any = None
    out: torch.Tensor | None = None


class Work:
    """One rank's part of a case."""

    def __init__(self, case: Case, group: Group, seed: int, backend: str) -> None:
        self.case, self.group, self.seed, self.backend = case, group, seed, backend
        shape = case.shape
        self.layout = (shape.max_tokens, shape.hidden, shape.num_experts)
        num_bytes = Buffer.get_low_latency_rdma_size_hint(*self.layout[:2], shape.num_ranks, shape.num_experts)
        self.buffer = Buffer(group, num_rdma_bytes=num_bytes, backend=backend, timeout_s=120.0, **case.grid)
        self.experts = case.draw_experts().to(backend)
        size = (shape.num_local_experts, shape.num_ranks * shape.max_tokens, shape.hidden)
        self.calls = [
            Call(
                draw_batch(case, seed, group.rank, call).to(backend),
                torch.empty(size, dtype=torch.bfloat16, device=backend),
            )
            for call in range(2 * NUM_PAIRS)
        ]

    def dispatch(self, call: Call, with_hook: bool) -> None:
        shape, batch = self.case.shape, call.batch
        recv_x, count, call.handle, _, call.hook = self.buffer.low_latency_dispatch(
            batch.x,
            batch.topk_idx,
            shape.max_tokens,
            shape.num_experts,
            use_fp8=self.case.use_fp8,
            return_recv_hook=with_hook,
        )
        call.recv = recv_x, count

    def combine(self, call: Call, with_hook: bool) -> None:
        if call.hook:
            call.hook()
        assert call.handle is not None
        self.buffer.apply_experts(call.handle, self.experts, call.rows)
        call.out, _, hook = self.buffer.low_latency_combine(
            call.rows, call.batch.topk_idx, call.batch.topk_weights, call.handle, return_recv_hook=with_hook
        )
        if hook:
            hook()

    def run(self) -> None:
        for pair, order in enumerate(self.case.orders):
            calls, hooks = self.calls[2 * pair : 2 * pair + 2], "hooks" in order
            if order in ("fused", "hooks"):
                for call in calls:
                    self.dispatch(call, hooks)
                    self.combine(call, hooks)
                continue
            for call in calls:
                self.dispatch(call, hooks)
            for call in reversed(calls) if order == "swapped" else calls:
                self.combine(call, hooks)
        self.buffer.synchronize()

    def faults(self) -> list[str]:
        faults = []
        for number, call in enumerate(self.calls):
            batches = [draw_batch(self.case, self.seed, rank, number) for rank in range(self.group.num_ranks)]
            assert call.handle is not None
            assert call.out is not None
            received = Received.of(*call.recv, call.handle)
            found = find_faults(received, self.group.rank, batches, self.case.shape.num_experts)
            # Of a sum in a matrix instruction the order is the device's own.
            device = self.backend if self.case.has_int4_experts else "cpu"
            own, experts = batches[self.group.rank].to(device), self.experts.to(device)
            wanted = low_latency_reference(own, experts, self.case.use_fp8)
            if not same_bits(call.out.cpu(), wanted.cpu()):
                found.append(f"rank {self.group.rank}: another result")
            faults += [f"call {number}: {fault}" for fault in found]
        return faults


def run_case(index: int, group: Group, options: argparse.Namespace) -> bool:
    """Whether all calls of a case are right on all ranks. Collective."""
    case = Case.draw(index, options.seed, options.ranks, options.backend, group.num_residents)
    work = Work(case, group, options.seed, options.backend)
    work.run()
    faults = work.faults()
    if faults:
        sys.stdout.write(f"{faults[:3]} of {len(faults)} in {asdict(case)}\n")
    # All ranks are through here. Only now memory of the case is freed, for which the device waits for all kernels.
    return not any(group.all_gather(faults))


def run_rank() -> int:
    """One rank; started by main()."""
    return random_ranks.run_rank(run_case)


if __name__ == "__main__":
    sys.exit(random_ranks.main("random_low_latency", __doc__))

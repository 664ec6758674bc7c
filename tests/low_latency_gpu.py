"""Functions that test_low_latency_gpu.py launches as resident ranks of one GPU. Each returns how much was wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from tests.deepep_calls import run_deepep_calls
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.reference import low_latency_reference
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.shape import MoeShape

TOKENS, HIDDEN, TOPK = 16, 1024, 4
REPLAYS = 1000
CALLS_OF_A_GRAPH = 3


class Work:
    """A buffer, batches and memory for one rank."""

    def __init__(self, num_batches: int, hosts: Sequence[int] | None = None, timeout_s: float = 10.0) -> None:
        self.group = Group.discover()
        ranks = self.group.num_ranks
        self.shape = MoeShape(ranks, TOKENS, 8 * ranks, TOPK, HIDDEN, "bf16")
        num_bytes = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, 8 * ranks)
        self.buffer = Buffer(self.group, num_rdma_bytes=num_bytes, hosts=hosts, timeout_s=timeout_s)
        self.experts = draw_experts(self.shape)
        self.batches = [
            draw_batch(self.shape, seed=5, rank=self.group.rank, iteration=i, routing="uniform", uneven=True)
            for i in range(num_batches)
        ]
        self.on_gpu = [batch.to("cuda") for batch in self.batches]
        self.scale = self.experts.to("cuda")
        size = (8, ranks * TOKENS, HIDDEN)
        self.rows = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def call(
        self,
        batch: Batch,
        number: int,
        out: torch.Tensor | None = None,
        use_fp8: bool = True,
        with_hooks: bool = False,
    ) -> torch.Tensor:
        _, _, handle, _, receive = self.buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, TOKENS, self.shape.num_experts, use_fp8=use_fp8, return_recv_hook=with_hooks
        )
        if receive:
            receive()
        rows = self.rows[number % 2]
        self.buffer.apply_experts(handle, self.scale, rows)
        combined, _, receive = self.buffer.low_latency_combine(
            rows, batch.topk_idx, batch.topk_weights, handle, out=out, return_recv_hook=with_hooks
        )
        if receive:
            receive()
        return combined

    def drop(self, batch: Batch) -> None:
        """A dispatch without a combine."""
        self.buffer.low_latency_dispatch(batch.x, batch.topk_idx, TOKENS, self.shape.num_experts)

    def wanted(self, batch: Batch, use_fp8: bool = True) -> torch.Tensor:
        return low_latency_reference(batch, self.experts, use_fp8=use_fp8)


def differs(out: torch.Tensor, wanted: torch.Tensor) -> int:
    return int((out.cpu().view(torch.int16) != wanted.view(torch.int16)).any())


def bad_choices() -> int:
    """A token of rank 1 names one expert twice, another one that there is not: neither is followed."""
    work = Work(1)
    batch, is_bad = work.batches[0], work.group.rank == 1
    if is_bad:
        batch = draw_batch(work.shape, seed=5, rank=1, iteration=0, routing="uniform", uneven=False)
        bad = Batch(batch.x, batch.topk_idx.clone(), batch.topk_weights)
        bad.topk_idx[2, 3] = bad.topk_idx[2, 0]
        bad.topk_idx[4, 1] = 8 * work.group.num_ranks
        out = work.call(bad.to("cuda"), 0)
        batch.topk_idx[2, 3] = batch.topk_idx[4, 1] = -1
    else:
        out = work.call(work.on_gpu[0], 0)
    told = ""
    try:
        work.buffer.synchronize()
    except BadInput as error:
        told = str(error)
    wanted = ("topk_idx[2, 3]", "topk_idx[4, 1]") if is_bad else ("",)
    wrong = differs(out, work.wanted(batch)) + (not any(text in told for text in wanted)) + (bool(told) != is_bad)
    sys.stdout.write(f"rank {work.group.rank}: {wrong} wrong; {told}\n")
    work.group.barrier()
    return int(wrong)


def streams() -> int:
    """Calls on two streams in turns are ordered by the buffer."""
    work = Work(12)
    other, first = torch.cuda.Stream(), torch.cuda.current_stream()
    other.wait_stream(first)
    outs = []
    for number, batch in enumerate(work.on_gpu):
        with torch.cuda.stream(other if number % 2 else first):
            outs.append(work.call(batch, number))
    torch.cuda.current_stream().wait_stream(other)
    work.buffer.synchronize()
    wrong = sum(differs(out, work.wanted(batch)) for out, batch in zip(outs, work.batches, strict=True))
    sys.stdout.write(f"rank {work.group.rank}: {wrong} wrong\n")
    work.group.barrier()
    return wrong


def graph() -> int:
    """One rank replays a graph of an odd number of calls."""
    work = Work(CALLS_OF_A_GRAPH)
    outs = [torch.empty_like(batch.x) for batch in work.on_gpu]
    captured, wrong = torch.cuda.CUDAGraph(), 0

    def calls() -> None:
        for number, (batch, out) in enumerate(zip(work.on_gpu, outs, strict=True)):
            work.call(batch, number, out)

    calls()
    work.buffer.synchronize()
    with torch.cuda.graph(captured):
        calls()
        try:
            work.buffer.low_latency_dispatch(
                work.on_gpu[0].x, work.on_gpu[0].topk_idx, TOKENS, work.shape.num_experts, use_fp8=False
            )
            wrong += 1
        except BadInput as error:
            wrong += "was never run; run it before" not in str(error)
    wanted = [work.wanted(batch) for batch in work.batches]
    for replay in range(REPLAYS):
        captured.replay()
        if replay % 50 == 0:
            work.buffer.synchronize()
            wrong += sum(map(differs, outs, wanted))
            for out in outs:
                out.fill_(torch.nan)
    calls()  # eager calls go on where the replays left off
    work.buffer.synchronize()
    wrong += sum(map(differs, outs, wanted))
    sys.stdout.write(f"rank {work.group.rank}: {wrong} wrong\n")
    return wrong


def two_graphs() -> int:
    """Graphs of one rank in turns on two streams, in order by events."""
    work = Work(2 * CALLS_OF_A_GRAPH)
    outs = [torch.empty_like(batch.x) for batch in work.on_gpu]
    halves = (range(CALLS_OF_A_GRAPH), range(CALLS_OF_A_GRAPH, 2 * CALLS_OF_A_GRAPH))

    def calls(half: range) -> None:
        for number in half:
            work.call(work.on_gpu[number], number, outs[number])

    calls(halves[0])
    work.buffer.synchronize()
    graphs, streams = [torch.cuda.CUDAGraph() for _ in halves], [torch.cuda.Stream() for _ in halves]
    for captured, half in zip(graphs, halves, strict=True):
        with torch.cuda.graph(captured):
            calls(half)
    before = torch.cuda.Event()
    before.record()
    for replay in range(REPLAYS):
        with torch.cuda.stream(streams[replay % 2]) as _:
            streams[replay % 2].wait_event(before)
            graphs[replay % 2].replay()
            before = torch.cuda.Event()
            before.record()
    torch.cuda.current_stream().wait_event(before)
    work.buffer.synchronize()
    wanted = [work.wanted(batch) for batch in work.batches]
    wrong = sum(map(differs, outs, wanted))
    sys.stdout.write(f"rank {work.group.rank}: {wrong} wrong\n")
    return wrong


def deepep() -> int:
    """DeepEP's own calls; a rank that finds a fault raises."""
    group = Group.discover()
    right = run_deepep_calls(group, None, "cuda", (16, 1024, 8 * group.num_ranks, 4))
    sys.stdout.write(f"rank {group.rank}: {16 - right} wrong\n")
    return 16 - right


# ---- ranks of two hosts ----


def refuses_graphs(work: Work) -> bool:
    """Whether rank 0 is told so; the others only wait for it."""
    is_told = work.group.rank != 0
    if not is_told:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            try:
                work.drop(work.on_gpu[0])
            except BadInput as error:
                is_told = "a graph is being captured; calls between hosts" in str(error)
    work.group.barrier()
    return is_told


def hosts(num_calls: int = 60) -> int:
    """Calls of ranks that proxies reach: both types of messages, with and without hooks, and after dropped handles."""
    wrong = 0
    for of_first in (4, 3):
        work = Work(num_calls, [int(rank >= of_first) for rank in range(8)])
        outs = []
        for number, batch in enumerate(work.on_gpu):
            if number % 7 == 6:
                work.drop(batch)
            outs.append(work.call(batch, number, use_fp8=number % 3 != 0, with_hooks=number % 4 == 1))
        work.buffer.synchronize()
        wanted = [work.wanted(batch, use_fp8=number % 3 != 0) for number, batch in enumerate(work.batches)]
        wrong += sum(map(differs, outs, wanted)) + (not refuses_graphs(work))
        work.buffer.destroy()
    sys.stdout.write(f"rank {work.group.rank}: {wrong} wrong\n")
    work.group.barrier()
    return wrong


def lost_host() -> int:
    """Rank 1 stays away from a call: the others give up, also on the other host, and go on after a reset."""
    work = Work(4, [int(rank >= 4) for rank in range(8)], timeout_s=1.0)
    told = ""

    def count_wrong() -> int:
        outs = [work.call(batch, number) for number, batch in enumerate(work.on_gpu)]
        work.buffer.synchronize()
        return sum(differs(out, work.wanted(batch)) for out, batch in zip(outs, work.batches, strict=True))

    wrong = count_wrong()
    if work.group.rank == 1:
        time.sleep(9.0)  # as long as launches of the others wait for this one's, and their limit
    else:
        try:
            work.call(work.on_gpu[0], 0)
            work.buffer.synchronize()
        except CommTimeout as error:
            told = str(error)
    wrong += ("rank 1" in told) != (work.group.rank != 1)
    work.buffer.reset()
    wrong += count_wrong()
    sys.stdout.write(f"rank {work.group.rank}: {wrong} wrong; {told}\n")
    work.group.barrier()
    return wrong

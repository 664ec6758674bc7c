"""Functions that test_resident.py launches as resident ranks on the CPU backend."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from tracekern.comm.devices.this_thread import rank_of_thread
from tracekern.comm.ranks.group import Group
from tracekern.launcher.watch import RUN, enter
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.reference import reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.record.session import capture

DIRECTORY = os.environ.get("RESIDENT_DIR", "")


def calls(after: object = None) -> int:
    """Some calls of a pipeline, compared with the reference."""
    group = Group.discover()
    shape = MoeShape(group.num_ranks, 8, 4 * group.num_ranks, 2, 64, "bf16")
    pipeline, experts, wrong = P2PPipeline(group, shape, "balanced", timeout_s=20.0), draw_experts(shape), 0
    with capture(DIRECTORY, device=pipeline.comm.device, max_bytes=1 << 22, records_per_track=512) as session:
        for iteration in range(4):
            batch = draw_batch(shape, seed=3, rank=group.rank, iteration=iteration, routing="uniform", uneven=True)
            out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)
            wrong += int((out.view(torch.int16) != reference(batch, experts).view(torch.int16)).sum())
        if after is not None:
            after(group)
    sys.stdout.write(f"rank {group.rank}: {wrong} wrong\n")
    return 0


def calls_of_groups() -> int:
    """Every second rank is one group. What its experts get is what went in."""
    rank = rank_of_thread()
    size = Buffer.get_low_latency_rdma_size_hint(8, 256, 2, 8)
    buffer = Buffer([rank % 2, rank % 2 + 2], num_rdma_bytes=size, backend="cpu", timeout_s=20.0)
    x, wrong = torch.full((8, 256), rank + 1.0, dtype=torch.bfloat16), 0
    ids = torch.stack([torch.arange(8) % 8, (torch.arange(8) + 4) % 8], dim=1)
    with capture(DIRECTORY, device=buffer.comm.device, max_bytes=1 << 22, records_per_track=512) as session:
        for _ in range(4):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, 8, use_fp8=False, capture=session)
            out, _, _ = buffer.low_latency_combine(rows, ids, torch.full((8, 2), 0.5), handle, capture=session)
            buffer.synchronize()
            wrong += int((out != x).sum())
    return int(wrong > 0)


def killed() -> int:
    def kill(group: Group) -> None:
        group.barrier()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    return calls(kill)


def interrupted() -> int:
    """Ctrl-C comes while the ranks talk to each other."""

    def talk_on(group: Group) -> None:
        group.barrier()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            group.barrier()

    return calls(talk_on)


def stopped() -> int:
    enter(RUN)
    if rank_of_thread() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
    return 0


def one_fails() -> int:
    return 7 if rank_of_thread() == 2 else 0

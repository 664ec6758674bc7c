"""Experts on a part of the ranks, in a job of torchrun, and what its trace tells when one rank is late.

    torchrun --nproc-per-node 4 examples/expert_groups/main.py -o groups-capture --late 2
    tracekern report groups-capture

Half of the ranks, 0, 2, ..., are one expert group, the others another one. --layout overlapping: beside these each rank
is in a group with its neighbour. --layout pipeline: the first half is a group, and sends what it has computed to the
second by torch. --late, --hang, --kill: what rank to hold up by 50 ms in each call, to let sleep from the middle on, or
to end there. Exits with 1 where a call failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import tracekern
from tracekern.errors import CommTimeout
from tracekern.moe.low_latency import Buffer

TOKENS, HIDDEN, TOPK = 8, 256, 2
LATE_S, LIMIT_S = 0.05, 3.0
LAYOUTS = {
    "disjoint": lambda n: [("experts", [range(0, n, 2), range(1, n, 2)])],
    "overlapping": lambda n: [
        ("neighbours", [range(first, first + 2) for first in range(0, n, 2)]),
        ("experts", [range(0, n, 2), range(1, n, 2)]),
    ],
    "pipeline": lambda n: [("stage", [range(n // 2), range(n // 2, n)])],
}


class Experts:
    """The calls of one group. Its experts return what they get."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._num_experts = 2 * dist.get_world_size(group)
        size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, dist.get_world_size(group), self._num_experts)
        self.buffer = Buffer(group, num_rdma_bytes=size, backend="cpu", timeout_s=LIMIT_S)
        first = torch.arange(TOKENS) % self._num_experts
        self._ids = torch.stack([first, (first + self._num_experts // 2) % self._num_experts], dim=1)
        self._weights = torch.full((TOKENS, TOPK), 1.0 / TOPK)

    def call(self, x: torch.Tensor, capture: tracekern.Capture) -> torch.Tensor:
        arguments = x, self._ids, TOKENS, self._num_experts
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(*arguments, use_fp8=False, capture=capture)
        combined, _, _ = self.buffer.low_latency_combine(rows, self._ids, self._weights, handle, capture=capture)
        self.buffer.synchronize()
        return combined


def make_groups(layout: str) -> list[Experts]:
    """Makes all groups on all ranks, as torch wants it. Returns this rank's."""
    own = []
    for name, groups in LAYOUTS[layout](dist.get_world_size()):
        for number, ranks in enumerate(groups):
            group = dist.new_group(list(ranks), group_desc=f"{name} {number}")
            if dist.get_rank() in ranks:
                own.append(group)
    return [Experts(group) for group in own]


def hold_up(asked: argparse.Namespace, number: int) -> None:
    rank, is_middle = dist.get_rank(), number == asked.calls // 2
    if rank == asked.late:
        time.sleep(LATE_S)
    if rank == asked.hang and is_middle:
        time.sleep(2 * LIMIT_S)
    if rank == asked.kill and is_middle:
        os.kill(os.getpid(), signal.SIGKILL)


def run(asked: argparse.Namespace, groups: list[Experts], capture: tracekern.Capture) -> bool:
    """Returns whether each call returned what went in."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    x, is_right = torch.arange(TOKENS * HIDDEN).remainder(100).reshape(TOKENS, HIDDEN).to(torch.bfloat16), True
    sent = []
    for number in range(asked.calls):
        hold_up(asked, number)
        passed = torch.empty_like(x)
        if asked.layout == "pipeline" and rank >= half:
            dist.recv(passed, rank - half)
        else:
            passed.copy_(x)
        for group in groups:
            passed = group.call(passed, capture)
        is_right &= torch.equal(passed, x)
        if asked.layout == "pipeline" and rank < half:
            sent.append((dist.isend(passed, rank + half), passed))
    for work, _ in sent:
        work.wait()
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", default="groups-capture")
    parser.add_argument("--layout", choices=LAYOUTS, default="disjoint")
    parser.add_argument("--calls", type=int, default=6)
    for what in ("--late", "--hang", "--kill"):
        parser.add_argument(what, type=int, default=-1, metavar="RANK")
    asked = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=4 * LIMIT_S))
    groups = make_groups(asked.layout)
    try:
        with tracekern.capture(asked.output, device=groups[0].buffer.comm.device) as capture:
            is_right = run(asked, groups, capture)
    except (CommTimeout, RuntimeError) as error:  # of a kernel, or of torch's messages
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

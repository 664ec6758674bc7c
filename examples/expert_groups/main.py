"""Experts on a part of the ranks, and what the trace of the whole job tells when one rank is late.

    torchrun --nproc-per-node 4 examples/expert_groups/main.py -o groups-capture --late-rank 2
    tracekern report groups-capture

Ranks 0, 2, ... are one expert group, the others another one. --layout overlapping: beside these each rank is in a group
with its neighbour. --layout pipeline: the first half is a group, and sends what it has computed to the second by torch.
--late-rank, --hang, --kill: the rank that is held up in each call, sleeps from the middle on, or ends there. With
--resident 8 ranks are threads of this process that share a GPU, or its cores. Exits with 1 where a call failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import tracekern
from tracekern.moe.low_latency import Buffer

HERE = Path(__file__).resolve().parent
TOKENS, HIDDEN, TOPK = 8, 512, 2
LIMIT_S = 3.0
ASKED = "EXPERT_GROUPS_ARGUMENTS"
"""Environment variable in which resident ranks find the arguments, a word a line."""


def groups_of(layout: str, num_ranks: int) -> dict[str, range]:
    """Returns the ranks of each group."""
    half = num_ranks // 2
    if layout == "pipeline":
        return {"stage 0": range(half), "stage 1": range(half, num_ranks)}
    experts = {f"experts {first}": range(first, num_ranks, 2) for first in range(2)}
    if layout == "disjoint":
        return experts
    return {f"neighbours {idx}": range(2 * idx, 2 * idx + 2) for idx in range(half)} | experts


class Experts:
    """The calls of one group. Its experts return what they get."""

    def __init__(self, ranks: Sequence[int], name: str, backend: str) -> None:
        group, self._num_experts = tracekern.Group.of(list(ranks), name), 2 * len(ranks)
        size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, len(ranks), self._num_experts)
        self.buffer = Buffer(group, num_rdma_bytes=size, backend=backend, timeout_s=LIMIT_S)
        self.device = self.buffer.comm.device
        first = torch.arange(TOKENS) % self._num_experts
        ids = torch.stack([first, (first + self._num_experts // 2) % self._num_experts], dim=1)
        self._ids = ids.to(self.device.torch_device)
        self._weights = torch.full((TOKENS, TOPK), 1.0 / TOPK, device=self.device.torch_device)

    def call(self, x: torch.Tensor, capture: tracekern.Capture) -> torch.Tensor:
        arguments = x, self._ids, TOKENS, self._num_experts
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(*arguments, use_fp8=False, capture=capture)
        combined, _, _ = self.buffer.low_latency_combine(rows, self._ids, self._weights, handle, capture=capture)
        self.buffer.synchronize()
        return combined


class Job:
    """One rank of the job."""

    def __init__(self, asked: argparse.Namespace) -> None:
        world = tracekern.Group.discover()
        self.rank, self._half, self._asked = world.rank, world.num_ranks // 2, asked
        groups = groups_of(asked.layout, world.num_ranks).items()
        self._groups = [Experts(ranks, name, asked.backend) for name, ranks in groups if world.rank in ranks]
        self._is_pipeline = asked.layout == "pipeline"
        if self.rank == asked.late_rank:
            self._groups[0].buffer.late_us = asked.late_us

    def run(self) -> bool:
        """Returns whether each call returned what went in."""
        device, sent, is_right = self._groups[0].device, [], True
        x = torch.arange(TOKENS * HIDDEN).remainder(100).reshape(TOKENS, HIDDEN)
        x = x.to(torch.bfloat16).to(device.torch_device)
        command = " ".join(["examples/expert_groups/main.py", *self._asked.words])  # resident ranks know no other
        with tracekern.capture(self._asked.output, device=device, records_per_track=512, command=command) as capture:
            for number in range(self._asked.calls):
                self._break(number)
                passed = x.clone()
                if self._is_pipeline and self.rank >= self._half:
                    dist.recv(passed.zero_(), self.rank - self._half)
                for group in self._groups:
                    passed = group.call(passed, capture)
                is_right &= torch.equal(passed, x)
                if self._is_pipeline and self.rank < self._half:
                    sent.append((dist.isend(passed, self.rank + self._half), passed))
            for work, _ in sent:
                work.wait()
        return is_right

    def _break(self, number: int) -> None:
        asked, is_middle = self._asked, number == self._asked.calls // 2
        if self.rank == asked.hang and is_middle:
            time.sleep(2 * LIMIT_S)
        if self.rank == asked.kill and is_middle:
            os.kill(os.getpid(), signal.SIGKILL)


def run_rank(asked: argparse.Namespace | None = None) -> int:
    """Runs this rank; without arguments, a resident one."""
    try:
        return 0 if Job(asked or parse(os.environ[ASKED].splitlines())).run() else 1
    except (tracekern.CommTimeout, RuntimeError) as error:  # of a kernel, or of torch's messages
        print(error, file=sys.stderr)
        return 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", default="groups-capture")
    parser.add_argument("--layout", choices=("disjoint", "overlapping", "pipeline"), default="disjoint")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--late-us", type=int, default=50_000)
    for what in ("--late-rank", "--hang", "--kill"):
        parser.add_argument(what, type=int, default=-1, metavar="RANK")
    parser.add_argument("--resident", type=int, default=0, metavar="RANKS")
    asked = parser.parse_args(words, argparse.Namespace(words=words))
    if asked.resident and asked.layout == "pipeline":
        parser.error("--resident: the stages of a pipeline send each other messages by torch; start it by torchrun")
    return asked


def main() -> int:
    asked = parse(sys.argv[1:])
    if asked.resident:
        told = {ASKED: "\n".join(sys.argv[1:]), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        ends = tracekern.launch_ranks(asked.resident, "main:run_rank", env=told, resident=True)
        return max(end.returncode for end in ends)
    dist.init_process_group("gloo", timeout=timedelta(seconds=4 * LIMIT_S))
    return run_rank(asked)


if __name__ == "__main__":
    sys.exit(main())

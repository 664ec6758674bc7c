"""Leaves one thing at a time out of the protocol on real GPUs and prints, as JSON, how each fault was noticed.

    python tests/gpu_mutants.py NUM_RANKS

A release or acquire left out shows nothing here: the stores of a warp come over NVLink in their order (4 H200s,
2026-11: 60 calls of the pipelined kernel for each site). Those are for the race detector of test_mutants.py.

Runs in a tree that planted_tree.py made.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree that holds this file, not what is installed

from rank_pool import RankFailed, RankPool

VALUE = ("epoch", "acknowledgement")
SITES = {
    "token": [("token", mutation) for mutation in VALUE] + [("result", mutation) for mutation in VALUE],
    "flag": [("rank", mutation) for mutation in VALUE]
    + [("results", mutation) for mutation in VALUE]
    + [("grid", "acknowledgement")],
    "balanced": [("counts", mutation) for mutation in VALUE],
    "dedup": [(name, mutation) for name in ("row", "layout", "result") for mutation in VALUE],
    "reduce": [(name, mutation) for name in ("row", "partial") for mutation in VALUE],
    "pipelined": [(name, mutation) for name in ("row", "partial", "layout") for mutation in VALUE],
    "overlapped": [(name, mutation) for name in ("row", "partial") for mutation in VALUE],
    "empty": [("ack", mutation) for mutation in VALUE],
    "barrier": [("barrier", mutation) for mutation in VALUE],
}
"""What is attacked -> (channel, what is left out)."""
NUM_BATCHES = 4


@dataclass(frozen=True)
class Load:
    variant: str
    tokens: int = 256
    hidden: int = 7168
    topk: int = 8
    calls: int = 60


# Rows that take long, of a zipf routing that gives the blocks unlike work. Hardly a token: nothing but the
# acknowledgement keeps a fast rank from lapping a slow one.
LOADS = {"empty": Load("token", tokens=1, hidden=8, topk=1, calls=3000)}


def run_pipeline(group: Any, name: str, channel: str, mutation: str) -> str:
    """How this rank noticed the fault; empty: not at all."""
    import torch

    from tracekern import _cuda
    from tracekern.errors import CommTimeout
    from tracekern.moe.experts import draw_experts
    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.p2p.reference import expected
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    load = LOADS.get(name, Load(name))
    torch.cuda.set_device(group.rank)
    _cuda.families["p2p"].plant(channel, mutation)
    shape = MoeShape(group.num_ranks, load.tokens, 8 * group.num_ranks, load.topk, load.hidden, "bf16")
    experts = draw_experts(shape)
    batches = [
        draw_batch(shape, seed=5, rank=group.rank, iteration=iteration, routing="zipf", uneven=True)
        for iteration in range(NUM_BATCHES)
    ]
    wanted = [expected(load.variant, batch, experts, shape).cuda().view(torch.int16) for batch in batches]
    batches, experts = [batch.to("cuda") for batch in batches], experts.to("cuda")
    grid = {"num_blocks": 16, "warps_per_block": 8}
    pipeline = P2PPipeline(group, shape, load.variant, timeout_s=1.0, **grid, partitions=2, backend="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    try:
        for call in range(load.calls):
            if call % (8 + group.rank) == 0:
                time.sleep(1e-3)  # ranks lap one another
            batch = batches[call % NUM_BATCHES]
            out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
            wrong += (out.view(torch.int16) != wanted[call % NUM_BATCHES]).sum()
        pipeline.synchronize()
    except CommTimeout:
        return "time-out"
    return "wrong result" if int(wrong) else ""


def run_barrier(group: Any, _: str, channel: str, mutation: str) -> str:
    """A rank that comes late: nobody may be through before it has come."""
    import torch

    from tracekern import _cuda
    from tracekern.comm.communicator import Communicator

    torch.cuda.set_device(group.rank)
    _cuda.plant("barrier", "none")
    comm = Communicator(group, 1 << 20, 1.0, "cuda")
    for _turn in range(4):  # in the first epochs no flag was raised before
        comm.barrier()
    _cuda.plant(channel, mutation)
    group.barrier()
    if group.rank == 0:
        time.sleep(0.05)
    entered_ns = time.monotonic_ns()
    comm.barrier()
    through_ns = time.monotonic_ns()
    times = group.all_gather({"entered": entered_ns, "through": through_ns})
    return "early" if min(entry["through"] for entry in times) < times[0]["entered"] else ""


def main() -> int:
    num_ranks = int(sys.argv[1])
    noticed: dict[str, str] = {}
    pool = RankPool(num_ranks)
    for variant, sites in SITES.items():
        function = run_barrier if variant == "barrier" else run_pipeline
        for channel, mutation in [(sites[0][0], "none"), *sites]:
            try:
                answers = [answer for answer in pool.call(function, variant, channel, mutation) if answer]
            except RankFailed as error:  # a wrong count can lead a kernel astray
                answers = [str(error).strip().splitlines()[-1]]
                pool.close()
                pool = RankPool(num_ranks)
            name = f"{variant}:control" if mutation == "none" else f"{variant}:{channel}:{mutation}"
            noticed[name] = answers[0] if answers else ""
            print(f"{name:24} {noticed[name] or '-'}", file=sys.stderr, flush=True)
    pool.close()
    print(json.dumps(noticed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

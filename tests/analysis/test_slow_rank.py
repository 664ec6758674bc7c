"""The whole way on the CPU pipeline: a rank that is held up before dispatch is the one that is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rank_pool import RankPool

import tracekern
from tracekern.analysis.doubt import charge_ranks, most_charged, name_worst
from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.analysis.why.candidates import CauseKind
from tracekern.comm.ranks.group import Group
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape

HELD_UP_S = 5e-3
NUM_RANKS, NUM_CALLS = 4, 10


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(NUM_RANKS)
    yield pool
    pool.close()


def run_calls(group: Group, directory: Path, slow_rank: int) -> None:
    shape = MoeShape(num_ranks=NUM_RANKS, max_tokens=16, num_experts=8, topk=2, hidden=64, dtype="fp32")
    pipeline = P2PPipeline(group, shape, "balanced", num_blocks=2, warps_per_block=2)
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False)
    experts = draw_experts(shape)
    with tracekern.capture(directory) as capture:
        for _ in range(NUM_CALLS):
            pipeline.comm.barrier()
            if group.rank == slow_rank:
                time.sleep(HELD_UP_S)
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture)


def check_that_it_is_named(pool: RankPool, directory: Path, slow_rank: int) -> None:
    pool.call(run_calls, directory, slow_rank)
    timeline = tracekern.load(directory)
    waits = analyze_waits(timeline)
    # Where it was held up. Later stages show what the machine did to the ranks on top of it.
    in_dispatch = np.array([phase.stage == "dispatch_send" for phase in waits.phases])[waits.phase]
    blames = most_charged(charge_ranks(timeline, waits.take(np.flatnonzero(in_dispatch))))
    assert name_worst(blames).rank == slow_rank, blames
    # A busy machine holds up those that wait as well, and then they wait less.
    assert blames[0].likely.lo_ns >= HELD_UP_S * 1e9 * NUM_CALLS * (NUM_RANKS - 1) / 2
    # Over all stages, what came after leads back to where it began: its host, which slept.
    first = analyze(timeline).answer.costs[0].candidate
    assert (first.rank, first.kind) == (slow_rank, CauseKind.HOST)


# Other work on this machine can hold a rank up for longer than that, and is then rightly named.
@pytest.mark.soak
@pytest.mark.parametrize("slow_rank", [1, 2])
def test_a_rank_held_up_before_dispatch_is_named(pool: RankPool, tmp_path: Path, slow_rank: int):
    check_that_it_is_named(pool, tmp_path / "capture", slow_rank)


@pytest.mark.soak
def test_it_is_named_in_20_of_20_runs(pool: RankPool, tmp_path: Path):
    for number in range(20):
        check_that_it_is_named(pool, tmp_path / str(number), number % NUM_RANKS)

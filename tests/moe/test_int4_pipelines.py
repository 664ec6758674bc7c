"""int4 experts between dispatch and combine: every variant has the bits of the same layer on one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from int4_experts import draw_words, recorded_ring_tiles, ring_tiles
from rank_pool import RankPool

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.gemm import fused_moe_apply
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline
from tracekern.moe.p2p.reference import REDUCING, expected
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.shape import MoeShape

SIZE, EXPERTS, TOPK, TOKENS = 128, 4, 2, 5
VARIANTS = [variant for variant in STAGES if variant != "pipelined"]


def shape_of(num_ranks: int) -> MoeShape:
    return MoeShape(num_ranks, TOKENS, EXPERTS, TOPK, SIZE, "bf16")


def draw_experts() -> Int4Experts:
    return Int4Experts.of(draw_words(EXPERTS, SIZE, 2 * SIZE, seed=3), draw_words(EXPERTS, SIZE, SIZE, seed=4))


def draw(num_ranks: int, rank: int, num_tokens: int = TOKENS - 2) -> Batch:
    batch = draw_batch(shape_of(num_ranks), seed=1, rank=rank, iteration=0, routing="uniform", uneven=False)
    return Batch(batch.x[:num_tokens], batch.topk_idx[:num_tokens], batch.topk_weights[:num_tokens])


def run(group: Group, variant: str, directory: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Two calls, of which the first leaves NaN in all rows; (the second result, what it is to be)."""
    shape, experts, batch = shape_of(group.num_ranks), draw_experts(), draw(group.num_ranks, group.rank)
    pipeline = P2PPipeline(group, shape, variant, num_blocks=2, warps_per_block=2)
    longer = draw(group.num_ranks, group.rank, TOKENS)
    pipeline(torch.full_like(longer.x, torch.nan), longer.topk_idx, longer.topk_weights, experts)
    if directory:
        with tracekern.capture(directory, device=pipeline.comm.device) as capture:
            out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture)
    else:
        out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    pipeline.synchronize()
    return out, expected(variant, batch, experts, shape)


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[..., list[object]]]:
    pool = RankPool(2)
    yield pool.call
    pool.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_has_the_bits_of_the_layer_on_one_device(variant):
    out, wanted = run(Group(0, 1), variant)
    assert torch.equal(out, wanted)
    experts, batch = draw_experts(), draw(1, 0)
    alone = fused_moe_apply(batch.x, batch.topk_idx, batch.topk_weights, experts.w13, experts.w2)
    if variant not in REDUCING:
        assert torch.equal(out, alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_have_the_bits_of_their_reference(pair, variant):
    for out, wanted in pair(run, variant):
        assert torch.equal(out, wanted)


def test_experts_are_on_record_between_dispatch_and_combine(tmp_path: Path):
    run(Group(0, 1), "fused", str(tmp_path))
    timeline = tracekern.load(tmp_path)
    assert [launch.name for launch in timeline.launches] == [
        *("dispatch_send", "dispatch_recv", "tiles", "k2", "k4", "combine_send", "combine_recv")
    ]
    counts = torch.bincount(draw(1, 0).topk_idx.flatten(), minlength=EXPERTS).tolist()
    assert recorded_ring_tiles(timeline) == ring_tiles("k2", counts, SIZE) + ring_tiles("k4", counts, SIZE)
    assert not timeline.problems


def test_what_takes_no_int4_experts_says_so():
    shape, experts, batch = shape_of(1), draw_experts(), draw(1, 0)
    pipeline = P2PPipeline(Group(0, 1), shape, "pipelined")
    with pytest.raises(BadInput, match="pipelined calls its experts inside its kernel"):
        pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    wide = MoeShape(1, TOKENS, EXPERTS, TOPK, SIZE, "fp32")
    with pytest.raises(BadInput, match="dtype is fp32; int4 experts take bf16"):
        P2PPipeline(Group(0, 1), wide, "fused")(batch.x.float(), batch.topk_idx, batch.topk_weights, experts)


# ---- tracekern run moe ----

RUN = ("run", "moe", "--expert", "int4_sparse", "--backend", "cpu", "--iterations", 1)
SMALL = ("--ranks", 2, "--tokens", 4, "--hidden", SIZE, "--intermediate", SIZE, "--experts", EXPERTS, "--topk", TOPK)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", [("dedup",), ("low_latency",), ("low_latency", "--dispatch-dtype", "bf16")])
def test_a_run_with_int4_experts_checks_its_results(command_line, tmp_path: Path, how):
    done = command_line(*RUN, *SMALL, "--variant", *how, "-o", tmp_path / "capture")
    assert done.returncode == 0, done.stderr
    assert "int4 experts of intermediate size 128" in done.stdout
    assert re.search("every result equals the (low latency )?reference, bit by bit", done.stdout)
    timeline = tracekern.load(tmp_path / "capture")
    settings = timeline.ranks[0].metadata["settings"]
    assert (settings["expert"], settings["intermediate"]) == ("int4_sparse", SIZE)
    assert {"k2", "k4"} <= {launch.name for launch in timeline.launches}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("--variant", "low_latency", "--dtype", "fp32"), "--dtype is fp32; variant low_latency takes bf16"),
        (("--variant", "flag", "--dtype", "fp16"), "--dtype is fp16; expert int4_sparse takes bf16"),
        (("--variant", "flag", "--hidden", 192), "--hidden is 192; expert int4_sparse takes a multiple of 128"),
        (("--variant", "flag", "--intermediate", 64), "--intermediate is 64; expert int4_sparse takes a multiple"),
        (("--variant", "flag", "--hidden", 14592), "--hidden is 14592, intermediate 128; expert int4_sparse takes at"),
    ],
)
def test_a_run_that_has_no_int4_experts_is_refused(command_line, changes, told):
    done = command_line(*RUN, *SMALL, *changes, "--no-trace")
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_all_variants_leave_out_those_that_take_no_int4_experts(command_line):
    done = command_line(*RUN, *SMALL, "--variant", "all", "--no-trace")
    assert done.returncode == 0, done.stderr
    left_out = [line.split()[0] for line in done.stderr.splitlines() if "is left out" in line]
    assert left_out == ["reference", "sorted", "pipelined"]
    assert done.stdout.count("bit by bit") == len(VARIANTS) + 2

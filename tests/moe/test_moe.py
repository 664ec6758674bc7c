"""The MoE variants on real rank processes: one result, bit by bit, on random shapes and back to back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline, num_partitions
from tracekern.moe.p2p.reference import expected, reduce_tolerance
from tracekern.moe.reference import reference, sorted_all_to_all
from tracekern.moe.routing import ROUTINGS, Batch, draw_batch
from tracekern.moe.shape import MoeShape

POOL_SIZES = (1, 2, 3, 4, 8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool((a.view(bits) == b.view(bits)).all())


def drop_some_choices(batch: Batch, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    dropped = torch.rand(batch.topk_idx.shape, generator=generator) < 0.1
    return Batch(batch.x, batch.topk_idx.masked_fill(dropped, -1), batch.topk_weights)


def wrong_variants(
    group: Group, shape: MoeShape, grid: tuple[int, int], partitions: int, seed: int, routing: str, uneven: bool
) -> list[str]:
    """On one rank: the variants whose result differs from their reference in any bit, or too much from the loops."""
    batch = draw_batch(shape, seed=seed, rank=group.rank, iteration=0, routing=routing, uneven=uneven)
    batch = drop_some_choices(batch, seed * 64 + group.rank)
    experts = draw_experts(shape)
    loops = reference(batch, experts)
    tolerance = reduce_tolerance(batch, experts, shape)
    wrong = [] if same_bits(loops, sorted_all_to_all(batch, experts, shape)) else ["sorted"]
    for variant in STAGES:
        wanted = expected(variant, batch, experts, shape)
        if not bool(((wanted.double() - loops.double()).abs() <= tolerance).all()):
            wrong.append(f"reference of {variant}")
        pipeline = P2PPipeline(
            group, shape, variant, num_blocks=grid[0], warps_per_block=grid[1], partitions=partitions
        )
        for _ in range(2):
            out = torch.full_like(batch.x, float("nan"))
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, out=out)
            if not same_bits(wanted, out):
                wrong.append(variant)
    return wrong


@st.composite
def shapes(draw) -> MoeShape:
    num_ranks = draw(st.sampled_from(POOL_SIZES))
    num_experts = num_ranks * draw(st.integers(1, 12))
    return MoeShape(
        num_ranks=num_ranks,
        max_tokens=draw(st.integers(1, 24)),
        num_experts=num_experts,
        topk=draw(st.integers(1, min(16, num_experts))),
        hidden=draw(st.one_of(st.integers(1, 260), st.sampled_from((512, 2880)))),
        dtype=draw(st.sampled_from(("fp32", "fp16", "bf16"))),
    )


@pytest.mark.parametrize("num_shapes", [6, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_all_variants_give_the_bits_of_reference(pools, num_shapes):
    @settings(max_examples=num_shapes, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        shape=shapes(),
        grid=st.tuples(st.integers(1, 5), st.integers(1, 4)),
        partitions=st.integers(1, 5),
        seed=st.integers(0, 2**31),
        routing=st.sampled_from(ROUTINGS),
        uneven=st.booleans(),
    )
    def no_variant_is_wrong(shape, grid, partitions, seed, routing, uneven):
        answers = pools(shape.num_ranks).call(wrong_variants, shape, grid, partitions, seed, routing, uneven)
        assert answers == [[]] * shape.num_ranks

    no_variant_is_wrong()


def run_back_to_back(group: Group, shape: MoeShape, variant: str, iterations: int) -> int:
    """Wrong iterations on one rank: input, routing and counts change every time, nobody waits in between."""
    pipeline = P2PPipeline(group, shape, variant, partitions=2)
    experts = draw_experts(shape)
    wrong = 0
    for iteration in range(iterations):
        routing = ROUTINGS[iteration % len(ROUTINGS)]
        batch = draw_batch(shape, seed=3, rank=group.rank, iteration=iteration, routing=routing, uneven=True)
        out = torch.full_like(batch.x, float("nan"))
        pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, out=out)
        wrong += not same_bits(expected(variant, batch, experts, shape), out)
    assert pipeline.epoch == (0xFFFFFFF0 + iterations) % 2**32
    return wrong


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", list(STAGES))
@pytest.mark.parametrize("num_calls", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_calls_back_to_back(pools, variant, num_calls):
    shape = MoeShape(num_ranks=8, max_tokens=4, num_experts=16, topk=2, hidden=40, dtype="bf16")
    assert pools(8).call(run_back_to_back, shape, variant, num_calls) == [0] * 8


def refuse(group: Group, what: str) -> str:
    """What the pipeline says to a bad call; the same on every rank."""
    shape = MoeShape(num_ranks=2, max_tokens=4, num_experts=4, topk=2, hidden=8, dtype="fp32")
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False)
    experts = draw_experts(shape)
    x, idx, weights, out = batch.x, batch.topk_idx.clone(), batch.topk_weights, None
    try:
        if what == "other ranks":
            P2PPipeline(group, MoeShape(1, 4, 4, 2, 8, "fp32"), "fused")
        if what == "sizes differ":
            P2PPipeline(group, MoeShape(2, 4 + group.rank, 4, 2, 8, "fp32"), "fused")
        if what == "one rank cannot":
            P2PPipeline(group, shape, "fused", executor="fibers" if group.rank == 0 else "steam")
        pipeline = P2PPipeline(group, shape, "fused")
        if what == "expert out of range":
            idx[1, 1] = 4
        elif what == "dtype":
            x = x.to(torch.bfloat16)
        elif what == "too many tokens":
            x, idx, weights = (torch.cat([tensor, tensor]) for tensor in (x, idx, weights))
        elif what == "columns first":
            x = x.t().contiguous().t()
        elif what == "results columns first":
            out = torch.empty(8, 4).t()
        elif what == "too few results":
            out = torch.empty(3, 8)
        pipeline(x, idx, weights, experts, out=out)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("expert out of range", "topk_idx names expert 4; wanted -1 (none) or 0 to 3"),
        ("dtype", "x is torch.bfloat16 [4, 8]; wanted torch.float32 [4, 8]"),
        ("too many tokens", "8 tokens; the pipeline was made for at most 4"),
        ("columns first", "x is not contiguous, on cpu; wanted contiguous, on cpu"),
        (
            "results columns first",
            "out is not contiguous, on cpu; wanted contiguous, on cpu",
        ),
        ("too few results", "out is torch.float32 [3, 8]; wanted torch.float32 [4, 8]"),
        ("other ranks", "the shape is for 1 rank, the group has 2"),
        ("one rank cannot", "rank 1: executor is 'steam'; wanted 'fibers' or 'threads'"),
    ],
)
def test_a_bad_call_is_refused_in_one_line(pools, what, said):
    assert pools(2).call(refuse, what) == [said, said]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5; wanted a whole number from 1 to 262144"),
        ({"hidden": "8"}, "hidden is '8'; wanted a whole number from 1 to 1048576"),
        ({"topk": 17}, "topk is 17; wanted 1 to 16"),
        ({"num_blocks": 1.5}, "num_blocks is 1.5; wanted a whole number from 0 to 4096"),
        ({"warps_per_block": None}, "warps_per_block is None; wanted a whole number from 0 to 32"),
    ],
)
def test_sizes_that_are_no_numbers_are_refused(changes, said):
    sizes = {"num_ranks": 1, "max_tokens": 4, "num_experts": 4, "topk": 2, "hidden": 8, "dtype": "fp32"}
    shape = {name: changes.get(name, value) for name, value in sizes.items()}
    grid = {name: value for name, value in changes.items() if name not in sizes}
    with pytest.raises(BadInput) as refused:
        P2PPipeline(Group(0, 1), MoeShape(**shape), "fused", **grid)
    assert str(refused.value) == said


def test_sizes_that_differ_name_both_ranks(pools):
    answers = pools(2).call(refuse, "sizes differ")
    assert answers == ["max_tokens is 4 on rank 0 and 5 on rank 1"] * 2


def wait_for_one_who_does_not_come(group: Group) -> list[str]:
    """Rank 1 stays away; rank 0 gives up, is refused afterwards, and works again after a reset."""
    from tracekern.errors import CommTimeout

    shape = MoeShape(num_ranks=2, max_tokens=4, num_experts=4, topk=2, hidden=8, dtype="fp32")
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False)
    experts = draw_experts(shape)
    pipeline = P2PPipeline(group, shape, "balanced", timeout_s=0.2)
    said = []
    if group.rank == 0:
        for _ in range(2):
            try:
                pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
            except CommTimeout as error:
                said.append(str(error))
    pipeline.reset()
    out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    said.append("same" if same_bits(out, reference(batch, experts)) else "differs")
    return said


def test_a_missing_peer_is_named_and_reset_repairs(pools):
    first, second = pools(2).call(wait_for_one_who_does_not_come)
    assert second == ["same"]
    assert first[0].startswith("rank 0 dispatch_send block 0 warp ")
    assert "gave up on rank 1 after " in first[0]
    assert "channel counts slot 0: wanted call 1, nothing has come" in first[0]
    assert first[1].startswith("the communicator is out of use since: rank 0 dispatch_send")
    assert first[2] == "same"


@pytest.mark.parametrize(
    ("ranks", "tokens", "wanted"),
    [(1, 4096, 1), (2, 256, 1), (2, 4096, 8), (4, 64, 1), (4, 256, 2), (4, 4096, 16), (8, 4096, 32), (8, 1 << 16, 64)],
)
def test_partitions_are_of_about_9_mb_for_other_ranks_and_have_work_for_all_warps(ranks, tokens, wanted):
    assert num_partitions(MoeShape(ranks, tokens, 256, 8, 7168, "bf16"), 131 * 8) == wanted


@pytest.mark.parametrize("num_warps", [1, 7, 1048, 1 << 20])
def test_any_grid_has_partitions(num_warps):
    for ranks, tokens in ((1, 1), (2, 4096), (64, 1), (64, 1 << 17)):
        assert 1 <= num_partitions(MoeShape(ranks, tokens, 256, 8, 7168, "bf16"), num_warps) <= 64


def test_a_pipeline_takes_as_many_partitions_as_suit_its_shape():
    small = MoeShape(1, 64, 4, 1, 8, "fp32")
    pipelines = [P2PPipeline(Group.discover(), small, "pipelined", partitions=count) for count in (0, 7)]
    assert [pipeline.options["partitions"] for pipeline in pipelines] == [1, 7]

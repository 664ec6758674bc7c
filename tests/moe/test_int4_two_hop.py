"""int4 experts between two-hop dispatch and combine: bits of the same kernels without ranks, with counts or without."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from int4_experts import MAX_INSTRUCTIONS, instructions, recorded_ring_tiles
from low_latency_check import same_bits
from test_int4_low_latency import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOKENS,
    TOPK,
    assert_nothing_is_stored_of_rank_0,
    draw_experts,
    give_up_before_k2,
    poisoned_memory,
    tiles_of,
)
from test_int4_low_latency import draw as draw_batch
from two_hop_check import make_buffer

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.experts import Experts
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.gemm.kernels import FACTS, layer_stages
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.two_hop import Config
from tracekern.moe.two_hop.layout import Nodes
from tracekern.moe.two_hop.pipeline import Carried, TwoHopPipeline, count_wrong_elements
from tracekern.moe.two_hop.reference import node_reduced_reference

IS_QUEUED = pytest.mark.parametrize("is_queued", [False, True], ids=["counted", "queued"])


def draw(rank: int) -> Batch:
    """Rank 1 has no tokens. Nobody chooses expert 2, all choose expert 5, and a third of the last choices is none."""
    batch = draw_batch(rank)
    counts = torch.bincount(batch.topk_idx[batch.topk_idx >= 0].flatten(), minlength=EXPERTS).tolist()
    per_call = instructions("k2", counts, HIDDEN, INTERMEDIATE) + instructions("k4", counts, INTERMEDIATE, HIDDEN)
    assert 4 * per_call <= MAX_INSTRUCTIONS  # two calls, a reference, and token tiles that ranks do not share
    return batch


def make_pipeline(group: Group, num_nodes: int, **how: object) -> TwoHopPipeline:
    shape = MoeShape(group.num_ranks, TOKENS, EXPERTS, TOPK, HIDDEN, "bf16")
    return TwoHopPipeline(group, shape, nodes=num_nodes, **how)


def wrong_of(pipeline: TwoHopPipeline, carried: Carried) -> int:
    batches = [draw(rank) for rank in range(pipeline.shape.num_ranks)]
    about = draw_experts(), pipeline.shape, pipeline.options
    return count_wrong_elements(carried, batches, pipeline.comm.group.rank, *about)


def two_calls(group: Group, num_nodes: int, is_queued: bool, directory: str = "") -> list[int]:
    """Wrong elements of both, and of the second one with a bit of its result turned. The second one is on record."""
    experts, batch = draw_experts(), draw(group.rank)
    with poisoned_memory():
        pipeline = make_pipeline(group, num_nodes, is_queued=is_queued)
        called = [pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)]
        recorded = tracekern.capture(directory, device=pipeline.comm.device) if directory else contextlib.nullcontext()
        with recorded as capture:
            called.append(pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture))
        pipeline.synchronize()
    wrong = [wrong_of(pipeline, carried) for carried in called]
    called[1].combined.view(torch.int16)[:1, :1] ^= 1
    return [*wrong, wrong_of(pipeline, called[1])]


@pytest.mark.one_in(4)
@IS_QUEUED
@pytest.mark.parametrize(("ranks", "num_nodes"), [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_ranks_have_the_bits_of_their_reference(pools, ranks, num_nodes, is_queued):
    found = pools(ranks).call(two_calls, num_nodes, is_queued)
    assert found == [[0, 0, min(1, draw(rank).num_tokens)] for rank in range(ranks)]


@IS_QUEUED
def test_its_kernels_are_on_record_between_dispatch_and_combine(pools, tmp_path: Path, is_queued):
    pools(4).call(two_calls, 2, is_queued, str(tmp_path))
    timeline = tracekern.load(tmp_path)
    assert not timeline.problems
    for rank in range(4):
        names = [launch.name for launch in timeline.launches if launch.rank == rank]
        wanted = [layer_stages("ring", most_rows) for most_rows in (FACTS.few_tokens, FACTS.few_tokens + 1)]
        assert names in [["notify_dispatch", "dispatch", *kernels, "combine"] for kernels in wanted]
    chosen = torch.cat([draw(rank).topk_idx for rank in range(4)])
    counts = torch.bincount(chosen[chosen >= 0].flatten(), minlength=EXPERTS)
    assert int(counts[2]) == 0
    assert len(timeline.rows_of("permute_token")) == int(counts.sum())
    assert recorded_ring_tiles(timeline) == tiles_of(counts)


def test_the_reference_is_near_the_sum_without_ranks():
    """Each rounding to bf16 moves a number by at most v, its unit roundoff, times its size.

    Let A be the sum of the sizes of all products. Rounding the rows of ranks costs at most v A, rounding the sums of
    nodes v (1 + v) A more, and rounding either result v times that result. An fp32 sum of n terms costs at most
    g = n 2^-24 times A on each level.
    """
    batch, experts, v, g = draw(0), draw_experts(), 2.0**-8, TOPK * 2.0**-23
    found = node_reduced_reference(batch.x, batch.topk_idx.long(), batch.topk_weights, experts, Nodes.of(4, 2)).double()
    plain = reference(batch, experts).double()
    sizes = torch.zeros_like(plain)
    for expert, weights in zip(batch.topk_idx.T, batch.topk_weights.T, strict=True):
        rows = experts.apply(batch.x, expert.clamp(min=0)).double().abs()
        sizes += torch.where(expert[:, None] >= 0, weights[:, None] * rows, 0.0)
    bound = (v + v * (1 + v) + 4 * g) * sizes + v * (found.abs() + plain.abs()) / (1 - v)
    assert ((found - plain).abs() <= bound).all()
    assert not torch.equal(found, plain)


# ---- what is refused ----


def refusals(group: Group) -> dict[str, str]:
    """Returns the message for each kind of rows and experts that the kernels refuse."""
    buffer, batch, good, told = make_buffer(group, 1), draw(0), draw_experts(), {}
    ids = batch.topk_idx.long()

    def refuse(name: str, *given: object) -> None:
        with pytest.raises(BadInput) as refused:
            buffer.apply_experts(*given)
        told[name] = str(refused.value)

    refuse("too early", batch.x, ids, batch.topk_weights, good)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = per_rank, per_node, in_rank, per_expert
    x, ids, weights, _, handle, _ = buffer.dispatch(
        batch.x, None, *layout, ids, batch.topk_weights, config=Config(4, 1, 1, 1, 7)
    )
    refuse("stand-in", x, ids, weights, Experts(torch.ones(EXPERTS)))
    refuse("fewer experts", x, ids, weights, Int4Experts.of(good.w13[:4], good.w2[:4]))
    refuse("pair", (x, weights), ids, weights, good)
    refuse("dtype", x.float(), ids, weights, good)
    refuse("weights", x, ids, weights.bfloat16(), good)
    refuse("expert", x, torch.where(ids == 5, 8, ids), weights, good)
    rows = buffer.apply_experts(x, ids, weights, good)
    combined, _, _ = buffer.combine(rows, handle)
    wanted = node_reduced_reference(batch.x, ids, batch.topk_weights, good, buffer.nodes)
    return told | {"right": str(same_bits(combined, wanted))}


def test_what_no_kernel_can_use_is_refused_in_one_line(pools):
    (told,) = pools(1).call(refusals)
    wanted = {
        "too early": "nothing was dispatched; experts take the rows of a dispatch",
        "stand-in": "experts is Experts; wanted Int4Experts",
        "fewer experts": "experts.scale is torch.float32 [4]; wanted torch.float32 [8]",
        "pair": "recv_x is tuple; wanted a torch.Tensor",
        "dtype": "recv_x is torch.float32 [17, 256]; wanted torch.bfloat16 [17, 256]",
        "weights": "recv_topk_weights is torch.bfloat16 [17, 3]; wanted torch.float32 [17, 3]",
        "expert": "topk_ids[0, 0] is expert 8; wanted -1 (none) or 0 to 7",
        "right": "True",
    }
    assert told == wanted


# ---- a rank that gives up ----


def give_up_and_call_again(group: Group, directory: str) -> tuple[str, int]:
    batch, pipeline = draw(group.rank), make_pipeline(group, 1, timeout_s=1.0)
    call = batch.x, batch.topk_idx, batch.topk_weights, draw_experts()
    cause = give_up_before_k2(pipeline, call, "permute", directory)
    return cause, wrong_of(pipeline, pipeline(*call))


def test_k2_and_k4_return_at_once_after_another_rank_gave_up(pools, tmp_path: Path):
    assert pools(2).call(give_up_and_call_again, str(tmp_path)) == [("peer_aborted", 0), ("timeout", 0)]
    timeline = tracekern.load(tmp_path / "capture")
    assert_nothing_is_stored_of_rank_0(timeline)


# ---- tracekern run moe ----

RUN = ("run", "moe", "--variant", "two_hop", "--expert", "int4_sparse", "--backend", "cpu", "--iterations", 2)
SMALL = ("--ranks", 4, "--nodes", 2, "--tokens", 6, "--hidden", 128, "--intermediate", 128, "--experts", 8, "--topk", 3)


@pytest.mark.parametrize("how", ["--host-driven", "--device-driven"])
def test_a_run_checks_its_results(command_line, tmp_path: Path, how):
    done = command_line(*RUN, *SMALL, how, "-o", tmp_path / "capture")
    assert done.returncode == 0, done.stderr
    assert "int4 experts of intermediate size 128, on 2 nodes" in done.stdout
    assert "every result equals the node reduced reference, bit by bit" in done.stdout
    timeline = tracekern.load(tmp_path / "capture")
    assert timeline.ranks[0].metadata["settings"]["expert"] == "int4_sparse"
    assert set(layer_stages("ring", 0)) <= {launch.name for launch in timeline.launches}

"""int4 experts between low latency dispatch and combine: the bits of the same layer on one device, and no others."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from int4_experts import MAX_INSTRUCTIONS, draw_words, instructions, recorded_ring_tiles, ring_tiles
from low_latency_check import same_bits

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout
from tracekern.moe.gemm import fused_moe_apply
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.gemm.kernels import product_stages
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.pipeline import DISPATCH_DTYPES, LowLatencyPipeline
from tracekern.moe.low_latency.reference import cast_to_fp8, dequantise
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape
from tracekern.timeline.model import Timeline

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 256, 128, 8, 3, 17
DTYPES = pytest.mark.parametrize("dtype", DISPATCH_DTYPES)


def shape_of(group: Group) -> MoeShape:
    return MoeShape(group.num_ranks, TOKENS, EXPERTS, TOPK, HIDDEN, "bf16")


def draw_experts() -> Int4Experts:
    w13 = draw_words(EXPERTS, HIDDEN, 2 * INTERMEDIATE, seed=3)
    return Int4Experts.of(w13, draw_words(EXPERTS, INTERMEDIATE, HIDDEN, seed=4))


def draw(rank: int) -> Batch:
    """Rank 1 has no tokens. Expert 2 has none either, expert 5 is the first choice of all, and some choose nobody."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = (TOKENS, 0, 1, 9)[rank]
    liking = torch.rand((num_tokens, EXPERTS), generator=generator)
    liking[:, 5], liking[:, 2] = 1, 0
    topk_idx = liking.argsort(dim=1, descending=True)[:, :TOPK].int().contiguous()
    topk_idx[:, 2][torch.rand(num_tokens, generator=generator) < 0.3] = -1
    x = torch.randn((num_tokens, HIDDEN), generator=generator).bfloat16()
    return Batch(x, topk_idx, torch.rand((num_tokens, TOPK), generator=generator))


def on_one_device(batch: Batch, dtype: str) -> torch.Tensor:
    """What the layer makes of the rows that experts see."""
    experts = draw_experts()
    counts = torch.bincount(batch.topk_idx[batch.topk_idx >= 0].flatten(), minlength=EXPERTS).tolist()
    per_call = instructions("k2", counts, HIDDEN, INTERMEDIATE) + instructions("k4", counts, INTERMEDIATE, HIDDEN)
    assert 4 * per_call <= MAX_INSTRUCTIONS  # two calls, a reference, and a token tile more for each expert
    x = dequantise(*cast_to_fp8(batch.x)) if dtype == "fp8" else batch.x
    return fused_moe_apply(x, batch.topk_idx, batch.topk_weights, experts.w13, experts.w2)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """What is allocated inside is NaN, or the largest number, until it is written to."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def two_calls(group: Group, dtype: str, directory: str = "") -> bool:
    """Whether the results of both are right; the second one is on record."""
    experts, batch = draw_experts(), draw(group.rank)
    with poisoned_memory():
        pipeline = LowLatencyPipeline(group, shape_of(group), dispatch_dtype=DISPATCH_DTYPES.index(dtype) + 1)
        outs = [pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)]
        recorded = tracekern.capture(directory, device=pipeline.comm.device) if directory else contextlib.nullcontext()
        with recorded as capture:
            outs.append(pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture))
        pipeline.synchronize()
    wanted = on_one_device(batch, dtype)
    return all(same_bits(out, wanted) for out in outs)


@pytest.mark.one_in(3)
@DTYPES
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_the_bits_of_the_layer_on_one_device(pools, ranks, dtype):
    assert pools(ranks).call(two_calls, dtype) == [True] * ranks


def tiles_of(counts: torch.Tensor) -> Counter[tuple[str, int]]:
    """Counts the tiles of a layer whose experts have so many rows, by launch and width."""
    return ring_tiles("k2", counts.tolist(), INTERMEDIATE) + ring_tiles("k4", counts.tolist(), HIDDEN)


@DTYPES
def test_its_kernels_are_on_record(pools, tmp_path: Path, dtype):
    assert pools(2).call(two_calls, dtype, str(tmp_path)) == [True] * 2
    timeline = tracekern.load(tmp_path)
    assert not timeline.problems
    products = [name for stage in ("k2", "k4") for name in product_stages(stage, "ring", 2 * TOKENS)]
    kernels = ["dispatch", *(["dequantise"] if dtype == "fp8" else []), "tiles", *products, "combine"]
    for rank in range(2):
        assert [launch.name for launch in timeline.launches if launch.rank == rank] == kernels
    chosen = torch.cat([draw(rank).topk_idx for rank in range(2)])
    counts = torch.bincount(chosen[chosen >= 0].flatten(), minlength=EXPERTS)
    assert int(counts[2]) == 0
    assert len(timeline.rows_of("dequantise_token")) == (int(counts.sum()) if dtype == "fp8" else 0)
    assert recorded_ring_tiles(timeline) == tiles_of(counts)
    assert len(timeline.rows_of("scale_token")) == 0


# ---- what is not written, and what is not read ----


def regions(group: Group, dtype: str) -> list[str]:
    """Rows behind the last of a region are NaN as received, and 3 before results. What is wrong with results."""
    experts, batch, faults = draw_experts(), draw(group.rank), []
    num_bytes = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.num_ranks, EXPERTS)
    with poisoned_memory():
        buffer = Buffer(group, num_rdma_bytes=num_bytes, backend="cpu")
        recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, TOKENS, EXPERTS, use_fp8=dtype == "fp8"
        )
        rows = torch.full((EXPERTS // group.num_ranks, group.num_ranks * TOKENS, HIDDEN), 3.0).bfloat16()
        buffer.apply_experts(handle, experts, rows)
    received = dequantise(*recv_x) if dtype == "fp8" else recv_x
    for local, filled in enumerate(count.tolist()):
        expert = torch.full((filled,), group.rank * len(rows) + local)
        assert bool(received[local, filled:].isnan().all())
        if not bool((rows[local, filled:] == 3).all()):
            faults.append(f"expert {local}: rows behind the last of {filled} were written")
        if not same_bits(rows[local, :filled], experts.apply(received[local, :filled].contiguous(), expert)):
            faults.append(f"expert {local}: other results")
    buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, handle)
    buffer.destroy()
    return faults


@DTYPES
def test_rows_behind_the_last_of_a_region_are_left_alone(pools, dtype):
    assert pools(2).call(regions, dtype) == [[], []]


def refusals(group: Group) -> dict[str, str]:
    """What is told of experts and rows that the kernels cannot use."""
    batch, told = draw(group.rank), {}
    num_bytes = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.num_ranks, EXPERTS)
    buffer = Buffer(group, num_rdma_bytes=num_bytes, backend="cpu")
    _, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    rows = torch.empty((EXPERTS, TOKENS, HIDDEN), dtype=torch.bfloat16)
    good = draw_experts()
    nan = good.w2.clone()
    nan[3, 0, 7, 1] = 0x7FC0 << 48
    odd = torch.empty(rows.numel() + 1, dtype=torch.bfloat16)[1:].view(rows.shape)
    for name, experts, into in (
        ("fewer experts", Int4Experts.of(good.w13[:4], good.w2[:4]), rows),
        ("another hidden", Int4Experts.of(draw_words(EXPERTS, 128, 2 * INTERMEDIATE), good.w2), rows),
        ("scale", Int4Experts.of(good.w13, nan), rows),
        ("shape of rows", good, rows[:, :-1]),
        ("dtype of rows", good, rows.float()),
        ("alignment", good, odd),
    ):
        with pytest.raises(BadInput) as refused:
            buffer.apply_experts(handle, experts, into)
        told[name] = str(refused.value)
    buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, handle)
    for _ in range(2):
        buffer.low_latency_dispatch(batch.x, batch.topk_idx, TOKENS, EXPERTS, use_fp8=False)
    with pytest.raises(BadInput) as refused:
        buffer.apply_experts(handle, good, rows)
    return told | {"handle": str(refused.value)}


def test_what_no_kernel_can_use_is_refused_in_one_line(pools):
    (told,) = pools(1).call(refusals)
    wanted = {
        "fewer experts": "experts.scale is torch.float32 [4]; wanted torch.float32 [8]",
        "another hidden": "w13 is torch.int64 [8, 2, 256, 2]; wanted torch.int64 [8, 4, 256, 2]",
        "scale": "w2[3, 0, 7, 1] has a scale that is NaN or infinite",
        "shape of rows": "rows is torch.bfloat16 [8, 16, 256]; wanted torch.bfloat16 [8, 17, 256]",
        "dtype of rows": "rows is torch.float32 [8, 17, 256]; wanted torch.bfloat16 [8, 17, 256]",
        "alignment": "rows begins at an address that 16 bytes do not divide; clone() it",
        "handle": "a stale handle: a later dispatch has taken its slot, or it is of before a reset",
    }
    assert told == wanted


# ---- a rank that gives up ----


def give_up_before_k2(pipeline: Any, call: tuple[Any, ...], stage: str, directory: str) -> str:
    """Rank 1 gives up on the results of rank 0, whose K2 begins behind `stage` and after that. Resets; the cause."""
    gave_up, rank = Path(directory) / "gave_up", pipeline.comm.group.rank

    def wait_for_rank_1(done: str) -> None:
        while rank == 0 and done == stage and not gave_up.exists():
            time.sleep(0.01)

    with tracekern.capture(Path(directory) / "capture", device=pipeline.comm.device) as capture:
        with pytest.raises(CommTimeout) as lost:
            pipeline(*call, capture=capture, after_stage=wait_for_rank_1)
        if rank == 1:
            gave_up.touch()
    pipeline.reset()
    return str(lost.value.fault["cause"])


def give_up_and_call_again(group: Group, dtype: str, directory: str) -> tuple[str, bool]:
    batch, kind = draw(group.rank), DISPATCH_DTYPES.index(dtype) + 1
    pipeline = LowLatencyPipeline(group, shape_of(group), dispatch_dtype=kind, timeout_s=1.0)
    call = batch.x, batch.topk_idx, batch.topk_weights, draw_experts()
    cause = give_up_before_k2(pipeline, call, "tiles", directory)
    return cause, same_bits(pipeline(*call), on_one_device(batch, dtype))


def assert_nothing_is_stored_of_rank_0(timeline: Timeline) -> None:
    """A warp that gives up goes through the stages of its tile, which is its last one, and stores none of it."""
    ranks = np.array([track.rank for track in timeline.tracks])[timeline.spans.track]
    stored = {rank: int((ranks[timeline.rows_of("epilogue")] == rank).sum()) for rank in range(2)}
    assert stored[0] == 0 < stored[1]
    tiles = timeline.rows_of("multiply_tile")
    tiles = tiles[ranks[tiles] == 0]
    places = set(zip(timeline.spans.track[tiles].tolist(), timeline.spans.launch[tiles].tolist(), strict=True))
    assert 0 < len(tiles) == len(places)


@DTYPES
def test_k2_and_k4_return_at_once_after_another_rank_gave_up(pools, tmp_path: Path, dtype):
    assert pools(2).call(give_up_and_call_again, dtype, str(tmp_path)) == [("peer_aborted", True), ("timeout", True)]
    timeline = tracekern.load(tmp_path / "capture")
    assert_nothing_is_stored_of_rank_0(timeline)
    assert {"k2", "k4", "combine"} <= {launch.name for launch in timeline.launches if launch.rank == 0}

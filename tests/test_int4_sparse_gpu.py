"""int4 experts on a GPU: the instruction itself against fp64, and the same promises as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from int4_experts import draw_rows, draw_words, offsets_of

import tracekern
from tracekern.errors import BadInput
from tracekern.moe.gemm import fused_moe_apply, k2, k4, permute, unpack, unpermute
from tracekern.moe.gemm.kernels import STAGINGS
from tracekern.moe.gemm.reference import k2_reference, k4_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KERNELS = {"k2": (k2, k2_reference), "k4": (k4, k4_reference)}


def words_of(stage: str, experts: int, channels: int, outputs: int, scale: str = "plain") -> torch.Tensor:
    return draw_words(experts, channels, 2 * outputs if stage == "k2" else outputs, scale=scale).cuda()


@pytest.mark.parametrize("scale", ["plain", "negative", "zero", "subnormal"])
def test_every_number_lands_where_its_place_says(scale):
    words = words_of("k4", 1, 128, 128, scale)
    result = k4(torch.eye(128).bfloat16().cuda(), offsets_of([128]).cuda(), words)
    assert torch.equal(result, unpack(words)[0].T.bfloat16())


@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize(
    ("counts", "channels", "outputs"),
    [
        ([7, 0, 1, 8, 9, 300], 512, 384),
        ([3] * 256, 256, 256),
        ([9, 1], 7168, 2048),
        ([9, 1], 2048, 7168),
    ],
)
def test_kernels_agree_with_fp64(stage, counts, channels, outputs):
    kernel, reference = KERNELS[stage]
    rows, off_e = draw_rows(sum(counts), channels).cuda(), offsets_of(counts).cuda()
    words = words_of(stage, len(counts), channels, outputs)
    results = [kernel(rows, off_e, words, staging=staging) for staging in STAGINGS]
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)), "staging changes bits"
    wanted = reference(rows, off_e, words)
    off = (results[0].double() - wanted.value).abs()
    assert bool((off <= wanted.bound).all()), f"{float((off / wanted.bound).max())} of the bound"


@pytest.mark.parametrize("stage", KERNELS)
def test_a_row_does_not_depend_on_its_tile_mates(stage):
    kernel, _ = KERNELS[stage]
    rows, words = draw_rows(11, 512).cuda(), words_of(stage, 2, 512, 256)
    together = kernel(rows, offsets_of([3, 8]).cuda(), words)
    for row in range(11):
        alone = kernel(rows[row : row + 1].clone(), offsets_of([1, 0] if row < 3 else [0, 1]).cuda(), words)
        assert torch.equal(alone[0].view(torch.int16), together[row].view(torch.int16)), row


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(0, 2, 8), (1, 8, 128), (300, 8, 128), (64, 8, 256)])
def test_a_call_is_its_five_steps(tokens, topk, experts):
    hidden, intermediate = 512, 256
    x = draw_rows(tokens, hidden).cuda()
    ids = torch.rand((tokens, experts)).argsort(dim=1)[:, :topk].int().contiguous().cuda()
    weights = torch.rand((tokens, topk)).cuda()
    w13 = words_of("k2", experts, hidden, intermediate)
    w2 = words_of("k4", experts, intermediate, hidden)
    x_perm, off_e, inv = permute(x, ids, experts)
    y_perm = k4(k2(x_perm, off_e, w13), off_e, w2)
    assert torch.equal(x_perm[inv.long()], x[:, None].expand(-1, topk, -1))
    assert torch.equal(fused_moe_apply(x, ids, weights, w13, w2), unpermute(y_perm, inv, weights))


def test_a_choice_out_of_range_has_no_row():
    x, words = draw_rows(3, 128).cuda(), words_of("k4", 4, 128, 128)
    ids = torch.tensor([[0, 4], [-1, -7], [3, 1 << 30]], dtype=torch.int32).cuda()
    x_perm, off_e, inv = permute(x, ids, 4, eids=torch.tensor([3, 0, 9], dtype=torch.int32).cuda())
    assert off_e.tolist() == [0, 1, 1, 1, 2]
    assert inv.tolist() == [[0, -1], [-1, -1], [1, -1]]
    assert bool(k4(x_perm, off_e, words)[:2].isfinite().all())


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(BadInput, match="other tensors on cuda:0"):
        k4(draw_rows(1, 128).cuda(), offsets_of([1]).cuda(), draw_words(1, 128, 128))


def test_a_call_is_on_record_tile_by_tile(tmp_path: Path):
    rows, off_e, words = draw_rows(20, 256).cuda(), offsets_of([9, 0, 11]).cuda(), words_of("k2", 3, 256, 256)
    untraced = k2(rows, off_e, words)
    with tracekern.capture(tmp_path, device="cuda") as capture:
        traced = k2(rows, off_e, words, capture=capture)
        torch.cuda.synchronize()
    assert torch.equal(traced, untraced)
    timeline = tracekern.load(tmp_path)
    tiles = 4 * 2
    spans = {name: len(timeline.rows_of(name)) for name in ("preload", "sweep", "epilogue")}
    assert spans == {"preload": 4 * tiles, "sweep": 8 * tiles, "epilogue": 8 * tiles}

"""int4 experts as serving calls them: ids of both widths, renormalized weights, weights quantized from bf16."""

from __future__ import annotations

import pytest
import torch
from int4_experts import draw_layer

from tracekern.moe.gemm import fused_moe_apply, permute, unpack
from tracekern.moe.gemm.checks import int32_choices

# ---- ids ----


def test_ids_of_both_widths_give_the_same_bits():
    layer = draw_layer(9, 3, 8, size=128)
    ids = layer.topk_ids.clone()
    ids[2, 1] = ids[5, :] = -1
    wanted = fused_moe_apply(layer.x, ids, layer.topk_ws, layer.w13, layer.w2)
    got = fused_moe_apply(layer.x, ids.long(), layer.topk_ws, layer.w13, layer.w2)
    assert torch.equal(got, wanted)
    for one, other in zip(permute(layer.x, ids, 8)[1:], permute(layer.x, ids.long(), 8)[1:], strict=True):
        assert torch.equal(one, other)
        assert other.dtype == torch.int32


def test_int32_ids_are_not_copied():
    layer = draw_layer(9, 3, 8, size=128)
    assert int32_choices(layer.topk_ids, 9, 8, layer.x) is layer.topk_ids


def test_ids_out_of_range_stay_out_of_range_where_nobody_looks(monkeypatch):
    # As on a GPU: the check that waits for the device is left out.
    ids = torch.tensor([[1 << 32, (1 << 32) + 1, -(1 << 32), 7, 8, -1]])
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert int32_choices(ids, 1, 8, ids).tolist() == [[8, 8, -1, 7, 8, -1]]


# ---- renormalize ----


def dense_layer(layer, topk_ids: torch.Tensor, topk_ws: torch.Tensor) -> torch.Tensor:
    """The layer in plain torch, fp64."""
    w13, w2 = unpack(layer.w13).double(), unpack(layer.w2).double()
    out = torch.zeros(layer.x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_ws.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                gate, up = (w13[expert] @ layer.x[token].double()).chunk(2)
                out[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def check_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Rows are rounded to bf16 three times, 2^-8 each, of terms that partly cancel."""
    assert not bool(got.isnan().any())
    assert float((got.double() - wanted).norm()) <= 3 * 2.0**-8 * float(wanted.norm())


def test_renormalized_weights_add_up_to_one():
    layer = draw_layer(9, 3, 8, size=128)
    got = fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, renormalize=True)
    check_close(got, dense_layer(layer, layer.topk_ids, torch.nn.functional.normalize(layer.topk_ws, p=1, dim=1)))
    plain = fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2)
    check_close(plain, dense_layer(layer, layer.topk_ids, layer.topk_ws))


def test_rows_without_a_choice_or_a_weight_become_zero():
    layer = draw_layer(6, 2, 8, size=128)
    ids, weights = layer.topk_ids.clone(), layer.topk_ws.clone()
    ids[1, :] = -1  # no choice
    weights[2, :] = 0.0  # no weight
    ids[3, :], weights[3, :] = -1, 0.0
    ids[4, 0] = -1  # one choice; its weight is still a part of both
    weights[5, :] = torch.tensor([0.75, -0.75])  # adds up to nothing: stays
    got = fused_moe_apply(layer.x, ids, weights, layer.w13, layer.w2, renormalize=True)
    divided = weights / torch.where(weights.sum(1) == 0, torch.ones(6), weights.sum(1))[:, None]
    assert bool((got[1:4] == 0).all())
    assert torch.equal(divided[5], weights[5])
    check_close(got, dense_layer(layer, ids, divided))


@pytest.mark.parametrize("renormalize", [False, True])
def test_calls_with_a_part_of_the_experts_add_up(renormalize):
    layer = draw_layer(9, 3, 8, size=128)
    given = (layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2)
    parts = [
        fused_moe_apply(*given, eids=torch.arange(first, first + 4, dtype=torch.int32), renormalize=renormalize)
        for first in (0, 4)
    ]
    weights = torch.nn.functional.normalize(layer.topk_ws, p=1, dim=1) if renormalize else layer.topk_ws
    check_close(parts[0].double() + parts[1].double(), dense_layer(layer, layer.topk_ids, weights))


def test_weights_are_not_changed_in_place():
    layer = draw_layer(3, 2, 4, size=128)
    before = layer.topk_ws.clone()
    fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, renormalize=True)
    assert torch.equal(layer.topk_ws, before)

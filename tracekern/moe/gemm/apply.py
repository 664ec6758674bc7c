"""The whole layer as one call: permute, K2, K4, unpermute, with nothing looked at by the host in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.moe.gemm import checks
from tracekern.moe.gemm.blocks import PreparedWeights, Weights, with_staging
from tracekern.moe.gemm.kernels import Sizes, Tensors, launch, layer_stages, tile_tensors

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture


def fused_moe_apply(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_ws: torch.Tensor,
    w13: Weights,
    w2: Weights,
    *,
    eids: torch.Tensor | None = None,
    renormalize: bool = False,
    staging: str | None = None,
    detail: int = 0,
    capture: Capture | None = None,
) -> torch.Tensor:
    """Applies each token's experts and adds up their weighted results. Returns [num_tokens, hidden] bf16.

    x: [num_tokens, hidden] bf16. topk_ids int32 or int64, topk_ws fp32: [num_tokens, topk], for example from router();
    -1: no expert. w13, w2: both from prepare_weights(), which is faster, or both from quantize(), or pack_w13() and
    pack_w2(). eids: experts that this call computes, int32; choices of others count as none. renormalize: divides each
    token's weights by the sum of all of them, also of those whose choice is none or not in eids, so that results of
    calls with different eids add up; weights that sum to 0 stay as they are. A token without any choice becomes 0.
    staging: how weights come to the multiplication; None: as they were prepared for, and of packed words "direct";
    those also take "pinned". The results are the same bits. detail: the capture gets every detail-th tile of K2 and K4
    step by step; 0: none. On a GPU the kernels are started on the current stream. Raises BadInput.
    """
    import torch

    w13, w2 = with_staging("w13", w13, staging), with_staging("w2", w2, staging)
    checks.check_rows("x", x)
    checks.check_layer(w13, w2, x.shape[1], x)
    topk_ids = checks.int32_choices(topk_ids, x.shape[0], w13.num_experts, x)
    checks.check_eids(eids, w13.num_experts, x)
    checks.check_detail(detail)
    checks.check("topk_ws", topk_ws, torch.float32, tuple(topk_ids.shape), x)
    if renormalize:
        topk_ws = _renormalized(topk_ws)
    sizes, tensors, out = call_of(x, topk_ids, topk_ws, w13, w2, eids, detail)
    if len(x):
        stages = layer_stages(w13.staging, sizes.num_rows)
        launch(stages, sizes, tensors, device=x.device, staging=w13.staging, capture=capture)
    return out


def call_of(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_ws: torch.Tensor,
    w13: PreparedWeights,
    w2: PreparedWeights,
    eids: torch.Tensor | None = None,
    detail: int = 0,
) -> tuple[Sizes, Tensors, torch.Tensor]:
    """Returns the sizes of a call, its tensors with all memory that its kernels need, and of these the result.

    Arguments: see fused_moe_apply(); topk_ids are int32.
    """
    (num_tokens, topk), hidden = topk_ids.shape, x.shape[1]
    num_experts, intermediate, num_rows = w13.num_experts, w13.rows // 2, num_tokens * topk
    num_listed = num_experts if eids is None else eids.numel()
    rows, out = x.new_empty((num_rows, hidden)), x.new_empty(x.shape)
    tensors: Tensors = {
        "x": x,
        "topk_ids": topk_ids,
        "topk_weights": topk_ws,
        "w13": w13.words,
        "w2": w2.words,
        "expert_ids": eids,
        "expert_offset": topk_ids.new_empty(num_experts + 1),
        **tile_tensors(w13.staging, num_listed, num_rows, x),
        "inverse": topk_ids.new_empty((num_tokens, topk)),
        "x_rows": rows,
        "middle_rows": x.new_empty((num_rows, intermediate)),
        "result_rows": rows,  # K4 begins when K2 has read the former
        "out": out,
    }
    sizes = Sizes(
        num_experts=num_experts,
        num_listed=num_listed,
        hidden=hidden,
        intermediate=intermediate,
        num_tokens=num_tokens,
        topk=topk,
        num_rows=num_rows,
        detail=detail,
    )
    return sizes, tensors, out


def _renormalized(topk_ws: torch.Tensor) -> torch.Tensor:
    """Returns weights [num_tokens, topk] divided by their sum, or as they are where that is 0."""
    total = topk_ws.sum(dim=-1, keepdim=True)
    return topk_ws / total.masked_fill(total == 0, 1.0)

"""The five steps of a layer of int4 experts, each alone: route, permute, K2, K4, unpermute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tracekern.moe.gemm import checks
from tracekern.moe.gemm.blocks import PreparedWeights, Weights, with_staging
from tracekern.moe.gemm.kernels import Sizes, Tensors, launch, product_stages, tile_tensors
from tracekern.moe.shape import MAX_EXPERTS, MAX_TOPK, check_range

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture


class Permuted(NamedTuple):
    """Rows of experts, one expert after the other."""

    x_perm: torch.Tensor
    """[num_tokens * topk, hidden] bf16; rows from off_e[-1] on are not written."""
    off_e: torch.Tensor
    """[num_experts + 1] int32: the first row of each expert."""
    inv: torch.Tensor
    """[num_tokens, topk] int32: the row of each choice, -1 for none."""


def router(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns topk_ids int32 and topk_ws fp32, [num_tokens, topk], of logits [num_tokens, num_experts].

    The weights are softmax over all experts, largest first.
    """
    import torch

    check_range("top-k", topk, 1, min(logits.shape[-1], MAX_TOPK))
    weights, ids = torch.softmax(logits.float(), dim=-1).topk(topk, dim=-1)
    return ids.int(), weights


def permute(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    eids: torch.Tensor | None = None,
    capture: Capture | None = None,
) -> Permuted:
    """Copies each token [hidden] bf16 to a row for each of its experts, in the order of tokens and choices.

    topk_ids: int32 or int64, -1 for no expert. eids: experts that are computed, int32; a choice of another one has no
    row, like -1. None: all. Raises BadInput.
    """
    checks.check_rows("x", x)
    check_range("experts", num_experts, 1, MAX_EXPERTS)
    topk_ids = checks.int32_choices(topk_ids, x.shape[0], num_experts, x)
    checks.check_eids(eids, num_experts, x)
    num_tokens, topk = topk_ids.shape
    num_listed = num_experts if eids is None else eids.numel()
    permuted = Permuted(
        x.new_empty((num_tokens * topk, x.shape[1])),
        topk_ids.new_empty(num_experts + 1),
        topk_ids.new_empty(topk_ids.shape),
    )
    tensors = {
        "x": x,
        "topk_ids": topk_ids,
        "expert_ids": eids,
        "x_rows": permuted.x_perm,
        "expert_offset": permuted.off_e,
        "inverse": permuted.inv,
        "tile_end": topk_ids.new_empty(num_listed + 1),
    }
    sizes = Sizes(num_experts=num_experts, num_listed=num_listed, hidden=x.shape[1], num_tokens=num_tokens, topk=topk)
    launch(("layout", "permute"), sizes, tensors, device=x.device, capture=capture)
    return permuted


def k2(
    x_perm: torch.Tensor,
    off_e: torch.Tensor,
    w13: Weights,
    *,
    eids: torch.Tensor | None = None,
    staging: str | None = None,
    abort: torch.Tensor | None = None,
    detail: int = 0,
    capture: Capture | None = None,
) -> torch.Tensor:
    """Returns silu(gate) * up of rows [M, hidden] bf16, [M, intermediate] bf16; rows of no expert are not written.

    off_e: [num_experts + 1] int32, looked at on the host. w13: see pack_w13() and prepare_weights(). eids: see
    permute(). staging: see fused_moe_apply(). abort: an int32 that makes the kernel return at once while it is not 0.
    detail: the capture gets every detail-th tile step by step; 0: none. Raises BadInput.
    """
    w13 = with_staging("w13", w13, staging)
    checks.check_rows("x_perm", x_perm)
    intermediate = w13.rows // 2
    checks.check_size("intermediate", intermediate)
    checks.check_weights("w13", w13, x_perm.shape[1], 2 * intermediate, x_perm)
    out = x_perm.new_empty((x_perm.shape[0], intermediate))
    tensors = {"w13": w13.words, "x_rows": x_perm, "middle_rows": out, "abort": abort}
    sizes = (x_perm.shape[1], intermediate)
    _multiply("k2", x_perm, off_e, w13, eids, tensors, sizes, detail, capture)
    return out


def k4(
    x2_perm: torch.Tensor,
    off_e: torch.Tensor,
    w2: Weights,
    *,
    eids: torch.Tensor | None = None,
    staging: str | None = None,
    abort: torch.Tensor | None = None,
    detail: int = 0,
    capture: Capture | None = None,
) -> torch.Tensor:
    """Returns w2 times rows [M, intermediate] bf16, [M, hidden] bf16. The rest: see k2()."""
    w2 = with_staging("w2", w2, staging)
    checks.check_rows("x2_perm", x2_perm)
    hidden = w2.rows
    checks.check_size("hidden", hidden)
    checks.check_weights("w2", w2, x2_perm.shape[1], hidden, x2_perm)
    out = x2_perm.new_empty((x2_perm.shape[0], hidden))
    tensors = {"w2": w2.words, "middle_rows": x2_perm, "result_rows": out, "abort": abort}
    sizes = (hidden, x2_perm.shape[1])
    _multiply("k4", x2_perm, off_e, w2, eids, tensors, sizes, detail, capture)
    return out


def unpermute(
    y_perm: torch.Tensor, inv: torch.Tensor, topk_ws: torch.Tensor, *, capture: Capture | None = None
) -> torch.Tensor:
    """Returns the sum of each token's weighted rows, [num_tokens, hidden] bf16.

    In fp32, in the order of the choices, each product and each sum rounded on its own. topk_ws: fp32, shaped like inv.
    """
    import torch

    checks.check_rows("y_perm", y_perm)
    checks.check_inverse(inv, y_perm.shape[0], y_perm)
    num_tokens, topk = inv.shape
    checks.check("topk_ws", topk_ws, torch.float32, (num_tokens, topk), y_perm)
    out = y_perm.new_empty((num_tokens, y_perm.shape[1]))
    tensors = {"inverse": inv, "topk_weights": topk_ws, "result_rows": y_perm, "out": out}
    sizes = Sizes(num_experts=1, num_listed=1, hidden=y_perm.shape[1], num_tokens=num_tokens, topk=topk)
    launch(("unpermute",), sizes, tensors, device=y_perm.device, capture=capture)
    return out


def _multiply(
    stage: str,
    rows: torch.Tensor,
    off_e: torch.Tensor,
    weights: PreparedWeights,
    eids: torch.Tensor | None,
    tensors: Tensors,
    hidden_and_intermediate: tuple[int, int],
    detail: int,
    capture: Capture | None,
) -> None:
    num_experts, num_rows, staging = weights.num_experts, rows.shape[0], weights.staging
    checks.check_detail(detail)
    checks.check_offsets(off_e, num_experts, num_rows, rows)
    checks.check_eids(eids, num_experts, rows)
    checks.check_abort(tensors["abort"], rows)
    num_listed = num_experts if eids is None else eids.numel()
    tensors |= {"expert_ids": eids, "expert_offset": off_e, **tile_tensors(staging, num_listed, num_rows, rows)}
    hidden, intermediate = hidden_and_intermediate
    sizes = Sizes(
        num_experts=num_experts,
        num_listed=num_listed,
        hidden=hidden,
        intermediate=intermediate,
        num_rows=num_rows,
        detail=detail,
    )
    stages = ("tiles", *product_stages(stage, staging, num_rows))
    launch(stages, sizes, tensors, device=rows.device, staging=staging, capture=capture)

"""The variants in plain torch: `reference`, a loop over choices, and `sorted`, with argsort and collectives.

Every variant computes, unless its family says otherwise, for each token,

    out = round(sum over choices k, in their order, of weight[k] * expert[k](x))

with products and sums in fp32, each rounded on its own, and round() to the dtype: one result, the same bits everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.moe.experts import Experts
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape

if TYPE_CHECKING:
    import torch


def reference(batch: Batch, experts: Experts) -> torch.Tensor:
    """Applies each token's experts on its own rank, all first choices, then all second ones, and so on.

    Returns [num_tokens, hidden] in batch.x's dtype.
    """
    import torch

    total = torch.zeros(batch.x.shape, dtype=torch.float32, device=batch.x.device)
    for experts_of_choice, weights in zip(batch.topk_idx.T, batch.topk_weights.T, strict=True):
        chosen = experts_of_choice >= 0
        result = experts.apply(batch.x[chosen], experts_of_choice[chosen])
        total[chosen] = total[chosen] + weights[chosen, None] * result.float()
    return total.to(batch.x.dtype)


def sorted_all_to_all(batch: Batch, experts: Experts, shape: MoeShape) -> torch.Tensor:
    """Computes the same result with argsort and all_to_all_single over the default process group. Collective."""
    import torch

    device = batch.x.device
    chosen = batch.topk_idx.reshape(-1).long()
    # Choices of no expert (-1) sort first and are not sent.
    order = torch.argsort(chosen, stable=True)[int((chosen < 0).sum()) :]
    rows = batch.x[order // shape.topk]
    send_counts = torch.bincount(chosen[order], minlength=shape.num_experts).reshape(shape.num_ranks, -1)
    recv_counts = torch.empty_like(send_counts)
    _all_to_all(recv_counts, send_counts, [1] * shape.num_ranks, [1] * shape.num_ranks)

    send_splits, recv_splits = send_counts.sum(1).tolist(), recv_counts.sum(1).tolist()
    received = torch.empty((sum(recv_splits), shape.hidden), dtype=rows.dtype, device=device)
    _all_to_all(received, rows, recv_splits, send_splits)

    # Rows arrive by source rank, then by expert; a second sort gives the layout of a grouped GEMM.
    locals_of_ranks = torch.arange(shape.num_local_experts, device=device).repeat(shape.num_ranks)
    local = locals_of_ranks.repeat_interleave(recv_counts.reshape(-1))
    by_expert = torch.argsort(local, stable=True)
    first_expert = _rank() * shape.num_local_experts
    results_of_experts = experts.apply(received[by_expert], first_expert + local[by_expert])

    back = torch.empty_like(received)
    back[by_expert] = results_of_experts
    returned = torch.empty_like(rows)
    _all_to_all(returned, back, send_splits, recv_splits)
    results = torch.zeros((batch.num_tokens * shape.topk, shape.hidden), dtype=torch.float32, device=device)
    results[order] = returned.float()
    return weighted_sum(batch, results.reshape(batch.num_tokens, shape.topk, shape.hidden)).to(rows.dtype)


def weighted_sum(batch: Batch, results: torch.Tensor) -> torch.Tensor:
    """Adds results [num_tokens, topk, hidden] fp32 in the order of the choices. Returns [num_tokens, hidden] fp32."""
    import torch

    total = torch.zeros((batch.num_tokens, results.shape[2]), dtype=torch.float32, device=results.device)
    for choice in range(results.shape[1]):
        weighted = batch.topk_weights[:, choice, None] * results[:, choice]
        total = torch.where(batch.topk_idx[:, choice, None] >= 0, total + weighted, total)
    return total


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _all_to_all(out: torch.Tensor, rows: torch.Tensor, out_splits: list[int], in_splits: list[int]) -> None:
    """Exchanges rows as bytes, because gloo does not support bf16."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        out.copy_(rows)
        return
    received = torch.empty((out.shape[0], out.shape[1] * out.element_size()), dtype=torch.uint8, device=out.device)
    dist.all_to_all_single(received, rows.contiguous().view(torch.uint8), out_splits, in_splits)
    out.copy_(received.view(out.dtype))

"""What two-hop dispatch delivers, in plain torch: its rows have one order, that of their ranks and of tokens there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracekern.moe.two_hop.layout import DispatchLayout, Nodes


@dataclass(frozen=True)
class Delivered:
    """What one rank receives, a row for each token that has an expert there."""

    rows: torch.Tensor
    """[num_rows, hidden]."""
    topk_idx: torch.Tensor
    """[num_rows, topk] int64: experts as this rank counts them, -1 for those of other ranks."""
    topk_weights: torch.Tensor
    """[num_rows, topk] fp32; 0 for experts of other ranks."""
    source: torch.Tensor
    """[num_rows, 2] int64: rank and token there."""


def dispatch_reference(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    layouts: list[DispatchLayout],
    nodes: Nodes,
    num_experts: int,
    rank: int,
) -> Delivered:
    """Returns what comes to `rank`. x, topk_idx, topk_weights, layouts: of all ranks."""
    experts = num_experts // nodes.num_ranks
    wanted = [layout.is_token_in_rank[:, rank].nonzero().squeeze(1) for layout in layouts]
    chosen = torch.cat([idx[tokens] for idx, tokens in zip(topk_idx, wanted, strict=True)])
    is_local = (chosen >= 0) & (chosen // experts == rank)
    weights = torch.cat([weight[tokens] for weight, tokens in zip(topk_weights, wanted, strict=True)])
    sources = [torch.stack([torch.full_like(tokens, source), tokens], 1) for source, tokens in enumerate(wanted)]
    return Delivered(
        torch.cat([rows[tokens] for rows, tokens in zip(x, wanted, strict=True)]),
        torch.where(is_local, chosen - rank * experts, -1),
        torch.where(is_local, weights, 0),
        torch.cat(sources),
    )

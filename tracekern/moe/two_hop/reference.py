"""What two-hop dispatch delivers, in plain torch: its rows have one order, that of their ranks and of tokens there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekern.moe.experts import Experts
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch
from tracekern.moe.two_hop.handle import Handle, Received
from tracekern.moe.two_hop.layout import (
    DispatchLayout,
    Nodes,
    channel_places,
    channel_prefix_matrix,
    get_dispatch_layout,
    get_receive_layout,
    is_token_in_node,
)

if TYPE_CHECKING:
    import torch


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
    import torch

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


def node_reduced_reference(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, experts: Experts, nodes: Nodes
) -> torch.Tensor:
    """Returns what comes back to a rank for its tokens, [num_tokens, hidden], where each rank gives back expert_rows(),
    or of int4 experts each row's weighted results, added up in fp32 in the order of its choices and rounded.

    Rows are added up in fp32 in the order of a node's ranks, rounded, and these sums in the order of the nodes.
    """
    import torch

    num_local = len(experts.scale) // nodes.num_ranks
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for node in range(nodes.num_nodes):
        of_node = torch.zeros_like(total)
        for rank in range(node * nodes.peers, (node + 1) * nodes.peers):
            is_local = (topk_idx >= 0) & (topk_idx // num_local == rank)
            chosen = torch.where(is_local, topk_idx, -1)
            if isinstance(experts, Int4Experts):
                rows = reference(Batch(x, chosen, topk_weights), experts)
            else:
                rows = expert_rows(x, chosen, topk_weights, experts.scale)
            of_node += rows.float()
        total += of_node.to(x.dtype).float()
    return total.to(x.dtype)


def expert_rows(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Returns what a stand-in for a rank's experts makes of rows: each times the sum over its choices, in their order,
    of weight * scale. topk_idx: -1: none. scale: fp32, of the experts that are named.
    """
    import torch

    factor = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    for choice in range(topk_idx.shape[1]):
        expert = topk_idx[:, choice]
        term = topk_weights[:, choice] * scale[expert.clamp(min=0)]
        factor = factor + torch.where(expert >= 0, term, 0.0)
    return (x.float() * factor[:, None]).to(x.dtype)


def received_reference(
    x: list[torch.Tensor],
    x_scales: list[torch.Tensor] | None,
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    nodes: Nodes,
    num_experts: int,
    num_channels: int,
    rank: int,
    expert_alignment: int = 1,
) -> Received:
    """Returns all that dispatch returns on `rank`, its handle included. Lists: of all ranks, on the CPU."""
    layouts = [get_dispatch_layout(idx, num_experts, nodes) for idx in topk_idx]
    about = topk_idx, topk_weights, layouts, nodes, num_experts, rank
    delivered = dispatch_reference(x, *about)
    layout = get_receive_layout(layouts, nodes, rank, expert_alignment)
    return Received(
        delivered.rows,
        dispatch_reference(x_scales, *about).rows if x_scales else None,
        delivered.topk_idx,
        delivered.topk_weights,
        list(layout.num_recv_tokens_per_expert),
        _handle_reference(delivered, layouts, nodes, num_channels, rank),
    )


def _handle_reference(
    delivered: Delivered, layouts: list[DispatchLayout], nodes: Nodes, num_channels: int, rank: int
) -> Handle:
    import torch

    node, peer = divmod(rank, nodes.peers)
    here = slice(node * nodes.peers, (node + 1) * nodes.peers)
    own, received = layouts[rank], get_receive_layout(layouts, nodes, rank)
    forwarded = layouts[peer :: nodes.peers]
    of_ranks = torch.stack([channel_prefix_matrix(layout.is_token_in_rank, num_channels)[rank] for layout in layouts])
    starts = torch.nn.functional.pad(of_ranks, (1, 0))[:, :-1]
    before = torch.nn.functional.pad(received.recv_gbl_rank_prefix_sum, (1, 0))[:-1]
    wanted = [layouts[source].is_token_in_rank[token, here] for source, token in delivered.source.tolist()]
    bits = [sum(int(is_wanted) << i for i, is_wanted in enumerate(row)) for row in wanted]
    meta = torch.stack([delivered.source[:, 0] // nodes.peers, torch.tensor(bits, dtype=torch.int64)], 1)
    places = []
    for layout in forwarded:
        comes = is_token_in_node(layout.is_token_in_rank, nodes)[:, node]
        places.append(channel_places(layout.is_token_in_rank[:, here], num_channels)[comes])
    in_node = is_token_in_node(own.is_token_in_rank, nodes)
    return Handle(
        own.is_token_in_rank,
        channel_prefix_matrix(in_node, num_channels),
        channel_prefix_matrix(own.is_token_in_rank, num_channels),
        torch.stack(
            [
                channel_prefix_matrix(is_token_in_node(layout.is_token_in_rank, nodes), num_channels)[node]
                for layout in forwarded
            ]
        ),
        received.recv_rdma_rank_prefix_sum,
        before[:, None] + starts,
        received.recv_gbl_rank_prefix_sum,
        meta.to(torch.int32).view(torch.uint8),
        channel_places(in_node, num_channels),
        torch.cat(places),
    )


def count_wrong(received: Received, wanted: Received) -> int:
    """Returns how many elements differ in any bit. Of a tensor of another size or dtype all do."""
    pairs = [*zip(received.handle, wanted.handle, strict=True)]
    for name in ("recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights"):
        pairs.append((getattr(received, name), getattr(wanted, name)))
    wrong = sum(num_different(*pair) for pair in pairs)
    return wrong + int(received.num_recv_tokens_per_expert_list != wanted.num_recv_tokens_per_expert_list)


def num_different(one: torch.Tensor | None, other: torch.Tensor | None) -> int:
    """Returns how many elements differ in any bit. Of a tensor of another size or dtype all do."""
    import torch

    if one is None or other is None:
        return int(one is not other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(1, one.numel(), other.numel())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return int((one.cpu().view(bits) != other.cpu().view(bits)).sum())

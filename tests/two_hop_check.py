"""Calls of two-hop dispatch for tests: what each rank brings, and how much of what it got is wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tracekern.comm.ranks.group import Group
from tracekern.moe.two_hop import Buffer, Config
from tracekern.moe.two_hop.handle import Received
from tracekern.moe.two_hop.layout import Nodes, get_dispatch_layout
from tracekern.moe.two_hop.reference import count_wrong, num_different, received_reference


@dataclass(frozen=True)
class Case:
    """A kind of calls, the same on all ranks. Some ranks bring no token, some choices are none."""

    config: Config
    tokens: int = 24
    hidden: int = 128
    experts_each: int = 3
    topk: int = 4
    is_fp8: bool = False
    has_topk: bool = True
    one_rank: bool = False
    """All tokens go to rank 0."""
    alignment: int = 1


@dataclass(frozen=True)
class Brought:
    """What one rank brings to a call."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: str) -> Brought:
        moved = {name: value if value is None else value.to(device) for name, value in vars(self).items()}
        return Brought(**moved)


def bring(case: Case, num_ranks: int, rank: int, seed: int) -> Brought:
    draw = torch.Generator().manual_seed(seed * 1000 + rank)
    num_tokens = 0 if (rank + seed) % 5 == 4 else int(torch.randint(1, case.tokens + 1, (1,), generator=draw))
    num_experts = case.experts_each * (1 if case.one_rank else num_ranks)
    topk_idx = torch.rand((num_tokens, num_experts), generator=draw).argsort(1)[:, : case.topk].contiguous()
    topk_idx[torch.rand(topk_idx.shape, generator=draw) < 0.2] = -1
    x = torch.randn((num_tokens, case.hidden), generator=draw)
    scales = torch.rand((num_tokens, case.hidden // 128), generator=draw) if case.is_fp8 else None
    values = x.to(torch.float8_e4m3fn if case.is_fp8 else torch.bfloat16)
    return Brought(values, scales, topk_idx, torch.rand(topk_idx.shape, generator=draw))


def dispatch(buffer: Buffer, case: Case, given: Brought, **how: Any) -> Received:
    """Runs a call."""
    layout = buffer.get_dispatch_layout(given.topk_idx, case.experts_each * buffer.group_size)
    per_rank, per_node, per_expert, in_rank, _ = layout
    x = given.x if given.scales is None else (given.x, given.scales)
    choices = (given.topk_idx, given.topk_weights) if case.has_topk else (None, None)
    how = {"expert_alignment": case.alignment, "config": case.config, **how}
    recv_x, *others, _ = buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, *choices, **how)
    values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    return Received(values, scales, *others)


def wanted(case: Case, nodes: Nodes, rank: int, seed: int) -> Received:
    """What the oracle says of a call."""
    brought = [bring(case, nodes.num_ranks, source, seed) for source in range(nodes.num_ranks)]
    scales = [one.scales for one in brought if one.scales is not None]
    received = received_reference(
        [one.x for one in brought],
        scales or None,
        [one.topk_idx for one in brought],
        [one.topk_weights for one in brought],
        nodes,
        case.experts_each * nodes.num_ranks,
        case.config.num_channels,
        rank,
        case.alignment,
    )
    return received if case.has_topk else dataclasses.replace(received, recv_topk_idx=None, recv_topk_weights=None)


def num_wrong(buffer: Buffer, case: Case, seed: int, **how: Any) -> int:
    """Runs a call of each rank. Returns how many elements of this rank's results are wrong."""
    given = bring(case, buffer.group_size, buffer.rank, seed)
    received = dispatch(buffer, case, given.to(buffer.comm.device.torch_device), **how)
    wrong = combine_wrong(buffer, received, combined_wanted(case, buffer.nodes, given), how.get("capture"))
    wrong += repeat_wrong(buffer, given, received)
    buffer.synchronize()
    return wrong + count_wrong(received, wanted(case, buffer.nodes, buffer.rank, seed))


def repeat_wrong(buffer: Buffer, given: Brought, received: Received) -> int:
    """Sends other values the same way. Returns how many elements differ from where the first ones came to lie."""
    if given.scales is not None:
        again, *_ = buffer.dispatch(
            (given.x.to(received.recv_x.device), given.scales.to(received.recv_x.device)), received.handle
        )
        return num_different(again[0], received.recv_x) + num_different(again[1], received.recv_x_scales)
    x = (-2 * given.x).to(received.recv_x.device)
    again, *others = buffer.dispatch(x, tuple(received.handle))
    assert others[:3] == [None, None, []]
    return num_different(again, -2 * received.recv_x)


def rows_of(values: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank gives back for rows of these values."""
    return (values.float() * (1 + rank / 8)).to(torch.bfloat16)


def combined_wanted(case: Case, nodes: Nodes, given: Brought) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes back for tokens where each rank gives back rows_of(), and their weights. given: on the CPU."""
    in_rank = get_dispatch_layout(given.topk_idx, case.experts_each * nodes.num_ranks, nodes).is_token_in_rank
    total = torch.zeros(given.x.shape)
    for node in range(nodes.num_nodes):
        of_node = torch.zeros_like(total)
        for rank in range(node * nodes.peers, (node + 1) * nodes.peers):
            of_node += torch.where(in_rank[:, rank, None], rows_of(given.x, rank).float(), 0.0)
        total += of_node.to(torch.bfloat16).float()
    return total.to(torch.bfloat16), torch.where(given.topk_idx >= 0, given.topk_weights, 0.0)


def combine_wrong(
    buffer: Buffer, received: Received, due: tuple[torch.Tensor, torch.Tensor], capture: Any = None
) -> int:
    """Combines twice, with weights where there are some. Returns how many elements of this rank's results are wrong.

    due: what combined_wanted() says.
    """
    rows, wrong = rows_of(received.recv_x, buffer.rank), 0
    for weights in (None, received.recv_topk_weights):
        combined, combined_weights, _ = buffer.combine(rows, received.handle, weights, capture=capture)
        buffer.synchronize()
        wrong += num_different(combined, due[0])
        if weights is not None:
            wrong += num_different(combined_weights, due[1])
    return wrong


def make_buffer(group: Group, num_nodes: int, **how: Any) -> Buffer:
    how = {"backend": "cpu", "num_max_tokens_per_rank": 64, "timeout_s": 20.0, **how}
    return Buffer(group, 1 << 21, 1 << 21, num_nodes=num_nodes, **how)

"""Where tokens go: the counts, masks and prefix sums that two-hop dispatch works by, in plain torch.

Names and shapes are those of DeepEP 1.2.1. Rank `node * peers + peer` is a peer of a node; a token goes to a node once,
however many of the ranks there want it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekern.errors import BadInput
from tracekern.moe.shape import check_range

if TYPE_CHECKING:
    import torch

NODE_SIZES = (1, 2, 4, 8)
MAX_NODES = 16


@dataclass(frozen=True)
class Nodes:
    """How ranks are spread over nodes. Raises BadInput for nodes of other sizes than NODE_SIZES."""

    num_nodes: int
    peers: int
    """Ranks of a node."""

    def __post_init__(self) -> None:
        check_range("nodes", self.num_nodes, 1, MAX_NODES)
        if self.peers not in NODE_SIZES:
            sizes = ", ".join(map(str, NODE_SIZES))
            raise BadInput(f"a node has {self.peers} ranks; wanted one of {sizes}: choose ranks and nodes so")

    @classmethod
    def of(cls, num_ranks: int, num_nodes: int) -> Nodes:
        """Splits ranks evenly. Raises BadInput where that cannot be."""
        if num_nodes < 1 or num_ranks % num_nodes:
            raise BadInput(f"{num_ranks} ranks on {num_nodes} nodes; wanted as many on each")
        return cls(num_nodes, num_ranks // num_nodes)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.peers


@dataclass(frozen=True)
class DispatchLayout:
    """Where one rank's tokens go."""

    num_tokens_per_rank: torch.Tensor
    """[num_ranks] int32."""
    num_tokens_per_rdma_rank: torch.Tensor
    """[num_nodes] int32. An RDMA rank is a node."""
    num_tokens_per_expert: torch.Tensor
    """[num_experts] int32: choices, of which a token may have several on a rank."""
    is_token_in_rank: torch.Tensor
    """[num_tokens, num_ranks] bool."""


def get_dispatch_layout(topk_idx: torch.Tensor, num_experts: int, nodes: Nodes) -> DispatchLayout:
    """Returns where the tokens with these choices go. topk_idx: [num_tokens, topk] int64, -1 for no expert.

    Raises BadInput for a number of experts that ranks cannot share evenly, and on the CPU for experts that there are
    not. On a GPU such a choice is none: looking at them would synchronize the stream in every call.
    """
    import torch

    if num_experts < 1 or num_experts % nodes.num_ranks:
        raise BadInput(f"{num_experts} experts on {nodes.num_ranks} ranks; wanted as many on each")
    if topk_idx.device.type == "cpu" and topk_idx.numel():
        low, high = int(topk_idx.min()), int(topk_idx.max())
        if not -1 <= low <= high < num_experts:
            raise BadInput(f"topk_idx has experts {low} to {high}; wanted -1 to {num_experts - 1}")
    chosen = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, num_experts)  # the last stands for none
    goes = torch.zeros(len(topk_idx), nodes.num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_token_in_rank = goes.scatter_(1, chosen // (num_experts // nodes.num_ranks), True)[:, :-1].contiguous()
    of_experts = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
    of_experts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen, dtype=torch.int32).flatten())
    return DispatchLayout(
        is_token_in_rank.sum(0, dtype=torch.int32),
        is_token_in_node(is_token_in_rank, nodes).sum(0, dtype=torch.int32),
        of_experts[:-1].contiguous(),
        is_token_in_rank,
    )


def is_token_in_node(is_token_in_rank: torch.Tensor, nodes: Nodes) -> torch.Tensor:
    """Returns [num_tokens, num_nodes] bool."""
    return is_token_in_rank.reshape(-1, nodes.num_nodes, nodes.peers).any(2)


def channel_task_range(num_tokens: int, num_channels: int, channel: int) -> range:
    """Returns the tokens of a channel, which are consecutive. The last channels may have fewer than others, or none."""
    share = -(-num_tokens // num_channels)
    return range(min(channel * share, num_tokens), min((channel + 1) * share, num_tokens))


def channel_prefix_matrix(goes_to: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Returns [num_targets, num_channels] int32: how many tokens go to a target in the channels up to this one.

    goes_to: [num_tokens, num_targets] bool. Of ranks it is the gbl_channel_prefix_matrix, of nodes the rdma one.
    """
    import torch

    ends = [channel_task_range(len(goes_to), num_channels, channel).stop for channel in range(num_channels)]
    so_far = torch.nn.functional.pad(goes_to.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    return so_far[ends].T.contiguous()


def channel_places(goes_to: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Returns [num_tokens, num_targets] int32: how many of a channel's earlier tokens go to the target, too, or -1."""
    import torch

    ranges = [channel_task_range(len(goes_to), num_channels, channel) for channel in range(num_channels)]
    earlier = [goes_to[tokens.start : tokens.stop].cumsum(0, dtype=torch.int32) - 1 for tokens in ranges]
    return torch.where(goes_to, torch.cat(earlier), -1)


@dataclass(frozen=True)
class ReceiveLayout:
    """What comes to one rank, and where it lies there."""

    recv_gbl_rank_prefix_sum: torch.Tensor
    """[num_ranks] int32: rows of recv_x from the ranks up to this one."""
    recv_rdma_rank_prefix_sum: torch.Tensor
    """[num_nodes] int32: tokens that this rank forwards, from the nodes up to this one."""
    num_recv_tokens_per_expert: tuple[int, ...]
    """Choices of each local expert, rounded up to the alignment."""


def get_receive_layout(
    layouts: list[DispatchLayout], nodes: Nodes, rank: int, expert_alignment: int = 1
) -> ReceiveLayout:
    """Returns what comes to `rank`. layouts: of all ranks, in their order.

    A rank forwards what its peers on other nodes send to its node; it is a peer itself.
    """
    import torch

    node, peer = divmod(rank, nodes.peers)
    rows = torch.stack([layout.num_tokens_per_rank[rank] for layout in layouts])
    passed = torch.stack([layout.num_tokens_per_rdma_rank[node] for layout in layouts[peer :: nodes.peers]])
    of_experts = torch.stack([layout.num_tokens_per_expert for layout in layouts]).sum(0).reshape(nodes.num_ranks, -1)
    aligned = -(-of_experts[rank] // expert_alignment) * expert_alignment
    return ReceiveLayout(
        rows.cumsum(0, dtype=torch.int32), passed.cumsum(0, dtype=torch.int32), tuple(map(int, aligned.tolist()))
    )

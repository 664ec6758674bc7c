"""What a dispatch returns and what it was given: the tensors of a call, under DeepEP's names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Handle(NamedTuple):
    """DeepEP's ten parts. An RDMA rank is a node, a channel two blocks of the kernel.

    All but the first know the number of their dispatch, in a plain tuple of them, too.
    """

    is_token_in_rank: torch.Tensor
    """[num_tokens, num_ranks] bool: that of the call."""
    rdma_channel_prefix_matrix: torch.Tensor
    """[num_nodes, num_channels] int32: tokens for the node in the channels up to this one."""
    gbl_channel_prefix_matrix: torch.Tensor
    """[num_ranks, num_channels] int32: tokens for the rank in the channels up to this one."""
    recv_rdma_channel_prefix_matrix: torch.Tensor
    """[num_nodes, num_channels] int32: tokens that this rank forwards from the node in the channels up to this one."""
    recv_rdma_rank_prefix_sum: torch.Tensor
    """[num_nodes] int32: tokens that this rank forwards from the nodes up to this one."""
    recv_gbl_channel_prefix_matrix: torch.Tensor
    """[num_ranks, num_channels] int32: the first row of recv_x from the rank in this channel."""
    recv_gbl_rank_prefix_sum: torch.Tensor
    """[num_ranks] int32: rows of recv_x from the ranks up to this one."""
    recv_src_meta: torch.Tensor
    """[num_rows, 8] uint8: two int32, the source's node and which peers of this node have the token, a bit each."""
    send_rdma_head: torch.Tensor
    """[num_tokens, num_nodes] int32: the token's place in its channel's ring to the node, -1 if it did not go there."""
    send_nvl_head: torch.Tensor
    """[num_forwarded, peers] int32: the token's place among those of its node and channel that the peer got, or -1."""

    def set_number(self, number: int) -> None:
        for part in self[1:]:
            part.handle_number = number  # type: ignore[attr-defined]

    @property
    def number(self) -> int:
        """Returns the number of the dispatch; 0 for parts that no dispatch has returned, or several have."""
        numbers = {getattr(part, "handle_number", 0) for part in self[1:]}
        return int(numbers.pop()) if len(numbers) == 1 else 0


@dataclass(frozen=True)
class Given:
    """What a call was given."""

    x: torch.Tensor
    x_scales: torch.Tensor | None
    num_tokens_per_rank: torch.Tensor
    num_tokens_per_rdma_rank: torch.Tensor
    is_token_in_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_alignment: int
    num_worst_tokens: int

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Returns name in the native Call -> tensor."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, int)}


@dataclass(frozen=True)
class Received:
    """What a call returns."""

    recv_x: torch.Tensor
    recv_x_scales: torch.Tensor | None
    recv_topk_idx: torch.Tensor | None
    recv_topk_weights: torch.Tensor | None
    num_recv_tokens_per_expert_list: list[int]
    handle: Handle

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self.recv_x, self.recv_x_scales, self.recv_topk_idx, self.recv_topk_weights, *self.handle)

    def what_came(self) -> Received:
        """Returns it without the rows that num_worst_tokens left over. Waits for the kernels."""
        num_rows = int(self.handle.recv_gbl_rank_prefix_sum[-1])
        num_forwarded = int(self.handle.recv_rdma_rank_prefix_sum[-1])
        handle = self.handle._replace(
            recv_src_meta=self.handle.recv_src_meta[:num_rows], send_nvl_head=self.handle.send_nvl_head[:num_forwarded]
        )
        names = "recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights"
        parts: dict[str, Any] = {name: getattr(self, name) for name in names}
        kept: dict[str, Any] = {name: None if part is None else part[:num_rows] for name, part in parts.items()}
        return dataclasses.replace(self, handle=handle, **kept)

    def as_returned(self) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int], Handle]:
        """Returns the parts as dispatch() returns them: recv_x with its scales, if it has some."""
        recv_x = self.recv_x if self.recv_x_scales is None else (self.recv_x, self.recv_x_scales)
        return recv_x, self.recv_topk_idx, self.recv_topk_weights, self.num_recv_tokens_per_expert_list, self.handle

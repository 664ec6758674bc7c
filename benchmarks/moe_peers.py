"""What others offer for the same job, where it is installed: torch's symmetric memory, and names of packages."""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from tracekern.moe.reference import weighted_sum
from tracekern.moe.routing import Batch, torch_dtype
from tracekern.moe.shape import MoeShape

PACKAGES = ("flashinfer", "deep_ep", "pplx_kernels", "uccl")


def importable_peers() -> dict[str, str]:
    """Package -> why it stands in no table."""
    missing = {name: "not installed" for name in PACKAGES if importlib.util.find_spec(name) is None}
    present = {name: "installed; not measured by this script" for name in PACKAGES if name not in missing}
    return {**missing, **present}


class Vdev2d:
    """torch.ops.symm_mem.all_to_all_vdev_2d there and its _offset twin back; tokens are permuted, scaled and added up
    by plain torch. No host in between: the split sizes stay on the device. Collective."""

    def __init__(self, shape: MoeShape) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.set_backend("NVSHMEM")
        self.shape = shape
        self.group = dist.group.WORLD.group_name
        rows, dtype, device = shape.max_tokens * shape.topk, torch_dtype(shape), torch.device("cuda")
        # Room for a quarter more than the mean: uniform routing stays below.
        self.input = symm_mem.empty(rows, shape.hidden, dtype=dtype, device=device)
        self.received = symm_mem.empty(rows * 5 // 4, shape.hidden, dtype=dtype, device=device)
        self.returned = symm_mem.empty(rows, shape.hidden, dtype=dtype, device=device)
        self.splits = symm_mem.empty(shape.num_experts, dtype=torch.int64, device=device)
        self.there = symm_mem.empty(2, shape.num_experts, dtype=torch.int64, device=device)
        self.back = symm_mem.empty(2, shape.num_experts, dtype=torch.int64, device=device)
        for tensor in (self.input, self.received, self.returned, self.splits, self.there, self.back):
            symm_mem.rendezvous(tensor, self.group)

    def __call__(self, batch: Batch, expert_scale: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]; no choice of batch may be -1."""
        shape = self.shape
        chosen = batch.topk_idx.reshape(-1).long()
        order = torch.argsort(chosen, stable=True)
        torch.index_select(batch.x, 0, order // shape.topk, out=self.input[: len(order)])
        self.splits.copy_(torch.bincount(chosen, minlength=shape.num_experts))
        ops = torch.ops.symm_mem
        ops.all_to_all_vdev_2d(self.input, self.received, self.splits, self.there, self.group)
        # Received rows stand by local expert, within it by source rank.
        ends = self.there[1] + self.there[0]
        split_of = torch.searchsorted(ends, torch.arange(len(self.received), device="cuda"), right=True)
        expert = dist.get_rank() * shape.num_local_experts + split_of // shape.num_ranks
        scale = expert_scale[expert.clamp(max=shape.num_experts - 1), None]
        self.received.copy_((self.received.float() * scale).to(self.received.dtype))
        ops.all_to_all_vdev_2d_offset(self.received, self.returned, self.there, self.back, self.group)
        results = torch.empty((len(order), shape.hidden), dtype=torch.float32, device="cuda")
        results[order] = self.returned[: len(order)].float()
        return weighted_sum(batch, results.reshape(-1, shape.topk, shape.hidden)).to(batch.x.dtype)

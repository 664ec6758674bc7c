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


MOST_SPLITS = 15


def fits(num_local_experts: int, sharers: int) -> bool:
    return num_local_experts % sharers == 0 and num_local_experts // sharers <= MOST_SPLITS


class Vdev2d:
    """torch.ops.symm_mem.all_to_all_vdev_2d there and its _offset twin back; tokens are permuted, scaled and added up
    by plain torch. No host in between: the split sizes stay on the device. Collective.

    It takes fewer than 16 splits a rank (NUM_TILES): with more experts several share one, and every row's expert goes
    along in a second exchange of 16 bytes a row.
    """

    def __init__(self, shape: MoeShape) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.set_backend("NVSHMEM")
        self.shape = shape
        self.group = dist.group.WORLD.group_name
        rows, dtype, device = (
            shape.max_tokens * shape.topk,
            torch_dtype(shape),
            torch.device("cuda", torch.cuda.current_device()),
        )
        # Room for a quarter more than the mean: uniform routing stays below.
        self.input = symm_mem.empty(rows, shape.hidden, dtype=dtype, device=device)
        self.received = symm_mem.empty(rows * 5 // 4, shape.hidden, dtype=dtype, device=device)
        self.returned = symm_mem.empty(rows, shape.hidden, dtype=dtype, device=device)
        self.sharers = next(n for n in range(1, shape.num_local_experts + 1) if fits(shape.num_local_experts, n))
        num_splits = shape.num_experts // self.sharers
        self.experts = symm_mem.empty(rows, 4, dtype=torch.int32, device=device)
        self.received_experts = symm_mem.empty(rows * 5 // 4, 4, dtype=torch.int32, device=device)
        self.splits = symm_mem.empty(num_splits, dtype=torch.int64, device=device)
        self.there = symm_mem.empty(2, num_splits, dtype=torch.int64, device=device)
        self.back = symm_mem.empty(2, num_splits, dtype=torch.int64, device=device)
        rows_of_tokens = (self.input, self.received, self.returned, self.experts, self.received_experts)
        for tensor in (*rows_of_tokens, self.splits, self.there, self.back):
            symm_mem.rendezvous(tensor, self.group)

    def __call__(self, batch: Batch, expert_scale: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]; no choice of batch may be -1."""
        shape = self.shape
        chosen = batch.topk_idx.reshape(-1).long()
        order = torch.argsort(chosen, stable=True)
        torch.index_select(batch.x, 0, order // shape.topk, out=self.input[: len(order)])
        self.experts[: len(order)] = chosen[order, None].int()
        self.splits.copy_(torch.bincount(chosen // self.sharers, minlength=len(self.splits)))
        ops = torch.ops.symm_mem
        ops.all_to_all_vdev_2d(self.input, self.received, self.splits, self.there, self.group)
        ops.all_to_all_vdev_2d(self.experts, self.received_experts, self.splits, self.there, self.group)
        expert = self.received_experts[:, 0].clamp(0, shape.num_experts - 1).long()
        scale = expert_scale[expert, None]
        self.received.copy_((self.received.float() * scale).to(self.received.dtype))
        ops.all_to_all_vdev_2d_offset(self.received, self.returned, self.there, self.back, self.group)
        results = torch.empty((len(order), shape.hidden), dtype=torch.float32, device="cuda")
        results[order] = self.returned[: len(order)].float()
        return weighted_sum(batch, results.reshape(-1, shape.topk, shape.hidden)).to(batch.x.dtype)

"""What others offer for the same job, where it is installed: torch's symmetric memory, and names of packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tracekern.moe.experts import Experts
from tracekern.moe.reference import weighted_sum
from tracekern.moe.routing import Batch, torch_dtype
from tracekern.moe.shape import MoeShape

PACKAGES = ("flashinfer", "deep_ep", "pplx_kernels", "uccl")

Rows = npt.NDArray[np.int64]


def importable_peers() -> dict[str, str]:
    """Package -> why it stands in no table."""
    missing = {name: "not installed" for name in PACKAGES if importlib.util.find_spec(name) is None}
    present = {name: "installed; not measured by this script" for name in PACKAGES if name not in missing}
    return {**missing, **present}


MOST_SPLITS = 15


def fits(num_local_experts: int, sharers: int) -> bool:
    return num_local_experts % sharers == 0 and num_local_experts // sharers <= MOST_SPLITS


@dataclass(frozen=True)
class Exchange:
    """torch's two operations over memory that all ranks can read.

    dispatch(input, out, splits, table): all_to_all_vdev_2d. input, out: [capacity, width]. splits: [num_splits] int64,
    rows for each group of experts, by rank and then by group. Leaves rows by group and, within it, by the rank they
    came from; table: [2, num_splits] int64 tells in that order how many and from which row on. A group without rows
    takes one.
    combine(input, out, table, table_back): all_to_all_vdev_2d_offset, the way back, to the order before dispatch.

    All lie in symmetric memory. Until an operation has ended on every rank a rank uses its table as a notepad, and no
    operation waits for that at its end: the next one that writes the same table would meet the notes of a slow rank.
    Between two that share a table there has to be another one. Within an operation the first block of a rank writes its
    notes over while the others may still read them; moving its rows takes it longer, unless the first split is empty
    (pytorch/pytorch pull request 192300, torch 2.11 is without it).
    """

    rank: int
    empty: Callable[..., torch.Tensor]
    """As torch.empty(*size, dtype=), in symmetric memory; collective."""
    dispatch: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
    combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]


def nvshmem() -> Exchange:
    """Over NVSHMEM, on torch's current device. Once a process. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.set_backend("NVSHMEM")
    group = dist.group.WORLD.group_name
    device = torch.device("cuda", torch.cuda.current_device())

    def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = symm_mem.empty(*size, dtype=dtype, device=device)
        symm_mem.rendezvous(tensor, group)
        return tensor

    there, back = torch.ops.symm_mem.all_to_all_vdev_2d, torch.ops.symm_mem.all_to_all_vdev_2d_offset
    return Exchange(
        dist.get_rank(), empty, lambda *tensors: there(*tensors, group), lambda *tensors: back(*tensors, group)
    )


class Vdev2d:
    """all_to_all_vdev_2d there and its _offset twin back; tokens are permuted, scaled and added up by plain torch. No
    host in between: the split sizes stay on the device. Collective.

    The operation takes fewer than 16 splits a rank: with more experts several share one. So a row carries its expert in
    a tag of 16 bytes behind its elements, (expert, rank, row, 0): the rest is there for diagnose().
    """

    TAG_BYTES = 16

    def __init__(self, shape: MoeShape, exchange: Exchange) -> None:
        self.shape, self.exchange = shape, exchange
        rows, dtype = shape.max_tokens * shape.topk, torch_dtype(shape)
        elements = self.TAG_BYTES // dtype.itemsize
        width = -(-shape.hidden // elements) * elements + elements  # whole pieces of 16 bytes
        self.input = exchange.empty(rows, width, dtype=dtype)
        # Room for a quarter more than the mean: uniform routing stays below. A group without rows takes one.
        self.received = exchange.empty(rows * 5 // 4 + MOST_SPLITS, width, dtype=dtype)
        self.returned = exchange.empty(rows, width, dtype=dtype)
        self.sharers = next(n for n in range(1, shape.num_local_experts + 1) if fits(shape.num_local_experts, n))
        num_splits = shape.num_experts // self.sharers
        self.splits = exchange.empty(num_splits, dtype=torch.int64)
        self.there, self.back = (exchange.empty(2, num_splits, dtype=torch.int64) for _ in range(2))
        tags = self.tags(self.input)
        tags[:, 1], tags[:, 3] = exchange.rank, 0
        tags[:, 2] = torch.arange(rows, device=tags.device)

    def tags(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, 4] int32: a view of the rows' tags."""
        return rows.view(torch.int32)[:, -4:]

    def __call__(
        self, batch: Batch, experts: Experts, after_dispatch: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """[num_tokens, hidden]; no choice of batch may be -1. after_dispatch: called when that was started."""
        shape, exchange = self.shape, self.exchange
        chosen = batch.topk_idx.reshape(-1).long()
        order = torch.argsort(chosen, stable=True)
        torch.index_select(batch.x, 0, order // shape.topk, out=self.input[: len(order), : shape.hidden])
        self.tags(self.input)[: len(order), 0] = chosen[order]
        # Not bincount(), which stops the host to look for the largest.
        self.splits.zero_().scatter_add_(0, chosen // self.sharers, torch.ones_like(chosen))
        exchange.dispatch(self.input, self.received, self.splits, self.there)
        if after_dispatch is not None:
            after_dispatch()
        expert = self.tags(self.received)[:, 0].clamp(0, shape.num_experts - 1).long()  # where no row came: anything
        self.received[:, : shape.hidden].mul_(experts.scale[expert, None])
        exchange.combine(self.received, self.returned, self.there, self.back)
        results = torch.empty((len(order), shape.hidden), dtype=torch.float32, device=batch.x.device)
        results[order] = self.returned[: len(order), : shape.hidden].float()
        return weighted_sum(batch, results.reshape(-1, shape.topk, shape.hidden)).to(batch.x.dtype)

    def diagnose(self, all_gather: Callable[[Any], list[Any]]) -> str:
        """Where the last call's rows went astray on this rank, in one line; collective."""
        sent = int(self.splits.sum())
        tags = self.tags(self.input)[:sent].cpu().numpy()
        gathered = all_gather((self.splits.cpu().numpy(), tags))
        splits = np.stack([splits for splits, _ in gathered])
        counts, offsets, first_rows = dispatched(splits, self.exchange.rank)
        found = []
        for name, wanted, got in (("splits", counts, self.there[0]), ("offsets", offsets, self.there[1])):
            wrong = np.flatnonzero(wanted != got.cpu().numpy())
            if len(wrong):
                group, source = divmod(int(wrong[0]), len(splits))
                found.append(
                    f"{len(wrong)} {name}, first of group {group} from rank {source}: wanted {wanted[wrong[0]]}, got "
                    f"{int(got[wrong[0]])}"
                )
        came = self.tags(self.received).cpu().numpy()
        wanted_tags, got_tags = [np.empty((0, 4), np.int32)], [np.empty((0, 4), np.int32)]
        for split, (count, offset, first) in enumerate(zip(counts, offsets, first_rows, strict=True)):
            wanted_tags.append(gathered[split % len(splits)][1][first : first + count])
            got_tags.append(came[offset : offset + count])
        found += differing("rows came", np.concatenate(wanted_tags), np.concatenate(got_tags))
        found += differing("rows came back", tags, self.tags(self.returned)[:sent].cpu().numpy())
        return "; ".join(found) or "every row went where it should"


def dispatched(splits: Rows, rank: int) -> tuple[Rows, Rows, Rows]:
    """What all_to_all_vdev_2d promises to leave on `rank`: [num_splits] rows, first row here, first row at the source.

    splits: [num_ranks, num_splits] int64, of every rank, by destination and group. By group here and, within it, by
    source; a group starts where the one before ends, and takes a row when it has none.
    """
    num_ranks, num_splits = splits.shape
    first_rows = np.cumsum(splits, axis=1) - splits
    mine = slice(rank * num_splits // num_ranks, (rank + 1) * num_splits // num_ranks)
    counts = splits[:, mine].T  # [group, source]
    lengths = np.maximum(counts.sum(axis=1), 1)
    starts = np.cumsum(lengths) - lengths
    offsets = starts[:, None] + np.cumsum(counts, axis=1) - counts
    return counts.reshape(-1), offsets.reshape(-1), first_rows[:, mine].T.reshape(-1)


def differing(what: str, wanted: npt.NDArray[np.int32], got: npt.NDArray[np.int32]) -> list[str]:
    """A line on the rows [n, 4] (expert, rank, row, 0) that differ; none where none does."""
    wrong = np.flatnonzero((wanted != got).any(axis=1))
    if not len(wrong):
        return []
    names = [
        f"row {row} of rank {rank} for expert {expert}"
        for expert, rank, row, _ in (wanted[wrong[0]].tolist(), got[wrong[0]].tolist())
    ]
    return [f"{len(wrong)} of {len(wanted)} {what} wrong, first at place {wrong[0]}: wanted {names[0]}, got {names[1]}"]

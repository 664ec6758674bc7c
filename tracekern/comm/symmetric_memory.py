"""Symmetric memory for kernels of a user's own: tensors at the same offset in every rank's part of a heap."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput

if TYPE_CHECKING:
    import torch

LINE_BYTES = 128
"""Tensors begin at multiples of it: no two share a cache line."""

_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True)
class MappedHeap:
    """A symmetric heap as one rank maps it."""

    rank: int
    addresses: tuple[int, ...]
    """Where each rank's part begins, [num_ranks]; 0: on another host."""
    num_bytes: int
    """Size of a part."""
    torch_device: str
    owner: Any
    """Keeps the memory mapped."""


class SymmetricTensor:
    """A tensor that each rank has in its part of the symmetric heap, with the same shape, dtype and offset.

    Its torch tensors keep the heap mapped in this process, even when the communicator is gone. A peer's copy can be
    used until the peer's process ends.
    """

    def __init__(self, heap: MappedHeap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Made by Communicator.malloc_symmetric()."""
        self.shape = shape
        self.dtype = dtype
        self.offset = offset
        """Bytes from the start of each rank's part; in a kernel `comm.at<T>(rank, offset)`."""
        self.pointers = tuple(address and address + offset for address in heap.addresses)
        """Addresses of all copies, [num_ranks], for kernels and code of this rank only; 0: on another host."""
        self._heap = heap
        self.local = self.peer(heap.rank)
        """This rank's copy, a torch.Tensor."""

    def peer(self, rank: int) -> torch.Tensor:
        """Returns the copy of `rank` as a tensor on this rank's device.

        The peer sees what was written there before this rank's `Communicator.synchronize()` and `barrier()`.

        Raises:
            BadInput: There is no such rank.
        """
        import torch

        from tracekern import _core

        if rank not in range(len(self.pointers)):
            raise BadInput(f"peer({rank!r}): wanted a rank from 0 to {len(self.pointers) - 1}")
        if not self._heap.addresses[rank]:
            raise BadInput(f"peer({rank}): it is on another host; wanted a rank of this one")
        device = torch.device(self._heap.torch_device)
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        kind = _DLPACK_DEVICES[device.type]
        capsule = _core.dlpack(self._heap.owner, self.pointers[rank], num_bytes, kind, device.index or 0)
        return torch.utils.dlpack.from_dlpack(capsule).view(self.dtype).view(self.shape)


class SymmetricAllocator:
    """Hands out a symmetric heap from `first_free` on, in the order of the calls. Nothing is given back."""

    def __init__(self, group: Group, heap: MappedHeap, first_free: int) -> None:
        self._group = group
        self._heap = heap
        self._first_free = first_free

    def malloc(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """See Communicator.malloc_symmetric()."""
        sizes, problem = _check_shape(shape)
        problem = problem or _check_dtype(dtype)
        asked = self._group.all_gather([problem, list(sizes), str(dtype), self._first_free], "malloc_symmetric()")
        for rank, (problem, *_) in zip(self._group.world_ranks, asked, strict=True):
            if problem:
                raise BadInput(f"malloc_symmetric on rank {rank}: {problem}")
        if difference := _find_difference(asked, self._group.world_ranks):
            raise BadInput(f"malloc_symmetric: {difference}")
        num_bytes = math.prod(sizes) * dtype.itemsize
        offset = min(-(-self._first_free // LINE_BYTES) * LINE_BYTES, self._heap.num_bytes)
        end, left = offset + num_bytes, self._heap.num_bytes - offset
        if num_bytes > left:
            room = f"{left} of the heap's {self._heap.num_bytes} are left"
            raise BadInput(
                f"malloc_symmetric: {list(sizes)} {dtype} takes {num_bytes} bytes, {room}; "
                f"make a Communicator with num_bytes={end} or more"
            )
        tensor = SymmetricTensor(self._heap, offset, sizes, dtype)
        self._first_free = end
        return tensor


def _check_shape(shape: Any) -> tuple[tuple[int, ...], str]:
    """Returns the sizes, and what is wrong with them; "" if nothing is."""
    wanted = "wanted a sequence of sizes from 0 on, such as (4, 128)"
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        return (), f"shape is {shape!r}; {wanted}"
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    possible = all(0 <= size < 1 << 63 for size in sizes)
    return (sizes, "") if possible else ((), f"shape is {shape!r}; {wanted}")


def _check_dtype(dtype: Any) -> str:
    """Returns what is wrong with it; "" if nothing is."""
    import torch

    return "" if isinstance(dtype, torch.dtype) else f"dtype is {dtype!r}; wanted one of torch, such as torch.bfloat16"


def _find_difference(asked: list[list[Any]], ranks: Sequence[int]) -> str:
    """Returns in what a rank differs from the first; "" if in nothing.

    asked: [problem, sizes, dtype, first_free] of each rank. ranks: what the run calls them.
    """
    _, sizes, dtype, first_free = asked[0]
    for rank, (_, their_sizes, their_dtype, their_first_free) in zip(ranks, asked, strict=True):
        if (their_sizes, their_dtype) != (sizes, dtype):
            return (
                f"rank {ranks[0]} asks for {sizes} {dtype}, rank {rank} for {their_sizes} {their_dtype}; all ranks "
                "must ask for the same tensors in the same order"
            )
        if their_first_free != first_free:
            return (
                f"the heap of rank {ranks[0]} is free from {first_free} bytes on, that of rank {rank} from "
                f"{their_first_free}; make the Communicator with the same reserved_bytes on all ranks"
            )
    return ""

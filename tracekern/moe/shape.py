"""The shape of a mixture-of-experts layer spread over ranks, and checks of numbers and tensors."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.comm.ranks.group import MAX_HEAP_RANKS
from tracekern.errors import BadInput
from tracekern.formatting import shown

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element of each dtype."""

MAX_TOKENS = 1 << 18
MAX_TOPK = 16
MAX_EXPERTS = 4096


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raises BadInput unless `value` is a whole number from `low` to `high`."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise BadInput(f"{name} is {shown(value)}; wanted a whole number from {low} to {high}")
    if not low <= int(value) <= high:
        raise BadInput(f"{name} is {shown(value)}; wanted {low} to {high}")


@dataclass(frozen=True)
class MoeShape:
    """Shape of the layer, the same on every rank. Raises BadInput if the numbers do not fit together."""

    num_ranks: int
    max_tokens: int
    """Most tokens of one rank; the actual numbers may differ between ranks, and may be 0."""
    num_experts: int
    topk: int
    hidden: int
    dtype: str

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_ranks", 1, MAX_HEAP_RANKS),
            ("max_tokens", 1, MAX_TOKENS),
            ("num_experts", 1, MAX_EXPERTS),
            ("topk", 1, MAX_TOPK),
            ("hidden", 1, 1 << 20),
        ):
            check_range(name, getattr(self, name), low, high)
        if self.dtype not in DTYPES:
            raise BadInput(f"dtype is {self.dtype!r}; wanted one of {', '.join(DTYPES)}")
        if self.num_experts % self.num_ranks:
            next_multiple = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise BadInput(
                f"{self.num_experts} experts do not divide over {self.num_ranks} ranks; "
                f"take a multiple of {self.num_ranks}, such as {next_multiple}"
            )
        if self.topk > self.num_experts:
            raise BadInput(
                f"top-k {self.topk} of {self.num_experts} experts: a token cannot choose more than there are; "
                f"take at most {self.num_experts}, or more experts"
            )
        if self.max_tokens * self.topk >= 1 << 22:
            raise BadInput(
                f"{self.max_tokens} tokens x top-k {self.topk} are {self.max_tokens * self.topk} rows for one rank; "
                f"the slot field of the events holds less than {1 << 22}"
            )

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def row_bytes(self) -> int:
        return self.hidden * DTYPES[self.dtype]


def check_tensor(
    comm: Communicator, name: str, tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    """Raises BadInput for a tensor of another dtype, size, layout or device than kernels of this rank take."""
    require_tensor(name, tensor)
    if tuple(tensor.shape) != size or tensor.dtype != dtype:
        raise BadInput(f"{name} is {describe_tensor(tensor)}; wanted {dtype} {list(size)}")
    if not tensor.is_contiguous() or str(tensor.device) != comm.device.torch_device:
        where = "on" if tensor.is_contiguous() else "not contiguous, on"
        raise BadInput(f"{name} is {where} {tensor.device}; wanted contiguous, on {comm.device.torch_device}")


def require_tensor(name: str, value: Any) -> None:
    """Raises BadInput for what is no dense tensor of torch."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise BadInput(f"{name} is {type(value).__name__}; wanted a torch.Tensor")
    if value.layout != torch.strided:
        raise BadInput(f"{name} is {value.layout}; wanted a dense tensor, such as of to_dense()")


def describe_tensor(tensor: torch.Tensor) -> str:
    """Returns the tensor's dtype and size for a message."""
    return f"{tensor.dtype} {list(tensor.shape)}"

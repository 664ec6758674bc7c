"""Checks of the tensors that kernels get, at the door of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.errors import BadInput

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator


def check_tensor(
    comm: Communicator, name: str, tensor: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    """Raises BadInput for a tensor that kernels of this rank cannot take as it is."""
    if tuple(tensor.shape) != size or tensor.dtype != dtype:
        raise BadInput(f"{name} is {describe_tensor(tensor)}; wanted {dtype} {list(size)}")
    if not tensor.is_contiguous() or str(tensor.device) != comm.device.torch_device:
        where = "on" if tensor.is_contiguous() else "not contiguous, on"
        raise BadInput(f"{name} is {where} {tensor.device}; wanted contiguous, on {comm.device.torch_device}")


def describe_tensor(tensor: torch.Tensor) -> str:
    """Its dtype and size, for a message."""
    return f"{tensor.dtype} {list(tensor.shape)}"

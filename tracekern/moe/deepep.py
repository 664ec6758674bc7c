"""What calls with DeepEP's names and arguments share: their event, checks, and limits of a single call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import check_timeout
from tracekern.errors import BadInput
from tracekern.formatting import shown
from tracekern.moe.launches import check_capture

if TYPE_CHECKING:
    import torch

Limits = tuple[float, str]
"""timeout_s and on_timeout, see Communicator.set_timeout()."""

ALIGNMENT = 16
"""Tensors begin at multiples of it: kernels move 16 bytes at a time."""


class EventOverlap:
    """What DeepEP returns for a call on a stream of its own. These calls run on the current stream: nothing to wait."""

    def current_stream_wait(self) -> None: ...


def refuse_later(**arguments: object) -> None:
    """Raises BadInput for DeepEP's arguments that are not implemented yet."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise BadInput(f"{name} is not supported yet; leave it out")


def check_flag(name: str, value: Any) -> None:
    """Raises BadInput unless `value` is True or False."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} is {shown(value)}; wanted True or False")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raises BadInput for memory that kernels cannot move 16 bytes at a time."""
    if tensor.data_ptr() % ALIGNMENT:
        raise BadInput(f"{name} begins at an address that {ALIGNMENT} bytes do not divide; clone() it")


def check_start(usual: Limits, capture: Any, timeout_s: Any, on_timeout: Any) -> Limits:
    """Checks a call's capture and its limits. Returns these; None stands for the usual one."""
    check_capture(capture)
    limits = (usual[0] if timeout_s is None else timeout_s, usual[1] if on_timeout is None else on_timeout)
    check_timeout(*limits)
    return limits


def address(tensor: torch.Tensor | None) -> int:
    """Returns where a tensor begins, for a native call; 0 for none."""
    return 0 if tensor is None else int(tensor.data_ptr())

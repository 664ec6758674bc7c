"""The experts that every family's pipeline takes, and their computation in plain torch.

Each expert scales its input: a placeholder that costs next to nothing and makes experts distinguishable. Networks can
replace it behind the same methods; csrc/moe/experts.h is the kernels' view of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekern.moe.shape import MoeShape, check_tensor

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator


@dataclass(frozen=True)
class Experts:
    """The experts of all ranks."""

    scale: torch.Tensor
    """[num_experts] fp32."""

    def to(self, device: str) -> Experts:
        return Experts(self.scale.to(device))

    def apply(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Applies expert [n] to rows [n, hidden]. Returns [n, hidden] in the dtype of rows, rounded once."""
        return (rows.float() * self.scale[expert.long(), None]).to(rows.dtype)

    def check(self, comm: Communicator, shape: MoeShape) -> None:
        """Raises BadInput if kernels of this rank cannot use the experts."""
        import torch

        check_tensor(comm, "experts.scale", self.scale, torch.float32, (shape.num_experts,))

    @property
    def addresses(self) -> dict[str, int]:
        """Returns the addresses for a native pipeline's set_call()."""
        return {"expert_scale": self.scale.data_ptr()}


def draw_experts(shape: MoeShape) -> Experts:
    """Returns the experts of a run, the same for every seed."""
    import torch

    return Experts(1.0 + torch.arange(shape.num_experts, dtype=torch.float32) / shape.num_experts)

"""The experts as every family's pipeline takes them, and what they compute in plain torch.

Each scales its input: a stand-in that costs next to nothing and tells experts apart. Networks come here, behind the
same methods; csrc/moe/experts.h is what kernels know of them.
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
    """Those of all ranks."""

    scale: torch.Tensor
    """[num_experts] fp32."""

    def to(self, device: str) -> Experts:
        return Experts(self.scale.to(device))

    def apply(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """[n, hidden] in the dtype of rows [n, hidden]: what expert [n] makes of each, rounded once."""
        return (rows.float() * self.scale[expert.long(), None]).to(rows.dtype)

    def check(self, comm: Communicator, shape: MoeShape) -> None:
        """Raises BadInput where kernels of this rank cannot use them."""
        import torch

        check_tensor(comm, "experts.scale", self.scale, torch.float32, (shape.num_experts,))

    @property
    def addresses(self) -> dict[str, int]:
        """For a native pipeline's set_call()."""
        return {"expert_scale": self.scale.data_ptr()}


def draw_experts(shape: MoeShape) -> Experts:
    """Experts of a run, the same for every seed."""
    import torch

    return Experts(1.0 + torch.arange(shape.num_experts, dtype=torch.float32) / shape.num_experts)

"""The experts that every family's pipeline takes, and their computation in plain torch.

Each expert scales its input: a placeholder that costs next to nothing and makes experts distinguishable. Networks can
replace it behind the same methods; csrc/moe/experts.h is the kernels' view of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tracekern.moe.shape import MoeShape, check_tensor

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator

ExpertRows = Literal["packed", "regions", "copied"]
"""How rows lie for kernels of experts: one expert's behind the other's, in a region for all tokens of each expert, or
in no order of experts, so that each is copied for each of its choices."""
MAX_DETAIL = (1 << 31) - 1
"""Largest number of tiles of which one is on record step by step."""


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


@dataclass(frozen=True)
class ExpertKind:
    """A kind of experts of `tracekern run moe`."""

    name: str
    draw: Callable[[MoeShape, int, int], Experts]
    """Returns the experts of all ranks, the same for every seed. Takes the shape, the intermediate size and of every
    how many-th tile each step is recorded."""
    why_unsuitable: Callable[[str, Mapping[str, tuple[str, ...]], MoeShape, int], str] = lambda *run: ""
    """Returns why a run cannot have such experts; "" if it can. Takes the variant, the kernels of all variants, the
    shape and the intermediate size."""
    tensor_bytes: Callable[[MoeShape, int, ExpertRows], int] = lambda *run: 0
    """Returns the bytes of a rank's weights and of its rows inside the experts. Takes the shape, the intermediate size
    and how rows lie."""
    compiled_part: str = ""
    """Name of the compiled part with their kernels; "" for none."""


SCALE = ExpertKind("scale", lambda shape, intermediate, detail: draw_experts(shape))

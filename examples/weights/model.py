"""The model whose weights are sent: what training keeps, what inference wants, and both computed plainly.

Training keeps parameters in bf16, rows of each on the ranks of its mesh. Inference wants weights: parameters that are
stacked (q, k and v; gate and up), in fp8 with a float32 scale for each block, split over its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0


class Split(Enum):
    """How a weight is divided over the inference ranks."""

    ROWS = "rows"
    """Each rank has a part of the rows of each parameter."""
    COLUMNS = "columns"
    NONE = "none"
    """Each rank has all of it."""


@dataclass(frozen=True)
class Parameter:
    """A matrix as training has it, in bf16."""

    name: str
    rows: int
    cols: int


@dataclass(frozen=True)
class Weight:
    """Parameters of equal width, stacked, as inference has them."""

    name: str
    parameters: tuple[Parameter, ...]
    split: Split
    is_fp8: bool = True
    """Else bf16, without scales."""

    @property
    def rows(self) -> int:
        return sum(parameter.rows for parameter in self.parameters)

    @property
    def cols(self) -> int:
        return self.parameters[0].cols


@dataclass(frozen=True)
class MeshGroup:
    """Weights that go the four stages together: their parameters lie on the same training ranks."""

    name: str
    mesh: tuple[int, ...]
    """Those training ranks. Each has whole rows of blocks of every parameter."""
    weights: tuple[Weight, ...]

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for weight in self.weights for parameter in weight.parameters]


@dataclass(frozen=True)
class Model:
    """All groups, in the order in which they are sent. block: rows and columns that share a scale."""

    groups: tuple[MeshGroup, ...]
    block: int = 128

    def on_mesh(self, mesh: tuple[int, ...]) -> Model:
        """The same with all parameters on these training ranks."""
        return replace(self, groups=tuple(replace(group, mesh=mesh) for group in self.groups))


def make_model(layers: int, hidden: int, block: int = 128) -> Model:
    """A small transformer: attention lies on four training ranks, an expert on two of them and one on the other two."""
    groups: list[MeshGroup] = []
    for layer in range(layers):
        name = f"layer{layer}"
        q, k, v = (Parameter(f"{name}.{key}", hidden // ratio, hidden) for key, ratio in (("q", 1), ("k", 2), ("v", 2)))
        weights: tuple[Weight, ...] = (
            Weight(f"{name}.norm", (Parameter(f"{name}.norm", hidden, 1),), Split.NONE, is_fp8=False),
            Weight(f"{name}.qkv", (q, k, v), Split.ROWS),
            Weight(f"{name}.o", (Parameter(f"{name}.o", hidden, hidden),), Split.COLUMNS),
        )
        groups.append(MeshGroup(f"{name}.attention", (0, 1, 2, 3), weights))
        for expert, mesh in enumerate(((0, 1), (2, 3))):
            name, width = f"layer{layer}.expert{expert}", hidden // 2
            both = (Parameter(f"{name}.gate", width, hidden), Parameter(f"{name}.up", width, hidden))
            down = Parameter(f"{name}.down", hidden, width)
            weights = (Weight(f"{name}.w13", both, Split.ROWS), Weight(f"{name}.w2", (down,), Split.COLUMNS))
            groups.append(MeshGroup(name, mesh, weights))
    return Model(tuple(groups), block)


def values_of(parameter: Parameter, version: int, first: int = 0, stop: int | None = None) -> torch.Tensor:
    """[stop - first, cols] bf16: rows of a parameter after so many steps of training."""
    rows = torch.arange(first, parameter.rows if stop is None else stop, dtype=torch.int32)[:, None]
    cols = torch.arange(parameter.cols, dtype=torch.int32)[None, :]
    seed = sum(parameter.name.encode()) + 31 * version
    whole = (rows * 37 + cols * 11 + rows * cols % 7 + seed) % 255 - 127  # exact in bf16
    return (whole.float() * torch.exp2(-((rows // 8 + cols // 8) % 5).float())).to(torch.bfloat16)


def quantize(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ([rows, cols] fp8, [rows / block, cols / block] float32 scales) of bf16; whole blocks only."""
    rows, cols = values.shape
    blocks = values.float().view(rows // block, block, cols // block, block)
    scales = blocks.abs().amax(dim=(1, 3)) / MAX_FP8
    blocks /= torch.where(scales > 0, scales, 1.0)[:, None, :, None]
    return blocks.view(rows, cols).to(FP8), scales


def plain_parts(weight: Weight, version: int, block: int, num_parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(values, scales) of each inference rank, computed block by block from the whole parameters."""
    wholes = [values_of(parameter, version) for parameter in weight.parameters]
    if weight.split is Split.ROWS:
        stacks = [torch.cat([whole.chunk(num_parts)[part] for whole in wholes]) for part in range(num_parts)]
    elif weight.split is Split.COLUMNS:
        stacks = [part.contiguous() for part in torch.cat(wholes).chunk(num_parts, dim=1)]
    else:
        stacks = [torch.cat(wholes)] * num_parts
    if not weight.is_fp8:
        return [(stack, torch.empty(0)) for stack in stacks]
    return [_plain_quantized(stack, block) for stack in stacks]


def _plain_quantized(stack: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = stack.shape
    values, scales = torch.empty(rows, cols, dtype=FP8), torch.empty(rows // block, cols // block)
    for row in range(0, rows, block):
        for col in range(0, cols, block):
            tile = stack[row : row + block, col : col + block].float()
            scale = tile.abs().max() / MAX_FP8
            scales[row // block, col // block] = scale
            values[row : row + block, col : col + block] = (tile / (scale if scale > 0 else 1.0)).to(FP8)
    return values, scales

"""Draws tokens and their routing as a function of (seed, rank, iteration), so that a test can redraw any rank's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.moe.shape import MoeShape

if TYPE_CHECKING:
    import torch

ROUTINGS = ("uniform", "zipf", "one-hot-rank")


@dataclass(frozen=True)
class Batch:
    """Inputs of one rank to one call.

    x: [num_tokens, hidden] in the shape's dtype. topk_idx: [num_tokens, topk] int32, experts of all ranks, -1 for none.
    topk_weights: [num_tokens, topk] fp32.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: str) -> Batch:
        """Returns the batch on another device."""
        return Batch(self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device))

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])


def draw_num_tokens(shape: MoeShape, rng: np.random.Generator, *, uneven: bool) -> int:
    """Returns the number of tokens of a rank. Even: max_tokens. Uneven: 0 on about every eighth rank, else
    1 to max_tokens.
    """
    if not uneven:
        return shape.max_tokens
    return 0 if rng.integers(8) == 0 else int(rng.integers(1, shape.max_tokens + 1))


def draw_topk(shape: MoeShape, num_tokens: int, rng: np.random.Generator, routing: str) -> np.ndarray:
    """Returns the experts of each token, [num_tokens, topk] int32, without repetition within a token.

    uniform: all experts are equally likely. zipf: weights 1/(i+1), with the experts in a fixed random order, so that
    some experts, and the ranks that hold them, get most. one-hot-rank: all tokens go to experts of one rank (as far as
    it has topk).
    """
    if routing == "uniform":
        weights: npt.NDArray[np.floating[Any]] = np.ones(shape.num_experts)
    elif routing == "zipf":
        weights = 1.0 / (1.0 + np.arange(shape.num_experts))
        weights = np.random.default_rng(shape.num_experts).permutation(weights)
    elif routing == "one-hot-rank":
        weights = np.full(shape.num_experts, 1e-12)
        weights[: shape.num_local_experts] = 1.0
        weights = np.roll(weights, int(rng.integers(shape.num_ranks)) * shape.num_local_experts)
    else:
        raise BadInput(f"routing is {routing!r}; wanted one of {', '.join(ROUTINGS)}")
    # Gumbel trick: the topk largest of log-weight plus noise are a draw without repetition.
    noise = rng.gumbel(size=(num_tokens, shape.num_experts))
    return np.argsort(-(np.log(weights) + noise), axis=1, kind="stable")[:, : shape.topk].astype(np.int32)


def draw_choices(
    shape: MoeShape, *, seed: int, rank: int, iteration: int, routing: str, uneven: bool
) -> tuple[np.ndarray, np.random.Generator]:
    """Draws the first part of a batch. Returns its topk_idx, and what the rest is drawn with."""
    rng = np.random.default_rng([seed, rank, iteration])
    return draw_topk(shape, draw_num_tokens(shape, rng, uneven=uneven), rng, routing), rng


def draw_batch(shape: MoeShape, *, seed: int, rank: int, iteration: int, routing: str, uneven: bool) -> Batch:
    """Draws the batch of one rank in one iteration."""
    import torch

    topk_idx, rng = draw_choices(shape, seed=seed, rank=rank, iteration=iteration, routing=routing, uneven=uneven)
    num_tokens = len(topk_idx)
    weights = rng.random((num_tokens, shape.topk), np.float32)
    x = rng.standard_normal((num_tokens, shape.hidden), np.float32)
    return Batch(
        x=torch.from_numpy(x).to(torch_dtype(shape)),
        topk_idx=torch.from_numpy(topk_idx),
        topk_weights=torch.from_numpy(weights),
    )


def torch_dtype(shape: MoeShape) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[shape.dtype]

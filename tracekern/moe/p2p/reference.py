"""Results of the P2P variants, computed in plain torch.

`reduce`, `pipelined` and `overlapped` add up at the experts' ranks first. Their result differs from that of
`reference`, but is again the same bits everywhere:

    out = round(sum over ranks r, in their order, of round(sum over the choices k at r of weight[k] * expert[k](x)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.moe.experts import Experts
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MoeShape

if TYPE_CHECKING:
    import torch

REDUCING = ("reduce", "pipelined", "overlapped")
"""Variants that add up at the experts' ranks: their result is rank_reduced_reference, within reduce_tolerance."""


def expected(variant: str, batch: Batch, experts: Experts, shape: MoeShape) -> torch.Tensor:
    """Returns the result that this variant promises bit by bit, [num_tokens, hidden]."""
    if variant in REDUCING:
        return rank_reduced_reference(batch, experts, shape)
    return reference(batch, experts)


def rank_reduced_reference(batch: Batch, experts: Experts, shape: MoeShape) -> torch.Tensor:
    """Computes the result of REDUCING, [num_tokens, hidden], rounding in the same order."""
    import torch

    total = torch.zeros((batch.num_tokens, shape.hidden), dtype=torch.float32, device=batch.x.device)
    for rank in range(shape.num_ranks):
        here = batch.topk_idx // shape.num_local_experts == rank  # -1 // n is -1
        partial = torch.zeros_like(total)
        for choice in range(shape.topk):
            chosen = here[:, choice, None]
            result = experts.apply(batch.x, batch.topk_idx[:, choice].clamp(min=0)).float()
            partial = torch.where(chosen, partial + batch.topk_weights[:, choice, None] * result, partial)
        some = here.any(1, keepdim=True)
        total = torch.where(some, total + partial.to(batch.x.dtype).float(), total)
    return total.to(batch.x.dtype)


def reduce_tolerance(batch: Batch, experts: Experts, shape: MoeShape) -> torch.Tensor:
    """Returns how far REDUCING may differ from `reference` in each element, [num_tokens, hidden] fp64.

    With products p_k = weight[k] * result[k], the same fp32 numbers in both, and A = sum |p_k|: a sum of n terms in
    fp32 is off by at most g A, g = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms,
    2nd ed., section 4.2). `reference` is off by g A before its last rounding. A rank's partial sum is rounded to the
    dtype as well, by v |sum| + s (v: its unit roundoff, 0 for fp32; s: half its smallest subnormal), and the sum of at
    most n partials is off by g times theirs, which are at most (1 + g)(1 + v) A + n s together. The two last roundings
    add v (|reference| + |result|) + 2 s. Holds as long as nothing overflows.
    """
    import torch

    v, s = {"fp32": (0.0, 0.0), "fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}[shape.dtype]
    n = shape.topk
    g = n * 2.0**-24 / (1 - n * 2.0**-24)
    magnitude = torch.zeros((batch.num_tokens, shape.hidden), dtype=torch.float64)
    for choice in range(n):
        chosen = batch.topk_idx[:, choice]
        result = experts.apply(batch.x, chosen.clamp(min=0)).float()
        product = (batch.topk_weights[:, choice, None] * result).abs().double()
        magnitude += torch.where(chosen[:, None] >= 0, product, 0.0)
    partials = (1 + g) * (1 + v) * magnitude + n * s
    apart = g * magnitude + ((1 + g) * (1 + v) - 1) * magnitude + n * s + g * partials
    unrounded = (reference(batch, experts).double().abs() + s) / (1 - v)
    return apart + v * (2 * unrounded + apart) + 2 * s

"""What K2 and K4 compute, in fp64 from packed words, and how far a kernel may be from it.

u is 2^-24, half a unit in the last place of fp32. A sum of the products w x is S' = S + d with

    |d| <= (steps + 64) u sum |w x|

steps: groups of 32 channels. Each adds one product of 32 terms, in an order and with a truncation that nobody promises:
at most 2 u for each of its terms; the scale is multiplied and added in one rounding. Behind the sums, K2 has

    |silu(G') U' - silu(G) U| <= 1.1 |dG| |U| + |silu(G)| |dU| + 1.1 |dG dU| + 9 u |silu(G') U'| + 2^-120 |U'|

because the slope of silu is below 1.1, and exponential, sum, quotient and product are off by 4, 1, 1 and 1 u; the last
term stands for an exponential that overflows. Rounding to bf16 adds 2^-8 of the value, at least 2^-134. A bound of two
units in the last place would not hold where a sum cancels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tracekern.moe.gemm.packing import unpack

if TYPE_CHECKING:
    import torch

U = 2.0**-24


class Bounded(NamedTuple):
    """Exact values, and how far from them each result may be. [M, outputs] fp64."""

    value: torch.Tensor
    bound: torch.Tensor


def k2_reference(x_perm: torch.Tensor, off_e: torch.Tensor, w13: torch.Tensor) -> Bounded:
    """Returns what k2() is to return for the rows of all experts."""
    import torch

    products = _products(x_perm, off_e, w13)
    (gate, up), (gate_off, up_off) = (each.chunk(2, dim=1) for each in products)
    silu = gate * torch.sigmoid(gate)
    value = silu * up
    largest_up = up.abs() + up_off
    off = 1.1 * gate_off * largest_up + silu.abs() * up_off
    off += 9 * U * (value.abs() + off) + 2.0**-120 * largest_up
    return _rounded(value, off)


def k4_reference(x2_perm: torch.Tensor, off_e: torch.Tensor, w2: torch.Tensor) -> Bounded:
    """Returns what k4() is to return for the rows of all experts."""
    return _rounded(*_products(x2_perm, off_e, w2))


def _products(rows: torch.Tensor, off_e: torch.Tensor, words: torch.Tensor) -> Bounded:
    import torch

    offsets = off_e.tolist()
    values, sizes = [], []
    for expert, weights in enumerate(words):
        x = rows[offsets[expert] : offsets[expert + 1]].double()
        dense = unpack(weights[None])[0].double()
        values.append(x @ dense.T)
        sizes.append(x.abs() @ dense.abs().T)
    steps = rows.shape[1] // 32
    # What is no normal fp32 is rounded to a multiple of 2^-149.
    return Bounded(torch.cat(values), (steps + 64) * (U * torch.cat(sizes) + 2.0**-149))


def _rounded(value: torch.Tensor, off: torch.Tensor) -> Bounded:
    return Bounded(value, off + 2.0**-8 * (value.abs() + off) + 2.0**-134)

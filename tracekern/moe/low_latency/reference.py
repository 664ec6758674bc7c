"""Results of low latency dispatch and combine, computed in plain torch."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from tracekern.moe.experts import Experts
from tracekern.moe.low_latency.settings import SCALE_GROUP
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
MIN_AMAX = 1e-4


def cast_to_fp8(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts bf16 rows as dispatch does. Returns [n, hidden] float8_e4m3fn and scales [n, hidden / 128] fp32.

    Of each 128 values: a = max(amax, 1e-4), the scale is a * (1 / 448), the values are x * (448 / a). round_scale: the
    scale is the least power of two not below that, the values are x divided by it. amax leaves out NaNs, as in DeepEP,
    and each becomes 0x7f. So does an infinity, beside which all others are 0.
    """
    import torch

    groups = x.float().reshape(x.shape[0], x.shape[1] // SCALE_GROUP, SCALE_GROUP)
    amax = groups.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dim=2, keepdim=True).clamp(min=MIN_AMAX)
    limit = torch.tensor(FP8_MAX, device=x.device)
    factor, scale = limit / amax, amax * (1 / limit)
    if round_scale:
        scale = torch.ldexp(torch.ones_like(scale), scale.log2().ceil())
        factor = 1 / scale
    scaled = groups * factor
    values = torch.where(scaled.isnan(), math.nan, scaled.clamp(-FP8_MAX, FP8_MAX)).to(torch.float8_e4m3fn)
    return values.reshape(x.shape), scale.squeeze(2)


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns values [..., hidden] float8_e4m3fn times scales, rounded to bf16.

    scales: [..., hidden / 128] fp32, or [..., hidden / 512] int32 of four exponents each, see use_ue8m0.
    """
    import torch

    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    groups = values.float().reshape(*scales.shape, SCALE_GROUP)
    return (groups * scales.unsqueeze(-1)).reshape(values.shape).to(torch.bfloat16)


def low_latency_reference(batch: Batch, experts: Experts, use_fp8: bool) -> torch.Tensor:
    """Returns what reference() makes of the rows that experts see, with fp8 messages the dequantised ones."""
    x = dequantise(*cast_to_fp8(batch.x)) if use_fp8 else batch.x
    return reference(dataclasses.replace(batch, x=x), experts)

"""Packs weights into the words that the kernels read, and back: int4, one number of four, a scale for eight of them.

    bits 0-31   q4 of 8 chunks of 4 channels: the number is q4 - 8
    bits 32-47  idx2 of 8 chunks: the number's place in its chunk
    bits 48-63  the scale of all 8 numbers, bf16

Words are int64, [num_experts, channels / 64, rows, 2]: half h of group g has the channels from 64 g + 32 h on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tracekern.errors import BadInput

if TYPE_CHECKING:
    import torch

CHUNKS = 8
"""Chunks of a word, each 4 channels."""
DIVISOR = 128
"""Hidden and intermediate sizes are multiples of it: a tile's outputs, and two groups of channels."""
LEAST_SQUARES_ROUNDS = 4
"""How often quantize() fits a scale and rounds again; more rounds change the error of random weights by under 0.1 %."""


def pack_w13(gate: torch.Tensor, up: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Packs weights [num_experts, intermediate, hidden] of K2. Returns [num_experts, hidden / 64, 2 * intermediate, 2].

    Of each four neighbouring channels the largest is kept. exact: raises BadInput where that, or rounding to 4 bits,
    would change a weight. Also raises BadInput for sizes that kernels do not take, NaN and infinity.
    """
    import torch

    if gate.shape != up.shape:
        raise BadInput(f"gate is {list(gate.shape)}, up is {list(up.shape)}; wanted the same")
    return _pack("w13", torch.cat([gate, up], dim=1), gate.shape[1:], _choose_scale, exact=exact)


def pack_w2(w2: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Packs weights [num_experts, hidden, intermediate] of K4. Returns [num_experts, intermediate / 64, hidden, 2].

    See pack_w13().
    """
    return _pack("w2", w2, w2.shape[1:], _choose_scale, exact=exact)


def quantize(weights: torch.Tensor) -> torch.Tensor:
    """Packs weights [num_experts, rows, channels], bf16, fp16 or fp32. Returns [num_experts, channels / 64, rows, 2].

    For w13 of fused_moe_apply() weights are [num_experts, 2 * intermediate, hidden], rows of gate before those of up;
    for its w2 they are [num_experts, hidden, intermediate]. Of each four neighbouring channels the largest is kept, as
    by pack_w13(). The scale of eight is fitted to them by least squares: they are never further off than with the scale
    of pack_w13(), and exact where that is exact. The same weights give the same words. Raises BadInput for other
    dtypes, sizes that kernels do not take, NaN and infinity.
    """
    import torch

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if weights.dtype not in dtypes:
        raise BadInput(f"weights are {weights.dtype}; wanted {', '.join(map(str, dtypes))}")
    return _pack("words", weights, weights.shape[1:], _fit_scale)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Returns the weights that packed words stand for, [num_experts, rows, channels] fp32. Raises BadInput."""
    import torch

    check_scales("words", words)
    experts, groups, rows, halves = words.shape
    dense = torch.zeros((*words.shape, CHUNKS, 4), dtype=torch.float32, device=words.device)
    chunk = torch.arange(CHUNKS, device=words.device)
    numbers = ((words[..., None] >> 4 * chunk) & 15) - 8
    places = (words[..., None] >> (32 + 2 * chunk)) & 3
    dense.scatter_(-1, places[..., None], (numbers * scales_of(words)[..., None])[..., None])
    return dense.permute(0, 2, 1, 3, 4, 5).reshape(experts, rows, groups * halves * CHUNKS * 4)


def scales_of(words: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each word, fp32."""
    import torch

    return words.contiguous().view(torch.int16)[..., 3::4].view(torch.bfloat16).float()  # never a copy of all words


def check_scales(name: str, words: torch.Tensor) -> None:
    """Raises BadInput for a tensor that holds no packed words, or a scale that is NaN or infinite."""
    import torch

    if words.dtype != torch.int64 or words.ndim != 4 or words.shape[3] != 2:
        raise BadInput(f"{name} is {words.dtype} {list(words.shape)}; wanted int64 [experts, channels / 64, rows, 2]")
    wrong = ~scales_of(words).isfinite()
    if wrong.any():
        expert, group, row, half = wrong.nonzero()[0].tolist()
        raise BadInput(f"{name}[{expert}, {group}, {row}, {half}] has a scale that is NaN or infinite")


def _pack(
    name: str,
    dense: torch.Tensor,
    sizes: torch.Size,
    choose_scale: Callable[[torch.Tensor], torch.Tensor],
    *,
    exact: bool = False,
) -> torch.Tensor:
    """choose_scale: takes eight numbers, [..., 8] fp32, and returns their scale in bf16, [..., 1] fp32."""
    import torch

    if dense.ndim != 3 or any(size % DIVISOR or size == 0 for size in sizes):
        raise BadInput(f"{name} is made of weights [experts, {list(sizes)}]; wanted multiples of {DIVISOR}")
    if not dense.isfinite().all():
        raise BadInput(f"{name} is made of weights with NaN or infinity")
    words = torch.stack([_pack_expert(weights.float(), choose_scale) for weights in dense])
    if exact:
        different = unpack(words) != dense.float()
        if different.any():
            expert, row, channel = different.nonzero()[0].tolist()
            raise BadInput(
                f"{name}: expert {expert}, row {row}, channel {channel} does not survive packing: wanted one non-zero "
                "of four, and eight of those whole multiples, -8 to 7, of a bf16 scale"
            )
    return words


def _pack_expert(weights: torch.Tensor, choose_scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Packs [rows, channels] fp32. Returns [channels / 64, rows, 2] int64."""
    import torch

    rows, channels = weights.shape
    chunks = weights.reshape(rows, channels // 64, 2, CHUNKS, 4)
    places = chunks.abs().argmax(-1)
    kept = chunks.gather(-1, places[..., None])[..., 0]
    scale = choose_scale(kept)
    numbers = _quantise(kept, scale)
    chunk = torch.arange(CHUNKS, device=weights.device)
    words = ((numbers.long() + 8) << 4 * chunk).sum(-1) | (places << (32 + 2 * chunk)).sum(-1)
    words |= scale[..., 0].bfloat16().view(torch.int16).long() << 48
    return words.permute(1, 0, 2).contiguous()


def _quantise(kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (kept / scale).nan_to_num(0.0).round().clamp(-8, 7)


def _choose_scale(kept: torch.Tensor) -> torch.Tensor:
    """Returns a scale in bf16 for each 8 numbers, [..., 1] fp32: one that makes all of them whole, if there is one.

    The largest is then a whole multiple of the scale, by 1 to 8. Elsewhere it is made 7. Of a negative scale 8 steps up
    are there, and 7 down.
    """
    import torch

    largest = kept.abs().amax(-1, keepdim=True)
    chosen = _as_bf16(largest / 7)
    is_exact = (_quantise(kept, chosen) * chosen == kept).all(-1, keepdim=True)
    for multiple in (8, 6, 5, 4, 3, 2, 1, -8):
        scale = _as_bf16(largest / multiple)
        fits = (_quantise(kept, scale) * scale == kept).all(-1, keepdim=True)
        chosen = torch.where(fits & ~is_exact, scale, chosen)
        is_exact |= fits
    return chosen


def _fit_scale(kept: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each 8 numbers, [..., 1] fp32, of the smallest squared error that least squares finds.

    The best scale for rounded numbers differs from the one they were rounded with, so the two take turns. Where that
    ends depends on where it begins. It begins at _choose_scale(), which makes the largest number 7, and where that is
    -8: the negative side has one step more.
    """
    import torch

    largest = kept.gather(-1, kept.abs().argmax(-1, keepdim=True))
    best = _choose_scale(kept)
    least = _squared_error(kept, best)
    for scale in (best, _as_bf16(largest / -8)):
        for _ in range(LEAST_SQUARES_ROUNDS):
            numbers = _quantise(kept, scale)
            fitted = (numbers * kept).sum(-1, keepdim=True) / numbers.square().sum(-1, keepdim=True)
            scale = _as_bf16(fitted.nan_to_num(0.0))
            error = _squared_error(kept, scale)
            best = torch.where(error < least, scale, best)
            least = torch.where(error < least, error, least)
    return best


def _squared_error(kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (_quantise(kept, scale) * scale - kept).square().sum(-1, keepdim=True)


def _as_bf16(scale: torch.Tensor) -> torch.Tensor:
    return scale.bfloat16().float()

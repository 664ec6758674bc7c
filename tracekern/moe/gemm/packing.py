"""Packs weights into the words that the kernels read, and back: int4, one number of four, a scale for eight of them.

    bits 0-31   q4 of 8 chunks of 4 channels: the number is q4 - 8
    bits 32-47  idx2 of 8 chunks: the number's place in its chunk
    bits 48-63  the scale of all 8 numbers, bf16

Words are int64, [num_experts, channels / 64, rows, 2]: half h of group g has the channels from 64 g + 32 h on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekern.errors import BadInput

if TYPE_CHECKING:
    import torch

CHUNKS = 8
"""Chunks of a word, each 4 channels."""
DIVISOR = 128
"""Hidden and intermediate sizes are multiples of it: a tile's outputs, and two groups of channels."""


def pack_w13(gate: torch.Tensor, up: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Packs weights [num_experts, intermediate, hidden] of K2. Returns [num_experts, hidden / 64, 2 * intermediate, 2].

    Of each four neighbouring channels the largest is kept. exact: raises BadInput where that, or rounding to 4 bits,
    would change a weight. Also raises BadInput for sizes that kernels do not take, NaN and infinity.
    """
    import torch

    if gate.shape != up.shape:
        raise BadInput(f"gate is {list(gate.shape)}, up is {list(up.shape)}; wanted the same")
    return _pack("w13", torch.cat([gate, up], dim=1), gate.shape[1:], exact)


def pack_w2(w2: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Packs weights [num_experts, hidden, intermediate] of K4. Returns [num_experts, intermediate / 64, hidden, 2].

    See pack_w13().
    """
    return _pack("w2", w2, w2.shape[1:], exact)


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

    return (words >> 48).to(torch.int16).view(torch.bfloat16).float()


def check_scales(name: str, words: torch.Tensor) -> None:
    """Raises BadInput for a tensor that holds no packed words, or a scale that is NaN or infinite."""
    import torch

    if words.dtype != torch.int64 or words.ndim != 4 or words.shape[3] != 2:
        raise BadInput(f"{name} is {words.dtype} {list(words.shape)}; wanted int64 [experts, channels / 64, rows, 2]")
    wrong = ~scales_of(words).isfinite()
    if wrong.any():
        expert, group, row, half = wrong.nonzero()[0].tolist()
        raise BadInput(f"{name}[{expert}, {group}, {row}, {half}] has a scale that is NaN or infinite")


def _pack(name: str, dense: torch.Tensor, sizes: torch.Size, exact: bool) -> torch.Tensor:
    import torch

    if dense.ndim != 3 or any(size % DIVISOR or size == 0 for size in sizes):
        raise BadInput(f"{name} is made of weights [experts, {list(sizes)}]; wanted multiples of {DIVISOR}")
    if not dense.isfinite().all():
        raise BadInput(f"{name} is made of weights with NaN or infinity")
    words = torch.stack([_pack_expert(weights) for weights in dense.float()])
    if exact:
        different = unpack(words) != dense.float()
        if different.any():
            expert, row, channel = different.nonzero()[0].tolist()
            raise BadInput(
                f"{name}: expert {expert}, row {row}, channel {channel} does not survive packing: wanted one non-zero "
                "of four, and eight of those whole multiples, -8 to 7, of a bf16 scale"
            )
    return words


def _pack_expert(weights: torch.Tensor) -> torch.Tensor:
    """Packs [rows, channels] fp32. Returns [channels / 64, rows, 2] int64."""
    import torch

    rows, channels = weights.shape
    chunks = weights.reshape(rows, channels // 64, 2, CHUNKS, 4)
    places = chunks.abs().argmax(-1)
    kept = chunks.gather(-1, places[..., None])[..., 0]
    scale = _choose_scale(kept)
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
    chosen = (largest / 7).bfloat16().float()
    is_exact = (_quantise(kept, chosen) * chosen == kept).all(-1, keepdim=True)
    for multiple in (8, 6, 5, 4, 3, 2, 1, -8):
        scale = (largest / multiple).bfloat16().float()
        fits = (_quantise(kept, scale) * scale == kept).all(-1, keepdim=True)
        chosen = torch.where(fits & ~is_exact, scale, chosen)
        is_exact |= fits
    return chosen

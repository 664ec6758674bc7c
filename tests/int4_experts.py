"""Packed weights and rows for tests of int4 experts, and how many instructions the CPU backend emulates for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from tracekern.moe.gemm.kernels import FACTS
from tracekern.timeline.model import Timeline

HIDDEN = 256
"""And intermediate size, where a test needs no other."""
MAX_INSTRUCTIONS = 20_000
SCALES = {
    "plain": (0.01, 0.03),
    "negative": (-0.03, -0.01),
    "zero": (0.0, 0.0),
    "subnormal": (2.0**-133, 2.0**-127),
}
"""Kind -> smallest and largest scale."""


def draw_words(experts: int, channels: int, rows: int, *, scale: str = "plain", seed: int = 0) -> torch.Tensor:
    """Words with every number and every place."""
    generator = torch.Generator().manual_seed(seed)
    size = (experts, channels // 64, rows, 2)
    low, high = SCALES[scale]
    scales = torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low
    bits = scales.float().bfloat16().view(torch.int16).long()
    return torch.randint(0, 1 << 48, size, generator=generator) | bits << 48


def draw_rows(count: int, channels: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((count, channels), generator=torch.Generator().manual_seed(seed)).bfloat16()


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class Layer:
    """Experts of one size, a batch and its routing."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_ws: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def experts(self) -> int:
        return int(self.w13.shape[0])


def draw_layer(tokens: int, topk: int, experts: int, *, size: int = HIDDEN, only_expert: int | None = None) -> Layer:
    """A layer with hidden and intermediate `size`. only_expert: the first choice of all tokens."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand((tokens, experts), generator=generator).argsort(dim=1)[:, :topk].int().contiguous()
    if only_expert is not None:
        ids[:, 0] = only_expert
    layer = Layer(
        draw_rows(tokens, size),
        ids,
        torch.rand((tokens, topk), generator=generator),
        draw_words(experts, size, 2 * size, seed=3),
        draw_words(experts, size, size, seed=4),
    )
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=experts).tolist()
    assert instructions("k2", counts, size, size) + instructions("k4", counts, size, size) <= MAX_INSTRUCTIONS
    return layer


def num_tiles(counts: list[int]) -> int:
    return sum(-(-count // FACTS.tile_tokens) for count in counts)


RING_CONSUMERS = 8
"""Warps of a block that multiply with staging "ring"."""
_WIDTHS = (8, 16, 32, 64)
"""Tokens of a ring's tile: the largest again and again, and the least that holds what is left."""
_RING_OUTPUTS = {"k2": 128, "k4": 256}


def ring_tiles(stage: str, counts: list[int], outputs: int) -> Counter[tuple[str, int]]:
    """Returns how many tiles of each width each launch of K2 or K4 has with staging "ring"."""
    tiles: Counter[tuple[str, int]] = Counter()
    for count in counts:
        widths = [_WIDTHS[-1]] * (count // _WIDTHS[-1])
        if left := count % _WIDTHS[-1]:
            widths.append(min(width for width in _WIDTHS if width >= left))
        for width in widths:
            name = f"{stage}_many" if width > FACTS.few_tokens else stage
            tiles[name, width] += -(-outputs // _RING_OUTPUTS[stage])
    return tiles


def recorded_ring_tiles(timeline: Timeline) -> Counter[tuple[str, int]]:
    """Returns the same of a capture, whose consumers have to have each tile alike."""
    spans, consumers = timeline.spans, Counter()
    for row in timeline.rows_of("multiply_tile").tolist():
        name, payload = timeline.launches[spans.launch[row]].name, int(spans.begin_payload[row])
        track = timeline.tracks[spans.track[row]]
        assert dict(track.kernel_roles).get(name, track.role) == "consumer"
        consumers[name, payload & 0x7F] += 1
    assert [tile for tile, count in consumers.items() if count % RING_CONSUMERS] == []
    assert len(timeline.rows_of("epilogue")) == sum(consumers.values())
    return Counter({tile: count // RING_CONSUMERS for tile, count in consumers.items()})


def instructions(stage: str, counts: list[int], channels: int, outputs: int) -> int:
    """Multiplications of a kernel: per tile 8 warps and phases, a step for 32 channels, two paths in K2."""
    steps = channels // 32 * (2 if stage == "k2" else 1)
    return num_tiles(counts) * (outputs // FACTS.tile_outputs) * 8 * steps

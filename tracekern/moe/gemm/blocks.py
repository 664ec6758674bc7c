"""Prepared weights: packed words, their bits put once where lanes of the faster kernels take them from.

A block is 16 rows x 128 channels, 512 bytes: 16 bytes for each lane of a warp, all that it decodes and nothing twice. A
lane's row is g = lane / 4 or g + 8, and t = lane % 4; half h of a block has the channels from 32 h on.

    word 0, 1 (f)  numbers: nibble j + 4 i is q4 of half 2 f + i, row g + 8 (j % 2), chunk t + 4 (j / 2)
    word 2         places: nibble n is idx2 of half 2 (t / 2), and 4 times that of half 2 (t / 2) + 1,
                   row g + 8 (n / 4), chunk 4 (t % 2) + n % 4
    word 3         scales: bits 16 i on are of half 2 (t % 2) + i, row g + 8 (t / 2)

Word 2 is the metadata of two multiplications as it stands: of each pair of indices the other one meets a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

from tracekern.errors import BadInput
from tracekern.moe.gemm.kernels import PREPARED_STAGINGS, STAGINGS

if TYPE_CHECKING:
    import torch

BLOCK_ROWS = 16
BLOCK_CHANNELS = 128


@dataclass(frozen=True)
class PreparedWeights:
    """Weights of int4 experts for one staging, from prepare_weights()."""

    words: torch.Tensor
    """int64 [num_experts, channels / 128, rows / 16, 64], the blocks; of "direct" and "pinned" what was packed."""
    staging: str

    @property
    def num_experts(self) -> int:
        return int(self.words.shape[0])

    @property
    def channels(self) -> int:
        """How many channels a row has; 0 where the tensor holds no weights."""
        return self._size(1, BLOCK_CHANNELS if self.is_permuted else 64)

    @property
    def rows(self) -> int:
        """How many rows an expert has; 0 where the tensor holds no weights."""
        return self._size(2, BLOCK_ROWS if self.is_permuted else 1)

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def is_permuted(self) -> bool:
        """Whether words are blocks."""
        return self.staging in PREPARED_STAGINGS

    def __getitem__(self, experts: slice) -> PreparedWeights:
        """Returns some of the experts, in the same memory."""
        return PreparedWeights(self.words[experts], self.staging)

    def _size(self, axis: int, unit: int) -> int:
        return int(self.words.shape[axis]) * unit if self.words.ndim == 4 else 0


Weights: TypeAlias = Union["torch.Tensor", PreparedWeights]
"""What calls take: packed words, or those of prepare_weights()."""


def with_staging(name: str, weights: Weights, staging: str | None = None) -> PreparedWeights:
    """Returns weights with the staging of a call; None: their own, of packed words "direct". Raises BadInput."""
    known = (*STAGINGS, *PREPARED_STAGINGS)
    if staging is not None and staging not in known:
        raise BadInput(f"staging is {staging!r}; wanted one of {', '.join(known)}")
    if not isinstance(weights, PreparedWeights):
        if staging in PREPARED_STAGINGS:
            raise BadInput(f"staging is {staging!r}, {name} are packed words; make them ready with prepare_weights()")
        return PreparedWeights(weights, staging or STAGINGS[0])
    if weights.staging not in known or staging not in (None, weights.staging):
        wanted = staging or f"one of {', '.join(known)}"
        raise BadInput(f"{name} has staging {weights.staging!r}, wanted {wanted}; prepare_weights() makes others")
    return weights


def restore_weights(prepared: PreparedWeights) -> torch.Tensor:
    """Returns the packed words that prepare_weights() was given, int64 [num_experts, channels / 64, rows, 2]."""
    if not prepared.is_permuted:
        return prepared.words
    words = prepared.words.new_empty((prepared.num_experts, prepared.channels // 64, prepared.rows, 2))
    for expert, blocks in enumerate(prepared.words):
        words[expert] = _words_of(blocks)
    return words


def permuted(words: torch.Tensor) -> torch.Tensor:
    """Returns blocks of packed words, expert by expert: copies of all would take several times their memory."""
    experts, groups, rows, _ = words.shape
    blocks = words.new_empty((experts, groups // 2, rows // BLOCK_ROWS, 64))
    for expert, packed in enumerate(words):
        blocks[expert] = _blocks_of(packed)
    return blocks


def _blocks_of(words: torch.Tensor) -> torch.Tensor:
    """Permutes [channels / 64, rows, 2] of one expert. Returns [channels / 128, rows / 16, 64]."""
    import torch

    groups, rows, _ = words.shape
    size = (groups // 2, 2, rows // BLOCK_ROWS, 2, 8, 2)  # block, pair of halves, block, bottom, g, half of the pair
    numbers, upper = words.contiguous().view(torch.int32).view(*size, 2).unbind(-1)
    bottom, half, four, high = _shifts(words.device)
    # A chunk is 4 * high + four.
    q4 = (numbers[..., None, None] >> (16 * high + 4 * four)) & 15
    q4 = (q4 << (16 * half + 8 * high + 4 * bottom)).sum((3, 5, 6), dtype=torch.int32)
    idx2 = (upper[..., None, None] >> (8 * high + 2 * four)) & 3
    idx2 = (idx2 << (16 * bottom + 4 * four + 2 * half)).sum((3, 5, 7), dtype=torch.int32)
    scales = ((upper >> 16) & 0xFFFF) << (16 * half[..., 0, 0])
    scales = scales.sum(5, dtype=torch.int32)
    lanes = torch.stack(
        [
            q4[:, 0],
            q4[:, 1],
            idx2.permute(0, 2, 3, 1, 4).flatten(3),  # t = 2 * pair + high
            scales.permute(0, 2, 4, 3, 1).flatten(3),  # t = 2 * bottom + pair
        ],
        dim=-1,
    )
    return lanes.view(torch.int64).view(size[0], size[2], 64)


def _words_of(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of _blocks_of()."""
    import torch

    tall, wide, _ = blocks.shape
    lanes = blocks.contiguous().view(torch.int32).view(tall, wide, 8, 4, 4)
    bottom, half, four, high = _shifts(blocks.device)
    q4 = lanes[..., :2].permute(0, 4, 1, 2, 3)[:, :, :, None, :, None, None, :]
    q4 = (q4 >> (16 * half + 8 * high + 4 * bottom)) & 15
    numbers = (q4 << (16 * high + 4 * four)).sum((6, 7), dtype=torch.int32)
    idx2 = lanes[..., 2].reshape(tall, wide, 8, 2, 2).permute(0, 3, 1, 2, 4)[:, :, :, None, :, None, :, None]
    idx2 = (idx2 >> (16 * bottom + 4 * four + 2 * half)) & 3
    places = (idx2 << (8 * high + 2 * four)).sum((6, 7), dtype=torch.int32)
    scales = lanes[..., 3].reshape(tall, wide, 8, 2, 2).permute(0, 4, 1, 3, 2)[..., None]
    upper = places | (((scales >> (16 * half[..., 0, 0])) & 0xFFFF) << 16)
    words = torch.stack([numbers, upper], dim=-1).view(torch.int64)
    return words.view(2 * tall, BLOCK_ROWS * wide, 2)


def _shifts(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns 0 and 1 along bottom and half, 0 to 3 along four and 0 and 1 along high, the last of eight axes:
    block, pair, block, bottom, g, half, high, four.
    """
    import torch

    def along(axis: int, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.int32, device=device).view([-1 if i == axis else 1 for i in range(8)])

    return along(3, 2), along(5, 2), along(7, 4), along(6, 2)

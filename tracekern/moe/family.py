"""What the rest of tracekern may know of a family of kernels; each states it in its own folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern import _C

if TYPE_CHECKING:
    import torch

    from tracekern.moe.experts import Experts
    from tracekern.moe.pipeline import Pipeline
    from tracekern.moe.routing import Batch
    from tracekern.moe.shape import MoeShape


@dataclass(frozen=True)
class Option:
    """A whole number that some variants of a family take besides shape and grid; 0 leaves the choice to the family."""

    name: str
    help: str
    high: int
    variants: tuple[str, ...]
    describe: Callable[[int], str]
    """What a run says of the value that it took."""


@dataclass(frozen=True)
class Family:
    """A folder of tracekern.moe, `FAMILY` in it, and the folder of csrc/moe with the same name."""

    name: str
    make_pipeline: Callable[..., Pipeline]
    """Takes (group, shape, variant), timeout_s, num_blocks, warps_per_block, backend and the family's options."""
    expected: Callable[[str, Batch, Experts, MoeShape], torch.Tensor]
    """[num_tokens, hidden]: the bits that a variant promises."""
    reference_name: Callable[[str], str]
    """The function of plain torch that computes them."""
    sent_events: frozenset[str] = frozenset()
    """Spans of which there is one for each row that a rank sends."""
    received_events: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()

    @property
    def variants(self) -> dict[str, tuple[str, ...]]:
        """Variant -> the kernels of one call, in their order."""
        variants: dict[str, tuple[str, ...]] = self._facts.variants
        return variants

    def options_of(self, variant: str) -> list[Option]:
        """The options that this variant takes."""
        return [option for option in self.options if variant in option.variants]

    def memory(self, variant: str, shape: MoeShape) -> tuple[int, int]:
        """Bytes of a rank's part of the symmetric heap, and of what its pipeline keeps beside it, at most."""
        kind = {"variant": variant, **{option.name: 1 for option in self.options}}
        sizes = {name: getattr(shape, name) for name in ("num_ranks", "max_tokens", "num_experts", "topk", "hidden")}
        about = {**sizes, "dtype": shape.dtype, **kind}
        return self._facts.heap_bytes(**about), self._facts.own_bytes(**about)

    @property
    def _facts(self) -> Any:
        return _C.families[self.name]

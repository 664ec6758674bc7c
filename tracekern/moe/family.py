"""Interface of a family of kernels to the rest of tracekern; each family implements it in its own folder."""

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
    """Describes the chosen value in the output of a run."""


@dataclass(frozen=True)
class Family:
    """A folder of tracekern.moe, `FAMILY` in it, and the folder of csrc/moe with the same name."""

    name: str
    make_pipeline: Callable[..., Pipeline]
    """Takes (group, shape, variant), timeout_s, num_blocks, warps_per_block, backend and the family's options."""
    expected: Callable[[str, Batch, Experts, MoeShape], torch.Tensor]
    """Returns the result that a variant promises bit by bit, [num_tokens, hidden]."""
    reference_name: Callable[[str], str]
    """Name of the plain torch function that computes `expected`."""
    sent_events: frozenset[str] = frozenset()
    """Names of events with one span for each row that a rank sends."""
    received_events: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()

    @property
    def variants(self) -> dict[str, tuple[str, ...]]:
        """Variant -> the kernels of one call, in order."""
        variants: dict[str, tuple[str, ...]] = self._facts.variants
        return variants

    def options_of(self, variant: str) -> list[Option]:
        """Returns the options that this variant takes."""
        return [option for option in self.options if variant in option.variants]

    def memory(self, variant: str, shape: MoeShape) -> tuple[int, int]:
        """Returns the bytes of a rank's part of the symmetric heap, and the most that its pipeline uses besides."""
        kind = {"variant": variant, **{option.name: 1 for option in self.options}}
        sizes = {name: getattr(shape, name) for name in ("num_ranks", "max_tokens", "num_experts", "topk", "hidden")}
        about = {**sizes, "dtype": shape.dtype, **kind}
        return self._facts.heap_bytes(**about), self._facts.own_bytes(**about)

    @property
    def _facts(self) -> Any:
        return _C.families[self.name]

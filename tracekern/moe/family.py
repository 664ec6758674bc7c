"""Interface of a family of kernels to the rest of tracekern; each family implements it in its own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tracekern.compiled import compiled
from tracekern.errors import BadInput
from tracekern.formatting import whole_number
from tracekern.moe.shape import check_range

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator
    from tracekern.moe.experts import ExpertRows, Experts
    from tracekern.moe.routing import Batch
    from tracekern.moe.shape import MoeShape
    from tracekern.record.session import Capture


class CallPipeline(Protocol):
    """One call on this rank: tokens to their experts and back (tracekern.moe.calls.pipeline.Pipeline)."""

    comm: Communicator
    options: dict[str, int]
    grid: int
    """Blocks of a kernel, where nothing else was asked for."""
    late_us: int

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Experts,
        *,
        out: torch.Tensor | None = None,
        capture: Capture | None = None,
        after_stage: Callable[[str], None] | None = None,
    ) -> Any:
        """Starts the call; returns its result, [num_tokens, hidden] unless Family.count_wrong is for another one."""

    def synchronize(self) -> None:
        """Waits for this rank's calls."""


@dataclass(frozen=True)
class Option:
    """A whole number that some variants of a family take besides shape and grid; 0 leaves the choice to the family."""

    name: str
    help: str
    high: int
    variants: tuple[str, ...]
    describe: Callable[[int], str]
    """Describes the chosen value in the output of a run; "" leaves it out."""
    names: tuple[str, ...] = ()
    """Names of the values from 1 on, where users choose by name."""
    default: int = 0
    """What 0 stands for, where that is the same for every shape."""

    def parse(self, text: str) -> int:
        """Returns the value of a name or number that a user gave, where values have names. Raises BadInput."""
        if (number := whole_number(text)) is not None:
            return number
        if text not in self.names:
            raise BadInput(f"{self.name} is {text!r}; wanted one of {', '.join(self.names)}")
        return self.names.index(text) + 1

    def setting(self, value: int) -> int | str:
        """Returns the value as a capture's settings keep it; 0 if it follows from the others."""
        value = value or self.default
        return self.names[value - 1] if self.names and value else value


def blocks_by_stage(stages: Sequence[str], asked: Mapping[str, int]) -> dict[str, int]:
    """Returns kernel -> blocks. A name stands for one of the kernels `stages`, or for all that begin with it and `_`.

    Raises BadInput for a name that stands for none, and for numbers that no grid has.
    """
    found: dict[str, int] = {}
    for name, blocks in asked.items():
        named = [stage for stage in stages if stage == name or stage.startswith(f"{name}_")]
        if not named:
            raise BadInput(f"blocks of {name!r}: no such kernel; the variant has {', '.join(stages)}")
        check_range(f"blocks of {name}", blocks, 1, 4096)
        found |= dict.fromkeys(named, blocks)
    return found


@dataclass(frozen=True)
class Family:
    """A folder of tracekern.moe, `FAMILY` in it, and the folder of csrc/moe with the same name."""

    name: str
    variants: Mapping[str, tuple[str, ...]]
    """Variant -> the kernels of one call of make_pipeline(), in order."""
    make_pipeline: Callable[..., CallPipeline]
    """Takes (group, shape, variant), timeout_s, num_blocks, warps_per_block, backend and the family's options."""
    expected: Callable[[str, Batch, Experts, MoeShape, dict[str, int]], torch.Tensor] | None
    """Returns the result that a variant with these options promises bit by bit, [num_tokens, hidden]; None where
    count_wrong knows it."""
    reference_name: Callable[[str], str]
    """Name of the plain torch function that computes what is promised."""
    count_wrong: Callable[[Any, Sequence[Batch], int, Experts, MoeShape, dict[str, int]], int] | None = None
    """Returns how many elements of a result are wrong, where calls return what came from other ranks. Takes the result,
    the batches of all ranks, the rank, the experts, and the options that were chosen."""
    sent_events: frozenset[str] = frozenset()
    """Names of events with one span for each row that a rank sends."""
    received_events: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()
    why_unsuitable: Callable[[MoeShape, dict[str, int]], str] = lambda shape, options: ""
    """Returns why the family's kernels do not take a shape with these options; "" if they do."""
    tensor_bytes: Callable[[MoeShape], int] = lambda shape: 0
    """Returns the bytes of the tensors that a call allocates on a rank, besides its result."""
    heap_options: Callable[[MoeShape, dict[str, int]], dict[str, int]] = lambda shape, options: {}
    """Returns the native options that the size of the heap follows from; each of the others counts as 1."""
    queue_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of make_pipeline for calls that are queued on the device, whose host must not wait in between."""
    takes_stage_blocks: bool = False
    """Whether kernels of a call may have different numbers of blocks."""
    side_by_side: frozenset[str] = frozenset()
    """Variants whose kernels run at the same time: the time between two launches is not that of a kernel."""
    expert_rows: ExpertRows = "packed"
    """How rows lie for experts that are kernels of their own."""

    def options_of(self, variant: str) -> list[Option]:
        """Returns the options that this variant takes."""
        return [option for option in self.options if variant in option.variants]

    def memory(self, variant: str, shape: MoeShape, options: dict[str, int]) -> tuple[int, int]:
        """Returns the bytes of a rank's part of the symmetric heap, and the most that its pipeline uses besides."""
        facts = compiled(self.name)
        kind = {"variant": variant, **dict.fromkeys(facts.options, 1), **self.heap_options(shape, options)}
        sizes = {name: getattr(shape, name) for name in ("num_ranks", "max_tokens", "num_experts", "topk", "hidden")}
        about = {**sizes, "dtype": shape.dtype, **kind}
        return facts.heap_bytes(**about), facts.own_bytes(**about) + self.tensor_bytes(shape)

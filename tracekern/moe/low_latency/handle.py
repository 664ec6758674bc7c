"""The handle of a low latency dispatch: what its combine needs, and which of the buffer's slots it holds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tracekern.errors import BadInput
from tracekern.moe.low_latency.settings import NUM_SLOTS, Layout

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Dispatched:
    """A dispatch that was started. Its slot is free again once its combine was started, or nothing refers to it."""

    slot: int
    epoch: int
    """As records keep it."""
    layout: Layout
    num_tokens: int
    topk: int
    use_fp8: bool
    generation: int
    """Of the buffer: how often it was set back before."""
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """By the names of the native Call; held until the kernels that use them were started."""
    is_received: bool = False
    is_combined: bool = False


class _Parts(NamedTuple):
    packed_recv_src_info: torch.Tensor
    """[num_local_experts, rows] int32: the token's index at its source."""
    packed_recv_layout_range: torch.Tensor
    """[num_local_experts, num_ranks] int64: the rows of a pair, begin << 32 | count."""
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class Handle(_Parts):
    """DeepEP's five parts, and the dispatch that they are of."""

    dispatched: Dispatched

    @classmethod
    def of(cls, dispatched: Dispatched, src_info: torch.Tensor, layout_range: torch.Tensor) -> Handle:
        layout = dispatched.layout
        handle = cls(src_info, layout_range, layout.num_max_dispatch_tokens_per_rank, layout.hidden, layout.num_experts)
        handle.dispatched = dispatched
        return handle


class Slots:
    """Which dispatch holds each slot. The same on all ranks if they make and drop handles in the same order."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets who holds them."""
        self._holders: list[Any] = [lambda: None] * NUM_SLOTS
        self._last = NUM_SLOTS - 1

    def choose(self) -> int:
        """Returns a free slot, in turns while both are free. Raises BadInput if none is."""
        for i in range(1, NUM_SLOTS + 1):
            slot = (self._last + i) % NUM_SLOTS
            holder = self._holders[slot]()
            if holder is None or holder.is_combined:
                return slot
        raise BadInput(
            f"a third live handle: {NUM_SLOTS} dispatches wait for their combine; combine one of them, or drop its "
            "handle on all ranks"
        )

    def take(self, dispatched: Dispatched) -> None:
        self._holders[dispatched.slot] = weakref.ref(dispatched)
        self._last = dispatched.slot

    def live(self) -> list[Dispatched]:
        holders = [holder() for holder in self._holders]
        return [holder for holder in holders if holder is not None and not holder.is_combined]

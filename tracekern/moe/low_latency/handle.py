"""The handle of a low latency dispatch: what its combine needs, and which of the buffer's slots it holds."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tracekern.errors import BadInput
from tracekern.formatting import count
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
        self._not_received: list[Dispatched | None] = [None] * NUM_SLOTS
        """Kept: a slot whose messages were not copied is not free, even if nothing else refers to its dispatch."""
        self._not_added_up: list[Dispatched | None] = [None] * NUM_SLOTS
        """Whose combine was sent, and its receive not launched yet."""
        self._last = NUM_SLOTS - 1

    def choose(self) -> int:
        """Returns a free slot, in turns while both are free. Raises BadInput if none is."""
        for i in range(1, NUM_SLOTS + 1):
            slot = (self._last + i) % NUM_SLOTS
            holder = self._holders[slot]()
            if holder is None or holder.is_combined:
                return slot
        hooks = sum(dispatched is not None for dispatched in self._not_received)
        pending = f" ({count(hooks, 'receive hook')} not called yet)" if hooks else ""
        raise BadInput(
            f"a third live handle: {NUM_SLOTS} dispatches wait for their combine{pending}; combine one of them, or "
            "drop its handle on all ranks"
        )

    def take(self, dispatched: Dispatched) -> None:
        self._holders[dispatched.slot] = weakref.ref(dispatched)
        self._not_received[dispatched.slot] = dispatched
        self._last = dispatched.slot

    def note_received(self, dispatched: Dispatched) -> None:
        """Of dispatch, or of combine if that was sent."""
        dispatched.is_received = True
        waiting = self._not_added_up if dispatched.is_combined else self._not_received
        if waiting[dispatched.slot] is dispatched:
            waiting[dispatched.slot] = None

    def start_combine(self, dispatched: Dispatched) -> None:
        """Raises BadInput if the slot's combine before was not received: kernels would wait for that for good."""
        if self._not_added_up[dispatched.slot] is not None:
            raise BadInput("the receive hook of the slot's combine before was not called; call it first")
        dispatched.is_combined = True
        self._not_added_up[dispatched.slot] = dispatched

    def num_hooks(self) -> int:
        """Returns how many receive hooks, of dispatch or combine, were not called."""
        return sum(dispatched is not None for dispatched in (*self._not_received, *self._not_added_up))

    def live(self) -> list[Dispatched]:
        holders = [holder() for holder in self._holders]
        return [holder for holder in holders if holder is not None and not holder.is_combined]

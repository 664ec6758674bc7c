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
    """A dispatch that was started.

    Its slot is free again once the receive of its combine was launched: the slot's next dispatch then tells all ranks
    that this one has added up its results, see csrc/moe/low_latency/combine.h. Or, once it was received, as soon as
    nothing refers to it.
    """

    number: int
    """How many dispatches there were before, the same on all ranks."""
    epoch: int
    """The epoch that records have."""
    layout: Layout
    num_tokens: int
    topk: int
    use_fp8: bool
    generation: int
    """How often the buffer was reset before."""
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Name in the native Call -> tensor; held until the kernels that use them were started."""
    sent_ids: torch.Tensor | None = None
    """A copy of topk_idx, on the CPU backend only."""
    is_received: bool = False
    is_combined: bool = False

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor that every dispatch has."""
        tensor = self.tensors[name]
        assert tensor is not None
        return tensor

    @property
    def slot(self) -> int:
        """Returns which half of the buffer it holds: dispatches take them in turns."""
        return self.number % NUM_SLOTS


class _Parts(NamedTuple):
    packed_recv_src_info: torch.Tensor
    """[num_local_experts, rows] int32: the token's index at its source."""
    packed_recv_layout_range: torch.Tensor
    """[num_local_experts, num_ranks] int64: the rows of a pair, begin << 32 | count."""
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class Handle(_Parts):
    """DeepEP's five parts, and the dispatch that they belong to."""

    dispatched: Dispatched

    @classmethod
    def of(cls, dispatched: Dispatched, src_info: torch.Tensor, layout_range: torch.Tensor) -> Handle:
        layout = dispatched.layout
        handle = cls(src_info, layout_range, layout.num_max_dispatch_tokens_per_rank, layout.hidden, layout.num_experts)
        handle.dispatched = dispatched
        return handle


class Slots:
    """Which dispatch holds each slot."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets who holds them."""
        self._holders: list[Any] = [lambda: None] * NUM_SLOTS
        self._not_received: list[Dispatched | None] = [None] * NUM_SLOTS
        """Kept: a slot whose messages were not copied is not free, even if nothing else refers to its dispatch."""
        self._not_added_up: list[Dispatched | None] = [None] * NUM_SLOTS
        """Dispatches whose combine was sent and whose receive was not launched yet."""

    def require_free(self, number: int) -> None:
        """Raises BadInput if the slot of that call is not free. Another one would not do: peers take the same."""
        slot = number % NUM_SLOTS
        if waiting := self._not_added_up[slot]:
            raise BadInput(
                f"slot {slot} is still held by dispatch {waiting.number}, whose combine was sent and its receive hook "
                "not called; call it first"
            )
        holder = self._holders[slot]()
        if holder is None or holder.is_combined:
            return
        hook = "" if holder.is_received else " and whose receive hook was not called"
        raise BadInput(
            f"slot {slot} is still held by the handle of dispatch {holder.number}, which was not "
            f"combined{hook}; dispatches take {NUM_SLOTS} slots in turns, and this is dispatch {number}: combine that "
            "handle, or drop it on all ranks"
        )

    def take(self, dispatched: Dispatched) -> None:
        self._holders[dispatched.slot] = weakref.ref(dispatched)
        self._not_received[dispatched.slot] = dispatched

    def note_received(self, dispatched: Dispatched) -> None:
        """Notes that the dispatch was received, or its combine if that was sent."""
        dispatched.is_received = True
        waiting = self._not_added_up if dispatched.is_combined else self._not_received
        if waiting[dispatched.slot] is dispatched:
            waiting[dispatched.slot] = None

    def note_combine(self, dispatched: Dispatched) -> None:
        """Notes that the combine was sent."""
        dispatched.is_combined = True
        self._not_added_up[dispatched.slot] = dispatched

    def num_hooks(self) -> int:
        """Returns how many receive hooks, of dispatch or combine, were not called."""
        return sum(dispatched is not None for dispatched in (*self._not_received, *self._not_added_up))

    def live(self) -> list[Dispatched]:
        holders = [holder() for holder in self._holders]
        return [holder for holder in holders if holder is not None and not holder.is_combined]

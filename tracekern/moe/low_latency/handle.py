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

    number: int
    """Of the call: how many dispatches there were before, the same on all ranks."""
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
    """DeepEP's five parts, and the dispatch that they are of."""

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
        """Whose combine was sent, and its receive not launched yet."""

    def require_free(self, number: int) -> None:
        """Raises BadInput if the slot of that call is not free. Another one would not do: peers take the same."""
        holder = self._holders[number % NUM_SLOTS]()
        if holder is None or holder.is_combined:
            return
        hook = "" if holder.is_received else " and whose receive hook was not called"
        raise BadInput(
            f"slot {number % NUM_SLOTS} is still held by the handle of dispatch {holder.number}, which was not "
            f"combined{hook}; dispatches take {NUM_SLOTS} slots in turns, and this is dispatch {number}: combine that "
            "handle, or drop it on all ranks"
        )

    def take(self, dispatched: Dispatched) -> None:
        self._holders[dispatched.slot] = weakref.ref(dispatched)
        self._not_received[dispatched.slot] = dispatched

    def note_received(self, dispatched: Dispatched) -> None:
        """Of dispatch, or of combine if that was sent."""
        dispatched.is_received = True
        waiting = self._not_added_up if dispatched.is_combined else self._not_received
        if waiting[dispatched.slot] is dispatched:
            waiting[dispatched.slot] = None

    def require_added_up(self, dispatched: Dispatched) -> None:
        """Raises BadInput if the slot's combine before was not received: kernels would wait for that for good."""
        if self._not_added_up[dispatched.slot] is not None:
            raise BadInput("the receive hook of the slot's combine before was not called; call it first")

    def note_combine(self, dispatched: Dispatched) -> None:
        """A combine was sent."""
        dispatched.is_combined = True
        self._not_added_up[dispatched.slot] = dispatched

    def num_hooks(self) -> int:
        """Returns how many receive hooks, of dispatch or combine, were not called."""
        return sum(dispatched is not None for dispatched in (*self._not_received, *self._not_added_up))

    def live(self) -> list[Dispatched]:
        holders = [holder() for holder in self._holders]
        return [holder for holder in holders if holder is not None and not holder.is_combined]

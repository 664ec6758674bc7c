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
    round_scale: bool
    use_ue8m0: bool
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


class Handle(NamedTuple):
    """DeepEP's five parts. The first keeps the dispatch that they belong to, in a plain tuple of them, too."""

    packed_recv_src_info: torch.Tensor
    """[num_local_experts, rows] int32: the token's index at its source."""
    packed_recv_layout_range: torch.Tensor
    """[num_local_experts, num_ranks] int64: the rows of a pair, begin << 32 | count."""
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int

    @classmethod
    def of(cls, dispatched: Dispatched) -> Handle:
        src_info = dispatched.tensor("packed_recv_src_info")
        src_info = src_info.view(src_info.shape)  # one that the dispatch does not keep in turn
        src_info.dispatched = dispatched  # type: ignore[attr-defined]
        layout, layout_range = dispatched.layout, dispatched.tensor("packed_recv_layout_range")
        return cls(src_info, layout_range, layout.num_max_dispatch_tokens_per_rank, layout.hidden, layout.num_experts)

    @staticmethod
    def dispatched_of(handle: Any) -> Dispatched:
        """Returns the dispatch of a handle, or of a plain tuple of its parts. Raises BadInput if it is neither."""
        dispatched = getattr(handle[0], "dispatched", None) if isinstance(handle, tuple) and handle else None
        if not isinstance(dispatched, Dispatched):
            raise BadInput(
                f"handle is {type(handle).__name__}; wanted the one that low_latency_dispatch() returned, or its parts"
            )
        return dispatched


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
        self.num_taken = 0
        """Dispatches so far, the number of the next one."""

    def require_free(self) -> None:
        """Raises BadInput if the slot of the next dispatch is not free. No other would do: peers take the same."""
        slot = self.num_taken % NUM_SLOTS
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
            f"combined{hook}; dispatches take {NUM_SLOTS} slots in turns, and this is dispatch {self.num_taken}: "
            "combine that handle, or drop it on all ranks"
        )

    def take(self, dispatched: Dispatched) -> None:
        self._holders[dispatched.slot] = weakref.ref(dispatched)
        self._not_received[dispatched.slot] = dispatched
        self.num_taken += 1

    def note_received(self, dispatched: Dispatched) -> None:
        """Notes that the dispatch was received, or its combine if that was sent."""
        dispatched.is_received = True
        waiting = self._not_added_up if dispatched.is_combined else self._not_received
        if waiting[dispatched.slot] is dispatched:
            waiting[dispatched.slot] = None

    def require_combinable(self, dispatched: Dispatched) -> None:
        """Raises BadInput if a combine of the handle cannot be started, the first one or another."""
        if self._holders[dispatched.slot]() is not dispatched:
            raise BadInput("a stale handle: a later dispatch has taken its slot, or it is of before a reset")
        if not dispatched.is_received:
            raise BadInput("the receive hook of this handle's dispatch was not called; call it before combine")
        if self._not_added_up[dispatched.slot] is not None:
            raise BadInput("the receive hook of this handle's combine before was not called; call it first")

    def note_combine(self, dispatched: Dispatched) -> None:
        """Notes that the combine was sent."""
        dispatched.is_combined = True
        self._not_added_up[dispatched.slot] = dispatched

    def num_hooks(self) -> int:
        """Returns how many receive hooks, of dispatch or combine, were not called."""
        return sum(dispatched is not None for dispatched in (*self._not_received, *self._not_added_up))

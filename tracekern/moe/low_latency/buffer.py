"""DeepEP's low latency Buffer: decode dispatch and combine over the ranks of one node, every step on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import Communicator
from tracekern.comm.group import Group
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.moe.experts import Experts
from tracekern.moe.low_latency.handle import Dispatched, Handle, Slots
from tracekern.moe.low_latency.kernels import Kernels
from tracekern.moe.low_latency.settings import (
    FACTS,
    FAULT_SLOTS,
    SCALE_GROUP,
    LaunchShape,
    Layout,
    bad_choice,
    check_combine,
    check_dispatch,
    check_experts,
)

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

Hook = Callable[[], None]


class EventOverlap:
    """What DeepEP returns for a call on a stream of its own. These calls run on the current stream: nothing to wait."""

    def current_stream_wait(self) -> None: ...


class Buffer:
    """Low latency dispatch and combine (csrc/moe/low_latency), by stores into the memory of the experts' ranks.

    All ranks make it, call it and drop handles in the same order. Usable from one thread at a time. Two dispatches may
    wait for their combine at a time. Kernels of a buffer run one after the other, whatever stream they are started on.
    """

    def __init__(
        self,
        group: Group | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = True,
        num_qps_per_rank: int = 1,
        *,
        backend: str = "cuda",
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_sms: int = 0,
        num_max_warp_groups: int = 0,
        executor: str = "fibers",
    ) -> None:
        """num_rdma_bytes: of each rank's part of the symmetric heap, see get_low_latency_rdma_size_hint().

        group: default the ranks of torch.distributed. num_qps_per_rank: taken for DeepEP's sake; there is no network.
        timeout_s, on_timeout: see Communicator.set_timeout(). backend: "cpu" or "cuda". num_sms: SMs that kernels fill,
        num_max_warp_groups: warps of a block at most; 0: see LaunchShape.choose(). Collective. Raises BadInput.
        """
        if num_nvl_bytes or not low_latency_mode:
            raise BadInput(
                "num_nvl_bytes and low_latency_mode=False are for DeepEP's normal mode, which is not here yet"
            )
        self.group = group or Group.discover()
        self.rank, self.group_size = self.group.rank, self.group.num_ranks
        self.num_rdma_bytes, self.num_qps_per_rank = num_rdma_bytes, num_qps_per_rank
        self.comm = Communicator(
            self.group, num_rdma_bytes, timeout_s, backend, on_timeout, reserved_bytes=num_rdma_bytes
        )
        self._limits = timeout_s, on_timeout
        self._first_stage = self.comm.add_kernels(FACTS.stages, FACTS.channels, FAULT_SLOTS)
        self._grid = num_sms, num_max_warp_groups
        self._executor = {"executor": executor} if backend == "cpu" else {}
        self._layout: Layout | None = None
        self._known_calls: set[tuple[object, ...]] = set()
        self._slots = Slots()
        self._generation = 0
        self._is_destroyed = False
        self.late_us = 0
        """How much later than its host this rank's next dispatches begin, to see how the others wait."""
        self.comm.on_reset(self._set_back)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of a rank's part of the heap that such calls need.

        Most are rdma_recv_x and as much for results, num_experts * num_max_dispatch_tokens_per_rank messages of bf16
        each (16 bytes more for the header of a message), once for each of two slots.
        """
        layout = Layout(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        layout.check(num_ranks)
        return layout.heap_bytes(num_ranks)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        capture: Capture | None = None,
        timeout_s: float | None = None,
        on_timeout: str | None = None,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Sends each token to its experts. Returns (recv_x, recv_count, handle, event, hook).

        x: [num_tokens, hidden] bf16. topk_idx: [num_tokens, topk] int64 or int32, experts of all ranks, -1 for none.
        recv_x: [num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden] bf16, or with use_fp8 a pair
        of that in float8_e4m3fn and its scales, [.., .., hidden / 128] fp32, column-major. The first recv_count[i]
        rows of expert i are filled; the handle's packed_recv_layout_range says which are from which rank.

        return_recv_hook: only sends; hook() receives. timeout_s, on_timeout: of this call. Raises BadInput, and
        CommTimeout if a peer does not arrive.
        """
        _refuse_later(
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
        )
        self._require_usable()
        layout = Layout(num_max_dispatch_tokens_per_rank, int(x.shape[-1]) if x.ndim else 0, num_experts)
        self._use_layout(layout)
        check_dispatch(self.comm, layout, self.launch_shape, x, topk_idx, use_fp8)
        self._agree("low_latency_dispatch", use_fp8=use_fp8, topk=int(topk_idx.shape[1]))
        dispatched = self._take_slot(layout, x, topk_idx, use_fp8)
        recv_x = dispatched.tensors["packed_recv_x"]
        recv_count = dispatched.tensors["packed_recv_count"]
        handle = Handle.of(
            dispatched, dispatched.tensors["packed_recv_src_info"], dispatched.tensors["packed_recv_layout_range"]
        )
        stages = ("dispatch_send", "dispatch_recv") if return_recv_hook else ("dispatch", "")
        hook = self._start(dispatched, stages, capture, timeout_s, on_timeout)
        scales = dispatched.tensors["packed_recv_scales"]
        received = recv_x if scales is None else (recv_x, scales.transpose(1, 2))
        return received, recv_count, handle, EventOverlap(), hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        capture: Capture | None = None,
        timeout_s: float | None = None,
        on_timeout: str | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sends what experts made of recv_x back, and adds up each token's results. Returns (combined_x, event, hook).

        x: bf16, shaped like recv_x. topk_idx as in dispatch. topk_weights: [num_tokens, topk] fp32. handle: of the
        dispatch; it cannot be used again. combined_x: [num_tokens, hidden] bf16, `out` if given; the sum is in fp32, in
        the order of the choices. The rest: see low_latency_dispatch().
        """
        import torch

        _refuse_later(
            use_logfmt=use_logfmt,
            zero_copy=zero_copy,
            async_finish=async_finish,
            combine_wait_recv_cost_stats=combine_wait_recv_cost_stats,
        )
        self._require_usable()
        dispatched = self._check_handle(handle)
        layout, num_tokens = dispatched.layout, dispatched.num_tokens
        check_combine(self.comm, layout, num_tokens, dispatched.topk, x, topk_idx, topk_weights, out)
        if out is None:
            out = torch.empty((num_tokens, layout.hidden), dtype=torch.bfloat16, device=x.device)
        dispatched.tensors |= {"expert_rows": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "out": out}
        self._slots.start_combine(dispatched)
        stages = ("combine_send", "combine_recv") if return_recv_hook else ("combine", "")
        hook = self._start(dispatched, stages, capture, timeout_s, on_timeout)
        return out, EventOverlap(), hook

    def apply_experts(
        self,
        handle: Handle,
        experts: Experts,
        rows: torch.Tensor,
        *,
        capture: Capture | None = None,
        after_stage: Callable[[str], None] | None = None,
    ) -> None:
        """Writes what experts make of recv_x to `rows`, bf16, shaped like recv_x.

        experts: the stand-in, or Int4Experts. after_stage: called with the name of each kernel that was started.
        Raises BadInput.
        """
        self._require_usable()
        dispatched = self._check_handle(handle)
        check_experts(self.comm, dispatched.layout, experts, rows)
        self._kernels.apply_experts(dispatched, experts, rows, capture, after_stage)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Sets flags and counters back and prepares for calls of such a layout. Handles of before cannot be used.

        Collective. Needed before calls whose layout is another than that of the calls before.
        """
        self._require_usable()
        layout = Layout(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        layout.check(self.group_size)
        self._open(layout)

    def synchronize(self) -> None:
        """Waits until this rank's kernels have finished.

        Raises CommTimeout if a peer did not arrive, and BadInput if a token named an expert that there is not, or one
        twice: no kernel has followed such a choice.
        """
        self.comm.synchronize()
        bad = self._kernels.native.take_bad_choice() if self._layout else None
        if bad is not None and self._layout is not None:
            raise BadInput(f"rank {self.rank}: {bad_choice(*bad, self._layout.num_experts)}")

    def reset(self) -> None:
        """Collective: makes the buffer usable again after a CommTimeout. Handles of before cannot be used."""
        self.comm.reset()

    def destroy(self) -> None:
        """Ends the use of the buffer. Raises BadInput while a receive hook has not been called."""
        if pending := self._slots.num_hooks():
            raise BadInput(f"destroy: {count(pending, 'receive hook')} not called yet; call it first")
        if not self._is_destroyed:
            self.comm.synchronize()
        self._is_destroyed = True

    # ---- layout and settings ----

    def _require_usable(self) -> None:
        if self._is_destroyed:
            raise BadInput("the buffer was destroyed; make another one")
        self.comm.require_usable()

    def _use_layout(self, layout: Layout) -> None:
        if layout == self._layout:
            return
        layout.check(self.group_size)
        if self._layout is not None:
            raise BadInput(
                f"calls so far had {self._layout}, this one has {layout}; call clean_low_latency_buffer() in between"
            )
        self._open(layout)

    def _open(self, layout: Layout) -> None:
        """Makes the native buffer. Collective, with all kernels finished."""
        if self.comm.device.streams.is_captured():
            raise BadInput("a graph is being captured, and calls of this layout were never run; run one before")
        self._agree_on(dataclasses.asdict(layout))
        heap_bytes = layout.heap_bytes(self.group_size)
        if heap_bytes > self.num_rdma_bytes:
            raise BadInput(
                f"num_rdma_bytes is {self.num_rdma_bytes}; {layout} needs {heap_bytes}, see "
                "get_low_latency_rdma_size_hint()"
            )
        backend = self.comm.device.backend
        self.launch_shape = shape = LaunchShape.choose(self.group, layout.num_experts, *self._grid, backend)
        self.comm.synchronize()
        self.group.barrier()
        self._kernels = Kernels(self.comm, layout, shape, self._first_stage, self._limits, self._executor)
        self._layout = layout
        self._known_calls.clear()
        self._set_back()
        self.group.barrier()

    def _set_back(self) -> None:
        """The state before the first call. With all kernels finished."""
        if self._layout is not None:
            self._kernels.native.reset()
        self._slots.clear()
        self._generation += 1

    def _agree(self, name: str, **settings: Any) -> None:
        """Raises BadInput if ranks differ in settings of a call. Looked at once for each combination."""
        key = (name, *settings.values())
        if key in self._known_calls:
            return
        if self.comm.device.streams.is_captured():
            told = ", ".join(f"{key}={value}" for key, value in settings.items())
            raise BadInput(f"a graph is being captured, and {name} with {told} was never run; run it before")
        self._agree_on(settings)
        self._known_calls.add(key)

    def _agree_on(self, settings: dict[str, Any]) -> None:
        for rank, theirs in enumerate(self.group.all_gather(settings)):
            for name, value in settings.items():
                if theirs.get(name) != value:
                    raise BadInput(f"{name} is {value} on rank {self.rank} and {theirs.get(name)} on rank {rank}")

    # ---- calls ----

    def _take_slot(self, layout: Layout, x: torch.Tensor, topk_idx: torch.Tensor, use_fp8: bool) -> Dispatched:
        slot = self._slots.choose()
        dispatched = Dispatched(
            slot=slot,
            epoch=self._kernels.native.epoch(slot),
            layout=layout,
            num_tokens=int(x.shape[0]),
            topk=int(topk_idx.shape[1]),
            use_fp8=use_fp8,
            generation=self._generation,
            tensors={"x": x, "topk_idx": topk_idx, **self._allocate(layout, x, use_fp8)},
        )
        self._slots.take(dispatched)
        return dispatched

    def _allocate(self, layout: Layout, x: torch.Tensor, use_fp8: bool) -> dict[str, torch.Tensor | None]:
        import torch

        num_local, num_rows = layout.num_experts // self.group_size, layout.num_rows(self.group_size)

        def make(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=x.device)

        values = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        scales = make(torch.float32, num_local, layout.hidden // SCALE_GROUP, num_rows) if use_fp8 else None
        return {
            "packed_recv_x": make(values, num_local, num_rows, layout.hidden),
            "packed_recv_scales": scales,
            "packed_recv_src_info": make(torch.int32, num_local, num_rows),
            "packed_recv_layout_range": make(torch.int64, num_local, self.group_size),
            "packed_recv_count": make(torch.int32, num_local),
            "handle_epoch": make(torch.int64, 1),
        }

    def _check_handle(self, handle: Handle) -> Dispatched:
        dispatched = getattr(handle, "dispatched", None)
        if not isinstance(dispatched, Dispatched):
            raise BadInput(f"handle is {type(handle).__name__}; wanted the one that low_latency_dispatch() returned")
        if dispatched.generation != self._generation or dispatched not in self._slots.live():
            why = "was combined already" if dispatched.is_combined else "is of another buffer, or of before a reset"
            raise BadInput(f"a stale handle: it {why}")
        if not dispatched.is_received:
            raise BadInput("the receive hook of this handle's dispatch was not called; call it before combine")
        return dispatched

    def _start(
        self,
        dispatched: Dispatched,
        stages: tuple[str, str],
        capture: Capture | None,
        timeout_s: float | None,
        on_timeout: str | None,
    ) -> Hook | None:
        """Starts the first stage. Returns what starts the second; None if there is none."""
        limits = (self._limits[0] if timeout_s is None else timeout_s, on_timeout or self._limits[1])
        late_us = 0 if dispatched.is_combined else self.late_us
        self._kernels.launch(dispatched, stages[:1], capture, limits, late_us)
        if not stages[1]:
            self._slots.note_received(dispatched)
            return None
        is_called = False

        def hook() -> None:
            nonlocal is_called
            self._require_usable()
            if is_called or dispatched.generation != self._generation:
                raise BadInput("a receive hook is called once, and not after a reset")
            is_called = True
            self._slots.note_received(dispatched)
            self._kernels.launch(dispatched, stages[1:], capture, limits)

        return hook


def _refuse_later(**arguments: object) -> None:
    """Raises BadInput for DeepEP's arguments that are not implemented yet."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise BadInput(f"{name} is not supported yet; leave it out")

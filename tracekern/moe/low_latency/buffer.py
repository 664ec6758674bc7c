"""DeepEP's low latency Buffer: decode dispatch and combine over the ranks of one node, every step on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.moe.calls.base import BufferBase
from tracekern.moe.calls.deepep import EventOverlap, Limits, check_flag, check_start, refuse_later
from tracekern.moe.calls.launch_order import HeapPart
from tracekern.moe.calls.launches import check_capture
from tracekern.moe.experts import Experts
from tracekern.moe.low_latency.checks import (
    DEFAULT_QPS,
    bad_choice,
    check_asynchronous,
    check_casting,
    check_combine,
    check_dispatch,
    check_experts,
    check_making,
    check_statistics,
)
from tracekern.moe.low_latency.handle import Dispatched, Handle, Slots
from tracekern.moe.low_latency.kernels import Kernels
from tracekern.moe.low_latency.settings import (
    FACTS,
    FAULT_SLOTS,
    FAULT_VALUES,
    NUM_SLOTS,
    SCALE_GROUP,
    LaunchShape,
    Layout,
)
from tracekern.moe.shape import require_tensor

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

Hook = Callable[[], None]


class Buffer(BufferBase):
    """Low latency dispatch and combine (csrc/moe/low_latency), by stores into the memory of the experts' ranks.

    All ranks make it and call it in the same order. Usable from one thread at a time. Dispatches take its two slots in
    turns, so two may wait for their combine. Kernels of a buffer run one after the other, whatever stream they are
    started on.

    What is wrong on one rank in the first call of a layout, a message type and a top-k raises the same BadInput on all
    ranks. Later calls are refused on that rank alone, which may repeat them: the others wait for it, and their
    CommTimeout says what it refused.
    """

    def __init__(
        self,
        group: Group | torch.distributed.ProcessGroup | Sequence[int] | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = DEFAULT_QPS,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        backend: str = "auto",
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_sms: int = 0,
        num_max_warp_groups: int = 0,
        executor: str = "fibers",
        heap: HeapPart | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        """num_rdma_bytes: of a rank's part of the symmetric heap, see get_low_latency_rdma_size_hint(). Collective.

        group: torch's, ours, or a list of ranks; default all ranks. low_latency_mode to explicitly_destroy: taken
        for DeepEP's sake; there is no network. enable_shrink, comm: not here. timeout_s, on_timeout: see
        Communicator.set_timeout(). backend: "cpu", "cuda" or "auto". num_sms: SMs that kernels fill,
        num_max_warp_groups: warps of a block at most; 0: see LaunchShape.choose(). heap: of num_rdma_bytes in that of
        another buffer with these limits and backend (tracekern.moe.calls.buffer). hosts: of each rank the number of its
        host, see Communicator. Raises BadInput.
        """
        group = Group.of(group)
        given = {
            "num_nvl_bytes": num_nvl_bytes,
            "num_rdma_bytes": num_rdma_bytes,
            "num_qps_per_rank": num_qps_per_rank,
            "num_sms": num_sms,
            "num_max_warp_groups": num_max_warp_groups,
            "low_latency_mode": low_latency_mode,
            "allow_nvlink_for_low_latency_mode": allow_nvlink_for_low_latency_mode,
            "allow_mnnvl": allow_mnnvl,
            "explicitly_destroy": explicitly_destroy,
        }
        group.agree("Buffer()", lambda: check_making(given, enable_shrink, comm, executor))
        self.num_rdma_bytes, limits = num_rdma_bytes, (timeout_s, on_timeout)
        heap = heap or HeapPart.of_new(group, num_rdma_bytes, _choose_backend(backend), limits, hosts)
        names = {"stages": FACTS.stages, "channels": FACTS.channels, "slots": FAULT_SLOTS, "values": FAULT_VALUES}
        self._layout: Layout | None = None
        self._known_calls: set[tuple[Any, ...]] = set()
        self._grid, self._slots = (num_sms, num_max_warp_groups), Slots()
        super().__init__(group, heap, limits, executor, **names)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of a rank's part of the heap that such calls need.

        Most are rdma_recv_x and as much for results, num_experts * num_max_dispatch_tokens_per_rank messages of bf16
        each (16 bytes more for the header of a message), once for each of two slots.
        """
        return Layout.of(num_max_dispatch_tokens_per_rank, hidden, num_experts, num_ranks).heap_bytes(num_ranks)

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

        round_scale: scales are powers of two. use_ue8m0: of which the exponents come, [.., .., hidden / 512] int32.
        cumulative_local_expert_recv_stats: [num_local_experts] int32, to which the tokens that came are added;
        dispatch_wait_recv_cost_stats: [num_ranks] int64, to which the ns are that warps waited for a rank's counts.
        async_finish: runs on a stream of its own; event.current_stream_wait() waits. return_recv_hook: only sends;
        hook() receives. timeout_s, on_timeout: of this call. Raises BadInput, and CommTimeout if a peer does not come.
        """
        casting = bool(use_fp8 and round_scale), bool(use_fp8 and use_ue8m0)

        def check() -> Layout:
            check_casting(use_fp8, round_scale, use_ue8m0)
            check_asynchronous(async_finish, return_recv_hook)
            self._check_start(return_recv_hook, capture, timeout_s, on_timeout)
            require_tensor("x", x)
            hidden = int(x.shape[-1]) if x.ndim else 0
            layout = Layout.of(num_max_dispatch_tokens_per_rank, hidden, num_experts, self.group_size)
            check_dispatch(self.comm, layout, self._shape_for(layout), x, topk_idx, use_fp8, casting[1])
            self._check_statistics(cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, layout)
            self._slots.require_free()
            return layout

        with self._one_call("low_latency_dispatch"):
            layout = self._check_on_all("low_latency_dispatch", (use_fp8, *casting), topk_idx, check, timeout_s)
            dispatched = self._make_dispatched(layout, x, topk_idx, use_fp8, *casting)
            dispatched.tensors |= {
                "recv_stats": cumulative_local_expert_recv_stats,
                "wait_ticks": dispatch_wait_recv_cost_stats,
            }
            limits = self._check_start(return_recv_hook, capture, timeout_s, on_timeout)
            with self._own_stream.of_call(async_finish, used=dispatched.tensors.values()) as (event, _):
                hook = self._start_dispatch(dispatched, return_recv_hook, capture, limits)
        tensor, scales = dispatched.tensor, dispatched.tensors["packed_recv_scales"]
        recv_x = tensor("packed_recv_x")
        received = recv_x if scales is None else (recv_x, scales.transpose(1, 2))
        return received, tensor("packed_recv_count"), Handle.of(dispatched), event, hook

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
        dispatch, until a later one takes its slot; it may be combined again. zero_copy: not x is sent, but what
        get_next_low_latency_combine_buffer() returned. combined_x: [num_tokens, hidden] bf16, `out` if given; the sum
        is in fp32, in the order of the choices. combine_wait_recv_cost_stats: [num_ranks] int64, to which the ns are
        added that warps waited for results, of the rank that came last. The rest: see low_latency_dispatch().
        """
        import torch

        with self._one_call("low_latency_combine"):
            refuse_later(use_logfmt=use_logfmt)
            check_flag("zero_copy", zero_copy)
            check_asynchronous(async_finish, return_recv_hook)
            limits = self._check_start(return_recv_hook, capture, timeout_s, on_timeout)
            dispatched = self._check_handle(handle)
            check_combine(self.comm, dispatched, x, topk_idx, topk_weights, out)
            self._check_statistics(None, combine_wait_recv_cost_stats, dispatched.layout)
            if zero_copy:
                x = self._combine_buffer(dispatched)
            if out is None:
                size = (dispatched.num_tokens, dispatched.layout.hidden)
                out = torch.empty(size, dtype=torch.bfloat16, device=x.device)
            dispatched.tensors |= {"expert_rows": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "out": out}
            dispatched.tensors["wait_ticks"] = combine_wait_recv_cost_stats
            with self._own_stream.of_call(async_finish, used=dispatched.tensors.values()) as (event, _):
                hook = self._start("combine", dispatched, return_recv_hook, capture, limits, self._slots.note_combine)
        return out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Returns what a combine of the handle with zero_copy=True sends: bf16, shaped like recv_x, the same each time.

        Raises BadInput.
        """
        with self._one_call("get_next_low_latency_combine_buffer"):
            return self._combine_buffer(self._check_handle(handle))

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
        with self._one_call("apply_experts"):
            check_capture(capture, after_stage)
            dispatched = self._check_handle(handle)
            check_experts(self.comm, dispatched.layout, experts, rows)
            self._kernels.apply_experts(dispatched, experts, rows, capture, after_stage)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Sets flags and counters back and prepares for calls of such a layout. Handles of before cannot be used.

        Collective. Needed before calls whose layout is another than that of the calls before. Raises BadInput, the same
        on all ranks.
        """
        what = "clean_low_latency_buffer"

        def settings() -> dict[str, Any]:
            layout = Layout.of(num_max_dispatch_tokens_per_rank, hidden, num_experts, self.group_size)
            self._check_new(layout)
            return dataclasses.asdict(layout)

        with self._one_call(what):
            self.comm.agree(what, settings, self._limits[0])
            self._open(what, Layout(int(num_max_dispatch_tokens_per_rank), int(hidden), int(num_experts)))

    def synchronize(self) -> None:
        """Waits until this rank's kernels have finished.

        Raises CommTimeout if a peer did not arrive, and BadInput if a token named an expert that there is not, or one
        twice: no kernel has followed such a choice.
        """
        self.comm.synchronize()
        bad = self._kernels.native.take_bad_choice() if self._layout else None
        if bad is not None and self._layout is not None:
            token, choice, expert = bad
            raise BadInput(
                f"rank {self.comm.group.world_rank}: {bad_choice(token, choice, expert, self._layout.num_experts)}"
            )

    # ---- layout and settings ----

    def _require_no_open_calls(self) -> None:
        if pending := self._slots.num_hooks():
            raise BadInput(f"destroy: {count(pending, 'receive hook')} not called yet; call it first")

    def _check_start(self, with_hook: Any, capture: Any, timeout_s: Any, on_timeout: Any) -> Limits:
        """Checks what both calls take. Returns the limits of the call."""
        check_flag("return_recv_hook", with_hook)
        if self.comm.network and self.comm.device.streams.is_captured():
            raise BadInput("a graph is being captured; calls between hosts cannot be part of one so far")
        return check_start(self._limits, capture, timeout_s, on_timeout)

    def _check_statistics(
        self, recv_stats: torch.Tensor | None, wait_ticks: torch.Tensor | None, layout: Layout
    ) -> None:
        import torch

        num_local = layout.num_experts // self.group_size
        check_statistics(self.comm, "cumulative_local_expert_recv_stats", recv_stats, torch.int32, num_local)
        check_statistics(self.comm, "wait_recv_cost_stats", wait_ticks, torch.int64, self.group_size)

    def _check_on_all(
        self, what: str, casting: tuple[Any, Any, Any], topk_idx: Any, check: Callable[[], Layout], timeout_s: Any
    ) -> Layout:
        """Checks a call: on this rank alone if all ranks have agreed on such calls, else on all together.

        casting: use_fp8, round_scale, use_ue8m0.
        """
        key = (*casting, _topk_of(topk_idx))
        if isinstance(casting[0], bool) and key in self._known_calls:
            return check()
        found: list[Layout] = []
        call = f"{what} with {_described(*key)}"

        def settings() -> dict[str, Any]:
            found.append(check())
            self._refuse_graph(f"{call} was")
            of_call = dict(zip(("use_fp8", "round_scale", "use_ue8m0", "topk"), key, strict=True))
            return {**dataclasses.asdict(found[0]), **of_call, "layout so far": str(self._layout or "none")}

        self._agree(what, settings, timeout_s, call)
        if self._layout is None:
            self._open(what, found[0])
        self._known_calls.add(key)
        return found[0]

    def _refuse_graph(self, what: str) -> None:
        if self.comm.device.streams.is_captured():
            raise BadInput(f"a graph is being captured, and {what} never run; run it before")

    def _shape_for(self, layout: Layout) -> LaunchShape:
        """Returns the launch shape of calls with this layout. Raises BadInput if the buffer is open for another."""
        if layout == self._layout:
            return self.launch_shape
        if self._layout is None:
            return self._check_new(layout)
        raise BadInput(
            f"calls so far had {self._layout}, this one has {layout}; call clean_low_latency_buffer() in between"
        )

    def _check_new(self, layout: Layout) -> LaunchShape:
        """Checks that the buffer can be opened for the layout, and waits for this rank's kernels."""
        self._refuse_graph("calls of this layout were")
        heap_bytes = layout.heap_bytes(self.group_size)
        if heap_bytes > self.num_rdma_bytes:
            raise BadInput(
                f"num_rdma_bytes is {self.num_rdma_bytes}; {layout} needs {heap_bytes}, see "
                "get_low_latency_rdma_size_hint()"
            )
        if self.comm.network:
            layout.check_network(self.group_size, self.comm.network.max_bytes)
        self.comm.synchronize()
        return LaunchShape.choose(self.group, layout.num_experts, *self._grid, self.comm.device.backend)

    def _open(self, what: str, layout: Layout) -> None:
        """Makes the native buffer. Collective, behind an agreement on the layout, with the kernels of all finished."""
        self._layout = None
        self._forget_calls()
        self.launch_shape = shape = self._check_new(layout)
        about = layout, shape, self._first_stage, self._executor
        self._kernels: Kernels = self._make_kernels(what, lambda: Kernels(self._heap, *about))
        self._layout = layout

    def _forget_calls(self) -> None:
        super()._forget_calls()
        if self._layout is not None:
            self._kernels.reset()
        self._known_calls.clear()
        self._slots.clear()

    # ---- calls ----

    def _make_dispatched(
        self,
        layout: Layout,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> Dispatched:
        number = self._slots.num_taken
        return Dispatched(
            number=number,
            epoch=self._kernels.native.epoch(number % NUM_SLOTS),
            layout=layout,
            num_tokens=int(x.shape[0]),
            topk=int(topk_idx.shape[1]),
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            generation=self._num_resets,
            tensors={"x": x, "topk_idx": topk_idx, **self._allocate(layout, x, use_fp8, use_ue8m0)},
            sent_ids=topk_idx.clone() if self.comm.device.backend == "cpu" else None,
        )

    def _allocate(
        self, layout: Layout, x: torch.Tensor, use_fp8: bool, use_ue8m0: bool
    ) -> dict[str, torch.Tensor | None]:
        import torch

        num_local, num_rows = layout.num_experts // self.group_size, layout.num_rows(self.group_size)

        def make(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=x.device)

        values = torch.float8_e4m3fn if use_fp8 else torch.bfloat16
        scales: torch.Tensor | None = None
        if use_ue8m0:
            scales = make(torch.int32, num_local, layout.hidden // (4 * SCALE_GROUP), num_rows)
        elif use_fp8:
            scales = make(torch.float32, num_local, layout.hidden // SCALE_GROUP, num_rows)
        return {
            "packed_recv_x": make(values, num_local, num_rows, layout.hidden),
            "packed_recv_scales": scales,
            "packed_recv_src_info": make(torch.int32, num_local, num_rows),
            "packed_recv_layout_range": make(torch.int64, num_local, self.group_size),
            "packed_recv_count": make(torch.int32, num_local),
            "handle": make(torch.int64, 2),
        }

    def _check_handle(self, handle: Handle) -> Dispatched:
        dispatched = Handle.dispatched_of(handle)
        self._slots.require_combinable(dispatched)
        return dispatched

    def _combine_buffer(self, dispatched: Dispatched) -> torch.Tensor:
        import torch

        buffer = dispatched.tensors.get("combine_buffer")
        if buffer is None:
            received = dispatched.tensor("packed_recv_x")
            buffer = torch.empty(received.shape, dtype=torch.bfloat16, device=received.device)
            dispatched.tensors["combine_buffer"] = buffer
        return buffer

    def _start_dispatch(
        self, dispatched: Dispatched, with_hook: bool, capture: Capture | None, limits: Limits
    ) -> Hook | None:
        casting = dispatched.use_fp8, dispatched.round_scale, dispatched.use_ue8m0
        with self._told(f"low_latency_dispatch with {_described(*casting, dispatched.topk)}"):
            return self._start("dispatch", dispatched, with_hook, capture, limits, self._slots.take, self.late_us)

    def _start(
        self,
        stage: str,
        dispatched: Dispatched,
        with_hook: bool,
        capture: Capture | None,
        limits: Limits,
        note: Callable[[Dispatched], None],
        late_us: int = 0,
    ) -> Hook | None:
        """Starts "dispatch" or "combine". Returns what receives, if that is a launch of its own.

        note: takes down what was started; not called if it was refused.
        """
        self._kernels.launch(dispatched, [f"{stage}_send" if with_hook else stage], capture, limits, late_us)
        note(dispatched)
        if not with_hook:
            self._slots.note_received(dispatched)
            return None
        pending: Dispatched | None = dispatched  # a hook that was called holds no slot

        def hook() -> None:
            nonlocal pending
            with self._one_call(f"the receive hook of low_latency_{stage}"):
                if pending is None or pending.generation != self._num_resets:
                    raise BadInput("a receive hook is called once, and not after a reset")
                self._kernels.launch(pending, [f"{stage}_recv"], capture, limits)
                self._slots.note_received(pending)
                pending = None

        return hook


def _choose_backend(backend: str) -> str:
    if backend != "auto":
        return backend
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _described(use_fp8: Any, round_scale: Any, use_ue8m0: Any, topk: Any) -> str:
    """Returns what calls are told apart by."""
    rounded = "".join(
        f", {name}=True" for name, given in (("round_scale", round_scale), ("use_ue8m0", use_ue8m0)) if given
    )
    return f"use_fp8={use_fp8}{rounded}, topk={topk}"


def _topk_of(topk_idx: Any) -> int:
    """Returns the top-k; -1 for what is no tensor of choices."""
    shape: Any = getattr(topk_idx, "shape", ())
    return int(shape[1]) if len(shape) == 2 else -1

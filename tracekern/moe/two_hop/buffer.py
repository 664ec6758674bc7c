"""DeepEP's Buffer for prefill: dispatch and combine over several nodes in two hops, every step on record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracekern import _core
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.calls.base import BufferBase
from tracekern.moe.calls.deepep import EventOverlap, Limits, check_events, check_start
from tracekern.moe.calls.launch_order import HeapPart
from tracekern.moe.calls.launches import check_capture
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.two_hop.checks import (
    check_cached_dispatch,
    check_combine,
    check_config,
    check_dispatch,
    check_experts,
    check_handle,
    check_making,
    check_topk_idx,
    refuse_beside_handle,
)
from tracekern.moe.two_hop.handle import Given, Handle, Received
from tracekern.moe.two_hop.kernels import Kernels
from tracekern.moe.two_hop.layout import Nodes, get_dispatch_layout
from tracekern.moe.two_hop.settings import (
    FACTS,
    FAULT_SLOTS,
    FAULT_VALUES,
    LINE_BYTES,
    NODE_PEERS,
    REFUSALS,
    Config,
    Layout,
    recommended_config,
    whole_chunks,
)

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

AfterStage = Callable[[str], None]
Events = tuple[EventOverlap | None, bool, bool]
"""previous_event, async_finish, allocate_on_comm_stream."""
_OF_NEW_CALL = (
    *("num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"),
    *("topk_idx", "topk_weights", "expert_alignment", "num_worst_tokens"),
)
"""Arguments of a dispatch that one with a handle takes none of."""


class Buffer(BufferBase):
    """Dispatch in two hops (csrc/moe/two_hop): once to each node, and there to each rank that wants the token. Combine
    goes the same way back, and adds up on it.

    All ranks make it and call it in the same order. Usable from one thread at a time.

    All ranks meet in the first call, and in each whose experts, top-k, hidden, type or Config differ from those of the
    call before: what is wrong there on one rank raises the same BadInput on all. Other calls are refused on that rank
    alone, which may repeat them: the others wait for it, and their CommTimeout says what it refused. Ranks that make
    different calls, or give handles of different dispatches, raise BadInput on all ranks, until reset().
    """

    num_sms = 20
    """What get_dispatch_config() goes by."""

    def __init__(
        self,
        group: Group | torch.distributed.ProcessGroup | Sequence[int] | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        *,
        num_nodes: int | None = None,
        num_max_tokens_per_rank: int = 4096,
        backend: str = "cuda",
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        executor: str = "fibers",
        num_bytes_behind: int = 0,
    ) -> None:
        """num_nvl_bytes, num_rdma_bytes: of each rank's part of the symmetric heap, which is one: their sum counts.

        See Config.get_nvl_buffer_size_hint() and get_rdma_buffer_size_hint(); a call that needs more says how many.
        group: torch's, ours, or a list of ranks; default all ranks. num_nodes: into which the ranks are split, in
        their order; None: nodes of 8 ranks. num_max_tokens_per_rank: the most that a rank may bring to a call.
        num_qps_per_rank: taken for DeepEP's sake. timeout_s, on_timeout: see Communicator.set_timeout(). backend: "cpu"
        or "cuda". num_bytes_behind: of the heap, behind these, for another buffer (tracekern.moe.calls.buffer).
        Collective. Raises BadInput.
        """
        group = Group.of(group)
        num_ranks = group.num_ranks
        if num_nodes is None:
            num_nodes = max(1, num_ranks // NODE_PEERS)
        sizes = {
            "num_nvl_bytes": num_nvl_bytes,
            "num_rdma_bytes": num_rdma_bytes,
            "num_qps_per_rank": num_qps_per_rank,
            "num_bytes_behind": num_bytes_behind,
        }
        making = sizes, low_latency_mode, executor, num_nodes, num_max_tokens_per_rank
        group.agree("Buffer()", lambda: check_making(num_ranks, *making))
        self.nodes = nodes = Nodes.of(num_ranks, num_nodes)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        num_bytes = whole_chunks(max(num_nvl_bytes + num_rdma_bytes, _core.heap_control_bytes), LINE_BYTES)
        self._num_bytes, limits = num_bytes, (timeout_s, on_timeout)
        self._layout: Layout | None = None
        super().__init__(
            group,
            HeapPart.of_new(group, num_bytes + num_bytes_behind, backend, limits),
            limits,
            executor,
            stages=FACTS.stages,
            channels=FACTS.channels,
            slots=FAULT_SLOTS,
            values=FAULT_VALUES,
            roles=FACTS.roles,
            rings=FACTS.rings,
            peers=nodes.peers,
            refusals=[REFUSALS[name] for name in FACTS.refusals],
        )

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets the blocks of get_dispatch_config(). Raises BadInput."""
        cls.num_sms = Config(num_sms=new_num_sms).num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Returns the Config that DeepEP recommends for so many ranks, with rings of whole chunks."""
        return recommended_config(num_ranks, cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Returns what combine goes by: the Config of the dispatch, whose rings it uses."""
        return cls.get_dispatch_config(num_ranks)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, EventOverlap]:
        """Returns where tokens with these choices go, for dispatch().

        topk_idx: [num_tokens, topk] int64, experts of all ranks, -1 for none. The result:
        (num_tokens_per_rank [num_ranks] int32, num_tokens_per_rdma_rank [num_nodes] int32, num_tokens_per_expert
        [num_experts] int32, is_token_in_rank [num_tokens, num_ranks] bool, event). A token that goes to several ranks
        of a node counts once there. Raises BadInput; on a GPU experts that there are not count as none.
        """
        check_events(previous_event, async_finish, allocate_on_comm_stream)
        check_topk_idx(self.comm, topk_idx)
        with self._own_stream.of_call(async_finish, previous_event, (topk_idx,)) as (event, made):
            layout = get_dispatch_layout(topk_idx, num_experts, self.nodes)
            parts = (
                *(layout.num_tokens_per_rank, layout.num_tokens_per_rdma_rank),
                *(layout.num_tokens_per_expert, layout.is_token_in_rank),
            )
            made += parts
        return *parts, event

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        capture: Capture | None = None,
        timeout_s: float | None = None,
        on_timeout: str | None = None,
        after_stage: AfterStage | None = None,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int], Handle, EventOverlap]:
        """Returns (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event).

        x: [num_tokens, hidden] bf16, or a pair of that in float8_e4m3fn and scales [num_tokens, hidden / 128] fp32;
        recv_x is alike. Its rows are in the order of the ranks that sent them, and of the tokens there. The next four
        arguments are what get_dispatch_layout() returns. topk_idx: [num_tokens, topk] int64, topk_weights the same in
        fp32, or both None; recv_topk_idx counts experts as this rank does, -1 for those of others, whose weights are 0.

        handle: of an earlier dispatch, in place of the next six: tokens go where those went, without experts and
        weights, and the host waits for nothing. Returns (recv_x, None, None, [], handle, event).

        expert_alignment: what the numbers in the list are rounded up to. num_worst_tokens: the rows of all results, of
        which the first handle.recv_gbl_rank_prefix_sum[-1] are filled; recv_topk_idx is -1 in the others, the list is
        empty, and the host waits for nothing, which a graph needs. More rows raise BadInput in synchronize(), and in a
        call with the handle on all ranks. after_stage: told each kernel that was started. Raises BadInput, and
        CommTimeout if a peer does not arrive.
        """
        layout = num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert
        choices = topk_idx, topk_weights, expert_alignment, num_worst_tokens
        arguments = dict(zip(_OF_NEW_CALL, (*layout, *choices), strict=True))
        events = previous_event, async_finish, allocate_on_comm_stream
        how = capture, timeout_s, on_timeout

        def check() -> tuple[Layout, Given]:
            check_events(*events)
            check_start(self._limits, *how, after_stage)
            return self._check(x, config, arguments)

        with self._one_call("dispatch"):
            if handle is not None:
                check_events(*events)
                recv_x, event = self._dispatch_cached(x, handle, config, arguments, how, events, after_stage)
                return recv_x, None, None, [], handle, event
            received, event = self._dispatch(check, *how, events, after_stage)
        return *received.as_returned(), event

    def apply_experts(
        self,
        recv_x: torch.Tensor,
        recv_topk_idx: torch.Tensor,
        recv_topk_weights: torch.Tensor,
        experts: Int4Experts,
        *,
        capture: Capture | None = None,
        after_stage: AfterStage | None = None,
    ) -> torch.Tensor:
        """Returns what this rank's int4 experts make of rows of a bf16 dispatch, for combine(): shaped like recv_x.

        Of each row the weighted results of its local experts, added up in fp32 in the order of the choices and rounded
        once. The host waits for nothing; rows that num_worst_tokens left over have no choice, and become 0. experts: of
        all ranks. after_stage: told each kernel that was started. Raises BadInput.
        """
        with self._one_call("apply_experts"):
            check_capture(capture, after_stage)
            ids = check_experts(self.comm, self._layout, recv_x, recv_topk_idx, recv_topk_weights, experts)
            return self._kernels.apply_experts(recv_x, ids, recv_topk_weights, experts, capture, after_stage)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        capture: Capture | None = None,
        timeout_s: float | None = None,
        on_timeout: str | None = None,
        after_stage: AfterStage | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Gives rows back to where their tokens came from. Returns (combined_x, combined_topk_weights, event).

        x: bf16, a row for each of recv_x. handle: of the dispatch. combined_x: [num_tokens, hidden] bf16, the sum of a
        token's rows: in fp32 those of a node in the order of its ranks, rounded to bf16, then in fp32 those of the
        nodes. bias: one or two tensors like combined_x, with which the last sum begins, on one node that of its ranks.
        topk_weights: [num_rows, topk] fp32, added up in the same order, in fp32 alone; None: none come back. The rest:
        see dispatch(). Raises BadInput, and CommTimeout if a peer does not arrive.
        """
        with self._one_call("combine"):
            check_events(previous_event, async_finish, allocate_on_comm_stream)
            limits = check_start(self._limits, capture, timeout_s, on_timeout, after_stage)
            parts = check_handle(self.comm, self.nodes, self._layout, handle, config)
            assert self._layout is not None
            biases = check_combine(self.comm, self.nodes, self._layout, x, parts, topk_weights, bias)
            used = (*parts, x, topk_weights, *biases)
            with self._own_stream.of_call(async_finish, previous_event, used) as (event, made):
                combined, weights = self._combine(x, parts, topk_weights, biases, capture, limits, after_stage)
                made += combined, weights
        return combined, weights, event

    def synchronize(self) -> None:
        """Waits until this rank's kernels have finished.

        Raises CommTimeout if a peer did not arrive, and BadInput if a kernel refused its call, or more rows came than
        num_worst_tokens.
        """
        self.comm.synchronize()
        if self._layout is not None:
            self._kernels.check_overflow()

    # ---- layout ----

    def _check(self, x: Any, config: Any, arguments: dict[str, Any]) -> tuple[Layout, Given]:
        chosen = self.get_dispatch_config(self.group_size) if config is None else config
        about = self.nodes, self.num_max_tokens_per_rank
        check_config(chosen, *about, self.comm.device.backend)
        return check_dispatch(self.comm, *about, chosen, x, arguments)

    def _dispatch(
        self,
        check: Callable[[], tuple[Layout, Given]],
        capture: Capture | None,
        timeout_s: float | None,
        on_timeout: str | None,
        events: Events,
        after_stage: AfterStage | None,
    ) -> tuple[Received, EventOverlap]:
        given = self._check_on_all(check, timeout_s)
        limits = check_start(self._limits, capture, timeout_s, on_timeout)
        stream = self._own_stream.of_call(events[1], events[0], given.tensors.values())
        with self._told(f"dispatch with {self._layout}") as number, stream as (event, made):
            received = self._kernels.dispatch(given, capture, limits, self.late_us, after_stage)
            made += received.tensors
            received.handle.set_number(self._handle_number(number))
        return received, event

    def _dispatch_cached(
        self,
        x: Any,
        handle: Handle,
        config: Config | None,
        arguments: dict[str, Any],
        how: tuple[Capture | None, float | None, str | None],
        events: Events,
        after_stage: AfterStage | None,
    ) -> tuple[Any, EventOverlap]:
        """arguments: those that a call with a handle takes none of. how: capture, timeout_s, on_timeout."""
        limits = check_start(self._limits, *how, after_stage)
        refuse_beside_handle(arguments)
        parts = check_handle(self.comm, self.nodes, self._layout, handle, config)
        assert self._layout is not None
        values, scales = check_cached_dispatch(self.comm, self._layout, x, parts)
        tensors: dict[str, torch.Tensor | None] = {**parts._asdict(), "x": values, "x_scales": scales}
        with self._own_stream.of_call(events[1], events[0], tensors.values()) as (event, made):
            received = self._kernels.dispatch_cached(tensors, len(values), how[0], limits, after_stage)
            made += received.values()
        recv_x, recv_scales = received["recv_x"], received["recv_x_scales"]
        return (recv_x if recv_scales is None else (recv_x, recv_scales)), event

    def _combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        biases: tuple[torch.Tensor, ...],
        capture: Capture | None,
        limits: Limits,
        after_stage: AfterStage | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_tokens = len(handle.is_token_in_rank)
        combined = x.new_empty((num_tokens, x.shape[1]))
        weights = None if topk_weights is None else topk_weights.new_empty((num_tokens, topk_weights.shape[1]))
        tensors: dict[str, torch.Tensor | None] = {
            **handle._asdict(),
            "combine_x": x,
            "combine_topk_weights": topk_weights,
            **{f"bias_{i}": bias for i, bias in enumerate(biases)},
            "combined_x": combined,
            "combined_topk_weights": weights,
        }
        self._kernels.combine(tensors, num_tokens, capture, limits, after_stage)
        return combined, weights

    def _check_on_all(self, check: Callable[[], tuple[Layout, Given]], timeout_s: Any) -> Given:
        """Checks a call: on this rank alone if the layout is that of the call before, else on all together."""
        call = "the first dispatch"
        if self._layout is not None:
            layout, given = check()
            if layout == self._layout:
                return given
            call = f"dispatch with {layout}"
        found: list[tuple[Layout, Given]] = []

        def settings() -> dict[str, Any]:
            found.append(check())
            layout = found[0][0]
            self._check_new(layout)
            about = {"experts": layout.num_experts, "top-k": layout.topk, "hidden": layout.hidden}
            return {**about, "x": "fp8" if layout.is_fp8 else "bf16", **dataclasses.asdict(layout.config)}

        self._agree("dispatch", settings, timeout_s, call)
        layout, given = found[0]
        self._open(layout)
        return given

    def _check_new(self, layout: Layout) -> None:
        """Checks that the buffer can be opened for the layout, and waits for this rank's kernels."""
        if self.comm.device.streams.is_captured():
            raise BadInput("a graph is being captured, and a call like this was never run before; run it before")
        heap_bytes = layout.heap_bytes(self.nodes, self.num_max_tokens_per_rank)
        if heap_bytes > self._num_bytes:
            raise BadInput(
                f"num_nvl_bytes + num_rdma_bytes is {self.num_nvl_bytes + self.num_rdma_bytes}; a call with {layout} "
                f"needs {heap_bytes}: see Config.get_nvl_buffer_size_hint() and get_rdma_buffer_size_hint()"
            )
        self.comm.synchronize()

    def _open(self, layout: Layout) -> None:
        """Makes the native buffer. Collective, behind an agreement on the layout, with the kernels of all finished."""
        self._layout = None
        about = self.nodes, layout, self.num_max_tokens_per_rank, self._first_stage, self._executor
        self._kernels: Kernels = self._make_kernels("dispatch", lambda: Kernels(self.comm, self._heap.order, *about))
        self._layout = layout

    def _handle_number(self, call: int) -> int:
        """Returns the number that the handle of a call has on all ranks. call: its number since the last reset."""
        return int(1 + ((self._num_resets << 16) + call) % ((1 << FACTS.handle_number_bits) - 1))

    def _forget_calls(self) -> None:
        super()._forget_calls()
        if self._layout is not None:
            self._kernels.reset()

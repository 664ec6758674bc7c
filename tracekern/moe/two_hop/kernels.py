"""The kernels of a Buffer for one layout, and a dispatch step by step: notify, counts, memory for rows, dispatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import Communicator
from tracekern.errors import BadInput
from tracekern.moe.calls.deepep import Limits, address
from tracekern.moe.calls.launch_order import LaunchOrder
from tracekern.moe.calls.launches import Launches, Run, describe
from tracekern.moe.calls.native import native_family
from tracekern.moe.gemm.experts import ChosenExpertKernels, Int4Experts
from tracekern.moe.two_hop.counts import Counts, CountsPoll, host_span
from tracekern.moe.two_hop.handle import Given, Handle, Received
from tracekern.moe.two_hop.layout import Nodes
from tracekern.moe.two_hop.settings import FACTS, REFUSALS, Layout, block_warps

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

AfterStage = Callable[[str], None]
Tensors = dict[str, "torch.Tensor | None"]
"""Name in the native Call -> tensor."""

STAGES = ("notify_dispatch", "dispatch", "combine")
_TENSORS = (
    "x",
    "x_scales",
    "topk_idx",
    "topk_weights",
    "is_token_in_rank",
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "num_tokens_per_expert",
    "rdma_channel_prefix_matrix",
    "gbl_channel_prefix_matrix",
    "recv_rdma_rank_prefix_sum",
    "recv_gbl_rank_prefix_sum",
    "recv_x",
    "recv_x_scales",
    "recv_topk_idx",
    "recv_topk_weights",
    "recv_src_meta",
    "send_rdma_head",
    "send_nvl_head",
    "recv_rdma_channel_prefix_matrix",
    "recv_gbl_channel_prefix_matrix",
    "combine_x",
    "combine_topk_weights",
    "bias_0",
    "bias_1",
    "combined_x",
    "combined_topk_weights",
)
"""Names of the tensors of the native Call."""
_OF_ROWS = ("recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", "recv_src_meta")


@dataclass(frozen=True)
class _Call:
    """A call under way."""

    given: Given
    tensors: Tensors
    epoch: int
    capture: Capture | None
    limits: Limits
    late_us: int
    after_stage: AfterStage | None

    def received(self, num_recv_tokens_per_expert: list[int]) -> Received:
        tensors: dict[str, Any] = self.tensors
        return Received(
            tensors["recv_x"],
            tensors["recv_x_scales"],
            tensors["recv_topk_idx"],
            tensors["recv_topk_weights"],
            num_recv_tokens_per_expert,
            Handle(**{name: tensors[name] for name in Handle._fields}),
        )


class Kernels:
    """This rank's kernels. Made by all ranks together."""

    def __init__(
        self,
        comm: Communicator,
        order: LaunchOrder,
        nodes: Nodes,
        layout: Layout,
        max_tokens: int,
        first_stage: int,
        executor: dict[str, str],
    ) -> None:
        """max_tokens: of a rank. first_stage: see Communicator.add_kernels(). executor: an option of the CPU backend.

        Raises BadInput if this rank cannot run the kernels.
        """
        self._comm, self._nodes, self._layout, self._max_tokens = comm, nodes, layout, max_tokens
        self._order = order
        self._family = native_family("two_hop", comm.device.backend)
        try:
            with comm.device.active():
                options = layout.native(nodes, max_tokens, comm.device.backend)
                options |= {"first_stage": first_stage, **executor}
                self.native = self._family.Buffer(comm.native, **options)
        except (ValueError, RuntimeError, MemoryError) as error:  # such as more blocks than the GPU holds at once
            raise BadInput(str(error)) from None
        events = _event_table(nodes, layout, max_tokens, layout.row_bytes(nodes))
        warps = block_warps(nodes, comm.device.backend)
        self._launches = Launches(comm, events, FACTS.roles, layout.config.num_sms, warps)
        self._launches.add_stage("notify_dispatch", events, FACTS.roles, 1 + nodes.num_nodes, warps)
        of_combine = _event_table(nodes, layout, max_tokens, layout.combine_row_bytes)
        self._launches.add_stage("combine", of_combine, FACTS.roles, layout.config.num_sms, warps)
        self._poll = CountsPoll(comm, self.native.wait_counts)
        self._expert_kernels: ChosenExpertKernels | None = None
        self._num_calls = 0
        """Tickets of the native buffer."""

    def dispatch(
        self,
        given: Given,
        capture: Capture | None,
        limits: Limits,
        late_us: int = 0,
        after_stage: AfterStage | None = None,
    ) -> Received:
        """Launches a call on the current stream; on the CPU runs it.

        late_us: how much later than its host the dispatch kernel begins, so that its rings are full and dry; behind
        notify_dispatch, in which all wait for all. after_stage: called with the name of each kernel that was started.
        """
        tensors: Tensors = {**given.tensors, **self._allocate_for_notify(given)}
        reserved = given.num_worst_tokens
        if self._comm.group.num_residents > 1:  # memory that is allocated later might wait for kernels that wait for it
            reserved = reserved or self._nodes.num_ranks * self._max_tokens
        call = _Call(given, tensors, int(self.native.epoch), capture, limits, late_us, after_stage)
        with self._order.limited(limits), self._order.in_order():
            return self._dispatch_reserved(call, reserved) if reserved else self._dispatch_counted(call)

    def _dispatch_counted(self, call: _Call) -> Received:
        """The counts say how much memory is needed, which is allocated while notify may still run."""
        stream = _stream_of(self._comm)

        def allocate(counts: Counts) -> Tensors:
            with host_span(call.capture, "allocate_recv"), self._comm.device.active(), stream():
                return self._allocate_for_rows(call.given, counts.num_recv_tokens, counts.num_rdma_recv_tokens)

        with self._poll.started(self._num_calls + 1, call.limits[0], call.capture, allocate) as waiting:
            self._start_notify(call)
            counts, of_rows = self._counts_of(waiting)
        call.tensors.update(of_rows)
        self._start_dispatch(call)
        return call.received(counts.num_recv_tokens_per_expert)

    def _dispatch_reserved(self, call: _Call, num_rows: int) -> Received:
        """Memory for `num_rows` rows is there before. Without num_worst_tokens the counts say how many have come."""
        tensors, is_worst = call.tensors, call.given.num_worst_tokens > 0
        with host_span(call.capture, "allocate_recv"):
            tensors |= self._allocate_for_rows(call.given, num_rows, num_rows)
        if is_worst:
            self.check_overflow()
            if tensors["recv_topk_idx"] is not None:
                tensors["recv_topk_idx"].fill_(-1)
            self._start_notify(call)
            self._start_dispatch(call)
            return call.received([])
        with self._poll.started(self._num_calls + 1, call.limits[0], call.capture, lambda _: None) as waiting:
            self._start_notify(call)
            self._start_dispatch(call)
            counts, _ = self._counts_of(waiting)
        for name in (*_OF_ROWS, "send_nvl_head"):
            tensor = tensors[name]
            rows = counts.num_rdma_recv_tokens if name == "send_nvl_head" else counts.num_recv_tokens
            tensors[name] = None if tensor is None else tensor[:rows]
        return call.received(counts.num_recv_tokens_per_expert)

    def _counts_of(self, waiting: Future[tuple[Counts, Any] | None]) -> tuple[Counts, Any]:
        with self._comm.one_call(), self._comm.guarded():  # what goes wrong now breaks off what has begun
            found = waiting.result()
            self._comm.check()
            assert found is not None  # None is a failure that check() raises
            return found

    def combine(
        self,
        tensors: Tensors,
        num_tokens: int,
        capture: Capture | None,
        limits: Limits,
        after_stage: AfterStage | None = None,
    ) -> None:
        """Launches a combine on the current stream; on the CPU runs it. tensors: of a handle, and the call's own."""
        self._start_cached("combine", self.native.combine, tensors, num_tokens, capture, limits, after_stage)

    def apply_experts(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Int4Experts,
        capture: Capture | None,
        after_stage: AfterStage | None,
    ) -> torch.Tensor:
        """Launches this rank's experts on rows of a dispatch. Returns their results. topk_ids: int32."""
        if self._expert_kernels is None or self._expert_kernels.experts is not experts:
            self._expert_kernels = ChosenExpertKernels(self._comm, experts)
            self._expert_kernels.add_to(self._launches)
        epoch = int(self.native.epoch)

        def start(stages: Sequence[str], run: Run) -> None:
            self._launches.late_us = 0
            self._launches.start(stages, run, epoch, capture, after_stage)

        with self._order.in_order():
            return self._expert_kernels.apply(x, topk_ids, topk_weights, start)

    def dispatch_cached(
        self,
        tensors: Tensors,
        num_tokens: int,
        capture: Capture | None,
        limits: Limits,
        after_stage: AfterStage | None = None,
    ) -> Tensors:
        """The same of a dispatch with a handle. tensors: its parts, x, x_scales. Returns recv_x and recv_x_scales."""
        x, rows = tensors["x"], tensors["recv_src_meta"]
        assert x is not None
        assert rows is not None
        scales = tensors["x_scales"]
        received: Tensors = {
            "recv_x": x.new_empty((len(rows), x.shape[1])),
            "recv_x_scales": None if scales is None else scales.new_empty((len(rows), scales.shape[1])),
        }
        about = tensors | received, num_tokens, capture, limits, after_stage
        self._start_cached("dispatch", self.native.cached_dispatch, *about)
        return received

    def _start_cached(
        self,
        stage: str,
        launch: Callable[[Any, int, int], None],
        tensors: Tensors,
        num_tokens: int,
        capture: Capture | None,
        limits: Limits,
        after_stage: AfterStage | None,
    ) -> None:
        native_call = self._native_call(tensors, num_tokens, 1)

        def run(_: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
            launch(native_call, descriptors[0], stream)

        with self._order.limited(limits), self._order.in_order():
            self._launches.late_us = 0
            self._launches.start((stage,), run, int(self.native.epoch), capture, after_stage)

    def _start_notify(self, call: _Call) -> None:
        self._launches.late_us = 0
        self._launches.start(STAGES[:1], self._run(call), call.epoch, call.capture, call.after_stage)

    def _start_dispatch(self, call: _Call) -> None:
        with self._comm.one_call():  # a refusal now breaks off what has begun
            self._launches.late_us = call.late_us
            self._launches.start(STAGES[1:2], self._run(call), call.epoch, call.capture, call.after_stage)

    def check_overflow(self) -> None:
        """Raises BadInput if more rows came than num_worst_tokens, in any call that has begun since the last check."""
        if most := self.native.take_overflow():
            raise BadInput(REFUSALS["overflow"].format(rank=self._comm.group.rank, number=most))

    def reset(self) -> None:
        """The state before the first call. With all kernels finished."""
        self.native.reset()

    def _run(self, call: _Call) -> Callable[[Sequence[str], Sequence[int], int], None]:
        """Returns what launches stages of the call."""
        native_call = self._native_call(call.tensors, call.given.num_tokens, call.given.expert_alignment)

        def run(stages: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
            for stage, descriptor in zip(stages, descriptors, strict=True):
                if stage == STAGES[0]:
                    self._num_calls += 1
                    self.native.notify(native_call, descriptor, stream)
                else:
                    self.native.dispatch(native_call, descriptor, stream)

        return run

    def _native_call(self, tensors: Tensors, num_tokens: int, expert_alignment: int) -> Any:
        rows, places = tensors.get("recv_src_meta"), tensors.get("send_nvl_head")
        return self._family.Call(
            num_tokens=num_tokens,
            expert_alignment=expert_alignment,
            recv_capacity=0 if rows is None else len(rows),
            forward_capacity=0 if places is None else len(places),
            ticket=0,
            handle_number=getattr(tensors.get("send_rdma_head"), "handle_number", 0),  # of a new call: 0
            has_weights=tensors.get("combine_topk_weights") is not None,
            **{name: address(tensors.get(name)) for name in _TENSORS},
        )

    # ---- memory ----

    def _allocate_for_notify(self, given: Given) -> Tensors:
        """Returns the tensors whose size is known before the counts."""
        import torch

        nodes, channels = self._nodes, self._layout.config.num_channels
        return {
            name: torch.empty(size, dtype=torch.int32, device=given.x.device)
            for name, size in (
                ("rdma_channel_prefix_matrix", (nodes.num_nodes, channels)),
                ("gbl_channel_prefix_matrix", (nodes.num_ranks, channels)),
                ("recv_rdma_channel_prefix_matrix", (nodes.num_nodes, channels)),
                ("recv_gbl_channel_prefix_matrix", (nodes.num_ranks, channels)),
                ("recv_rdma_rank_prefix_sum", (nodes.num_nodes,)),
                ("recv_gbl_rank_prefix_sum", (nodes.num_ranks,)),
                ("send_rdma_head", (given.num_tokens, nodes.num_nodes)),
            )
        }

    def _allocate_for_rows(self, given: Given, num_rows: int, num_forwarded: int) -> Tensors:
        import torch

        def make(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((rows, columns), dtype=dtype, device=given.x.device)

        layout = self._layout
        return {
            "recv_x": make(num_rows, layout.hidden, given.x.dtype),
            "recv_x_scales": make(num_rows, layout.num_scales, torch.float32) if layout.is_fp8 else None,
            "recv_topk_idx": make(num_rows, layout.topk, torch.int64) if layout.topk else None,
            "recv_topk_weights": make(num_rows, layout.topk, torch.float32) if layout.topk else None,
            "recv_src_meta": make(num_rows, 8, torch.uint8),
            "send_nvl_head": make(num_forwarded, self._nodes.peers, torch.int32),
        }


def _stream_of(comm: Communicator) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns what makes the stream that is current now the current one of another thread."""
    if comm.device.backend == "cpu":
        return contextlib.nullcontext
    import torch

    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)


def _event_table(nodes: Nodes, layout: Layout, max_tokens: int, row: int) -> str:
    """Returns the event table of such calls for captures. row: bytes of a token as it travels."""
    config = layout.config
    settings = {
        "variant": "two_hop",
        "tokens": max_tokens,
        "hidden": layout.hidden,
        "experts": layout.num_experts,
        "topk": layout.topk,
        "dtype": "bf16",
        "dispatch_dtype": "fp8" if layout.is_fp8 else "bf16",
        "nodes": nodes.num_nodes,
        **config.native(),
    }
    bytes_of: dict[str, int | tuple[int, str]] = {
        "copy_to_ring": (row, "nodes"),
        **dict.fromkeys(("issue_put", "signal_tail"), (row, "tokens")),
        **dict.fromkeys(("send_token", "receive_token", "send_row"), row),
        "forward_token": (row, "peers"),
        "sum_in_node": (row, "peers"),
        "reduce_token": (row, "nodes"),
    }
    part_slots = FACTS.part_slots(config.num_max_nvl_chunked_recv_tokens, nodes.num_nodes)
    slots = {
        "head": config.num_max_rdma_chunked_recv_tokens,
        **dict.fromkeys(("peer_head", "return_head"), part_slots),
    }
    return describe(FACTS.event_table(), settings, bytes_of, slots)

"""The kernels of a Buffer for one layout, and a dispatch step by step: notify, counts, memory for rows, dispatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import Communicator
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.moe.deepep import Limits, address
from tracekern.moe.launch_order import LaunchOrder, native_family
from tracekern.moe.launches import Launches, describe
from tracekern.moe.two_hop.counts import Counts, CountsPoll, host_span
from tracekern.moe.two_hop.handle import Given, Handle, Received
from tracekern.moe.two_hop.layout import Nodes
from tracekern.moe.two_hop.settings import FACTS, Layout

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

AfterStage = Callable[[str], None]
Tensors = dict[str, "torch.Tensor | None"]
"""Name in the native Call -> tensor."""

STAGES: tuple[str, ...] = FACTS.variants["two_hop"]
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
)
"""Names of the tensors of the native Call."""
_OF_ROWS = ("recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", "recv_src_meta")


class Kernels:
    """This rank's kernels. Made by all ranks together."""

    def __init__(
        self,
        comm: Communicator,
        nodes: Nodes,
        layout: Layout,
        max_tokens: int,
        first_stage: int,
        limits: Limits,
        executor: dict[str, str],
    ) -> None:
        """max_tokens: of a rank. first_stage: see Communicator.add_kernels(). limits: of launches that have none of
        their own. executor: an option of the CPU backend. Raises BadInput if this rank cannot run the kernels.
        """
        self._comm, self._nodes, self._layout, self._max_tokens = comm, nodes, layout, max_tokens
        self._order = LaunchOrder(comm, limits)
        self._family = native_family(comm, "two_hop")
        try:
            with comm.device.active():
                options = {**layout.native(nodes, max_tokens), "first_stage": first_stage, **executor}
                self.native = self._family.Buffer(comm.native, **options)
        except (ValueError, RuntimeError, MemoryError) as error:  # such as more blocks than the GPU holds at once
            raise BadInput(str(error)) from None
        events, warps = _event_table(nodes, layout, max_tokens), FACTS.warps(nodes.peers)
        self._launches = Launches(comm, events, FACTS.roles, layout.config.num_sms, warps)
        self._launches.add_stage(STAGES[0], events, FACTS.roles, 1 + nodes.num_nodes, warps)
        self._poll = CountsPoll(comm, self.native.wait_counts)
        self._late_us = 0
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
        notify_dispatch, in which all wait for all. after_stage: called with the name of each kernel that was
        started.
        """
        tensors: Tensors = {**given.tensors, **self._allocate_for_notify(given)}
        reserved = given.num_worst_tokens
        if self._comm.group.num_residents > 1:  # memory that is allocated later might wait for kernels that wait for it
            reserved = reserved or self._nodes.num_ranks * self._max_tokens
        self._late_us = late_us
        with self._order.limited(limits), self._order.in_order():
            if reserved:
                return self._dispatch_reserved(given, tensors, reserved, capture, limits, after_stage)
            return self._dispatch_counted(given, tensors, capture, limits, after_stage)

    def _dispatch_counted(
        self, given: Given, tensors: Tensors, capture: Capture | None, limits: Limits, after_stage: AfterStage | None
    ) -> Received:
        """The counts say how much memory is needed, which is allocated while notify may still run."""
        stream, epoch = _stream_of(self._comm), int(self.native.epoch)

        def allocate(counts: Counts) -> Tensors:
            with host_span(capture, "allocate_recv"), self._comm.device.active(), stream():
                return self._allocate_for_rows(given, counts.num_recv_tokens, counts.num_rdma_recv_tokens)

        with self._poll.started(self._num_calls + 1, limits[0], capture, allocate) as waiting:
            self._start(STAGES[:1], given, tensors, epoch, capture, after_stage)
            with self._comm.one_call():  # what comes between belongs to the call
                found = waiting.result()
                self._comm.check()
                assert found is not None  # None is a failure that check() raises
                counts, of_rows = found
        tensors |= of_rows
        with self._comm.one_call():
            self._start(STAGES[1:], given, tensors, epoch, capture, after_stage)
        return _received(tensors, counts.num_recv_tokens_per_expert)

    def _dispatch_reserved(
        self,
        given: Given,
        tensors: Tensors,
        num_rows: int,
        capture: Capture | None,
        limits: Limits,
        after_stage: AfterStage | None,
    ) -> Received:
        """Memory for `num_rows` rows is there before. Without num_worst_tokens the counts say how many have come."""
        with host_span(capture, "allocate_recv"):
            tensors |= self._allocate_for_rows(given, num_rows, num_rows)
        if given.num_worst_tokens:
            self.check_overflow()
            if tensors["recv_topk_idx"] is not None:
                tensors["recv_topk_idx"].fill_(-1)
        ticket, epoch = self._num_calls + 1, int(self.native.epoch)
        waits: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not given.num_worst_tokens:
            waits = self._poll.started(ticket, limits[0], capture, lambda _: None)
        with waits as waiting:
            self._start(STAGES[:1], given, tensors, epoch, capture, after_stage)
            self._start(STAGES[1:], given, tensors, epoch, capture, after_stage)
            if waiting is None:
                return _received(tensors, [])
            found = waiting.result()
            self._comm.check()
            assert found is not None  # None is a failure that check() raises
        counts: Counts = found[0]
        for name in _OF_ROWS:
            tensor = tensors[name]
            tensors[name] = None if tensor is None else tensor[: counts.num_recv_tokens]
        places = tensors["send_nvl_head"]
        tensors["send_nvl_head"] = None if places is None else places[: counts.num_rdma_recv_tokens]
        return _received(tensors, counts.num_recv_tokens_per_expert)

    def _start(
        self,
        stages: Sequence[str],
        given: Given,
        tensors: Tensors,
        epoch: int,
        capture: Capture | None,
        after_stage: AfterStage | None,
    ) -> None:
        self._launches.late_us = self._late_us if stages == STAGES[1:] else 0
        self._launches.start(stages, self._run(given, tensors), epoch, capture, after_stage)

    def check_overflow(self) -> None:
        """Raises BadInput if more rows came than num_worst_tokens, in any call that has begun since the last check."""
        if most := self.native.take_overflow():
            raise BadInput(
                f"rank {self._comm.group.rank}: {count(most, 'token')} came, to stay or to be forwarded, and "
                f"num_worst_tokens was less; the rest is lost: give at least {most}"
            )

    def reset(self) -> None:
        """The state before the first call. With all kernels finished."""
        self.native.reset()

    def _run(self, given: Given, tensors: Tensors) -> Callable[[Sequence[str], Sequence[int], int], None]:
        """Returns what launches stages of the call."""
        places = tensors.get("recv_src_meta"), tensors.get("send_nvl_head")
        call = self._family.Call(
            num_tokens=given.num_tokens,
            expert_alignment=given.expert_alignment,
            recv_capacity=0 if places[0] is None else len(places[0]),
            forward_capacity=0 if places[1] is None else len(places[1]),
            ticket=0,
            **{name: address(tensors.get(name)) for name in _TENSORS},
        )

        def run(stages: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
            for stage, descriptor in zip(stages, descriptors, strict=True):
                if stage == STAGES[0]:
                    self._num_calls += 1
                    self.native.notify(call, descriptor, stream)
                else:
                    self.native.dispatch(call, descriptor, stream)

        return run

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


def _received(tensors: Tensors, num_recv_tokens_per_expert: list[int]) -> Received:
    parts: dict[str, Any] = {name: tensors[name] for name in Handle._fields}
    recv_x: Any = tensors["recv_x"]
    return Received(
        recv_x,
        tensors["recv_x_scales"],
        tensors["recv_topk_idx"],
        tensors["recv_topk_weights"],
        num_recv_tokens_per_expert,
        Handle(**parts),
    )


def _stream_of(comm: Communicator) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns what makes the stream that is current now the current one of another thread."""
    if comm.device.backend == "cpu":
        return contextlib.nullcontext
    import torch

    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)


def _event_table(nodes: Nodes, layout: Layout, max_tokens: int) -> str:
    """Returns the event table of such calls for captures."""
    config, row = layout.config, layout.row_bytes
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
        "issue_put": (row, "tokens"),
        **dict.fromkeys(("forward_token", "receive_token"), row),
    }
    slots = {
        "head": config.num_max_rdma_chunked_recv_tokens,
        "peer_head": config.num_max_nvl_chunked_recv_tokens,
    }
    return describe(FACTS.event_table(), settings, bytes_of, slots)

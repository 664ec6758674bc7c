"""The kernels of a Buffer for one layout, and how they are launched: in order, traced, with their own time limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracekern.errors import BadInput
from tracekern.moe.calls.deepep import Limits, address
from tracekern.moe.calls.launch_order import HeapPart
from tracekern.moe.calls.launches import Launches, describe
from tracekern.moe.calls.native import native_family
from tracekern.moe.experts import Experts
from tracekern.moe.gemm.experts import ExpertKernels, Int4Experts
from tracekern.moe.low_latency.handle import Dispatched
from tracekern.moe.low_latency.settings import FACTS, LaunchShape, Layout

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

AfterStage = Callable[[str], None]
LEFT_OUT = ["wait_group", "wait_sub_warps"]
"""Events that a warp with nothing to do before or behind them records only where a capture wants all detail."""
_WITHOUT_GROUPS = ("scale_experts", "dequantise")
"""Kernels whose warps take turns at all rows."""

_TENSORS = (
    "x",
    "topk_idx",
    "packed_recv_x",
    "packed_recv_scales",
    "packed_recv_src_info",
    "packed_recv_layout_range",
    "packed_recv_count",
    "handle",
    "recv_stats",
    "wait_ticks",
    "expert_rows",
    "expert_scale",
    "topk_weights",
    "out",
)
"""Names of the tensors of the native Call."""


class Kernels:
    """This rank's kernels. Made by all ranks together."""

    def __init__(
        self,
        heap: HeapPart,
        layout: Layout,
        shape: LaunchShape,
        first_stage: int,
        executor: dict[str, str],
    ) -> None:
        """first_stage: see Communicator.add_kernels(). executor: an option of the CPU backend.

        Raises BadInput if this rank cannot run the kernels.
        """
        self._comm, self._order = heap.comm, heap.order
        self._family = native_family("low_latency", heap.comm.device.backend)
        places = {"first_byte": heap.first_byte, "first_stage": first_stage}
        self.native = self._make_native(layout, shape, {**places, **executor})
        self._layout, self._shape, self._first_byte = layout, shape, heap.first_byte
        self._reset_network()
        self._described: tuple[bool, int] | None = None
        """use_fp8 and top-k of the calls that launches are described as."""
        self._launches = Launches(heap.comm, FACTS.event_table(), FACTS.roles, shape.num_sms, shape.num_warps)
        self._expert_kernels: ExpertKernels | None = None

    def reset(self) -> None:
        """The state before the first call. Collective, with all ranks' kernels finished."""
        self.native.reset()
        self._reset_network()

    def _reset_network(self) -> None:
        network, group = self._comm.network, self._comm.group
        if network is None:
            return
        places = {"rank": group.rank, "first_byte": self._first_byte, "far_heap": network.far_heap}
        with self._comm.device.active():
            network.reset(FACTS.inbox(**self._layout.native(group.num_ranks), **places))

    def launch(
        self,
        dispatched: Dispatched,
        stages: Sequence[str],
        capture: Capture | None,
        limits: Limits | None = None,
        late_us: int = 0,
        after_stage: AfterStage | None = None,
    ) -> None:
        """Launches stages of a call on the current stream; on the CPU runs them."""
        call = self._make_call(dispatched, records_idle=capture is not None and capture.detail == "all")

        def run_own(names: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
            self.native.run(list(names), call, dispatched.use_fp8, list(descriptors), stream)

        def run(names: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
            if self._expert_kernels is None:
                run_own(names, descriptors, stream)
            else:
                self._expert_kernels.run(names, descriptors, stream, run_own)

        self._launches.late_us = late_us
        if capture is not None:
            self._describe(dispatched.use_fp8, dispatched.topk)
        with self._order.limited(limits), self._order.in_order():
            self._launches.start(stages, run, dispatched.epoch, capture, after_stage)

    def _describe(self, use_fp8: bool, topk: int) -> None:
        """Says of the next launches of which calls they are."""
        if self._described == (use_fp8, topk):
            return
        events, without_groups = _event_tables(self._layout, self._shape, use_fp8, topk)
        self._launches.describe_as(events)
        for stage in _WITHOUT_GROUPS:
            self._launches.add_stage(stage, without_groups, FACTS.roles, self._shape.num_sms, self._shape.num_warps)
        self._described = use_fp8, topk

    def apply_experts(
        self,
        dispatched: Dispatched,
        experts: Experts,
        rows: torch.Tensor,
        capture: Capture | None,
        after_stage: AfterStage | None,
    ) -> None:
        """Launches what writes the results of experts to `rows`."""
        dispatched.tensors |= {"expert_rows": rows, "expert_scale": experts.scale}
        stages: tuple[str, ...] = ("scale_experts",)
        if isinstance(experts, Int4Experts):
            own = self._use_int4(dispatched, experts, rows)
            stages = (*(["dequantise"] if dispatched.use_fp8 else []), *own.stages)
        self.launch(dispatched, stages, capture, after_stage=after_stage)

    def _use_int4(self, dispatched: Dispatched, experts: Int4Experts, rows: torch.Tensor) -> ExpertKernels:
        if self._expert_kernels is None or self._expert_kernels.experts is not experts:
            num_local, rows_per_expert, _ = rows.shape
            self._expert_kernels = ExpertKernels(self._comm, experts, num_local * rows_per_expert, rows_per_expert)
            self._expert_kernels.add_to(self._launches)
        tensors = dispatched.tensors
        self._expert_kernels.use(
            row_counts=address(tensors["packed_recv_count"]),
            x_rows=address(rows if dispatched.use_fp8 else tensors["packed_recv_x"]),  # results replace the former
            result_rows=address(rows),
        )
        return self._expert_kernels

    def _make_native(self, layout: Layout, shape: LaunchShape, options: dict[str, Any]) -> Any:
        try:
            with self._comm.device.active():
                network = self._comm.network
                make = self._family.Buffer
                if network:
                    make = self._family.FarBuffer
                    options = {**options, "commands": network.ring, "far_heap": network.far_heap}
                return make(
                    self._comm.native,
                    num_blocks=shape.num_sms,
                    warps_per_block=shape.num_warps,
                    num_warp_groups=shape.num_warp_groups,
                    **layout.native(self._comm.group.num_ranks),
                    **options,
                )
        except (ValueError, RuntimeError, MemoryError) as error:  # such as more blocks than the GPU holds at once
            raise BadInput(str(error)) from None

    def _make_call(self, dispatched: Dispatched, records_idle: bool) -> Any:
        tensors = dispatched.tensors
        addresses = {name: address(tensors.get(name)) for name in _TENSORS}
        topk_idx = tensors["topk_idx"]
        return self._family.Call(
            slot=dispatched.slot,
            num_tokens=dispatched.num_tokens,
            topk=dispatched.topk,
            has_long_ids=topk_idx is not None and topk_idx.element_size() == 8,
            records_idle=records_idle,
            round_scale=dispatched.round_scale,
            use_ue8m0=dispatched.use_ue8m0,
            **addresses,
        )


def _event_tables(layout: Layout, shape: LaunchShape, use_fp8: bool, topk: int) -> tuple[str, str]:
    """Returns the event table of such calls for captures, and that of kernels whose warps do not work in groups."""
    message, row = FACTS.message_bytes(layout.hidden, use_fp8), 2 * layout.hidden
    bytes_of = {
        **dict.fromkeys(("cast_token", "send_message", "copy_token"), message),
        "signal_count": (message, "tokens"),
        "send_result": (16, "vectors"),
        "signal_results": (row, "tokens"),
    }
    told = FACTS.event_table(), layout.workload(use_fp8, topk), bytes_of
    grouped = describe(*told, left_out=LEFT_OUT, groups=shape.num_warp_groups, group_field="responsible_expert_idx")
    return grouped, describe(*told, left_out=LEFT_OUT)

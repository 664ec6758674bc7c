"""Low latency dispatch, experts and combine as one call: what `tracekern run moe` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.experts import Experts
from tracekern.moe.low_latency.buffer import Buffer
from tracekern.moe.low_latency.settings import MAX_TOKENS, SCALE_GROUP, LaunchShape
from tracekern.moe.shape import MoeShape, check_range

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

DISPATCH_DTYPES = ("fp8", "bf16")


class LowLatencyPipeline:
    """Dispatch -> experts -> combine through a Buffer of its own, with the interface of other families' pipelines."""

    stages = ("dispatch", "scale_experts", "combine")
    """The kernels of one call, in order; int4 experts are several in place of `scale_experts`."""

    def __init__(
        self,
        group: Group,
        shape: MoeShape,
        variant: str = "low_latency",
        *,
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_blocks: int = 0,
        warps_per_block: int = 0,
        executor: str = "fibers",
        backend: str = "cpu",
        dispatch_dtype: int = 0,
        hosts: Sequence[int] | None = None,
    ) -> None:
        """num_blocks: SMs that kernels fill. warps_per_block: at most. dispatch_dtype: place in DISPATCH_DTYPES + 1.
        hosts: see Buffer.

        0: see LaunchShape.choose(), and fp8. Collective. Raises BadInput.
        """

        def check() -> dict[str, Any]:
            if variant != "low_latency":
                raise BadInput(f"variant is {variant!r}; wanted low_latency")
            check_range("dispatch_dtype", dispatch_dtype, 0, len(DISPATCH_DTYPES))
            if why := why_unsuitable(shape, {"dispatch_dtype": dispatch_dtype}):
                raise BadInput(why)
            return {**dataclasses.asdict(shape), "dispatch_dtype": dispatch_dtype}

        group.agree("the making of a LowLatencyPipeline", check)
        self.shape, self.variant = shape, variant
        self.options = {"dispatch_dtype": dispatch_dtype or 1}
        self._use_fp8 = DISPATCH_DTYPES[self.options["dispatch_dtype"] - 1] == "fp8"
        layout = (shape.max_tokens, shape.hidden, shape.num_experts)
        num_bytes = Buffer.get_low_latency_rdma_size_hint(
            shape.max_tokens, shape.hidden, group.num_ranks, shape.num_experts
        )
        warps = LaunchShape.choose(group, shape.num_experts, num_blocks, warps_per_block, backend, shape.topk).num_warps
        self.buffer = Buffer(
            group,
            num_rdma_bytes=num_bytes,
            backend=backend,
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            num_sms=num_blocks,
            num_max_warp_groups=warps,
            executor=executor,
            hosts=hosts,
        )
        self.buffer.clean_low_latency_buffer(*layout)
        self.comm = self.buffer.comm
        self.grid, self.warps = self.buffer.launch_shape.num_sms, self.buffer.launch_shape.num_warps
        self._expert_rows: torch.Tensor | None = None

    @property
    def late_us(self) -> int:
        """How much later than its host this rank's next calls begin, to see how the others wait."""
        return self.buffer.late_us

    @late_us.setter
    def late_us(self, late_us: int) -> None:
        self.buffer.late_us = late_us

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Experts,
        *,
        out: torch.Tensor | None = None,
        capture: Capture | None = None,
        after_stage: Callable[[str], None] | None = None,
    ) -> torch.Tensor:
        """Returns [num_tokens, hidden] bf16; `out` if given. Arguments as those of moe.calls.pipeline.Pipeline."""
        with self.comm.one_user_call("a call of low_latency"):
            experts.check(self.comm, self.shape)
        tell = after_stage or (lambda stage: None)
        _, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, topk_idx, self.shape.max_tokens, self.shape.num_experts, use_fp8=self._use_fp8, capture=capture
        )
        tell("dispatch")
        rows = self._rows()
        self.buffer.apply_experts(handle, experts, rows, capture=capture, after_stage=after_stage)
        combined, _, _ = self.buffer.low_latency_combine(rows, topk_idx, topk_weights, handle, out=out, capture=capture)
        tell("combine")
        return combined

    def _rows(self) -> torch.Tensor:
        import torch

        if self._expert_rows is None:
            num_local, num_ranks = self.shape.num_local_experts, self.shape.num_ranks
            size = (num_local, num_ranks * self.shape.max_tokens, self.shape.hidden)
            device = self.comm.device.torch_device
            self._expert_rows = torch.empty(size, dtype=torch.bfloat16, device=device)
        return self._expert_rows

    def synchronize(self) -> None:
        """Waits until this rank's calls have finished. Raises CommTimeout and BadInput, see Buffer.synchronize()."""
        self.buffer.synchronize()

    def reset(self) -> None:
        """Collective: makes the communicator usable again after a CommTimeout."""
        self.buffer.reset()


def why_unsuitable(shape: MoeShape, options: dict[str, int]) -> str:
    """Returns why the kernels do not take the shape; "" if they do."""
    if shape.dtype != "bf16":
        return f"dtype is {shape.dtype}; variant low_latency takes bf16"
    if shape.max_tokens > MAX_TOKENS:
        return f"tokens is {shape.max_tokens}; variant low_latency takes at most {MAX_TOKENS}"
    is_fp8 = DISPATCH_DTYPES[max(0, options.get("dispatch_dtype", 0) - 1)] == "fp8"
    if is_fp8 and shape.hidden % SCALE_GROUP:
        return f"hidden is {shape.hidden}; fp8 messages take a multiple of {SCALE_GROUP}, with dispatch-dtype bf16 of 8"
    if shape.hidden % 8:
        return f"hidden is {shape.hidden}; variant low_latency takes a multiple of 8"
    return ""


def tensor_bytes(shape: MoeShape) -> int:
    """Returns the bytes of what a rank receives and of what its experts make of it, at most."""
    return shape.num_local_experts * shape.num_ranks * shape.max_tokens * shape.hidden * 4

"""The P2P kernels as a call: dispatch, experts, combine over the ranks of one node, traced where a capture is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tracekern import _C
from tracekern.comm.group import Group
from tracekern.errors import BadInput
from tracekern.moe.pipeline import Pipeline, check_grid, check_on_device, describe_tensor
from tracekern.moe.shape import MAX_PARTITIONS, MoeShape, check_range

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

STAGES: dict[str, tuple[str, ...]] = _C.families["p2p"].variants
"""The kernels of one call of each variant, in their order."""


class P2PPipeline(Pipeline):
    """Dispatch -> experts -> combine by stores into the peers' memory (csrc/moe/p2p)."""

    def __init__(
        self,
        group: Group,
        shape: MoeShape,
        variant: str,
        *,
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_blocks: int = 4,
        warps_per_block: int = 4,
        partitions: int = 0,
        executor: str = "fibers",
        backend: str = "cpu",
    ) -> None:
        """variant: a key of STAGES.

        partitions: of a rank's tokens in the pipelined variant, at most; two of them are under way at a time. 0: as
        many as suit the shape and the grid. The rest: see Pipeline. Raises BadInput.
        """
        if variant not in STAGES:
            raise BadInput(f"variant is {variant!r}; wanted one of {', '.join(STAGES)}")
        check_grid(num_blocks, warps_per_block, backend)
        partitions = partitions or shape.num_partitions(max(1, num_blocks - 1) * max(1, warps_per_block // 2))
        check_range("partitions", partitions, 1, MAX_PARTITIONS)
        super().__init__(
            "p2p",
            group,
            shape,
            variant,
            options={"partitions": partitions},
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            num_blocks=num_blocks,
            warps_per_block=warps_per_block,
            executor=executor,
            backend=backend,
        )

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_scale: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        capture: Capture | None = None,
        after_stage: Callable[[str], None] | None = None,
    ) -> torch.Tensor:
        """Returns [num_tokens, hidden] in x's dtype; `out` if given.

        x: [num_tokens, hidden]; topk_idx: [num_tokens, topk] int32, -1 for none; topk_weights: [num_tokens, topk] fp32;
        expert_scale: [num_experts] fp32.

        after_stage: called with the name of each kernel when it was started. What it raises breaks the call off.
        On a GPU the call only starts the work, on the current stream; synchronize() waits for it.
        Raises BadInput, and CommTimeout when a peer does not come. After a call that was broken off between two kernels
        the next one raises CallBroken, until reset().
        """
        import torch

        self.comm.require_usable()
        self._check_tensors(x, topk_idx, topk_weights, expert_scale)
        if out is None:
            out = torch.empty_like(x)
        elif out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
            wanted = f"{describe_tensor(x)}, contiguous, on {x.device}"
            raise BadInput(f"out is {describe_tensor(out)} on {out.device}; wanted {wanted}")
        self._native.set_call(
            x=x.data_ptr(),
            topk_idx=topk_idx.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            expert_scale=expert_scale.data_ptr(),
            out=out.data_ptr(),
            num_tokens=x.shape[0],
        )
        self._start(capture, after_stage)
        return out

    def _check_tensors(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, expert_scale: torch.Tensor
    ) -> None:
        import torch

        from tracekern.moe.routing import torch_dtype

        shape = self.shape
        num_tokens = int(x.shape[0]) if x.ndim == 2 else -1
        wanted = (
            ("x", x, torch_dtype(shape), (num_tokens, shape.hidden)),
            ("topk_idx", topk_idx, torch.int32, (num_tokens, shape.topk)),
            ("topk_weights", topk_weights, torch.float32, (num_tokens, shape.topk)),
            ("expert_scale", expert_scale, torch.float32, (shape.num_experts,)),
        )
        for name, tensor, dtype, size in wanted:
            if tuple(tensor.shape) != size or tensor.dtype != dtype:
                raise BadInput(f"{name} is {describe_tensor(tensor)}; wanted {dtype} {list(size)}")
            check_on_device(self.comm, name, tensor)
        if num_tokens > shape.max_tokens:
            raise BadInput(f"{num_tokens} tokens; the pipeline was made for at most {shape.max_tokens}")
        # Looking at indices on a GPU would stop the stream in every call.
        on_host = self.comm.device.backend == "cpu"
        if on_host and num_tokens and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < shape.num_experts:
            bad = topk_idx[(topk_idx < -1) | (topk_idx >= shape.num_experts)][0].item()
            raise BadInput(f"topk_idx names expert {bad}; wanted -1 (none) or 0 to {shape.num_experts - 1}")

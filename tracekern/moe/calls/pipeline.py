"""Base of all kernel families' pipelines: opening over the ranks, traced launches, and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tracekern import _core
from tracekern.comm.communicator import Communicator
from tracekern.comm.ranks.group import Group
from tracekern.compiled import compiled
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.moe.calls.launches import Launches, check_capture, describe
from tracekern.moe.calls.native import native_family
from tracekern.moe.experts import Experts
from tracekern.moe.family import blocks_by_stage
from tracekern.moe.gemm.experts import ExpertKernels, Int4Experts, check_place_for_experts
from tracekern.moe.routing import torch_dtype
from tracekern.moe.shape import MoeShape, check_range, check_tensor, require_tensor

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

MAX_CPU_WARPS = 1 << 14
"""On the CPU backend each warp has a separate stack, which takes two of a process's 65,530 memory mappings on Linux."""

SPARE_SMS = 4
"""SMs of a GPU that kernels leave free unless told otherwise. Kernels that wait for other ranks fill an SM each until
these have come; another library's kernel on a second stream that also waits for its peers (a collective of NCCL, say)
needs room on every rank, or the ranks wait for each other for good: one waits for the collective, the next for ours."""


class Pipeline:
    """Dispatch -> experts -> combine on the symmetric heap. Allocates once; a call moves tokens only.

    Usable from one thread at a time. After a CommTimeout every call is refused until reset(), which is collective.
    A family's pipeline chooses the options of its kernels; one whose calls take other tensors overrides the call.
    """

    def __init__(
        self,
        family: str,
        group: Group,
        shape: MoeShape,
        variant: str,
        *,
        timeout_s: float = 10.0,
        on_timeout: str = "raise",
        num_blocks: int = 0,
        warps_per_block: int = 0,
        num_sms: int = 0,
        stage_blocks: dict[str, int] | None = None,
        executor: str = "fibers",
        backend: str = "cpu",
        fault_values: Mapping[str, str] | None = None,
        settings: dict[str, int] | None = None,
        bytes_of: dict[str, int | tuple[int, str]] | None = None,
        **options: int,
    ) -> None:
        """family: its name. variant: one of the family's. options: for the family's kernels.

        num_blocks x warps_per_block: the grid of every kernel; on a GPU at most 16 warps, on the CPU MAX_CPU_WARPS in
        all. num_sms: how many SMs of a GPU the kernels fill, where num_blocks does not say it. 0: see choose_grid().
        stage_blocks: of kernels with another number of blocks, see blocks_by_stage().
        timeout_s, on_timeout: see Communicator.set_timeout(). backend: "cpu" or "cuda". fault_values: `values` of
        Communicator.add_kernels(). settings: what a capture is told of the workload besides the shape. bytes_of: see
        launches.describe(). Raises BadInput.
        """
        facts = compiled(family)

        def choose() -> dict[str, Any]:
            _check_making(facts.variants, group, shape, variant)
            grid = choose_grid(group, num_blocks, warps_per_block, num_sms, backend)
            others = blocks_by_stage(facts.variants[variant], stage_blocks or {})
            choose_grid(group, max([1, *others.values()]), grid[1], 0, backend)  # which checks it
            return dataclasses.asdict(shape) | {"variant": variant, **options, "grid": list(grid), "blocks": others}

        chosen = group.agree(f"the making of a {family} pipeline", choose)
        (self.grid, self.warps), others = chosen["grid"], chosen["blocks"]
        self.shape, self.variant, self.options = shape, variant, options
        self.stages: tuple[str, ...] = facts.variants[variant]
        """The kernels of one call, in order."""
        sizes = {name: getattr(shape, name) for name in ("max_tokens", "num_experts", "topk", "hidden", "dtype")}
        kind: dict[str, Any] = {"variant": variant, **options}
        heap_bytes = facts.heap_bytes(num_ranks=shape.num_ranks, **sizes, **kind)
        self.comm = Communicator(group, heap_bytes, timeout_s, backend, on_timeout, reserved_bytes=heap_bytes)
        names = facts.stages, facts.channels
        first_stage = self.comm.add_kernels(*names, values=fault_values, first_epoch=_core.first_epoch)
        grid = {"num_blocks": self.grid, "warps_per_block": self.warps, "stage_blocks": others}
        kind |= {"first_stage": first_stage} | ({"executor": executor} if backend == "cpu" else {})
        self._native = _make_native(family, self.comm, backend, {**sizes, **kind, **grid})
        events = describe(facts.event_table(), workload(shape, variant) | (settings or {}), bytes_of)
        self._launches = Launches(self.comm, events, facts.roles, self.grid, self.warps)
        for stage, blocks in others.items():
            self._launches.add_stage(stage, events, facts.roles, blocks, self.warps)
        self._expert_kernels: ExpertKernels | None = None
        self.comm.on_reset(self._native.reset)
        group.barrier()

    @property
    def late_us(self) -> int:
        """How much later than its host this rank's next calls begin, to see how the others wait."""
        return self._launches.late_us

    @late_us.setter
    def late_us(self, late_us: int) -> None:
        self._launches.late_us = late_us

    @property
    def epoch(self) -> int:
        """The epoch of the next call, 32 bits. The first one is just below the wrap."""
        return int(self._native.epoch)

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
        """Returns [num_tokens, hidden] in x's dtype; `out` if given.

        x: [num_tokens, hidden]; topk_idx: [num_tokens, topk] int32, -1 for none; topk_weights: [num_tokens, topk] fp32.

        after_stage: called with the name of each kernel that was started. If it raises, the call is broken off.
        On a GPU the call only starts the work, on the current stream; synchronize() waits for it.
        Raises BadInput, and CommTimeout if a peer does not arrive. After a call that was broken off between two
        kernels, later calls raise CallBroken until reset().
        """
        import torch

        with self.comm.one_user_call(f"a call of {self.variant}"):
            self._check_tensors(x, topk_idx, topk_weights)
            check_capture(capture, after_stage)
            if not isinstance(experts, Experts):
                raise BadInput(f"experts is {type(experts).__name__}; wanted Experts, or Int4Experts")
            experts.check(self.comm, self.shape)
            if out is None:
                out = torch.empty_like(x)
            check_tensor(self.comm, "out", out, x.dtype, tuple(x.shape))
            self._native.set_call(
                x=x.data_ptr(),
                topk_idx=topk_idx.data_ptr(),
                topk_weights=topk_weights.data_ptr(),
                **experts.addresses,
                out=out.data_ptr(),
                num_tokens=x.shape[0],
            )
            self._launches.start(self._stages_with(experts), self._run, self.epoch, capture, after_stage)
        return out

    def _stages_with(self, experts: Experts) -> tuple[str, ...]:
        """Returns the kernels of a call with these experts, in order. Raises BadInput."""
        if not isinstance(experts, Int4Experts):
            return self.stages
        check_place_for_experts(self.stages)
        if self._expert_kernels is None or self._expert_kernels.experts is not experts:
            self._expert_kernels = ExpertKernels(self.comm, experts, self._num_expert_rows)
            off_e, rows = self._native.expert_input
            self._expert_kernels.use(expert_offset=off_e, x_rows=rows, result_rows=rows)
            self._expert_kernels.add_to(self._launches)
        return self._expert_kernels.stages_within(self.stages)

    @property
    def _num_expert_rows(self) -> int:
        """Most rows of this rank's experts."""
        return self.shape.num_ranks * self.shape.max_tokens * self.shape.topk

    def _run(self, stages: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
        if self._expert_kernels is None:
            self._native.run_stages(stages, descriptors, stream)
        else:
            self._expert_kernels.run(stages, descriptors, stream, self._native.run_stages)

    def _check_tensors(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        import torch

        shape = self.shape
        require_tensor("x", x)
        num_tokens = int(x.shape[0]) if x.ndim == 2 else -1
        check_tensor(self.comm, "x", x, torch_dtype(shape), (num_tokens, shape.hidden))
        check_tensor(self.comm, "topk_idx", topk_idx, torch.int32, (num_tokens, shape.topk))
        check_tensor(self.comm, "topk_weights", topk_weights, torch.float32, (num_tokens, shape.topk))
        if num_tokens > shape.max_tokens:
            raise BadInput(f"{num_tokens} tokens; the pipeline was made for at most {shape.max_tokens}")
        # Reading indices on a GPU would synchronize the stream in every call.
        on_host = self.comm.device.backend == "cpu"
        if on_host and num_tokens and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < shape.num_experts:
            bad = topk_idx[(topk_idx < -1) | (topk_idx >= shape.num_experts)][0].item()
            raise BadInput(f"topk_idx names expert {bad}; wanted -1 (none) or 0 to {shape.num_experts - 1}")

    def synchronize(self) -> None:
        """Waits until this rank's calls have finished. Raises CommTimeout if a peer did not arrive."""
        self.comm.synchronize()

    def reset(self) -> None:
        """Collective: makes the communicator usable again after a CommTimeout."""
        self.comm.reset()


def workload(shape: MoeShape, variant: str) -> dict[str, Any]:
    """Returns what a capture keeps of a workload, under the names that `run moe` has for it."""
    return {
        "variant": variant,
        "tokens": shape.max_tokens,
        "hidden": shape.hidden,
        "experts": shape.num_experts,
        "topk": shape.topk,
        "dtype": shape.dtype,
    }


def choose_grid(group: Group, num_blocks: int, warps_per_block: int, num_sms: int, backend: str) -> tuple[int, int]:
    """Returns the blocks of every kernel and the warps of each.

    0 stands for what suits the backend: on the CPU 4 x 4; on a GPU a block for each of `num_sms` SMs, by default all
    but SPARE_SMS, of which resident ranks get an equal part each, of as many warps as fill an SM. Raises BadInput for a
    grid that no kernel runs with.
    """
    check_range("num_blocks", num_blocks, 0, 4096)
    check_range("warps_per_block", warps_per_block, 0, 16 if backend == "cuda" else 32)
    check_range("num_sms", num_sms, 0, 4096)
    if backend == "cuda":
        if num_sms and num_blocks:
            raise BadInput(f"num_sms is {num_sms} and num_blocks {num_blocks}; a block fills an SM: give one of them")
        if not num_blocks:
            import torch

            # Where there is no GPU the communicator says so.
            has_gpu = torch.cuda.is_available()
            present = torch.cuda.get_device_properties().multi_processor_count if has_gpu else 1
            check_range("num_sms", num_sms, 0, present)
            num_blocks = num_sms or max(1, (present - SPARE_SMS) // group.num_residents)
        warps_per_block = warps_per_block or 16
    elif num_sms:
        raise BadInput(f"num_sms is {num_sms}; the CPU backend has no SMs, give num_blocks")
    num_blocks, warps_per_block = num_blocks or 4, warps_per_block or 4
    if backend == "cpu":
        check_range("num_blocks x warps_per_block", num_blocks * warps_per_block, 1, MAX_CPU_WARPS)
    return num_blocks, warps_per_block


def _make_native(family: str, comm: Communicator, backend: str, options: dict[str, Any]) -> Any:
    """Makes the native pipeline. Collective. Raises BadInput on all ranks if one of them cannot run the kernels."""
    native, problem = None, ""
    try:
        native = native_family(family, backend).Pipeline(comm.native, **options)
    except ValueError as error:  # such as more blocks than the GPU holds at once
        problem = f"rank {comm.group.world_rank}: {error}"
    except (RuntimeError, MemoryError) as error:  # no room for the kernels' memory besides the heap
        problem = f"rank {comm.group.world_rank}: {error}; make the shape smaller, or end what fills the memory"
    comm.group.refuse_together(problem)
    return native


def _check_making(variants: Any, group: Group, shape: MoeShape, variant: str) -> None:
    """Raises BadInput for a variant or a shape that kernels of this group cannot have."""
    if not isinstance(variant, str) or variant not in variants:
        raise BadInput(f"variant is {variant!r}; wanted one of {', '.join(variants)}")
    if not isinstance(shape, MoeShape):
        raise BadInput(f"shape is {type(shape).__name__}; wanted a MoeShape")
    if shape.num_ranks != group.num_ranks:
        raise BadInput(f"the shape is for {count(shape.num_ranks, 'rank')}, the group has {group.num_ranks}")

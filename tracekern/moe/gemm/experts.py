"""int4 experts between dispatch and combine of a pipeline: K2 and K4 on the rows where dispatch left them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.errors import BadInput
from tracekern.moe.calls.native import native_family
from tracekern.moe.experts import ExpertKind, ExpertRows, Experts
from tracekern.moe.gemm import checks
from tracekern.moe.gemm.apply import call_of
from tracekern.moe.gemm.blocks import PreparedWeights, Weights, restore_weights, with_staging
from tracekern.moe.gemm.kernels import (
    FACTS,
    Sizes,
    Tensors,
    event_table,
    layer_stages,
    make_call,
    product_stages,
    tile_tensors,
)
from tracekern.moe.gemm.packing import DIVISOR
from tracekern.moe.gemm.prepared import prepare_weights
from tracekern.moe.gemm.steps import k2, k4

if TYPE_CHECKING:
    import torch

    from tracekern.comm.communicator import Communicator
    from tracekern.moe.calls.launches import Launches, Run
    from tracekern.moe.shape import MoeShape


@dataclass(frozen=True)
class Int4Experts(Experts):
    """The experts of all ranks, as quantize(), or pack_w13() and pack_w2(), make them. Pipelines take them for bf16.

    Each rank prepares its own, once: prepare_weights(). All of them may be prepared before, too. `scale` is 1 for each:
    what comes back from an expert is moved and weighted, and no longer scaled.
    """

    w13: Weights
    w2: Weights
    detail: int = 0
    """A capture gets each step of every so many-th tile; 0: of none."""

    @classmethod
    def of(cls, w13: Weights, w2: Weights, detail: int = 0) -> Int4Experts:
        import torch

        num_experts = with_staging("w13", w13).num_experts
        return cls(torch.ones(num_experts, dtype=torch.float32, device=w13.device), w13, w2, detail)

    @property
    def intermediate(self) -> int:
        return with_staging("w13", self.w13).rows // 2

    def to(self, device: str) -> Int4Experts:
        return Int4Experts(self.scale.to(device), _moved(self.w13, device), _moved(self.w2, device), self.detail)

    def apply(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Applies expert [n] to rows [n, hidden] bf16 on their device, with "direct". Returns [n, hidden] bf16."""
        import torch

        w13, w2 = _packed(self.w13), _packed(self.w2)
        order = torch.argsort(expert, stable=True)
        counts = torch.bincount(expert, minlength=len(w13))
        off_e = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        result = torch.empty_like(rows)
        result[order] = k4(k2(rows[order], off_e, w13), off_e, w2)
        return result

    def check(self, comm: Communicator, shape: MoeShape) -> None:
        super().check(comm, shape)
        if shape.dtype != "bf16":
            raise BadInput(f"dtype is {shape.dtype}; int4 experts take bf16")
        checks.check_size("hidden", shape.hidden)
        w13, w2 = with_staging("w13", self.w13), with_staging("w2", self.w2)
        checks.check_layer(w13, w2, shape.hidden, self.scale)


class _OwnExperts:
    """This rank's experts as kernels: their weights, prepared, and how each kernel is launched."""

    def __init__(self, comm: Communicator, experts: Int4Experts) -> None:
        self.experts = experts
        self._comm = comm
        self._native = native_family("gemm", comm.device.backend)
        num_local = len(experts.scale) // comm.group.num_ranks
        own = slice(comm.group.rank * num_local, (comm.group.rank + 1) * num_local)
        self._w13, self._w2 = _prepared(experts.w13[own]), _prepared(experts.w2[own])
        self._staging = self._w13.staging
        self._sizes = Sizes(
            num_experts=num_local,
            num_listed=num_local,
            hidden=self._w2.rows,
            intermediate=experts.intermediate,
            detail=experts.detail,
        )
        self._grids: dict[str, tuple[int, int, int]] = {}
        self._call: Any = None

    def _set_grids(self, stages: Sequence[str], most_sms: int = 0) -> None:
        """Asks how many blocks each kernel is launched with, of how many warps, and how many of these are on record.

        most_sms: of a GPU; 0: all.
        """
        with self._comm.device.active():
            alike = make_call(self._native, self._sizes, {})
            self._grids = {stage: self._native.grid(stage, self._staging, alike) for stage in stages}
        if most_sms and self._comm.device.backend == "cuda":
            import torch

            present = torch.cuda.get_device_properties().multi_processor_count
            for stage, (num_blocks, num_warps, num_recorded) in self._grids.items():
                if num_blocks > 1:  # as many on each SM as where they have all of them
                    self._grids[stage] = max(1, num_blocks * most_sms // present), num_warps, num_recorded

    def _make_call(self, sizes: Sizes, tensors: Tensors, places: dict[str, int] | None = None) -> Any:
        """Returns what kernels get: see make_call()."""
        abort = self._comm.native.heap_addresses[self._comm.group.rank]  # HeapControl begins with it
        return make_call(self._native, sizes, tensors, {**(places or {}), "abort": abort})

    def add_to(self, launches: Launches, suffix: str = "", stream: int = 0) -> None:
        """Tells of the kernels that come between those of the pipeline's family.

        suffix: of their stages, where a call has them several times. stream: of their own; 0: that of the call.
        """
        events = event_table(self._sizes.hidden, self._sizes.intermediate)
        for stage, (num_blocks, _, num_recorded) in self._grids.items():
            key = stage + suffix
            launches.add_stage(key, events, FACTS.roles, num_blocks, num_recorded, name=stage, stream=stream)

    def launch(self, call: Any, stage: str, descriptor: int, stream: int) -> None:
        """Launches a kernel with what `call` says; on the CPU runs it."""
        num_blocks, num_warps, _ = self._grids[stage]
        self._native.run(
            stage=stage,
            staging=self._staging,
            call=call,
            num_blocks=num_blocks,
            num_warps=num_warps,
            descriptor=descriptor,
            stream=stream,
            comm=self._comm.native,
        )

    def _run_own(self, stages: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
        for stage, descriptor in zip(stages, descriptors, strict=True):
            self.launch(self._call, stage, descriptor, stream)


class ExpertKernels(_OwnExperts):
    """K2 and K4 on rows that lie by expert, between the kernels of one pipeline."""

    def __init__(
        self, comm: Communicator, experts: Int4Experts, num_rows: int, rows_per_expert: int = 0, most_sms: int = 0
    ) -> None:
        """num_rows: of this rank's experts at most. rows_per_expert: of the region of each; 0: rows are packed.

        most_sms: how many SMs of a GPU they may fill; 0: all.
        """
        import torch

        super().__init__(comm, experts)
        self._sizes = dataclasses.replace(self._sizes, rows_per_expert=rows_per_expert, num_rows=num_rows)
        products = [product_stages(stage, self._staging, rows_per_expert or num_rows) for stage in ("k2", "k4")]
        self.stages = ("tiles", *products[0], *products[1])
        """The kernels, in order."""
        self._set_grids(self.stages, most_sms)
        words, num_local = self._w13.words, self._w13.num_experts
        self._tensors: Tensors = {
            "w13": words,
            "w2": self._w2.words,
            **tile_tensors(self._staging, num_local, num_rows, words),
            "expert_offset": words.new_empty((num_local, 2), dtype=torch.int32) if rows_per_expert else None,
            "middle_rows": words.new_empty((num_rows, experts.intermediate), dtype=torch.bfloat16),
        }

    def use(self, **places: int) -> None:
        """Sets the addresses of what the next calls read and write besides weights, by name of _TENSORS."""
        self._call = self.call_of(**places)

    def call_of(self, **places: int) -> Any:
        """Returns the same as an argument of launch()."""
        return self._make_call(self._sizes, self._tensors, places)

    def run(self, stages: Sequence[str], descriptors: Sequence[int], stream: int, run_others: Run) -> None:
        """Launches stages in order, those of the pipeline's family by run_others; on the CPU runs them."""
        given = zip(stages, descriptors, strict=True)
        for is_own, some in itertools.groupby(given, lambda pair: pair[0] in self.stages):
            names, numbers = map(list, zip(*some, strict=True))
            (self._run_own if is_own else run_others)(names, numbers, stream)

    def stages_within(self, stages: Sequence[str]) -> tuple[str, ...]:
        """Returns the kernels of a call with these experts in place of `scale_experts`."""
        own = [stage for stage in stages if stage != "scale_experts"]
        at = next(idx for idx, stage in enumerate(own) if stage.startswith("combine"))
        return (*own[:at], *self.stages, *own[at:])


class ChosenExpertKernels(_OwnExperts):
    """The whole layer on rows that are in no order of experts, each with choices among them."""

    def __init__(self, comm: Communicator, experts: Int4Experts) -> None:
        super().__init__(comm, experts)
        self._set_grids(layer_stages(self._staging, checks.MAX_ROWS))

    def apply(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_ws: torch.Tensor,
        start: Callable[[Sequence[str], Run], None],
    ) -> torch.Tensor:
        """Returns what fused_moe_apply() does, of this rank's experts. start: launches stages with what it is given.

        topk_ids: int32, as this rank counts its experts. The host looks at nothing in between.
        """
        sizes, tensors, out = call_of(x, topk_ids, topk_ws, self._w13, self._w2, detail=self.experts.detail)
        self._call = self._make_call(sizes, tensors)
        start(layer_stages(self._staging, sizes.num_rows), self._run_own)
        return out


def _prepared(weights: Weights) -> PreparedWeights:
    return weights if isinstance(weights, PreparedWeights) else prepare_weights(weights)


def _packed(weights: Weights) -> torch.Tensor:
    return restore_weights(weights) if isinstance(weights, PreparedWeights) else weights


def _moved(weights: Weights, device: str) -> Weights:
    """Returns weights on a device. Prepared ones are prepared for it anew: each has its own staging."""
    if not isinstance(weights, PreparedWeights):
        return weights.to(device)
    return prepare_weights(restore_weights(weights).to(device))


def check_place_for_experts(stages: Sequence[str]) -> None:
    """Raises BadInput unless has_place_for_experts()."""
    if not has_place_for_experts(stages):
        raise BadInput(
            "variant pipelined calls its experts inside its kernel, and takes no int4 experts; take overlapped"
        )


def has_place_for_experts(stages: Sequence[str]) -> bool:
    """Returns whether experts that are kernels of their own can run between these kernels of a variant."""
    return any(stage.startswith("combine") for stage in stages)


def draw_int4_experts(shape: MoeShape, intermediate: int, detail: int = 0) -> Int4Experts:
    """Returns the experts of a run, the same for every seed: all numbers and places, results about as large as x."""
    import torch

    generator = torch.Generator().manual_seed(shape.num_experts)

    def draw(channels: int, rows: int) -> torch.Tensor:
        size = (shape.num_experts, channels // 64, rows, 2)
        # A number of four bits is 4.6 from zero on average, root mean square; one of four is there.
        scale = torch.tensor(1 / (4.6 * (channels / 4) ** 0.5)).bfloat16().view(torch.int16)
        return torch.randint(0, 1 << 48, size, generator=generator) | int(scale) << 48

    return Int4Experts.of(draw(shape.hidden, 2 * intermediate), draw(intermediate, shape.hidden), detail)


def tensor_bytes(shape: MoeShape, intermediate: int, rows: ExpertRows) -> int:
    """Returns the bytes of the experts' weights, of those that a rank prepares, and of its rows between K2 and K4, with
    copies of others.
    """
    words = (shape.num_experts + shape.num_local_experts) * 3 * (shape.hidden // 64) * intermediate * 2
    num_rows = shape.num_ranks * shape.max_tokens * (shape.num_local_experts if rows == "regions" else shape.topk)
    return 8 * words + 2 * num_rows * (intermediate + (shape.hidden if rows == "copied" else 0))


def why_unsuitable(variant: str, stages: Mapping[str, tuple[str, ...]], shape: MoeShape, intermediate: int) -> str:
    """Returns why a run of the variant cannot have int4 experts; "" if it can.

    stages: variant -> its kernels.
    """
    takes = [name for name, kernels in stages.items() if has_place_for_experts(kernels)]
    if variant not in takes:
        return f"expert is int4_sparse; variant {variant} takes scale alone, int4_sparse goes with {', '.join(takes)}"
    if shape.dtype != "bf16":
        return f"dtype is {shape.dtype}; expert int4_sparse takes bf16"
    for name, size in (("hidden", shape.hidden), ("intermediate", intermediate)):
        if size == 0 or size % DIVISOR:
            return f"{name} is {size}; expert int4_sparse takes a multiple of {DIVISOR}"
    most = (checks.MAX_SHARED_BYTES - FACTS.shared_bytes(0)) // 16
    if max(shape.hidden, intermediate) > most:
        return f"hidden is {shape.hidden}, intermediate {intermediate}; expert int4_sparse takes at most {most}"
    return ""


EXPERTS = ExpertKind("int4_sparse", draw_int4_experts, why_unsuitable, tensor_bytes, compiled_part="gemm")

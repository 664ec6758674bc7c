"""The native kernels of int4 experts: the tensors of a call by address, and each stage as a launch on record."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekern.moe.calls.launches import describe
from tracekern.moe.calls.native import NativeFamily, native_family

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

FACTS = NativeFamily("gemm")
STAGINGS = ("direct", "pinned")
"""How the contract's words come to the multiplication. The results of all stagings are the same bits."""
PREPARED_STAGINGS = ("wide", "ring", "reg")
"""How prepared weights come to it: see tracekern/moe/gemm/prepared.py."""
SPLIT_STAGINGS = ("wide", "ring")
"""Those that compute experts with more than FACTS.few_tokens rows in a launch of their own, which comes first."""

Tensors = dict[str, "torch.Tensor | None"]
"""Name in the native Call -> tensor."""
_TENSORS = (
    "expert_ids",
    "abort",
    "x",
    "topk_ids",
    "topk_weights",
    "w13",
    "w2",
    "expert_offset",
    "row_counts",
    "tile_end",
    "tile_list",
    "tile_count",
    "inverse",
    "x_rows",
    "middle_rows",
    "result_rows",
    "out",
)
"""Names of the tensors of the native Call (GemmArgs in csrc/moe/gemm/layout.h)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of a call that its kernels get besides tensors; 0 where none of its stages reads it."""

    num_experts: int
    num_listed: int
    hidden: int = 0
    intermediate: int = 0
    num_tokens: int = 0
    topk: int = 0
    rows_per_expert: int = 0
    """Rows of an expert's region if rows are not packed; `row_counts` says how many are used."""
    num_rows: int = 0
    """Rows of all experts, those of all regions: SPLIT_STAGINGS lay out their tiles by it."""
    detail: int = 0
    """Every how many-th tile of K2 and K4 a capture gets step by step; 0: none."""


def product_stages(stage: str, staging: str, most_rows: int) -> tuple[str, ...]:
    """Returns the launches of K2 ("k2") or K4 ("k4"), in order. most_rows: of an expert, as far as the host knows."""
    if staging in SPLIT_STAGINGS and most_rows > FACTS.few_tokens:
        return (f"{stage}_many", stage)
    return (stage,)


def layer_stages(staging: str, most_rows: int) -> tuple[str, ...]:
    """Returns the kernels of a whole layer, in order. Arguments: see product_stages()."""
    products = (*product_stages("k2", staging, most_rows), *product_stages("k4", staging, most_rows))
    return ("layout", "permute", *products, "unpermute")


def tile_tensors(staging: str, num_listed: int, num_rows: int, like: torch.Tensor) -> Tensors:
    """Returns memory for the tiles of a call, which `layout` or `tiles` fill. like: a tensor on the device."""
    import torch

    def empty(*size: int) -> torch.Tensor:
        return like.new_empty(size, dtype=torch.int32)

    if staging not in SPLIT_STAGINGS:
        return {"tile_end": empty(num_listed + 1)}
    num_lists = FACTS.num_tile_lists  # an expert has one tile at most in each but the last
    num_entries = (num_lists - 1) * num_listed + num_rows // FACTS.open_list_rows
    return {"tile_list": empty(num_entries, 4), "tile_count": empty(num_lists)}


def launch(
    stages: Sequence[str],
    sizes: Sizes,
    tensors: Mapping[str, torch.Tensor | None],
    *,
    device: torch.device,
    staging: str = "direct",
    capture: Capture | None = None,
) -> None:
    """Starts stages one after the other on the current stream of `device`; on the CPU runs them.

    tensors: by name of _TENSORS, those that the stages use.
    """
    native = native_family("gemm", device.type)
    if device.type == "cpu":
        _launch(native, stages, make_call(native, sizes, tensors), sizes, 0, staging, capture)
        return
    import torch

    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        _launch(native, stages, make_call(native, sizes, tensors), sizes, stream, staging, capture)


def make_call(
    native: Any, sizes: Sizes, tensors: Mapping[str, torch.Tensor | None], places: dict[str, int] | None = None
) -> Any:
    """Returns a native Call of these tensors, and of what lies at other addresses. Both by name of _TENSORS."""
    known = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    return native.Call(**vars(sizes), **(dict.fromkeys(_TENSORS, 0) | known | (places or {})))


@functools.cache
def event_table(hidden: int, intermediate: int) -> str:
    """Returns the kernels' event table for captures. Settings have the names of `run moe`; a size of 0 is left out."""
    sizes = {name: size for name, size in (("hidden", hidden), ("intermediate", intermediate)) if size}
    return describe(FACTS.event_table(), {"expert": "int4_sparse", "dtype": "bf16"} | sizes)


def _launch(
    native: Any, stages: Sequence[str], call: Any, sizes: Sizes, stream: int, staging: str, capture: Capture | None
) -> None:
    for stage in stages:
        num_blocks, num_warps, num_recorded = native.grid(stage, staging, call)
        descriptor = 0
        if capture is not None:
            descriptor = capture.launch(
                stage,
                grid=num_blocks,
                warps=num_recorded,
                stream=stream,
                events=event_table(sizes.hidden, sizes.intermediate),
                roles=tuple(FACTS.roles),
            ).descriptor
        native.run(
            stage=stage,
            staging=staging,
            call=call,
            num_blocks=num_blocks,
            num_warps=num_warps,
            descriptor=descriptor,
            stream=stream,
        )

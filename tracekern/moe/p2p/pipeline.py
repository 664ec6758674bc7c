"""The P2P kernels as a call: dispatch, experts, combine over the ranks of one node, traced if a capture is given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tracekern.comm.ranks.group import Group
from tracekern.moe.calls.pipeline import Pipeline, choose_grid
from tracekern.moe.experts import Experts
from tracekern.moe.p2p.overlap import (
    OVERLAPPED,
    Overlap,
    Split,
    check_cells,
    destinations,
    num_exchange_blocks,
    num_overlapped,
)
from tracekern.moe.shape import MoeShape, check_range

_SEND_AND_RECEIVE = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
_WITH_EXPERTS = ("dispatch_send", "dispatch_recv", "scale_experts", "combine_send", "combine_recv")
STAGES: dict[str, tuple[str, ...]] = {
    "flag": _WITH_EXPERTS,
    "token": _WITH_EXPERTS,
    "fused": _SEND_AND_RECEIVE,
    "balanced": _SEND_AND_RECEIVE,
    "dedup": ("dispatch", "combine"),
    "reduce": ("dispatch", "combine"),
    "pipelined": ("dispatch_combine",),
    "overlapped": ("dispatch", "combine"),
}
"""Variant -> the kernels of one call, in order."""

FAULT_VALUES = {"counts": "token", "rank": "token"}
"""Channel -> what the values of its flags count."""
_ROWS = (
    "copy_token",
    "signal_token",
    "receive_token",
    "copy_row",
    "signal_row",
    "send_result",
    "signal_result",
    "send_partial",
    "signal_partial",
)
"""Events with one span for each row."""

MAX_PARTITIONS = 64
PARTITION_BYTES = 9_000_000
"""Bytes of a partition's rows for other ranks. For 16 to 8,192 tokens the resulting number of partitions is close to
the best (measured: benchmarks/moe.py --sweep)."""


class P2PPipeline(Pipeline):
    """Dispatch -> experts -> combine by stores into the peers' memory (csrc/moe/p2p)."""

    def __init__(
        self,
        group: Group,
        shape: MoeShape,
        variant: str,
        *,
        num_blocks: int = 0,
        warps_per_block: int = 0,
        num_sms: int = 0,
        backend: str = "cpu",
        partitions: int = 0,
        exchange_blocks: int = 0,
        stage_blocks: dict[str, int] | None = None,
        **how: Any,
    ) -> None:
        """variant: a key of STAGES.

        partitions: most partitions of a rank's tokens in `pipelined` and `overlapped`; two are in flight at a time. 0:
        as many as suit the shape and the grid. exchange_blocks: of dispatch and combine in `overlapped` while int4
        experts multiply, which have the other SMs of a GPU; 0: as many as suit. The rest: see Pipeline. Raises
        BadInput.
        """

        def choose() -> dict[str, Any]:
            grid = choose_grid(group, num_blocks, warps_per_block, num_sms, backend)
            return dataclasses.asdict(shape) | _choose(shape, variant, backend, grid, partitions, exchange_blocks)

        settings = group.agree("the making of a P2PPipeline", choose)
        asked = {"partitions": partitions, "exchange_blocks": exchange_blocks}
        super().__init__(
            "p2p",
            group,
            shape,
            variant,
            backend=backend,
            num_blocks=settings["num_blocks"],
            warps_per_block=settings["warps_per_block"],
            partitions=settings["partitions"],
            fault_values=FAULT_VALUES,
            stage_blocks=stage_blocks,
            settings={name: number for name, number in asked.items() if number},
            bytes_of=_bytes_of(shape),
            **how,
        )
        self._overlap: Overlap | None = None
        if variant == OVERLAPPED:
            self._set_overlap(settings["exchange_blocks"], stage_blocks or {})

    def _set_overlap(self, exchange_blocks: int, stage_blocks: dict[str, int]) -> None:
        experts, is_split = 0, int(self._native.num_partitions) > 1 and self.comm.device.backend == "cuda"
        if is_split:
            import torch

            present = torch.cuda.get_device_properties().multi_processor_count
            experts = max(1, present // self.comm.group.num_residents - exchange_blocks)
        self.options["exchange_blocks"] = exchange_blocks if is_split else 0
        self._overlap = Overlap(
            self.comm, self._native, self._launches, Split(self.grid, exchange_blocks, experts), stage_blocks
        )

    def _stages_with(self, experts: Experts) -> tuple[str, ...]:
        if self._overlap is None:
            return super()._stages_with(experts)
        return self._overlap.stages_with(experts, self._num_expert_rows)

    def _run(self, stages: Sequence[str], descriptors: Sequence[int], stream: int) -> None:
        run = super()._run if self._overlap is None else self._overlap.run
        run(stages, descriptors, stream)


def _choose(
    shape: MoeShape, variant: str, backend: str, grid: tuple[int, int], partitions: int, exchange_blocks: int
) -> dict[str, Any]:
    """Returns what was asked for, with what suits in the place of zeros. grid: blocks and warps. Raises BadInput."""
    blocks, warps = grid
    check_range("partitions", partitions, 0, MAX_PARTITIONS)
    check_range("exchange_blocks", exchange_blocks, 0, blocks)
    if variant == OVERLAPPED:
        partitions = partitions or num_overlapped(shape)
        check_cells(shape, partitions)
    else:
        partitions = partitions or num_partitions(shape, max(1, blocks - 1) * max(1, warps // 2))
    few = num_exchange_blocks(shape) if backend == "cuda" else blocks
    chosen = {"partitions": partitions, "exchange_blocks": exchange_blocks or min(few, blocks)}
    return {"num_blocks": blocks, "warps_per_block": warps, **chosen}


def _bytes_of(shape: MoeShape) -> dict[str, int | tuple[int, str]]:
    """Returns event -> bytes, for describe()."""
    return {
        **dict.fromkeys(_ROWS, shape.row_bytes),
        "expand_row": (shape.row_bytes, "experts"),
        "signal_rank": (shape.row_bytes, "tokens"),
    }


def num_partitions(shape: MoeShape, num_warps: int) -> int:
    """Returns the default number of partitions of a rank's tokens in the pipelined variant.

    num_warps: warps on the token's side of the kernel. Each handles one (token, rank) pair of a partition, or several.
    If a few warps have one pair more than the others, the others wait for them.
    """
    rows_each = destinations(shape) * (shape.num_ranks - 1) / shape.num_ranks  # for other ranks
    wanted = math.ceil(shape.max_tokens * rows_each * shape.row_bytes / PARTITION_BYTES)
    pairs_each = round(shape.max_tokens / max(1, wanted) * shape.num_ranks / num_warps)
    if wanted > 1 and pairs_each:
        wanted = math.ceil(shape.max_tokens / max(1, pairs_each * num_warps // shape.num_ranks))
    return min(max(1, wanted), MAX_PARTITIONS)

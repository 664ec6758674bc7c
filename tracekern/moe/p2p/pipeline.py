"""The P2P kernels as a call: dispatch, experts, combine over the ranks of one node, traced if a capture is given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tracekern import _C
from tracekern.comm.group import Group
from tracekern.moe.pipeline import Pipeline, choose_grid
from tracekern.moe.shape import MoeShape, check_range

STAGES: dict[str, tuple[str, ...]] = _C.families["p2p"].variants
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
"""Events whose spans are of a row each."""

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
        **how: Any,
    ) -> None:
        """variant: a key of STAGES.

        partitions: most partitions of a rank's tokens in the pipelined variant; two are in flight at a time. 0: as many
        as suit the shape and the grid. The rest: see Pipeline. Raises BadInput.
        """

        def choose() -> dict[str, Any]:
            blocks, warps = choose_grid(group, num_blocks, warps_per_block, num_sms, backend)
            check_range("partitions", partitions, 0, MAX_PARTITIONS)
            chosen = partitions or num_partitions(shape, max(1, blocks - 1) * max(1, warps // 2))
            return {**dataclasses.asdict(shape), "num_blocks": blocks, "warps_per_block": warps, "partitions": chosen}

        settings = group.agree("the making of a P2PPipeline", choose)
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
            settings={"partitions": partitions} if partitions else {},
            bytes_of={
                **dict.fromkeys(_ROWS, shape.row_bytes),
                "expand_row": (shape.row_bytes, "experts"),
                "signal_rank": (shape.row_bytes, "tokens"),
            },
            **how,
        )


def num_partitions(shape: MoeShape, num_warps: int) -> int:
    """Returns the default number of partitions of a rank's tokens in the pipelined variant.

    num_warps: warps on the token's side of the kernel. Each handles one (token, rank) pair of a partition, or several.
    If a few warps have one pair more than the others, the others wait for them.
    """
    # Expected number of other ranks that a token goes to if each choice is equally likely to be on any rank.
    rows_each = (shape.num_ranks - 1) * (1 - (1 - 1 / shape.num_ranks) ** shape.topk)
    wanted = math.ceil(shape.max_tokens * rows_each * shape.row_bytes / PARTITION_BYTES)
    pairs_each = round(shape.max_tokens / max(1, wanted) * shape.num_ranks / num_warps)
    if wanted > 1 and pairs_each:
        wanted = math.ceil(shape.max_tokens / max(1, pairs_each * num_warps // shape.num_ranks))
    return min(max(1, wanted), MAX_PARTITIONS)

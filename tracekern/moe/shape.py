"""The shape of a mixture-of-experts layer spread over ranks, checked once at the door."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from tracekern.comm.group import MAX_HEAP_RANKS
from tracekern.errors import BadInput

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element of each number type."""

MAX_TOKENS = 1 << 18
MAX_TOPK = 16
MAX_EXPERTS = 4096
MAX_PARTITIONS = 64
PARTITION_BYTES = 9_000_000
"""Of rows for other ranks, 24 us of NVLink. For 16 to 8,192 tokens the numbers of partitions that were tried next to
this one took at most 8 % longer than the best (2 and 4 H200, 2026-11-22, benchmarks/moe.py --sweep)."""


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """Raises BadInput for a number that is not between them."""
    if not isinstance(value, numbers.Integral):
        raise BadInput(f"{name} is {value!r}; wanted a whole number from {low} to {high}")
    if not low <= value <= high:
        raise BadInput(f"{name} is {value}; wanted {low} to {high}")


@dataclass(frozen=True)
class MoeShape:
    """The same on every rank. Raises BadInput when the numbers do not fit together."""

    num_ranks: int
    max_tokens: int
    """Of one rank; the ranks' real numbers may differ, and may be 0."""
    num_experts: int
    topk: int
    hidden: int
    dtype: str

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_ranks", 1, MAX_HEAP_RANKS),
            ("max_tokens", 1, MAX_TOKENS),
            ("num_experts", 1, MAX_EXPERTS),
            ("topk", 1, MAX_TOPK),
            ("hidden", 1, 1 << 20),
        ):
            check_range(name, getattr(self, name), low, high)
        if self.dtype not in DTYPES:
            raise BadInput(f"dtype is {self.dtype!r}; wanted one of {', '.join(DTYPES)}")
        if self.num_experts % self.num_ranks:
            next_multiple = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise BadInput(
                f"{self.num_experts} experts do not divide over {self.num_ranks} ranks; "
                f"take a multiple of {self.num_ranks}, such as {next_multiple}"
            )
        if self.topk > self.num_experts:
            raise BadInput(
                f"top-k {self.topk} of {self.num_experts} experts: a token cannot choose more than there are"
            )
        if self.max_tokens * self.topk >= 1 << 22:
            raise BadInput(
                f"{self.max_tokens} tokens x top-k {self.topk} are {self.max_tokens * self.topk} rows for one rank; "
                f"the slot field of the events holds less than {1 << 22}"
            )

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def row_bytes(self) -> int:
        return self.hidden * DTYPES[self.dtype]

    def num_partitions(self, num_warps: int) -> int:
        """Of a rank's tokens in the pipelined variant, unless another number is asked for.

        num_warps: on the token's side of the kernel. Each looks after a (token, rank) pair of a partition, or after
        several: where a few have one more than all others, these wait (4,096 tokens in 7 partitions of 586 took 401 us,
        in 8 of 512, with a pair for nearly each of 1,048 warps, 366; 2 H200, 2026-11-22).
        """
        # How many other ranks a token goes to when each choice is as likely to be at any rank.
        rows_each = (self.num_ranks - 1) * (1 - (1 - 1 / self.num_ranks) ** self.topk)
        wanted = math.ceil(self.max_tokens * rows_each * self.row_bytes / PARTITION_BYTES)
        pairs_each = round(self.max_tokens / max(1, wanted) * self.num_ranks / num_warps)
        if wanted > 1 and pairs_each:
            wanted = math.ceil(self.max_tokens / max(1, pairs_each * num_warps // self.num_ranks))
        return min(max(1, wanted), MAX_PARTITIONS)

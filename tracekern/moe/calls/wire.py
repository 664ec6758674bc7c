"""The bytes that a call has to send from rank to rank, and how long the wires between GPUs take for them at least."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WIRE_BYTES_PER_NS = 371.0
"""What stores to other GPUs reach in one direction, all at once: measured over NVLink 4 on H200, 132 blocks of 1,024
threads (benchmarks/links.py)."""


def count_rows(
    topk_idx: list[npt.NDArray[np.int32]], num_ranks: int, num_experts: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the rows from each rank to each, [source, rank], its own included: a token once, and once a choice.

    topk_idx: of each rank, [num_tokens, topk], experts of all ranks, -1 for none.
    """
    once = np.zeros((num_ranks, num_ranks), np.int64)
    each = np.zeros_like(once)
    for source, chosen in enumerate(topk_idx):
        ranks = np.where(chosen >= 0, chosen // (num_experts // num_ranks), -1)
        for peer in range(num_ranks):
            each[source, peer] = (ranks == peer).sum()
            once[source, peer] = (ranks == peer).any(axis=1).sum()
    return once, each


def busiest_bytes(rows: npt.NDArray[np.int64], row_bytes: int) -> int:
    """Returns the bytes of the busiest rank in its busier direction. rows: as count_rows() returns them."""
    between = rows * (1 - np.eye(len(rows), dtype=np.int64))
    return int(max(between.sum(0).max(), between.sum(1).max())) * row_bytes


def least_call_us(topk_idx: list[npt.NDArray[np.int32]], num_experts: int, row_bytes: int) -> float:
    """Returns how long the wires take at least for each token once to each rank that has experts of it, and back."""
    once, _ = count_rows(topk_idx, len(topk_idx), num_experts)
    return 2 * busiest_bytes(once, row_bytes) / WIRE_BYTES_PER_NS / 1e3

"""What a low latency dispatch must have received, found from the batches that all ranks drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tracekern.moe.low_latency.handle import Handle
from tracekern.moe.low_latency.reference import cast_to_fp8
from tracekern.moe.routing import Batch


@dataclass(frozen=True)
class Received:
    """The results of a dispatch on one rank, on the CPU."""

    values: torch.Tensor
    scales: torch.Tensor | None
    count: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor

    @classmethod
    def of(cls, recv_x: Any, recv_count: torch.Tensor, handle: Handle) -> Received:
        values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
        return cls(
            values.cpu(),
            None if scales is None else scales.cpu(),
            recv_count.cpu(),
            handle.packed_recv_src_info.cpu(),
            handle.packed_recv_layout_range.cpu(),
        )


def sent(batch: Batch, use_fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows that a rank sends, and their scales."""
    x = batch.x.cpu()
    return cast_to_fp8(x) if use_fp8 else (x, None)


def find_faults(received: Received, rank: int, batches: Sequence[Batch], num_experts: int) -> list[str]:
    """What is wrong with the rows that `rank` received; batches: of all ranks. Arrival order is free."""
    num_local = num_experts // len(batches)
    faults = []
    rows_of = [sent(batch, received.scales is not None) for batch in batches]
    chosen = [batch.topk_idx.cpu() for batch in batches]
    for local in range(num_local):
        expert, ranges = rank * num_local + local, []
        for source in range(len(batches)):
            begin, count = divmod(int(received.layout_range[local, source]), 1 << 32)
            ranges.append((begin, begin + count))
            wanted = (chosen[source] == expert).any(1).nonzero().flatten()
            tokens = received.src_info[local, begin : begin + count].long()
            where = f"rank {rank}, local expert {local}, source {source}"
            if not torch.equal(tokens.sort().values, wanted):
                faults.append(f"{where}: tokens {tokens.tolist()}, wanted {wanted.tolist()}")
                continue
            values, scales = rows_of[source]
            if not same_bits(received.values[local, begin : begin + count], values[tokens]):
                faults.append(f"{where}: other values")
            if scales is not None and not same_bits(
                received.scales[local, begin : begin + count],
                scales[tokens],  # type: ignore[index]
            ):
                faults.append(f"{where}: other scales")
        ends = sorted(ranges)
        gaps = [1 for (_, end), (begin, _) in zip(ends, ends[1:], strict=False) if end != begin]
        if gaps or ends[0][0] != 0 or ends[-1][1] != int(received.count[local]):
            faults.append(f"rank {rank}, local expert {local}: ranges {ranges} of {int(received.count[local])} rows")
    return faults


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return torch.equal(one.view(bits[one.element_size()]), other.view(bits[other.element_size()]))

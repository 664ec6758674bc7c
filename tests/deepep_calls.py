"""The value checks of DeepEP's own test of its low latency calls: the same calls and arguments, on any device."""

from __future__ import annotations

import random
from typing import Any

import torch

import tracekern.moe.low_latency as deep_ep

RANK_OFFSET = 128
"""Rows are of rank - 128: whole numbers above 256 are none in bf16."""
INT_MASK = (1 << 32) - 1


def cast_back(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp8 rows as bf16. scales: fp32, or packed exponents."""
    if scales.dtype == torch.int32:
        scales = (scales.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    groups = values.float().view(values.shape[0], -1, 128) * scales.view(values.shape[0], -1, 1)
    return groups.view(values.shape).to(torch.bfloat16)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 less the similarity of two tensors, which is 1 where they are equal."""
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


class Case:
    """Tokens, choices and weights of one rank."""

    def __init__(self, group: Any, num_tokens: int, hidden: int, num_experts: int, topk: int, device: str) -> None:
        self.rank, self.num_ranks = group.rank, group.num_ranks
        self.num_tokens, self.hidden, self.num_experts = num_tokens, hidden, num_experts
        self.device = device
        generator, choices = torch.Generator().manual_seed(1 + self.rank), random.Random(1 + self.rank)
        self.x = torch.ones((num_tokens, hidden), dtype=torch.bfloat16) * (self.rank - RANK_OFFSET)
        self.x[:, -128:] = torch.arange(num_tokens).to(torch.bfloat16).view(-1, 1)
        self.noise = torch.randn((num_tokens, hidden), generator=generator, dtype=torch.bfloat16) * 0.1
        scores = torch.randn((num_tokens, num_experts), generator=generator).abs() + 1
        self.topk_idx = torch.topk(scores, topk, dim=-1, largest=True, sorted=True)[1]
        self.topk_weights = torch.randn((num_tokens, topk), generator=generator).abs()
        for _ in range(10):
            self.topk_idx[choices.randint(0, num_tokens - 1), choices.randint(0, topk - 1)] = -1
        self.all_topk_idx = torch.tensor(group.all_gather(self.topk_idx.tolist())).to(device)
        for name in ("x", "noise", "topk_idx", "topk_weights"):
            setattr(self, name, getattr(self, name).to(device))


def check_received(
    case: Case, recv_x: torch.Tensor, count: torch.Tensor, handle: Any, local: int, round_scale: bool
) -> None:
    """Rows of rank - 128, in each the token's index in the last 128 columns."""
    layout_range, num_valid = handle[1][local], int(count[local])
    expert = case.rank * (case.num_experts // case.num_ranks) + local
    recv_x, src_info = recv_x[:num_valid], handle[0][local][:num_valid]
    least = recv_x[:, :-128].amin(dim=-1)
    assert torch.equal(least, recv_x[:, :-128].amax(dim=-1))
    if round_scale:
        assert difference(recv_x[:, -1], src_info.view(-1)) < 0.007
        return
    assert (recv_x[:, -128:] - src_info.view(-1, 1) % case.num_tokens).sum().item() == 0
    for source in range(case.num_ranks):
        wanted = int((case.all_topk_idx[source] == expert).sum())
        assert int((least == source - RANK_OFFSET).sum()) == wanted == int(layout_range[source] & INT_MASK)


def dispatch(
    case: Case, buffer: deep_ep.Buffer, x: torch.Tensor, times: int, hooked: bool, how: dict[str, bool]
) -> Any:
    """Dispatches; the handle of all but the last time is dropped. Returns recv_x, count and handle."""
    for _ in range(times):
        stats = torch.zeros(case.num_experts // case.num_ranks, dtype=torch.int, device=case.device)
        recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
            x,
            case.topk_idx,
            case.num_tokens,
            case.num_experts,
            **how,
            cumulative_local_expert_recv_stats=stats,
            async_finish=not hooked,
            return_recv_hook=hooked,
        )
        hook() if hooked else event.current_stream_wait()
    assert torch.equal(stats, count)
    return recv_x, count, handle


def check_dispatch(case: Case, recv_x: Any, count: torch.Tensor, handle: Any, is_noise: bool, rounded: bool) -> None:
    for local in range(case.num_experts // case.num_ranks):
        expert = case.rank * (case.num_experts // case.num_ranks) + local
        rows = cast_back(recv_x[0][local], recv_x[1][local]) if isinstance(recv_x, tuple) else recv_x[local]
        wanted = int((case.all_topk_idx == expert).sum())
        assert int(count[local]) == int((handle[1][local] & INT_MASK).sum()) == wanted
        if not is_noise:
            check_received(case, rows, count, handle, local, rounded)


def check_combine(
    case: Case, buffer: deep_ep.Buffer, x: torch.Tensor, rows: torch.Tensor, handle: Any, hooked: bool, allowed: float
) -> None:
    """Combines the handle twice, the second time out of the buffer's own memory."""
    weight = case.topk_weights.masked_fill(case.topk_idx == -1, 0).sum(dim=1).view(-1, 1)
    for zero_copy in (False, True):
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
            rows = torch.full_like(rows, float("nan"))
        out = torch.empty((case.num_tokens, case.hidden), dtype=torch.bfloat16, device=case.device)
        combined, event, hook = buffer.low_latency_combine(
            rows,
            case.topk_idx,
            case.topk_weights,
            handle,
            use_logfmt=False,
            async_finish=not hooked,
            zero_copy=zero_copy,
            return_recv_hook=hooked,
            out=out,
        )
        hook() if hooked else event.current_stream_wait()
        assert not torch.isnan(combined).any()
        found = difference(x * weight, combined)
        assert found < allowed, (found, zero_copy, hooked)


def ways_of_casting() -> list[dict[str, bool]]:
    rounded = [(False, False), (True, False), (True, True)]
    fp8 = [{"use_fp8": True, "round_scale": scale, "use_ue8m0": ue8m0} for scale, ue8m0 in rounded]
    return [{"use_fp8": False}, *fp8]


def run_deepep_calls(group: Any, process_group: Any, device: str, sizes: tuple[int, int, int, int]) -> int:
    """sizes: tokens, hidden, experts, top-k. Returns how many ways of calling were right."""
    num_tokens, hidden, num_experts, topk = sizes
    case = Case(group, num_tokens, hidden, num_experts, topk, device)
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(num_tokens, hidden, group.num_ranks, num_experts)
    buffer = deep_ep.Buffer(
        process_group,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_experts // group.num_ranks,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
    )
    num_times = 0
    for x in (case.x, case.noise):
        for hooked in (False, True):
            for how in ways_of_casting():
                num_times += 1
                recv_x, count, handle = dispatch(case, buffer, x, num_times % 2 + 1, hooked, how)
                if how["use_fp8"]:
                    recv_x = recv_x[0], recv_x[1].contiguous()
                    flat = recv_x[0].view(-1, hidden), recv_x[1].view(-1, recv_x[1].shape[-1])
                    rows = cast_back(*flat).view(recv_x[0].shape)
                else:
                    rows = recv_x.clone()
                check_dispatch(case, recv_x, count, handle, x is case.noise, how.get("round_scale", False))
                allowed = 7e-4 if how["use_fp8"] else 1e-5
                check_combine(case, buffer, x, rows, handle if num_times % 2 else tuple(handle), hooked, allowed)
    buffer.destroy()
    return num_times

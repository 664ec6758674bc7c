"""The value checks of DeepEP's own tests of dispatch and combine, between nodes and within one: the same calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepep_calls import cast_back, difference

import tracekern.moe.two_hop as deep_ep
from tracekern.comm.ranks.group import Group

TOKENS, HIDDEN, TOPK, EXPERTS_EACH = 40, 256, 4, 3


class Case:
    """Tokens, choices and weights of one rank, and what all ranks chose."""

    def __init__(self, group: Group) -> None:
        self.rank, self.num_ranks = group.rank, group.num_ranks
        self.num_experts = EXPERTS_EACH * self.num_ranks
        draw = torch.Generator().manual_seed(1 + self.rank)
        self.x = torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16) * self.rank
        self.noise = torch.randn((TOKENS, HIDDEN), generator=draw, dtype=torch.bfloat16)
        scores = torch.randn((TOKENS, self.num_experts), generator=draw).abs() + 1
        self.topk_idx = torch.topk(scores, TOPK, dim=-1, largest=True, sorted=False)[1]
        self.topk_weights = torch.ones((TOKENS, TOPK)) * self.rank
        self.noise_weights = torch.randn((TOKENS, TOPK), generator=draw)
        every = torch.tensor(group.all_gather(self.topk_idx.tolist()))
        self.num_per_expert = every.flatten().bincount(minlength=self.num_experts)
        ranks = every // EXPERTS_EACH
        self.num_per_rank = torch.stack([(ranks == rank).any(2).sum() for rank in range(self.num_ranks)])

    def as_fp8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x cast as DeepEP's test casts it: a scale for each 128 values."""
        groups = self.x.float().view(TOKENS, -1, 128)
        amax = groups.abs().amax(2, keepdim=True).clamp(1e-4)
        return (groups * (448 / amax)).to(torch.float8_e4m3fn).view(TOKENS, HIDDEN), (amax / 448).squeeze(2)


def check_rows(recv_x: torch.Tensor, prefix_sum: torch.Tensor) -> None:
    """Each row holds the rank it came from, rank by rank."""
    assert torch.equal(recv_x.amin(1), recv_x.amax(1))
    begin = 0
    for rank, end in enumerate(prefix_sum.tolist()):
        assert (recv_x[begin:end] - rank).abs().sum() == 0
        begin = end


def check_choices(
    case: Case, recv_topk_idx: torch.Tensor, recv_topk_weights: torch.Tensor, of_experts: list[int]
) -> None:
    assert ((recv_topk_idx == -1) | ((recv_topk_idx >= 0) & (recv_topk_idx < EXPERTS_EACH))).all()
    assert [int((recv_topk_idx == expert).sum()) for expert in range(EXPERTS_EACH)] == of_experts
    assert recv_topk_weights[recv_topk_idx == -1].abs().sum() == 0


def check_combine(case: Case, buffer: Any, recv_x: torch.Tensor, handle: Any, weights: Any, x: Any, how: Any) -> None:
    is_noise = x is case.noise
    bias = torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16), torch.full((TOKENS, HIDDEN), 0.5, dtype=torch.bfloat16)
    given = {} if weights is None else {"topk_weights": weights}
    combined, combined_weights, event = buffer.combine(x=recv_x, bias=bias, handle=handle, **given, **how)
    event.current_stream_wait()
    copies = (case.topk_idx // EXPERTS_EACH).sort(1).values.diff(dim=1).ne(0).sum(1) + 1
    found = (combined.float() - bias[0].float() - bias[1].float()) / copies.unsqueeze(1)
    assert difference(found, case.noise if is_noise else case.x) < 5e-6
    if weights is not None:
        wanted = case.noise_weights if is_noise else case.topk_weights
        assert difference(combined_weights, wanted) < 1e-9


def run_calls(group: Group, num_nodes: int) -> int:
    case, config = Case(group), deep_ep.Config(4, 4, 16, 4, 16)
    buffer = deep_ep.Buffer(group, 1 << 22, 1 << 22, num_nodes=num_nodes, num_max_tokens_per_rank=TOKENS, backend="cpu")
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        case.topk_idx, case.num_experts, previous_event=buffer.capture(), async_finish=True
    )
    event.current_stream_wait()
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    if num_nodes > 1:
        layout["num_tokens_per_rdma_rank"] = per_node
    num_calls = 0
    for has_event in (False, True):
        for async_mode in (False, True):
            for x in (case.noise, case.x, case.as_fp8()):
                for with_topk in (False, True):
                    how: dict[str, Any] = {"config": config, "async_finish": async_mode}
                    if has_event:
                        how["previous_event"] = buffer.capture()
                    weights = case.noise_weights if x is case.noise else case.topk_weights
                    choices = {"topk_idx": case.topk_idx, "topk_weights": weights} if with_topk else {}
                    recv_x, idx, recv_weights, of_experts, handle, event = buffer.dispatch(
                        x=x, **layout, **choices, **how
                    )
                    event.current_stream_wait()
                    rows = cast_back(*recv_x) if isinstance(recv_x, tuple) else recv_x
                    assert len(rows) == case.num_per_rank[case.rank]
                    own = slice(case.rank * EXPERTS_EACH, (case.rank + 1) * EXPERTS_EACH)
                    assert of_experts == case.num_per_expert[own].tolist()
                    if x is not case.noise:
                        check_rows(rows, handle[-4])
                    if with_topk:
                        check_choices(case, idx, recv_weights, of_experts)
                    else:
                        again, *_, event = buffer.dispatch(x=x, handle=handle, **how)
                        event.current_stream_wait()
                        again = cast_back(*again) if isinstance(again, tuple) else again
                        assert torch.equal(again, rows)
                    check_combine(case, buffer, rows, handle, recv_weights, x, how)
                    num_calls += 1
    buffer.destroy()
    return num_calls


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(4, 2), (4, 1)], ids=["internode", "intranode"])
def test_its_own_test_is_passed(pools, num_ranks, num_nodes):
    assert pools(num_ranks).call(run_calls, num_nodes) == [24] * num_ranks

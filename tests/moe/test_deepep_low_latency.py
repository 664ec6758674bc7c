"""Programs written for DeepEP's low latency Buffer run on ours: its own test, and what its users do beside that."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from deepep_calls import run_deepep_calls

import tracekern.moe.low_latency as deep_ep
from tracekern.comm.ranks.group import Group
from tracekern.moe.low_latency.reference import cast_to_fp8, dequantise
from tracekern.moe.low_latency.utils import EventHandle, EventOverlap


def deepep_calls(group: Group) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        right = run_deepep_calls(group, dist.group.WORLD, "cpu", (12, 1024, 8, 4))
    return right, [str(warning.message) for warning in told]


def test_its_own_test_is_passed(pools):
    for right, told in pools(4).call(deepep_calls):
        assert right == 16
        assert told == ["num_qps_per_rank: no meaning here, where ranks write to each other's memory; accepted"]
    assert all(told == [] for _, told in pools(4).call(deepep_calls)), "said once"


def calls_of_a_half(group: Group) -> int:
    """Ranks 0, 2 and ranks 1, 3 are groups of their own, at the same time."""
    halves = [dist.new_group([half, half + 2], backend="gloo") for half in (0, 1)]
    own = halves[group.rank % 2]
    return run_deepep_calls(Group.of(own), own, "cpu", (7, 1024, 4, 2))


def test_some_of_torchs_ranks_are_a_group(pools):
    assert pools(4).call(calls_of_a_half) == [16] * 4


def casts(group: Group) -> list[str]:
    """What one rank receives of itself, in each way of casting, beside plain torch."""
    x = torch.randn((6, 1024), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1] = 0
    x[2, :128] = 448 * 2.0**3
    ids = torch.zeros((6, 1), dtype=torch.int64)
    buffer = deep_ep.Buffer(group, num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(6, 1024, 1, 1))
    faults = []
    for round_scale, use_ue8m0 in ((False, False), (True, False), (True, True)):
        how = {"round_scale": round_scale, "use_ue8m0": use_ue8m0}
        (values, scales), _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 6, 1, **how)
        order = handle[0][0].long()
        wanted, wanted_scales = cast_to_fp8(x, round_scale)
        if not torch.equal(values[0].view(torch.uint8), wanted[order].view(torch.uint8)):
            faults.append(f"values {how}")
        if use_ue8m0:
            exponents = scales[0].contiguous().view(torch.uint8)
            scales = (exponents.to(torch.int32) << 23).view(torch.float32).unsqueeze(0)
        if not torch.equal(scales[0], wanted_scales[order]):
            faults.append(f"scales {how}")
        if not torch.equal(dequantise(values[0], scales[0]), dequantise(wanted, wanted_scales)[order]):
            faults.append(f"rows {how}")
    return faults


def test_scales_have_the_bits_of_deepep(pools):
    """a * (1 / 448), or the least power of two that is not below, of which ue8m0 is the exponent."""
    assert pools(1).call(casts) == [[]]


def statistics(group: Group) -> tuple[list[int], list[int], list[int]]:
    buffer = deep_ep.Buffer(group, num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 512, 2, 4))
    x, weights = torch.ones((4, 512), dtype=torch.bfloat16), torch.ones((4, 2))
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, -1]])
    received = torch.zeros(2, dtype=torch.int32)
    waited, waited_again = (torch.zeros(2, dtype=torch.int64) for _ in range(2))
    for _ in range(3):
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, 4, 4, received, dispatch_wait_recv_cost_stats=waited, use_fp8=False
        )
        group.barrier()
        if group.rank == 1:
            torch.ones(1 << 22).sum()
        buffer.low_latency_combine(recv_x, ids, weights, handle, combine_wait_recv_cost_stats=waited_again)
    return received.tolist(), waited.tolist(), waited_again.tolist()


def test_statistics_add_up(pools):
    for rank, (received, waited, waited_again) in enumerate(pools(2).call(statistics)):
        assert received == [[3 * 2 * 4, 3 * 2], [3 * 2, 3 * 2]][rank]
        assert min(waited) > 0
        assert sum(waited_again) > 0


def test_an_event_may_be_waited_for_in_any_way():
    with EventOverlap(EventHandle(), (torch.ones(1),)) as overlap:
        assert len(overlap.extra_tensors) == 1
    deep_ep.Buffer.capture().current_stream_wait()
    EventOverlap().current_stream_wait()

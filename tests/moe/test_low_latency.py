"""Low latency dispatch and combine on real rank processes: launch arithmetic, rows, results, handles, bad input."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from low_latency_check import Received, find_faults, same_bits
from rank_pool import RankPool

import tracekern
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.pipeline import LowLatencyPipeline
from tracekern.moe.low_latency.reference import cast_to_fp8, dequantise, low_latency_reference
from tracekern.moe.low_latency.settings import FACTS, LaunchShape
from tracekern.moe.routing import Batch
from tracekern.moe.shape import MAX_TOPK, MoeShape
from tracekern.timeline.model import Timeline, field_values

# ---- launch arithmetic and layout ----


@pytest.mark.parametrize(
    ("num_experts", "num_device_sms", "num_max_warp_groups", "wanted"),
    [
        (256, 132, 32, (2, 16, 128)),
        (288, 132, 32, (3, 10, 96)),
        (288, 304, 16, (1, 16, 288)),
        (289, 132, 32, (3, 10, 97)),
        (8, 1, 32, (8, 4, 1)),
        (256, 16, 32, (8, 2, 32)),  # a rank of eight on one GPU: two blocks an SM
        (15, 1, 32, (8, 2, 2)),
    ],
)
def test_launch_shape(num_experts, num_device_sms, num_max_warp_groups, wanted):
    shape = LaunchShape.of(num_experts, num_device_sms, num_max_warp_groups)
    assert (shape.num_warp_groups, shape.num_warps_per_group, shape.num_sms) == wanted
    assert shape.num_warps == wanted[0] * wanted[1] <= num_max_warp_groups


def test_288_experts_take_960_threads():
    assert LaunchShape.of(288, 132, 32).num_warps * 32 == 960


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((29, 1, 64), "29 experts on 1 SMs are 29 warp groups an SM, at most 28 have a barrier"),
        ((17, 1, 32), "17 experts on 1 SMs are 17 warp groups an SM, which leaves each fewer than 2 of 32 warps"),
        ((9, 1, 16), "9 experts on 1 SMs are 9 warp groups an SM, which leaves each fewer than 2 of 16 warps"),
    ],
)
def test_a_block_has_no_room_for_more_groups(arguments, told):
    with pytest.raises(BadInput, match=re.escape(told)):
        LaunchShape.of(*arguments)


def test_groups_cover_every_pair_once():
    """9 local experts on 32 ranks: 288 pairs, as in docs/low_latency.md."""
    shape = LaunchShape.of(288, 132, 32)
    responsible = {}
    for sm_id in range(shape.num_sms):
        for warp_id in range(shape.num_warps):
            index = FACTS.responsible_expert_idx(sm_id, warp_id, shape.num_warp_groups, shape.num_warps_per_group)
            responsible.setdefault(index, []).append(warp_id % shape.num_warps_per_group)
    assert sorted(responsible) == list(range(288))
    assert all(sub_warps == list(range(10)) for sub_warps in responsible.values())
    pairs = [FACTS.expert_pair(index, 9) for index in range(288)]
    assert [pairs[index] for index in (0, 8, 9, 287)] == [(0, 0), (0, 8), (1, 0), (31, 8)]
    assert len(set(pairs)) == 288


def test_message_and_heap_sizes():
    assert (FACTS.message_bytes(7168, True), FACTS.message_bytes(7168, False)) == (7408, 14352)
    receive_bytes = 256 * 128 * 14464  # messages in whole lines of 128 bytes
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert hint > 2 * (receive_bytes + 256 * 128 * 14336)
    assert hint < 2 * (receive_bytes + 256 * 128 * 14336) * 1.002


# ---- what is cast ----


def test_the_oracle_of_fp8_is_what_the_issue_says():
    x = torch.randn(3, 256).to(torch.bfloat16)
    x[1] = 0
    x[2, 128:] = 1e-6
    values, scales = cast_to_fp8(x)
    group = x[0, :128].float()
    inverse = 1 / torch.tensor(448.0)
    assert scales[0, 0] == group.abs().max() * inverse
    assert scales[1].tolist() == scales[2, 1:].tolist() * 2 == [torch.tensor(1e-4) * inverse] * 2
    assert (dequantise(values, scales)[0].float() - x[0].float()).abs().max() <= x[0].float().abs().max() / 14


def test_a_nan_leaves_its_neighbours_alone_and_an_infinity_does_not():
    x = torch.randn(1, 384).to(torch.bfloat16)
    clean = x.clone()
    clean[0, [3, 200]] = 0
    x[0, 3], x[0, 200], x[0, 300] = math.nan, -math.nan, -math.inf
    values, scales = cast_to_fp8(x)
    wanted, wanted_scales = cast_to_fp8(clean)
    bits, wanted_bits = values.view(torch.uint8)[0], wanted.view(torch.uint8)[0]
    assert bits[[3, 200, 300]].tolist() == [0x7F] * 3
    bits[[3, 200]] = 0
    assert torch.equal(bits[:256], wanted_bits[:256])
    assert torch.equal(scales[0, :2], wanted_scales[0, :2])
    assert scales[0, 2] == math.inf
    assert sorted(set((bits[256:] & 0x7F).tolist())) == [0, 0x7F]


# ---- calls ----


def make_buffer(group: Group, tokens: int, hidden: int, experts: int, **how) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, group.num_ranks, experts)
    return Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", **how)


def draw(rank: int, num_tokens: int, hidden: int, experts: int, topk: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    topk_idx = torch.rand((num_tokens, experts), generator=generator).argsort(dim=1)[:, :topk].contiguous()
    x = torch.randn((num_tokens, hidden), generator=generator).to(torch.bfloat16)
    return Batch(x, topk_idx, torch.rand((num_tokens, topk), generator=generator))


def expert_rows(recv_x, experts: int, group: Group) -> torch.Tensor:
    """What the experts make of the rows, rows that hold nothing included."""
    rows = dequantise(*recv_x) if isinstance(recv_x, tuple) else recv_x
    num_local = experts // group.num_ranks
    scale = (1.0 + torch.arange(experts) / experts)[group.rank * num_local :][:num_local, None, None]
    return (rows.float() * scale).to(torch.bfloat16)


def call_of_most_choices(group: Group) -> bool:
    shape = shape_of(group, 4, 20, MAX_TOPK, 128)
    batch, experts = draw(0, 4, 128, 20, MAX_TOPK), draw_experts(shape)
    out = LowLatencyPipeline(group, shape)(batch.x, batch.topk_idx, batch.topk_weights, experts)
    return same_bits(out, low_latency_reference(batch, experts, use_fp8=True))


def dispatch_what_is_no_number(group: Group) -> list[str]:
    """NaNs of both signs alone in a group of 128, beside each other, as all of a group, and infinities."""
    batch = draw(0, 4, 1024, 8, 3)
    for place, number in ((5, math.nan), (140, -math.nan), (141, math.nan), (260, math.inf), (400, -math.inf)):
        batch.x[0, place] = number
    batch.x[1, 128:256] = math.nan
    batch.x[2, 0], batch.x[2, 1] = math.nan, math.inf
    buffer = make_buffer(group, 4, 1024, 8)
    recv_x, count, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, 4, 8, use_fp8=True)
    return find_faults(Received.of(recv_x, count, handle), 0, [batch], 8)


def shape_of(group: Group, tokens: int, experts: int, topk: int, hidden: int) -> MoeShape:
    return MoeShape(group.num_ranks, tokens, experts, topk, hidden, "bf16")


def one_call(group: Group, batches: list[Batch], experts: int, use_fp8: bool, with_hooks: bool) -> list[str]:
    """On one rank: what is wrong with a call, whose experts torch computes."""
    own, hidden = batches[group.rank], batches[0].x.shape[1]
    tokens = max(1, *(batch.num_tokens for batch in batches))
    buffer = make_buffer(group, tokens, hidden, experts)
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
        own.x, own.topk_idx, tokens, experts, use_fp8=use_fp8, return_recv_hook=with_hooks
    )
    if with_hooks:
        hook()
    event.current_stream_wait()
    faults = find_faults(Received.of(recv_x, count, handle), group.rank, batches, experts)
    out, _, hook = buffer.low_latency_combine(
        expert_rows(recv_x, experts, group), own.topk_idx, own.topk_weights, handle, return_recv_hook=with_hooks
    )
    if with_hooks:
        hook()
    shape = shape_of(group, tokens, experts, own.topk_idx.shape[1], hidden)
    wanted = low_latency_reference(own, draw_experts(shape), use_fp8)
    buffer.destroy()
    return faults + ([] if same_bits(out, wanted) else ["another result"])


@pytest.mark.parametrize("with_hooks", [False, True], ids=["fused", "hooks"])
@pytest.mark.parametrize("use_fp8", [True, False], ids=["fp8", "bf16"])
def test_a_call_is_the_reference(pools, use_fp8, with_hooks):
    batches = [draw(rank, 5 * rank, 512, 12, 4) for rank in range(4)]
    batches[2].topk_idx[3] = -1
    assert pools(4).call(one_call, batches, 12, use_fp8, with_hooks) == [[]] * 4


def test_a_call_of_the_most_choices_is_the_reference(pools):
    assert pools(1).call(call_of_most_choices) == [True]


def test_what_is_no_number_is_cast_as_the_reference_does(pools):
    assert pools(1).call(dispatch_what_is_no_number) == [[]]


def test_all_tokens_to_one_expert(pools):
    batches = [draw(rank, 9, 512, 8, 1) for rank in range(4)]
    for batch in batches:
        batch.topk_idx[:] = 5
    assert pools(4).call(one_call, batches, 8, True, False) == [[]] * 4


def test_289_experts_leave_groups_idle(pools):
    batches = [draw(0, 4, 512, 289, 4)]
    assert LaunchShape.of(289, 37, 16).num_sms * 8 > 289
    assert pools(1).call(one_call, batches, 289, True, False) == [[]]


@pytest.mark.rotates
@pytest.mark.parametrize("num_ranks", [12, pytest.param(32, marks=pytest.mark.soak)])
def test_many_tiny_ranks(num_ranks):
    batches = [draw(rank, 2, 512, num_ranks, 3) for rank in range(num_ranks)]
    pool = RankPool(num_ranks)
    try:
        assert pool.call(one_call, batches, num_ranks, True, False) == [[]] * num_ranks
    finally:
        pool.close()


# ---- the tables of docs/low_latency.md, in a trace ----

SENT = {2: 8, 0: 5, 5: 3, 1: 4, 4: 30}
"""Rank -> tokens for the expert of rank 3, in the order in which they arrive."""


def receive_in_order(group: Group, directory: str) -> None:
    buffer = make_buffer(group, 30, 512, 6, num_sms=2, num_max_warp_groups=30)
    num_tokens = SENT.get(group.rank, 0)
    x = torch.ones((num_tokens, 512), dtype=torch.bfloat16)
    topk_idx = torch.full((num_tokens, 1), 3, dtype=torch.int32)
    buffer.clean_low_latency_buffer(30, 512, 6)
    assert (buffer.launch_shape.num_warp_groups, buffer.launch_shape.num_warps_per_group) == (3, 10)
    with tracekern.capture(directory, device=buffer.comm.device) as session:
        buffer.late_us = 200_000 * list(SENT).index(group.rank) if group.rank in SENT else 0
        dispatched = buffer.low_latency_dispatch(
            x, topk_idx, 30, 6, use_fp8=False, return_recv_hook=True, capture=session
        )
        hook = dispatched[-1]
        assert hook is not None
        hook()


@pytest.fixture(scope="module")
def received_in_order(pools, tmp_path_factory) -> Timeline:
    directory = tmp_path_factory.mktemp("order") / "capture"
    pools(6).call(receive_in_order, str(directory))
    return tracekern.load(directory)


def spans_of(timeline: Timeline, name: str, rank: int) -> list[dict[str, int]]:
    """Fields of the event's spans on a rank in the order of their begin, and the warp of each."""
    number, event = next((idx, event) for idx, event in enumerate(timeline.events) if event.name == name)
    spans = timeline.spans
    rows = [row for row in range(len(spans)) if spans.event[row] == number]
    rows = [row for row in rows if timeline.tracks[int(spans.track[row])].rank == rank]
    names = [field.name for field in (*event.begin_fields, *event.end_fields)]
    return [
        {field: int(field_values(event, field, spans, [row])[0]) for field in names}  # type: ignore[index]
        | {"warp": timeline.tracks[int(spans.track[row])].warp}
        for row in sorted(rows, key=lambda row: int(spans.start[row]))
    ]


def test_rows_are_claimed_in_the_order_of_arrival(received_in_order):
    claimed = {(span["src_rank"], span["begin"]) for span in spans_of(received_in_order, "wait_group", 3)}
    assert claimed >= set(zip(SENT, (0, 8, 13, 16, 20), strict=True))
    assert len(claimed) == 6  # all sub-warps of a group are told the same
    counted = {span["peer"]: span["tokens"] for span in spans_of(received_in_order, "wait_count", 3)}
    assert counted == {**SENT, 3: 0}


def test_a_warp_group_waits_for_the_sub_warp_that_waits_for_a_late_rank(received_in_order):
    timeline, waits = received_in_order, analyze_waits(received_in_order)
    (event,) = (event for event in timeline.events if event.name == "wait_group")
    mine = np.flatnonzero(np.isin(waits.row, timeline.rows_of("wait_group")) & (waits.rank == 3))
    mine = mine[field_values(event, "src_rank", timeline.spans, waits.row[mine]) == 4]
    sub_warps, last = (
        [timeline.tracks[track].sub_warp for track in timeline.spans.track[rows[mine]].tolist()]
        for rows in (waits.row, waits.last_arrival)
    )
    assert sorted(sub_warps) == list(range(10))
    assert set(last) == {1}
    assert ((waits.late_ns[mine] > 0) == (np.array(sub_warps) != 1)).all()


def test_sub_warps_share_a_pairs_tokens(received_in_order):
    """30 tokens on 10 sub-warps: the first copies 0, 10 and 20, and so on."""
    copied: dict[int, list[int]] = {}
    for span in spans_of(received_in_order, "copy_token", 3):
        if span["src_rank"] == 4:
            assert span["local_expert"] == 0
            copied.setdefault(span["warp"] % 10, []).append(span["slot"])
    assert copied == {sub_warp: [sub_warp, sub_warp + 10, sub_warp + 20] for sub_warp in range(10)}
    tokens = [span["token"] for span in spans_of(received_in_order, "copy_token", 3) if span["src_rank"] == 4]
    assert sorted(tokens) == list(range(30))


# ---- handles ----


def two_of_three(group: Group) -> list[str]:
    """Dispatches two: the next is refused until the first is combined, whose slot it takes."""
    buffer = make_buffer(group, 8, 512, 4)
    batch = draw(group.rank, 6, 512, 4, 2)

    def dispatch():
        return buffer.low_latency_dispatch(batch.x, batch.topk_idx, 8, 4, use_fp8=False)

    def combine(call) -> torch.Tensor:
        rows = expert_rows(call[0], 4, group)
        return buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, call[2])[0]

    told = []
    first, second = dispatch(), dispatch()
    with pytest.raises(BadInput) as refused:
        dispatch()
    told.append(str(refused.value))
    outs = [combine(second)]
    with pytest.raises(BadInput) as refused:
        dispatch()
    assert str(refused.value) == told[0]
    outs.append(combine(first))
    third = dispatch()
    outs.append(combine(third))
    with pytest.raises(BadInput) as refused:
        combine(first)
    told.append(str(refused.value))
    wanted = low_latency_reference(batch, draw_experts(shape_of(group, 8, 4, 2, 512)), False)
    told += [f"out {i} differs" for i, out in enumerate(outs) if not same_bits(out, wanted)]
    for _ in range(5):  # dropped without a combine
        call = dispatch()
    combine(call)
    last = dispatch()
    buffer.clean_low_latency_buffer(8, 512, 4)
    with pytest.raises(BadInput) as refused:
        combine(last)
    told.append(str(refused.value))
    return told


def forgotten_hooks(group: Group) -> list[str]:
    """A hook that nothing refers to any more still holds the slot, that of a dispatch and that of a combine."""
    buffer = make_buffer(group, 8, 512, 4)
    batch, told = draw(group.rank, 6, 512, 4, 2), []

    def dispatch(with_hook: bool):
        return buffer.low_latency_dispatch(batch.x, batch.topk_idx, 8, 4, use_fp8=False, return_recv_hook=with_hook)

    def combine(call, with_hook: bool):
        rows = expert_rows(call[0], 4, group)
        return buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, call[2], return_recv_hook=with_hook)

    hooks = [combine(dispatch(False), True)[2] for _ in range(2)]
    with pytest.raises(BadInput) as refused:
        dispatch(False)
    told.append(str(refused.value))
    for hook in hooks:
        hook()
    combine(dispatch(False), False)
    for _ in range(2):
        dispatch(True)
    with pytest.raises(BadInput) as refused:
        dispatch(True)
    told.append(str(refused.value))
    buffer.clean_low_latency_buffer(8, 512, 4)
    combine(dispatch(False), False)
    buffer.destroy()
    return told


def test_a_forgotten_hook_holds_its_slot(pools):
    for combined, dispatched in pools(2).call(forgotten_hooks):
        assert "slot 0 is still held by dispatch 0, whose combine was sent and its receive hook not called" in combined
        assert "slot 1 is still held by the handle of dispatch 3, which was not combined and whose" in dispatched


def test_two_handles_live_and_a_third_is_refused(pools):
    for told in pools(2).call(two_of_three):
        third, again, cleaned = told
        assert "slot 0 is still held by the handle of dispatch 0, which was not combined; dispatches take" in third
        assert "a stale handle: a later dispatch has taken its slot, or it is of before a reset" in again
        assert cleaned == again


def combine_received_late(group: Group) -> list[str]:
    """The receive of a combine is launched behind the dispatch of the other slot."""
    buffer = make_buffer(group, 8, 512, 4)
    batches = [draw(group.rank, 6, 512, 4, 2, seed) for seed in range(6)]
    shape, outs, hooks = shape_of(group, 8, 4, 2, 512), [], []
    for batch in batches:
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, 8, 4, use_fp8=False)
        out, _, hook = buffer.low_latency_combine(
            expert_rows(recv_x, 4, group), batch.topk_idx, batch.topk_weights, handle, return_recv_hook=True
        )
        outs.append(out)
        hooks.append(hook)
        if len(hooks) == 2:
            hooks.pop(0)()
    for hook in hooks:
        hook()
    wanted = [low_latency_reference(batch, draw_experts(shape), False) for batch in batches]
    return [
        f"out {i} differs" for i, (out, want) in enumerate(zip(outs, wanted, strict=True)) if not same_bits(out, want)
    ]


def test_a_combine_may_be_received_behind_the_other_slots_dispatch(pools):
    assert pools(2).call(combine_received_late) == [[], []]


# ---- bad input ----


def refusals(group: Group) -> dict[str, str]:
    """On one rank: what is told of each wrong use, before anything is launched."""
    buffer = make_buffer(group, 8, 512, 4)
    batch = draw(group.rank, 6, 512, 4, 2)
    told = {}

    def refuse(name: str, call, *args, **kwargs) -> None:
        with pytest.raises(BadInput) as refused:
            call(*args, **kwargs)
        told[name] = str(refused.value)

    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    ids = batch.topk_idx
    repeated, outside = ids.clone(), ids.clone()
    repeated[2, 1] = repeated[2, 0] = 3
    outside[4, 1] = 4
    dispatch(batch.x, ids, 8, 4)
    refuse("tokens", dispatch, torch.cat([batch.x, batch.x]), torch.cat([ids, ids]), 8, 4)
    refuse("layout", dispatch, batch.x, ids, 9, 4)
    refuse("repeated", dispatch, batch.x, repeated, 8, 4)
    refuse("outside", dispatch, batch.x, outside, 8, 4)
    refuse("topk", dispatch, batch.x, torch.full((6, 17), -1), 8, 4)
    refuse("stats", dispatch, batch.x, ids, 8, 4, cumulative_local_expert_recv_stats=torch.zeros(2))
    refuse("mask", combine, batch.x, ids, batch.topk_weights, (1, 2), use_logfmt=False)
    recv_x, _, handle, _, hook = dispatch(batch.x, ids, 8, 4, use_fp8=False, return_recv_hook=True)
    refuse("not received", combine, recv_x, ids, batch.topk_weights, handle)
    refuse("in use", buffer.destroy)
    hook()
    refuse("rows", combine, recv_x[:1], ids, batch.topk_weights, handle)
    refuse("logfmt", combine, recv_x, ids, batch.topk_weights, handle, use_logfmt=True)
    again = combine(recv_x, ids, batch.topk_weights, tuple(handle), return_recv_hook=True)[2]
    refuse("not added up", combine, recv_x, ids, batch.topk_weights, handle)
    again()
    other = make_buffer(group, 8, 520, 4)
    x = torch.zeros((6, 520), dtype=torch.bfloat16)
    refuse("fp8 hidden", other.low_latency_dispatch, x, ids, 8, 4)
    third = make_buffer(group, 8, 512, 4)
    refuse("heap", third.clean_low_latency_buffer, 64, 512, 4)
    refuse("differ", third.low_latency_dispatch, batch.x, ids, 8 - group.rank, 4)
    buffer.destroy()
    refuse("destroyed", dispatch, batch.x, ids, 8, 4)
    return told


def test_bad_input_is_refused_before_a_launch(pools):
    wanted = {
        "tokens": "12 tokens; num_max_dispatch_tokens_per_rank is 8",
        "layout": "call clean_low_latency_buffer() in between",
        "repeated": "topk_idx[2, 1] is expert 3, which the token has named before; wanted each expert once",
        "outside": "topk_idx[4, 1] is expert 4; wanted -1 (none) or 0 to 3",
        "topk": "top-k is 17; wanted 1 to 16",
        "stats": "cumulative_local_expert_recv_stats is torch.float32 [2]; wanted torch.int32 [2]",
        "mask": "handle is tuple; wanted the one that low_latency_dispatch() returned, or its parts",
        "not received": "the receive hook of this handle's dispatch was not called; call it before combine",
        "in use": "destroy: 1 receive hook not called yet; call it first",
        "rows": "x is torch.bfloat16 [1, 16, 512]; wanted torch.bfloat16 [2, 16, 512]",
        "not added up": "the receive hook of this handle's combine before was not called; call it first",
        "logfmt": "use_logfmt is not supported yet; leave it out",
        "fp8 hidden": "hidden is 520; fp8 has a scale for 128 values: wanted a multiple, or use_fp8=False",
        "heap": "see get_low_latency_rdma_size_hint()",
        "differ": "num_max_dispatch_tokens_per_rank is",
        "destroyed": "the buffer was destroyed; make another one",
    }
    for told in pools(2).call(refusals):
        assert told.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in told[name], name
            assert "\n" not in told[name]


def few_warps(group: Group) -> str:
    buffer = make_buffer(group, 8, 512, 4, num_sms=2, num_max_warp_groups=4)
    batch = draw(group.rank, 6, 512, 4, 4)
    with pytest.raises(BadInput) as refused:
        buffer.low_latency_dispatch(batch.x, batch.topk_idx, 8, 4)
    return str(refused.value)


def test_topk_is_below_a_blocks_warps(pools):
    assert pools(1).call(few_warps) == [
        "top-k is 4; a block's 4 warps send at most 3 choices; take a larger num_max_warp_groups, of `run moe` --warps"
    ]


@pytest.mark.parametrize("num_experts", [16, 20, 60, 289])
def test_a_call_has_the_warps_that_its_topk_needs(num_experts):
    for topk in range(1, MAX_TOPK + 1):
        usual = LaunchShape.choose(Group(0, 1), num_experts, 0, 0, "cpu")
        chosen = LaunchShape.choose(Group(0, 1), num_experts, 0, 0, "cpu", topk)
        assert (chosen == usual) if topk < usual.num_warps else (topk < chosen.num_warps <= 32)
        assert LaunchShape.choose(Group(0, 1), num_experts, 0, usual.num_warps, "cpu", topk) == usual


# ---- a silent peer ----


def dispatch_without_rank_1(group: Group, directory: str) -> tuple[str, dict[str, object]]:
    """A call of all ranks, one that rank 1 stays away from, and after a reset one of all again."""
    buffer = make_buffer(group, 8, 512, 6)
    batch = draw(group.rank, 6, 512, 6, 2)

    def call(**how) -> None:
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, 8, 6, **how)
        rows = expert_rows(recv_x, 6, group)
        buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, handle)

    told, fault = "", {}
    call()
    with tracekern.capture(directory, device=buffer.comm.device, keep="last") as session:
        if group.rank == 1:
            time.sleep(1.0)
        else:
            with pytest.raises(CommTimeout) as lost:
                call(timeout_s=0.3, capture=session)
            told, fault = str(lost.value), lost.value.fault
    buffer.reset()
    call()
    return told, fault


def test_a_silent_peer_is_named_with_the_pair(pools, tmp_path):
    results = pools(3).call(dispatch_without_rank_1, str(tmp_path / "capture"))
    waited = [fault for _, fault in results if fault.get("cause") == "timeout"]
    assert waited, results
    assert {(fault["channel"], fault["peer"]) for fault in waited} == {("count", 1)}
    assert all(fault["slot"] in (0, 1) for fault in waited)  # the local expert
    assert any(
        re.search(r"rank [02] dispatch .* gave up on rank 1 .*; channel count local expert [01]:", told)
        for told, _ in results
    )
    timeline = tracekern.load(Path(tmp_path / "capture"))
    assert {"wait_count", "copy_token"} <= {event.name for event in timeline.events}

"""Prefill and decoding on one communicator: two-hop and low latency calls in turns, without a clean call."""

from __future__ import annotations

import functools
import os
import random
import time
from pathlib import Path

import pytest
import torch
from two_hop_check import Case, bring, combined_wanted, dispatch, num_wrong, rows_of, wanted

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout
from tracekern.moe.calls.buffer import Buffer
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency.reference import low_latency_reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.two_hop import Config
from tracekern.moe.two_hop.reference import count_wrong, num_different

TOKENS, HIDDEN, EXPERTS, TOPK = 6, 128, 8, 3
NUM_SEEDS = 5
CASE = Case(Config(4, 2, 4, 2, 8), tokens=9)


def make_buffer(group: Group, **how: object) -> Buffer:
    num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, group.num_ranks, EXPERTS)
    how = {"low_latency_mode": True, "timeout_s": 20.0, **how}
    return Buffer(group, 1 << 20, num_rdma_bytes, num_nodes=2, num_max_tokens_per_rank=64, backend="cpu", **how)


class Decoding:
    """A low latency call of this rank, from its dispatch to its combine."""

    def __init__(self, buffer: Buffer, seed: int, use_fp8: bool) -> None:
        self._buffer = buffer
        self._shape = MoeShape(buffer.group_size, TOKENS, EXPERTS, TOPK, HIDDEN, "bf16")
        about = {"rank": buffer.rank, "iteration": 0, "routing": "uniform", "uneven": True}
        self._batch, self._use_fp8 = draw_batch(self._shape, seed=seed, **about), use_fp8
        _, _, self._handle, _, self._hook = buffer.low_latency_dispatch(
            self._batch.x, self._batch.topk_idx, TOKENS, EXPERTS, use_fp8=use_fp8, return_recv_hook=seed % 2 == 0
        )

    def wrong_of_combine(self) -> int:
        if self._hook is not None:
            self._hook()
        experts, ranks = draw_experts(self._shape), self._shape.num_ranks
        rows = torch.empty((self._shape.num_local_experts, ranks * TOKENS, HIDDEN), dtype=torch.bfloat16)
        self._buffer.low_latency.apply_experts(self._handle, experts, rows)
        call = rows, self._batch.topk_idx, self._batch.topk_weights, self._handle
        combined, _, _ = self._buffer.low_latency_combine(*call)
        return num_different(combined, low_latency_reference(self._batch, experts, self._use_fp8))


def alternate(group: Group, num_times: int) -> tuple[int, int]:
    """Wrong elements of prefill and of decoding. In every second turn two decoding handles are alive."""
    buffer, delays, wrong = make_buffer(group), random.Random(group.rank), [0, 0]
    due = functools.cache(lambda seed: wanted(CASE, buffer.nodes, group.rank, seed))

    def delay() -> None:
        if delays.random() < 0.5:
            time.sleep(delays.expovariate(1 / 0.002))

    for turn in range(num_times):
        seed = turn % NUM_SEEDS
        given = bring(CASE, group.num_ranks, group.rank, seed)
        delay()
        decoding = [Decoding(buffer, seed, use_fp8=turn % 3 > 0)]
        delay()
        received = dispatch(buffer, CASE, given)
        delay()
        if turn % 2:
            decoding.append(Decoding(buffer, seed + 1, use_fp8=False))
        wrong[1] += decoding[0].wrong_of_combine()
        delay()
        combined, _, _ = buffer.combine(rows_of(received.recv_x, group.rank), received.handle)
        wrong[1] += sum(call.wrong_of_combine() for call in decoding[1:])
        wrong[0] += count_wrong(received, due(seed)) + num_different(
            combined, combined_wanted(CASE, buffer.nodes, given)[0]
        )
    buffer.synchronize()
    buffer.destroy()
    return wrong[0], wrong[1]


def test_calls_in_turns_are_right_whatever_rank_is_late(pools):
    assert pools(4).call(alternate, 100) == [(0, 0)] * 4


def test_one_capture_has_both(pools, tmp_path: Path):
    assert pools(4).call(record, str(tmp_path)) == [0] * 4
    timeline = tracekern.load(tmp_path)
    assert not timeline.problems
    names = [launch.name for launch in timeline.launches if launch.rank == 3]
    assert names == ["dispatch", "combine", "notify_dispatch", "dispatch"]
    assert len(timeline.rows_of("send_message")) > 0 < len(timeline.rows_of("forward_token"))


def record(group: Group, directory: str) -> int:
    buffer = make_buffer(group)
    first = Decoding(buffer, 1, use_fp8=True).wrong_of_combine() + num_wrong(buffer, CASE, 1)
    batch = draw_batch(
        MoeShape(group.num_ranks, TOKENS, EXPERTS, TOPK, HIDDEN, "bf16"),
        **{"seed": 1, "rank": group.rank, "iteration": 0, "routing": "uniform", "uneven": True},
    )
    with tracekern.capture(directory, device=buffer.comm.device) as capture:
        call = batch.x, batch.topk_idx, TOKENS, EXPERTS
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(*call, use_fp8=False, capture=capture)
        buffer.low_latency_combine(recv_x, batch.topk_idx, batch.topk_weights, handle, capture=capture)
        dispatch(buffer, CASE, bring(CASE, group.num_ranks, group.rank, 1), capture=capture)
        buffer.synchronize()
    return first


# ---- what goes wrong ----


def lose_rank_1(group: Group) -> tuple[list[str], int]:
    """Rank 1 leaves out a decoding call, then a prefill call. (who was lost, wrong elements of both after resets)"""
    buffer, told = make_buffer(group), []
    wrong = Decoding(buffer, 1, use_fp8=True).wrong_of_combine() + num_wrong(buffer, CASE, 1)
    calls = (lambda: Decoding(buffer, 1, use_fp8=True).wrong_of_combine(), lambda: num_wrong(buffer, CASE, 2))
    for call in calls:
        if group.rank != 1:
            buffer.comm.set_timeout(0.4)
            with pytest.raises(CommTimeout) as lost:
                call()
            told.append(str(lost.value))
            buffer.comm.set_timeout(20.0)
        buffer.reset()
        wrong += Decoding(buffer, 3, use_fp8=True).wrong_of_combine() + num_wrong(buffer, CASE, 3)
    return told, wrong


def test_after_a_rank_was_lost_in_one_kind_both_work_again(pools):
    results = pools(4).call(lose_rank_1)
    assert [wrong for _, wrong in results] == [0] * 4
    decoding, prefill = zip(*(told for told, _ in results if told), strict=True)
    assert any("dispatch" in text and "rank 1" in text and "expert" in text for text in decoding), decoding
    assert any("notify_dispatch" in text and "rank 1 of node 0" in text for text in prefill), prefill


def refusals(group: Group) -> list[str]:
    told = []

    def refuse(make: object) -> None:
        with pytest.raises(BadInput) as refused:
            make()
        told.append(str(refused.value))

    buffer = make_buffer(group, low_latency_mode=False)
    refuse(lambda: buffer.low_latency_dispatch)
    refuse(lambda: make_buffer(group, low_latency_mode=1))
    both = make_buffer(group)
    large = torch.zeros((1, 1024), dtype=torch.bfloat16), torch.zeros((1, TOPK), dtype=torch.int32)
    refuse(lambda: both.low_latency_dispatch(*large, 64, EXPERTS, use_fp8=False))
    return told


def test_what_has_no_place_is_refused_in_one_line(pools):
    for told in pools(2).call(refusals):
        assert told[:2] == [
            "low_latency_mode is False; make the Buffer with low_latency_mode=True for such calls",
            "low_latency_mode is 1; wanted True or False",
        ]
        assert "get_low_latency_rdma_size_hint()" in told[2]


def refusals_in_a_fork(group: Group) -> tuple[set[str], int]:
    """What calls of a child say, and the wrong elements of the parent's before and after."""
    buffer = make_buffer(group)
    wrong = Decoding(buffer, 1, use_fp8=True).wrong_of_combine() + num_wrong(buffer, CASE, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            lambda: Decoding(buffer, 1, use_fp8=True),
            lambda: num_wrong(buffer, CASE, 1),
            lambda: buffer.comm.malloc_symmetric((1,), torch.int32),
            buffer.comm.barrier,
            buffer.comm.reset,
        ):
            try:
                call()
                said.append("was let through")
            except BadInput as error:
                said.append(str(error))
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        told = set(answers.read().splitlines())
    os.waitpid(child, 0)
    for seed in range(3):
        wrong += Decoding(buffer, seed, use_fp8=True).wrong_of_combine() + num_wrong(buffer, CASE, seed)
    buffer.destroy()
    return told, wrong


def test_a_forked_child_is_refused_and_disturbs_nobody(pools):
    for told, wrong in pools(4).call(refusals_in_a_fork):
        assert told == {
            "the communicator was made before this process was forked, and cannot be used here; make one after the fork"
        }
        assert wrong == 0

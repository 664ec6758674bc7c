"""Calls that end before their last kernel, or after a rank gave up: nobody takes what they left for a result."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import RankPool

from tracekern.comm.communicator import Communicator
from tracekern.comm.ranks.group import Group
from tracekern.compiled import compiled
from tracekern.errors import BadInput, CallBroken, CommTimeout
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline
from tracekern.moe.p2p.reference import expected
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.record.session import capture

SHAPE = MoeShape(num_ranks=2, max_tokens=16, num_experts=8, topk=2, hidden=24, dtype="fp32")
OF_SEVERAL_KERNELS = [variant for variant, stages in STAGES.items() if len(stages) > 1]
SENDS_BACK = {"combine_send", "combine"}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def batch_of(group: Group, iteration: int) -> Batch:
    return draw_batch(SHAPE, seed=3, rank=group.rank, iteration=iteration, routing="uniform", uneven=False)


def is_right(pipeline: P2PPipeline, batch: Batch, wanted: Batch | None = None) -> bool:
    experts = draw_experts(SHAPE)
    out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    return torch.equal(out, expected(pipeline.variant, wanted or batch, experts, SHAPE))


def break_off(group: Group, variant: str, stage: str, how: str) -> tuple[str, list[bool]]:
    """What the call after a broken one says, and whether those after a reset are right."""
    pipeline = P2PPipeline(group, SHAPE, variant)
    assert is_right(pipeline, batch_of(group, 0))

    def stop(done: str) -> None:
        if done == stage and how == "hook":
            raise ArithmeticError("of the user's hook")
        if done == stage:
            os.kill(os.getpid(), signal.SIGINT)

    batch = batch_of(group, 1)
    with pytest.raises((ArithmeticError, KeyboardInterrupt)):
        pipeline(batch.x, batch.topk_idx, batch.topk_weights, draw_experts(SHAPE), after_stage=stop)
    with pytest.raises(CallBroken) as caught:
        is_right(pipeline, batch)
    pipeline.reset()
    return str(caught.value), [is_right(pipeline, batch_of(group, iteration)) for iteration in range(2, 5)]


@pytest.mark.parametrize(
    ("variant", "stage"), [(variant, stage) for variant in OF_SEVERAL_KERNELS for stage in STAGES[variant][:-1]]
)
def test_after_a_call_that_broke_off_the_next_one_is_refused_until_reset(pair, variant, stage):
    for rank, (said, right) in enumerate(pair.call(break_off, variant, stage, "hook")):
        assert f"rank {rank}: a call ended between its kernels (ArithmeticError: of the user's hook)" in said
        assert said.endswith("call reset() on every rank")
        assert right == [True] * 3


def test_ctrl_c_between_two_kernels_breaks_a_call_off(pair):
    for said, right in pair.call(break_off, "balanced", "dispatch_send", "ctrl-c"):
        assert "a call ended between its kernels (KeyboardInterrupt)" in said
        assert right == [True] * 3


def run_all_kernels_after_an_abort(group: Group, variant: str) -> str:
    """Rank 0 runs its kernels as a GPU does, all of them; before it sends back some wait has given up."""
    pipeline = P2PPipeline(group, SHAPE, variant, timeout_s=0.5)
    experts = draw_experts(SHAPE)
    assert is_right(pipeline, batch_of(group, 0))
    batch = batch_of(group, 1)
    out = torch.zeros_like(batch.x)
    group.barrier()
    tensors = {"x": batch.x, "topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights, "out": out}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    pipeline._native.set_call(**addresses, **experts.addresses, num_tokens=batch.num_tokens)
    for stage in STAGES[variant]:
        if group.rank == 0 and stage in SENDS_BACK:
            np.asarray(pipeline.comm._heap.maps[0])[:4].view(np.uint32)[0] = 1  # HeapControl.abort
        pipeline._native.run_stages([stage], [0])
    try:
        pipeline.comm.check()
    except CommTimeout as error:
        return str(error.fault["cause"])
    return "no fault"


@pytest.mark.parametrize("variant", sorted(set(OF_SEVERAL_KERNELS) - {"flag"}))
def test_after_a_rank_gave_up_it_sends_no_result(pair, variant):
    """Rows may be missing: what would go out in their place is the result of the call before, with a good flag."""
    assert pair.call(run_all_kernels_after_an_abort, variant) == ["peer_aborted"] * 2


def run_with_strange_experts(group: Group, variant: str) -> bool:
    """As on a GPU, where nobody looks at topk_idx before a call."""
    pipeline = P2PPipeline(group, SHAPE, variant)
    pipeline._check_tensors = lambda *_: None  # type: ignore[method-assign]
    batch = batch_of(group, 0)
    strange, none = batch.topk_idx.clone(), batch.topk_idx.clone()
    for place, expert in (((1, 0), 8), ((2, 1), 2**31 - 1), ((3, 0), -7), ((3, 1), 1 << 20)):
        strange[place], none[place] = expert, -1
    return is_right(pipeline, Batch(batch.x, strange, batch.topk_weights), Batch(batch.x, none, batch.topk_weights))


@pytest.mark.parametrize("variant", list(STAGES))
def test_numbers_that_name_no_row_counts_as_none(pair, variant):
    assert pair.call(run_with_strange_experts, variant) == [True, True]


def capture_without_its_communicator(group: Group, directory: str) -> int:
    """Samples of clocks that a capture took on a device whose communicator is gone."""
    device = Communicator(group, 1 << 16, 10.0).device
    with capture(directory, device=device) as session:
        return int(session.segment.header["num_samples"])


def test_a_device_outlives_its_communicator(pair, tmp_path):
    assert all(count > 0 for count in pair.call(capture_without_its_communicator, str(tmp_path)))


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """This process maps no more than it does now and so much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def make_without_memory(group: Group) -> str:
    """Rank 1 has room for the heap, and none for the experts' rows, 67 MB."""
    shape = MoeShape(num_ranks=2, max_tokens=256, num_experts=8, topk=8, hidden=4096, dtype="fp32")
    sizes = {"max_tokens": 256, "num_experts": 8, "topk": 8, "hidden": 4096, "dtype": "fp32"}
    heap_bytes = compiled("p2p").heap_bytes(num_ranks=2, variant="balanced", partitions=1, **sizes)
    P2PPipeline(group, SHAPE, "balanced")  # the threads that the ranks talk by have their memory from here on
    try:
        with room_for(2 * heap_bytes + (32 << 20)) if group.rank == 1 else contextlib.nullcontext():
            P2PPipeline(group, shape, "balanced")
    except BadInput as error:
        return str(error)
    return ""


def test_a_rank_without_memory_is_told_of_on_all(pair):
    wanted = "rank 1: std::bad_alloc; make the shape smaller, or end what fills the memory"
    assert pair.call(make_without_memory) == [wanted] * 2


def run_more_threads_than_there_can_be(group: Group) -> str:
    pipeline = P2PPipeline(group, SHAPE, "balanced", num_blocks=64, warps_per_block=16, executor="threads")
    try:
        with room_for(400 << 20):  # stacks of 8 MB
            is_right(pipeline, batch_of(group, 0))
    except RuntimeError as error:
        return str(error)
    return ""


def test_threads_that_cannot_be_started_are_an_error(pair):
    assert pair.call(run_more_threads_than_there_can_be) == ["Resource temporarily unavailable"] * 2


@pytest.mark.parametrize("timeout_s", [-1.0, 0, float("nan"), float("inf"), 1e300])
def test_a_time_limit_that_is_none_is_refused(timeout_s):
    with pytest.raises(BadInput, match="wanted more than 0 and less than 1e6 seconds"):
        Communicator(Group(0, 1), 1 << 16, timeout_s)


def test_a_grid_beyond_what_a_process_can_map_is_refused():
    shape = MoeShape(num_ranks=1, max_tokens=4, num_experts=4, topk=1, hidden=8, dtype="fp32")
    with pytest.raises(BadInput, match="num_blocks x warps_per_block is 131072; wanted 1 to 16384"):
        P2PPipeline(Group(0, 1), shape, "balanced", num_blocks=4096, warps_per_block=32)


def test_sms_are_for_gpus():
    shape = MoeShape(num_ranks=1, max_tokens=4, num_experts=4, topk=1, hidden=8, dtype="fp32")
    with pytest.raises(BadInput, match="num_sms is 8; the CPU backend has no SMs, give num_blocks"):
        P2PPipeline(Group(0, 1), shape, "balanced", num_sms=8)


@pytest.mark.parametrize(
    ("max_tokens", "topk", "why"), [(1 << 21, 8, "more than 2.24 - 1 rows"), (1, 33, "32 choices")]
)
def test_more_than_a_flag_or_a_warp_can_hold_is_refused(max_tokens, topk, why):
    """In C++, whatever Python would allow: flags count rows in 24 bits, a warp looks at 32 results side by side."""
    shape = {"num_ranks": 1, "max_tokens": max_tokens, "num_experts": 64, "topk": topk, "hidden": 8, "dtype": "bf16"}
    with pytest.raises(ValueError, match=why):
        compiled("p2p").own_bytes(**shape, variant="reduce", partitions=1)

"""Users who get calls of a low latency Buffer wrong, on one rank or in one thread: each ends in one clear error on the
ranks that it concerns, and the next right call is right bit by bit."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from low_latency_check import same_bits
from rank_pool import RankPool
from test_low_latency import draw, expert_rows, make_buffer, shape_of
from waiting import in_a_while

from tracekern.comm.ranks.group import Group
from tracekern.errors import TracekernError
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.reference import low_latency_reference
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.shape import MoeShape

TOKENS, HIDDEN, EXPERTS, TOPK = 8, 256, 6, 2
LONG_S = 60.0
"""A limit that no test is to reach."""


class User:
    """One rank's Buffer, and right calls of it."""

    def __init__(self, group: Group, **how: Any) -> None:
        self.group = group
        self.buffer = make_buffer(group, TOKENS, HIDDEN, EXPERTS, **{"timeout_s": LONG_S, **how})
        self.batch = draw(group.rank, 6, HIDDEN, EXPERTS, TOPK)

    def dispatch(self, **wrong: Any) -> Any:
        right = {
            "x": self.batch.x,
            "topk_idx": self.batch.topk_idx,
            "num_max_dispatch_tokens_per_rank": TOKENS,
            "num_experts": EXPERTS,
            "use_fp8": False,
        }
        return self.buffer.low_latency_dispatch(**{**right, **wrong})

    def combine(self, dispatched: Any, **wrong: Any) -> torch.Tensor:
        right = {
            "x": expert_rows(dispatched[0], EXPERTS, self.group),
            "topk_idx": self.batch.topk_idx,
            "topk_weights": self.batch.topk_weights,
            "handle": dispatched[2],
        }
        return self.buffer.low_latency_combine(**{**right, **wrong})[0]

    def is_right(self, use_fp8: bool = False) -> bool:
        """Runs a whole call as it should be."""
        out = self.combine(self.dispatch(use_fp8=use_fp8))
        shape = shape_of(self.group, TOKENS, EXPERTS, TOPK, HIDDEN)
        return same_bits(out, low_latency_reference(self.batch, draw_experts(shape), use_fp8))


def error_of(call: Callable[..., Any], *args: Any, **wrong: Any) -> str:
    """Kind and text of what a call raises; "" if it raises nothing. The error itself would keep its frame's handle."""
    try:
        call(*args, **wrong)
    except TracekernError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- the first call ----

BAD_FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"x": "tokens"}, "x is str; wanted a torch.Tensor"),
    "list": ({"topk_idx": [[0, 1]] * 6}, "topk_idx is list; wanted a torch.Tensor"),
    "sparse": ({"x": torch.zeros(6, HIDDEN).to_sparse()}, "x is torch.sparse_coo; wanted a dense tensor"),
    "float tokens": (
        {"num_max_dispatch_tokens_per_rank": 8.0},
        "num_max_dispatch_tokens_per_rank is 8.0; wanted a whole",
    ),
    "flag": ({"use_fp8": "no"}, "use_fp8 is 'no'; wanted True or False"),
    "limit": ({"timeout_s": 0}, "timeout_s is 0; wanted more than 0"),
    "expert": ({"topk_idx": torch.full((6, TOPK), EXPERTS)}, "topk_idx[0, 0] is expert 6; wanted -1 (none) or 0 to 5"),
    "layout": ({"num_max_dispatch_tokens_per_rank": 4096}, "see get_low_latency_rdma_size_hint()"),
    "device": ({"x": torch.zeros((6, HIDDEN), dtype=torch.bfloat16, device="meta")}, "x is on meta; wanted contiguous"),
}


def first_calls(group: Group) -> tuple[dict[str, str], str, str, str, bool]:
    """What is told of first calls that are wrong on rank 1: of any, of fp8, of a layout. Are right ones right?"""
    user, told = User(group), {}
    for name, (wrong, _) in BAD_FIRST.items():
        told[name] = error_of(user.dispatch, **(wrong if group.rank == 1 else {}))
    differs = error_of(user.dispatch, use_fp8=group.rank == 1)
    right = user.is_right()
    later = error_of(user.dispatch, use_fp8=True, **({"x": None} if group.rank == 1 else {}))
    clean = error_of(user.buffer.clean_low_latency_buffer, TOKENS, "256" if group.rank == 1 else HIDDEN, EXPERTS)
    return told, later, clean, differs, right and user.is_right(use_fp8=True) and user.is_right()


def test_a_bad_first_call_on_one_rank_is_the_same_error_on_all(pools):
    for told, later, clean, differs, right in pools(3).call(first_calls):
        for name, (_, text) in BAD_FIRST.items():
            assert told[name].startswith("BadInput: rank 1: "), name
            assert text in told[name], name
        assert later == "BadInput: rank 1: x is NoneType; wanted a torch.Tensor"
        assert clean == "BadInput: rank 1: hidden is '256'; wanted a whole number from 8 to 1048576"
        assert differs == "BadInput: use_fp8 is False on rank 0 and True on rank 1"
        assert right


def make_buffers(group: Group) -> list[str]:
    """What is told of makings that are wrong on rank 1."""
    wrongs: list[dict[str, Any]] = [
        {"num_rdma_bytes": "8"},
        {"num_nvl_bytes": 1},
        {"timeout_s": "10"},
        {"on_timeout": "ignore"},
        {"backend": "tpu"},
        {"backend": "cuda"},
        {"num_rdma_bytes": 1 << 17},
    ]
    right = {"num_rdma_bytes": 1 << 16, "backend": "cpu"}
    return [error_of(Buffer, group, **{**right, **(wrong if group.rank == 1 else {})}) for wrong in wrongs]


def test_a_buffer_that_one_rank_makes_wrong_is_made_on_none(pools):
    first, second = pools(2).call(make_buffers)
    assert first == second
    for text, wanted in zip(
        first,
        [
            "num_rdma_bytes is '8'; wanted a whole number",
            "num_nvl_bytes is for DeepEP's normal mode",
            "timeout_s is '10'",
            "on_timeout is 'ignore'",
            "backend is 'tpu'",
            "backend is cpu on rank 0 and cuda on rank 1",
            "num_rdma_bytes is 65536 on rank 0 and 131072 on rank 1",
        ],
        strict=True,
    ):
        assert text.startswith("BadInput: ")
        assert wanted in text


def come_late_to_the_first_call(group: Group) -> tuple[str, float, str, bool]:
    """Rank 1 does not come: what the others are told, after how long, what rank 1 is told; and after reset()."""
    user = User(group)
    started = time.monotonic()
    if group.rank != 1:
        told = error_of(user.dispatch, timeout_s=0.5)
        waited_s = time.monotonic() - started
        group.barrier()
    else:
        group.barrier()
        waited_s, told = 0.0, error_of(user.dispatch, timeout_s=LONG_S)
    again = error_of(user.dispatch)
    user.buffer.reset()
    return told, waited_s, again, user.is_right()


def test_the_limit_holds_in_a_first_call(pools):
    results = pools(3).call(come_late_to_the_first_call)
    for rank, (told, waited_s, again, right) in enumerate(results):
        assert told.startswith(f"CommTimeout: rank {rank} low_latency_dispatch ")
        if rank == 1:
            assert re.search("stopped waiting: rank ([02]) is out of use: rank \\1 low_latency_dispatch ", told)
        else:
            assert "gave up on rank" in told
            assert waited_s < LONG_S / 2
        assert again.startswith("CommTimeout: the communicator is out of use since: ")
        assert again.endswith("call reset() on every rank")
        assert right


def gather_for_different_things(group: Group) -> tuple[str, list[int]]:
    what = "a" if group.rank == 0 else "b"
    return error_of(group.all_gather, 1, what), group.all_gather(group.rank, "c")


def meet_in_different_calls(group: Group) -> tuple[str, bool]:
    user = User(group)
    call = user.dispatch if group.rank == 0 else lambda: user.buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
    return error_of(call), user.is_right()


def test_ranks_in_different_calls_are_told_so(pools):
    for told, after in pools(2).call(gather_for_different_things):
        assert told == "BadInput: rank 0 is in a, rank 1 in b: all ranks make the same calls in the same order"
        assert after == [0, 1]
    for told, right in pools(2).call(meet_in_different_calls):
        assert "rank 0 is in low_latency_dispatch, rank 1 in clean_low_latency_buffer" in told
        assert right


# ---- calls that other ranks have begun ----


def differ_from_what_is_known(group: Group) -> tuple[str, str, bool]:
    """Rank 1 asks for fp8, which no rank has had; the others know their own settings and begin."""
    user = User(group)
    user.is_right()
    if group.rank == 1:
        told = error_of(user.dispatch, use_fp8=True)  # at once
        missing = error_of(user.dispatch, x=None, topk_idx=None)
        return told, missing, user.is_right()  # the others still wait in their call
    return "", "", user.is_right()


def test_other_settings_than_a_rank_that_runs_already_are_told_at_once(pools):
    results = pools(3).call(differ_from_what_is_known)
    assert [right for *_, right in results] == [True] * 3
    told, missing, _ = results[1]
    assert "runs low_latency_dispatch with use_fp8=False, topk=2, rank 1 asks for low_latency_dispatch with" in told
    assert "use_fp8=True" in told
    assert missing == "BadInput: x is NoneType; wanted a torch.Tensor"


def refuse_and_stay_away(group: Group) -> tuple[str, bool]:
    """Rank 1 keeps a handle: it refuses the dispatch that takes its slot, and gives up. Then all go on."""
    user = User(group)
    kept = user.dispatch()
    assert user.is_right()
    if group.rank != 1:
        group.barrier()
        del kept
        told = error_of(user.dispatch, timeout_s=1.0)
    else:
        told = error_of(user.dispatch)
        group.barrier()
        del kept
    user.buffer.reset()
    return told, user.is_right()


def keep_a_handle(group: Group) -> tuple[str, bool]:
    """Rank 1 keeps a handle that the others drop, is refused, drops it and repeats: all slots are the same again."""
    user = User(group)
    kept = user.dispatch()
    right = user.is_right()
    told = ""
    if group.rank == 1:
        told = error_of(user.dispatch)
    del kept
    return told, right and all(user.is_right() for _ in range(3))


HELD = "slot 0 is still held by the handle of dispatch 0, which was not combined; dispatches take 2 slots in turns"


def test_a_handle_that_one_rank_keeps_moves_no_rank_to_another_slot(pools):
    results = pools(2).call(keep_a_handle)
    assert [right for _, right in results] == [True] * 2
    assert results[1][0].startswith(f"BadInput: {HELD}")


def test_who_waits_for_a_rank_that_refused_is_told_why(pools):
    results = pools(2).call(refuse_and_stay_away)
    assert [right for _, right in results] == [True] * 2
    waited, refused = results[0][0], results[1][0]
    assert refused.startswith(f"BadInput: {HELD}")
    assert waited.startswith("CommTimeout: rank 0 dispatch block ")
    assert "gave up on rank 1 " in waited
    assert f"; rank 1 refused low_latency_dispatch: {HELD}" in waited


# ---- what is refused leaves nothing behind ----


def refuse_much(group: Group) -> list[str]:
    """Refusals of later calls, on all ranks or on rank 1 alone, and after each whether right calls are right."""
    user, faults = User(group), []
    assert user.is_right()

    def refuse(name: str, wanted: str, call: Callable[..., Any], *args: Any, **wrong: Any) -> None:
        told = error_of(call, *args, **wrong)
        if not told.startswith("BadInput: ") or wanted not in told:
            faults.append(f"{name}: {told}")

    for _ in range(3):
        refuse("limit", "timeout_s is 0", user.dispatch, timeout_s=0)
    refuse("on_timeout", "on_timeout is ''", user.dispatch, on_timeout="")
    if group.rank == 1:
        refuse("x", "x is torch.float32", user.dispatch, x=user.batch.x.float())
        refuse("strided", "not contiguous", user.dispatch, x=user.batch.x.repeat(1, 2)[:, ::2])
        refuse("layout", "call clean_low_latency_buffer()", user.dispatch, num_experts=8)
    call = user.dispatch(return_recv_hook=True)
    hook = call[-1]
    refuse("destroy", "1 receive hook not called yet", user.buffer.destroy)
    hook()
    refuse("hook twice", "a receive hook is called once", hook)
    ids = user.batch.topk_idx
    for name, wanted, wrong in (
        ("limit", "timeout_s is 0", {"timeout_s": 0}),
        ("capture", "capture is str", {"capture": "x"}),
        ("outside", "is expert 9; wanted -1", {"topk_idx": torch.full_like(ids, 9)}),
        ("twice", "which the token has named before", {"topk_idx": torch.zeros_like(ids)}),
        ("others", "to which the dispatch has not sent the token", {"topk_idx": (ids + 1) % EXPERTS}),
        ("weights", "topk_weights is NoneType", {"topk_weights": None}),
        ("handle", "handle is NoneType", {"handle": None}),
    ):
        refuse(f"combine {name}", wanted, user.combine, call, **wrong)
    refuse("experts", "experts is NoneType", user.buffer.apply_experts, call[2], None, call[0])
    user.combine(call)
    if not all(user.is_right() for _ in range(3)):
        faults.append("wrong results")
    user.buffer.destroy()
    user.buffer.destroy()
    for name, late in (
        ("dispatch", user.dispatch),
        ("hook", hook),
        ("clean", lambda: user.buffer.clean_low_latency_buffer(1, 8, 2)),
    ):
        refuse(f"{name} late", "the buffer was destroyed", late)
    return faults


def test_refused_calls_leave_nothing_behind(pools):
    assert pools(2).call(refuse_much) == [[], []]


def use_from_two_threads(group: Group) -> tuple[str, bool]:
    """A second thread comes while the first waits for rank 1."""
    user = User(group)
    user.is_right()
    told: list[str] = []
    if group.rank == 0:
        thread = threading.Thread(target=lambda: told.append(str(user.is_right())))
        thread.start()
        while not user.buffer.comm._in_call.locked():
            time.sleep(0.001)
        for call in (user.dispatch, user.buffer.destroy):
            told.append(error_of(call))
        group.barrier()
        thread.join()
    else:
        group.barrier()
        told.append(str(user.is_right()))
    return told, user.is_right()


def test_a_second_thread_is_refused(pools):
    (told, right), (_, other) = pools(2).call(use_from_two_threads)
    assert right
    assert other
    for what, text in zip(("low_latency_dispatch", "destroy"), told[:2], strict=True):
        assert text == (
            f"BadInput: {what}: another thread is in a call of this communicator; call from one thread at a time"
        )
    assert told[2] == "True"


def use_a_pipeline_wrong(group: Group) -> tuple[list[str], bool]:
    """Makings and a call of another family that are wrong on rank 1, which then repeats the call."""
    shape = MoeShape(2, TOKENS, EXPERTS, TOPK, 24, "fp32")
    wrongs: list[dict[str, Any]] = [{"variant": "none"}, {"num_blocks": "4"}, {"partitions": 1.5}, {"timeout_s": 0}]
    wrongs.append({"shape": MoeShape(2, TOKENS, EXPERTS, 1, 24, "fp32")})
    right = {"shape": shape, "variant": "balanced", "timeout_s": LONG_S}
    told = [error_of(P2PPipeline, group, **{**right, **(wrong if group.rank else {})}) for wrong in wrongs]
    pipeline = P2PPipeline(group, **right)
    batch = draw(group.rank, 6, 24, EXPERTS, TOPK)
    if group.rank == 1:
        told.append(error_of(pipeline, [1.0], batch.topk_idx, batch.topk_weights, draw_experts(shape)))
    return told, run_pipeline(pipeline, group)


def test_a_pipeline_that_one_rank_uses_wrong(pools):
    (first, right), (second, other) = pools(2).call(use_a_pipeline_wrong)
    wanted = (
        "rank 1: variant is 'none'",
        "rank 1: num_blocks is '4'",
        "rank 1: partitions is 1.5",
        "rank 1: timeout_s is 0",
        "topk is 2 on rank 0 and 1 on rank 1",
    )
    assert first == second[:-1]
    for text, told in zip(wanted, first, strict=True):
        assert told.startswith(f"BadInput: {text}")
    assert second[-1] == "BadInput: x is list; wanted a torch.Tensor"
    assert right
    assert other


# ---- ranks that end, Ctrl-C ----


def destroy_without_rank_1(group: Group) -> list[str]:
    user = User(group)
    user.is_right()
    if group.rank == 1:
        os._exit(0)
    return [
        error_of(user.dispatch, timeout_s=0.5),
        error_of(user.dispatch),
        error_of(user.buffer.destroy),
        error_of(user.dispatch),
    ]


def test_a_buffer_whose_peer_died_can_be_destroyed():
    pool = RankPool(2)
    try:
        pool._pipes[1].send((destroy_without_rank_1, ()))
        pool._pipes[0].send((destroy_without_rank_1, ()))
        ok, told = pool._pipes[0].recv()
    finally:
        pool.close()
    assert ok, told
    lost, again, destroyed, late = told
    assert "gave up on rank 1" in lost
    assert "the communicator is out of use since: " in again
    assert destroyed == ""
    assert late == "BadInput: the buffer was destroyed; make another one"


def interrupt_while_waiting(group: Group, how: str) -> tuple[str, float, str, bool]:
    """Rank 0 waits for rank 1, and Ctrl-C is pressed there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    user = User(group, executor="threads" if how == "threads" else "fibers")
    pipeline = P2PPipeline(group, MoeShape(2, TOKENS, EXPERTS, TOPK, 24, "fp32"), "balanced", timeout_s=LONG_S)
    calls = {"barrier": user.buffer.comm.barrier, "pipeline": lambda: run_pipeline(pipeline, group)}
    call = calls.get(how, user.dispatch)
    comm = pipeline.comm if how == "pipeline" else user.buffer.comm
    if how != "first call":
        user.is_right()
    group.barrier()
    told, waited_s = "", 0.0
    if group.rank == 0:
        pressed: list[float] = []
        me = os.getpid()
        in_a_while(lambda: (pressed.append(time.monotonic()), os.kill(me, signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            call()
        waited_s = time.monotonic() - pressed[0]
        told = error_of(comm.require_usable)
    group.barrier()
    if group.rank == 1:
        told = next(filter(None, (error_of(call) for _ in range(5))))  # rank 0 had sent its part of the first one
    comm.reset()
    right = run_pipeline(pipeline, group) if how == "pipeline" else user.is_right()
    return told, waited_s, right


def run_pipeline(pipeline: P2PPipeline, group: Group) -> bool:
    batch = draw(group.rank, 6, 24, EXPERTS, TOPK)
    return bool(pipeline(batch.x.float(), batch.topk_idx.int(), batch.topk_weights, draw_experts(pipeline.shape)).any())


@pytest.mark.parametrize("how", ["first call", "dispatch", "threads", "barrier", "pipeline"])
def test_ctrl_c_ends_a_wait(pools, how):
    (told, waited_s, right), (peer, _, other) = pools(2).call(interrupt_while_waiting, how)
    assert told.startswith("CallBroken: the communicator is out of use since: rank 0: ")
    assert "(KeyboardInterrupt)" in told
    assert waited_s < LONG_S / 2
    assert "rank 0" in peer
    assert right
    assert other

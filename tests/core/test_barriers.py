"""Grid and rank barriers: nobody goes on too early, across the wrap of the epoch, and everybody can give up."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest
from attack import SLOW, TIMED_OUT, Shape, assert_right, run_program, stress
from toolchains import program

from tracekern import _core

NEVER = 0xFFFFFFEF
FIRST_EPOCH = 0xFFFFFFF0
TIMEOUT = "1"  # FaultCause: its own time ran out


def faults(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    """One record a rank that gave up."""
    assert done.returncode == TIMED_OUT, done.stderr
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stderr.splitlines()]


def barriers(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_program(program("barriers", *SLOW), *map(str, arguments))


@pytest.mark.programs("tests/cpp/barriers.cpp")
@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize(("blocks", "warps"), [(1, 1), (1, 4), (13, 1), (8, 3)])
def test_grid_barrier_waits_for_every_warp(executor, blocks, warps):
    assert_right(barriers("grid", executor, 2, blocks, warps, 100 if executor == "fibers" else 20))


@pytest.mark.programs("tests/cpp/barriers.cpp")
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 100), (2, 3000), (8, 200)])
def test_rank_barrier_crosses_the_wrap(ranks, rounds):
    assert_right(barriers("rank", "fibers", ranks, 1, 1, rounds))


@pytest.mark.programs("tests/cpp/barriers.cpp")
@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_a_block_that_never_comes_is_named(executor):
    (fault,) = faults(barriers("grid", executor, 1, 5, 3, 10, "absent=2", "timeout_ms=3000"))
    assert fault["channel"] == "grid"
    assert fault["cause"] == TIMEOUT
    assert (fault["wanted"], fault["seen"]) == ("5", "4")


@pytest.mark.programs("tests/cpp/barriers.cpp")
@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_a_rank_that_never_comes_is_named_by_all_others(executor):
    found = faults(barriers("rank", executor, 4, 1, 1, 10, "absent=2", "timeout_ms=3000"))
    assert sorted(fault["rank"] for fault in found) == ["0", "1", "3"]
    for fault in found:
        assert (fault["peer"], fault["channel"]) == ("2", "barrier")
        assert (fault["wanted"], fault["seen"]) == (str(FIRST_EPOCH), str(NEVER))
    assert TIMEOUT in {fault["cause"] for fault in found}, "somebody's time ran out"


def test_a_rank_that_gives_up_tells_itself_and_all_others_whatever_a_dead_one_began():
    """Rank 1 said that it gives up, and ended before it stored what all ranks look at."""
    size = _core.heap_control_bytes
    memory = np.zeros(3 * size, np.uint8)
    skipped = -memory.ctypes.data % size
    heaps = [memory[skipped + rank * size :][:size].view(np.uint32) for rank in range(2)]
    waiting = _core.CpuCommunicator(0, [heap.ctypes.data for heap in heaps], timeout_ns=50_000_000)
    abort, aborted_by = 0, 2  # their places in HeapControl
    for heap in heaps:
        heap[aborted_by] = 2
    waiting.barrier()
    assert waiting.fault() is not None
    assert [(heap[abort], heap[aborted_by]) for heap in heaps] == [(1, 2), (1, 2)]


@pytest.mark.programs("tests/cpp/p2p_stress.cpp")
@pytest.mark.parametrize("variant", ["flag", "balanced"])
@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_the_pipeline_gives_up_on_a_rank_that_never_comes(variant, executor):
    # Every warp still reaches its block barriers: were one left behind, this would hang and not exit with 3.
    shape = Shape(ranks=4, blocks=3, warps=3, experts=8, iterations=3)
    found = faults(stress(SLOW, variant, "bf16", executor, shape, "absent=1", "timeout_ms=2000"))
    assert sorted(fault["rank"] for fault in found) == ["0", "2", "3"]
    # A rank that hears of it from another may still have waited for one whose threads had no core yet.
    assert {fault["peer"] for fault in found if fault["cause"] == TIMEOUT} == {"1"}
    for fault in found:
        assert (fault["stage"], fault["channel"]) == ("dispatch_send", "counts")
        assert (fault["wanted"], fault["seen"]) == (str(FIRST_EPOCH), str(NEVER))

"""Low latency calls between hosts: a network lies between ranks, and writes overtake each other there.

Every result is checked bit by bit. The network is a libfabric of the tests, or TCP on this machine.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack import (
    COUNTED,
    FLAGGED,
    MUTANT_TIMEOUT,
    RACES,
    SEEDS,
    SLOW,
    TIMED_OUT,
    TSAN,
    WITH_TIME_OUT,
    Shape,
    assert_right,
    in_process,
    run_program,
    sites,
)
from kept_builds import log_of
from low_latency_check import same_bits
from rank_pool import RankFailed, RankPool
from toolchains import ROOT, compile_sm_90, program

import tracekern
from tracekern.analysis.waits.analyze import WaitKind, analyze_waits
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout, NotBuilt
from tracekern.fabric import library
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.pipeline import LowLatencyPipeline
from tracekern.moe.low_latency.reference import low_latency_reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run

try:
    LIBRARY = library.require_library() or "libfabric.so.1"
except NotBuilt as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.programs("tests/cpp/low_latency_stress.cpp", "tests/cpp/in_process_fabric.cpp")

SMALL = {"variant": "low_latency", "ranks": 3, "tokens": 6, "hidden": 256, "experts": 6, "topk": 2, "backend": "cpu"}
NARROW = ("commands=2", "window=3")
"""Room for two commands, and for three writes on their way to a peer."""


def network(provider: str, *flags: str) -> tuple[str, ...]:
    """Options of a network. "in_process", whose writes overtake each other, or "tcp"."""
    fabric = in_process(flags) if provider == "in_process" else LIBRARY
    return (f"library={fabric}", f"provider={provider}")


def stress(
    flags: tuple[str, ...], executor: str, shape: Shape, hosts: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """low_latency_stress of the given build. hosts: the ranks of each, such as "3+5"."""
    return run_program(program("low_latency_stress", *flags), executor, *shape.arguments(), f"hosts={hosts}", *options)


DELAYED = {
    "1+1": Shape(ranks=2, blocks=3, warps=6, tokens=6, hidden=256, experts=6, topk=3, iterations=150),
    "2+2": Shape(ranks=4, blocks=4, warps=8, tokens=4, hidden=128, experts=8, topk=3, iterations=100),
    "1+1+1": Shape(ranks=3, blocks=2, warps=6, tokens=3, hidden=1408, experts=6, topk=1, iterations=100),
    "3+5": Shape(ranks=8, blocks=2, warps=16, tokens=3, hidden=128, experts=16, topk=4, iterations=40),
}


@pytest.mark.parametrize("options", [(), NARROW], ids=["roomy", "narrow"])
@pytest.mark.parametrize("hosts", DELAYED)
def test_delayed_calls_whatever_order_writes_come_in(hosts, options):
    assert_right(stress(SLOW, "fibers", DELAYED[hosts], hosts, *network("in_process", "-O2"), *options))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_delayed_calls():
    shape = replace(DELAYED["3+5"], iterations=6500, seed=2)
    assert_right(stress(SLOW, "fibers", shape, "3+5", *network("in_process", "-O2")))


def drawn(number: int) -> tuple[Shape, str]:
    """A shape and the ranks of its hosts."""
    draw = random.Random(number)
    sizes = [draw.randint(1, 3) for _ in range(draw.randint(2, 3))]
    ranks, blocks = sum(sizes), draw.randint(1, 4)
    experts = ranks * draw.randint(1, 3)
    groups = -(-experts // blocks)
    topk = draw.randint(1, min(experts, 4))
    warps = groups * max(2, -(-(topk + 1) // groups)) + draw.randint(0, 3)
    hidden = draw.choice([8, 24, 128, 136, 512])
    tokens = draw.randint(0, 9)
    shape = Shape(ranks, blocks, warps, tokens, hidden, experts, topk, iterations=6, seed=number)
    return shape, "+".join(map(str, sizes))


@pytest.mark.parametrize("provider", ["in_process", "tcp"])
@pytest.mark.parametrize("numbers", [range(20), pytest.param(range(20, 200), marks=pytest.mark.soak)], ids=len)
def test_any_shape_on_any_hosts(provider, numbers):
    for number in numbers:
        shape, hosts = drawn(number)
        executor = "threads" if shape.ranks * shape.blocks * shape.warps < 100 else "fibers"
        assert_right(stress(SLOW, executor, shape, hosts, *network(provider, "-O2"), "delays=off"))


RACED = {
    "1+1": Shape(ranks=2, blocks=2, warps=8, tokens=12, hidden=8, experts=4, topk=3, iterations=10),
    "1+2": Shape(ranks=3, blocks=3, warps=4, tokens=4, hidden=128, experts=6, topk=2, iterations=10),
}


@pytest.mark.parametrize("hosts", RACED)
def test_calls_have_no_race(hosts):
    options = ("trace=on", *NARROW) if hosts == "1+2" else ()
    assert_right(stress(TSAN, "threads", RACED[hosts], hosts, *network("in_process", *RACES), *options))


# ---- ranks that are lost ----


def faults_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("provider", ["in_process", "tcp"])
def test_ranks_of_all_hosts_give_up_on_one_that_never_comes(provider):
    options = (*network(provider, "-O2"), "absent=1", "pattern=fused", "timeout_ms=700")
    done = stress(SLOW, "fibers", DELAYED["2+2"], "2+2", *options)
    assert done.returncode == TIMED_OUT, done.stderr
    first = [fault for fault in faults_of(done) if fault["cause"] == "1"]
    assert {(fault["stage"], fault["channel"], fault["peer"]) for fault in first} == {("dispatch", "count", "1")}
    assert sorted(fault["rank"] for fault in faults_of(done)) == ["0", "2", "3"]


# ---- one thing left out at a time ----

BUSY = Shape(ranks=2, blocks=2, warps=6, tokens=8, hidden=8, experts=4, topk=2, iterations=20)
AGAIN = ("pattern=again",)
DROPPED = ("pattern=dropped",)
MUTANTS = {
    **dict.fromkeys(sites("message", *FLAGGED), ()),
    **dict.fromkeys(sites("count", "epoch", "acknowledgement"), ()),
    **dict.fromkeys(sites("results", *COUNTED), ()),
    **dict.fromkeys(sites("ack", "epoch", "acknowledgement"), DROPPED),
    **dict.fromkeys(sites("ack", "value"), AGAIN),
    **dict.fromkeys(sites("command", "release", "acquire", "epoch", "acknowledgement", "value"), NARROW),
    **dict.fromkeys(sites("sent", "acquire", "acknowledgement"), DROPPED),
}


def assert_noticed(*options: str) -> None:
    exits = []
    for seed in SEEDS:
        exits.append(stress(TSAN, "threads", replace(BUSY, seed=seed), "1+1", *options).returncode)
        if exits[-1] in WITH_TIME_OUT:
            return
    pytest.fail(f"nothing noticed with {options}: exits {exits}")


@pytest.mark.parametrize("site", MUTANTS)
def test_what_is_left_out_is_noticed(site):
    # What waits for completions is missed where these come late.
    flags = (*RACES, "-DTK_ANSWERS_LATE") if site.startswith("sent") else RACES
    assert_noticed(*network("in_process", *flags), *MUTANTS[site], f"plant={site}", MUTANT_TIMEOUT)


def test_immediates_before_their_bytes_are_noticed():
    assert_noticed(*network("in_process", *RACES, "-DTK_TELLS_EARLY"))


@pytest.mark.parametrize("options", [(), NARROW, AGAIN, DROPPED], ids=" ".join)
def test_without_a_fault_the_same_run_is_right(options):
    assert_right(stress(TSAN, "threads", BUSY, "1+1", *network("in_process", *RACES, "-DTK_ANSWERS_LATE"), *options))


# ---- compilers ----


@pytest.mark.compilers
def test_kernels_compile_for_gpus_within_their_registers():
    kernels = compile_sm_90(ROOT / "tests" / "cpp" / "far_low_latency.cu")[1]
    told = log_of(kernels).read_text()
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", told)]
    assert len(registers) > 20
    assert max(registers) <= 64


# ---- real processes ----


def wrong_calls(group: Group, hosts: list[int], shape: MoeShape, numbers: list[int]) -> list[int]:
    """Those of some calls whose results are not the reference's, on this rank, which makes them with hooks."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(
        shape.max_tokens, shape.hidden, group.num_ranks, shape.num_experts
    )
    buffer = Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", hosts=hosts)
    experts = draw_experts(shape)
    wrong = []
    for number in numbers:
        batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="zipf", uneven=True)
        use_fp8 = number % 2 == 0
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, shape.max_tokens, shape.num_experts, use_fp8=use_fp8, return_recv_hook=True
        )
        hook()
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        buffer.apply_experts(handle, experts, rows)
        out, _, _ = buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, handle, zero_copy=True)
        if not same_bits(out, low_latency_reference(batch, experts, use_fp8)):
            wrong.append(number)
    buffer.destroy()
    return wrong


@pytest.mark.parametrize("net", ["tcp", "shm"])
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1], [0, 1, 2, 1]], ids=str)
def test_calls_are_the_reference_whatever_hosts_ranks_are_on(pools, hosts, net):
    shape = MoeShape(len(hosts), 6, 2 * len(hosts), 2, 256, "bf16")
    found = pools(len(hosts)).call(with_net, net, wrong_calls, hosts, shape, list(range(6)))
    assert found == [[]] * len(hosts)


def with_net(group: Group, net: str, call: Callable[..., Any], *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEKERN_NET", net)
        return call(group, *arguments)


def call_without_rank_1(group: Group, hosts: list[int]) -> tuple[list[bool], str]:
    """Whether calls were right before and after one from which rank 1 stays away, and what the others were told."""
    shape = MoeShape(group.num_ranks, 4, 6, 2, 256, "bf16")
    pipeline, experts = LowLatencyPipeline(group, shape, hosts=hosts, timeout_s=0.7), draw_experts(shape)

    def is_right(number: int) -> bool:
        batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="uniform", uneven=False)
        out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
        return same_bits(out, low_latency_reference(batch, experts, use_fp8=True))

    right, told = [is_right(number) for number in range(10, 21)], ""
    if group.rank == 1:
        time.sleep(2.0)
    else:
        with pytest.raises(CommTimeout) as lost:
            is_right(1)
        told = str(lost.value)
    pipeline.reset()
    right += [is_right(number) for number in range(2, 8)]
    pipeline.comm.barrier()
    return right, told


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1]], ids=str)
def test_after_a_reset_nothing_of_before_is_taken_for_new(pools, hosts):
    found = pools(3).call(call_without_rank_1, hosts)
    assert [right for right, _ in found] == [[True] * 17] * 3
    assert any("rank 1" in told for _, told in found), found


def call_until_rank_1_is_killed(group: Group, hosts: list[int], told: Path) -> None:
    shape = MoeShape(group.num_ranks, 4, 6, 2, 256, "bf16")
    pipeline, experts = LowLatencyPipeline(group, shape, hosts=hosts, timeout_s=60), draw_experts(shape)
    started = time.monotonic()
    try:
        for number in range(20):
            if (group.rank, number) == (1, 9):
                os.kill(os.getpid(), signal.SIGKILL)
            batch = draw_batch(shape, seed=number, rank=group.rank, iteration=0, routing="uniform", uneven=False)
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    except CommTimeout as error:
        (told / str(group.rank)).write_text(f"{time.monotonic() - started} {error}")


def test_a_rank_that_is_killed_is_named_long_before_the_limit(tmp_path):
    pool = RankPool(3)
    with pytest.raises(RankFailed, match="rank 1: the process is gone"):
        pool.call(call_until_rank_1_is_killed, [0, 1, 2], tmp_path)
    pool.close()
    for rank in (0, 2):
        seconds, text = (tmp_path / str(rank)).read_text().split(maxsplit=1)
        assert "rank 1" in text
        assert float(seconds) < 30


def test_a_run_on_two_hosts_has_their_nodes_and_no_wait_without_a_signal(tmp_path):
    options = MoeRun(**SMALL, transport="fabric", link_nodes=2, iterations=3, late_rank=0, late_us=20_000)
    run(options, tmp_path).raise_for_error()
    timeline = tracekern.load(tmp_path)
    assert len({rank.node for rank in timeline.ranks}) == 2
    unmatched = analyze_waits(timeline).kind == WaitKind.UNMATCHED
    assert not np.any(unmatched), "what waits for flags that proxies raise has the signals of the other host"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"link_nodes": 4}, "nodes is 4; for a network wanted 2 to 3, the ranks"),
        ({"variant": "two_hop"}, "transport is fabric; variant two_hop has none, only low_latency"),
        ({"backend": "cuda"}, "transport is fabric and backend cuda; ranks on the CPU have a network"),
        ({"slow_link": 1.0}, "transport is fabric and slow-link 1; ranks on the CPU have a network"),
        ({"transport": "air"}, "transport is 'air'; wanted one of memory, fabric"),
    ],
)
def test_a_run_without_such_a_network_is_refused(options, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        MoeRun(**{**SMALL, "transport": "fabric", **options})


def make_with_hosts(group: Group, hosts: Any) -> str:
    with pytest.raises(BadInput) as refused:
        Buffer(group, num_rdma_bytes=1 << 20, backend="cpu", hosts=hosts)
    return str(refused.value)


@pytest.mark.parametrize(
    ("hosts", "said"), [([0], "hosts is [0]; wanted a number for each of 2 ranks"), ([0, True], "hosts is [0, True]")]
)
def test_hosts_that_are_none_are_refused(pools, hosts, said):
    assert all(said in told for told in pools(2).call(make_with_hosts, hosts))


def test_a_network_that_is_not_there_is_named(pools):
    (first, second) = pools(2).call(with_net, "verbs", make_with_hosts, [0, 1])
    assert first == second
    assert "network: provider verbs" in first

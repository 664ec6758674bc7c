"""Low latency calls between hosts: a network lies between ranks, and writes overtake each other there.

Every result is checked bit by bit. The network is a libfabric of the tests, or TCP on this machine.
"""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import replace

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
from toolchains import CSRC, compile_sm_90, program

from tracekern.errors import NotBuilt
from tracekern.fabric import library

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
    blocks = max(blocks, -(-experts // 13))  # an expert's warps have to fit into a block
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
    **dict.fromkeys(sites("completed", "acquire", "acknowledgement"), DROPPED),
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
    flags = (*RACES, "-DTK_ANSWERS_LATE") if site.startswith("completed") else RACES
    assert_noticed(*network("in_process", *flags), *MUTANTS[site], f"plant={site}", MUTANT_TIMEOUT)


def test_immediates_before_their_bytes_are_noticed():
    assert_noticed(*network("in_process", *RACES, "-DTK_TELLS_EARLY"))


@pytest.mark.parametrize("options", [(), NARROW, AGAIN, DROPPED], ids=" ".join)
def test_without_a_fault_the_same_run_is_right(options):
    assert_right(stress(TSAN, "threads", BUSY, "1+1", *network("in_process", *RACES, "-DTK_ANSWERS_LATE"), *options))


# ---- compilers ----


@pytest.mark.compilers
def test_kernels_compile_for_gpus_within_their_registers():
    kernels = compile_sm_90(CSRC / "moe" / "low_latency" / "far_kernels.cu")[1]
    told = log_of(kernels).read_text()
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", told)]
    assert len(registers) > 20
    assert max(registers) <= 64

"""Low latency calls back to back with no barrier in between: drawn orders of launches, slots, message types and inputs.

Every result is checked bit by bit, with random delays, under the race detector, and with one thing at a time left out.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from attack import (
    FLAGGED,
    MUTANT_TIMEOUT,
    NOTICED,
    PLANTED,
    RACES,
    RIGHT,
    SEEDS,
    SLOW,
    TIMED_OUT,
    USAGE,
    WITH_TIME_OUT,
    Attack,
    Shape,
    assert_right,
    run_program,
    sites,
)
from left_out import LEFT_OUT, LOW_LATENCY_FILES, barriers_in, numbered_program
from toolchains import SAMPLE, program

pytestmark = pytest.mark.programs("tests/cpp/low_latency_stress.cpp")

TSAN = (*RACES, *SAMPLE)
MEMORY = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *PLANTED, *SAMPLE)

# An iteration is 1.6 calls on average. Blocks and warps are upper bounds. A hidden size that 128 divides has calls of
# fp8 and of bf16, any other has none of fp8.
DELAYED = {
    "one_rank": Shape(ranks=1, blocks=2, warps=8, tokens=8, hidden=128, experts=4, topk=2, iterations=150),
    "two_ranks": Shape(ranks=2, blocks=3, warps=6, tokens=6, hidden=256, experts=6, topk=3, iterations=225),
    "four_ranks": Shape(ranks=4, blocks=4, warps=8, tokens=4, hidden=128, experts=8, topk=3, iterations=175),
    "eight_ranks": Shape(ranks=8, blocks=2, warps=16, tokens=3, hidden=128, experts=16, topk=4, iterations=75),
}


def stress(flags: tuple[str, ...], executor: str, shape: Shape, *options: str) -> subprocess.CompletedProcess[str]:
    """low_latency_stress of the given build."""
    return run_program(program("low_latency_stress", *flags), executor, *shape.arguments(), *options)


@pytest.mark.parametrize("name", DELAYED)
def test_a_thousand_delayed_calls(name):
    assert_right(stress(SLOW, "fibers", DELAYED[name]))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_delayed_calls():
    assert_right(stress(SLOW, "fibers", replace(DELAYED["eight_ranks"], iterations=6500, seed=2)))


LAYOUTS = {
    "idle_group": Shape(ranks=1, blocks=2, warps=16, tokens=9, hidden=24, experts=5, topk=4),
    "two_blocks_an_sm": Shape(ranks=2, blocks=1, warps=32, tokens=5, hidden=8, experts=16, topk=4),
    "fourteen_groups": Shape(ranks=2, blocks=1, warps=28, tokens=5, hidden=8, experts=14, topk=16),
    "more_blocks_than_tokens": Shape(ranks=3, blocks=12, warps=4, tokens=2, hidden=136, experts=12, topk=3),
    "long_rows": Shape(ranks=2, blocks=2, warps=5, tokens=3, hidden=1408, experts=4, topk=1),
    "no_tokens": Shape(ranks=4, blocks=4, warps=4, tokens=0, hidden=128, experts=8, topk=1, iterations=120),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_number_of_ranks_blocks_and_warps(name):
    assert_right(stress(SLOW, "fibers", LAYOUTS[name]))
    assert_right(stress(SLOW, "threads", replace(LAYOUTS[name], iterations=4), "trace=on"))


def test_memory_is_used_as_it_should():
    shape = Shape(ranks=3, blocks=3, warps=4, tokens=5, hidden=128, experts=6, topk=2, iterations=15)
    assert_right(stress(MEMORY, "fibers", shape, "trace=on"))


def test_more_choices_than_warps_that_send_are_refused():
    done = stress(SLOW, "fibers", Shape(ranks=1, blocks=2, warps=4, experts=4, topk=4))
    assert (done.returncode, done.stderr) == (
        USAGE,
        "low_latency_stress: a warp sends one choice: too few for top-k\n",
    )


def test_all_others_give_up_on_a_rank_that_never_comes():
    shape = Shape(ranks=4, blocks=4, warps=8, tokens=4, hidden=8, experts=8, topk=3)
    done = stress(SLOW, "fibers", shape, "absent=1", "pattern=fused", "timeout_ms=500")
    assert done.returncode == TIMED_OUT, done.stderr
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stderr.splitlines()]
    first = [fault for fault in found if fault["cause"] == "1"]  # the others gave up because of these
    assert {(fault["stage"], fault["channel"], fault["peer"]) for fault in first} == {("dispatch", "count", "1")}
    assert sorted(fault["rank"] for fault in found) == ["0", "2", "3"]


# ---- the race detector: a thread a warp ----

SMALL = Shape(ranks=3, blocks=3, warps=4, tokens=4, hidden=128, experts=6, topk=2, iterations=15)
RACED = {
    "one_rank": replace(SMALL, ranks=1),
    "fp8_and_bf16": SMALL,
    "wide_blocks": Shape(ranks=2, blocks=2, warps=8, tokens=12, hidden=8, experts=4, topk=3, iterations=12),
    "many_experts": Shape(ranks=4, blocks=4, warps=8, tokens=4, hidden=8, experts=16, topk=2, iterations=5),
}


@pytest.mark.parametrize("name", RACED)
def test_calls_have_no_race(name):
    assert_right(stress(TSAN, "threads", RACED[name]))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_message_types_that_change_in_a_slot_have_no_race(seed):
    """A rank that is ahead writes where its own messages were copied, and nowhere else."""
    assert_right(stress(TSAN, "threads", replace(SMALL, iterations=40, seed=seed), "pattern=dropped"))


def test_recording_has_no_race():
    assert_right(stress(TSAN, "threads", replace(SMALL, iterations=8), "trace=on"))


# ---- one thing left out at a time ----


def calls(shape: Shape, *options: str) -> tuple[str, ...]:
    return ("threads", *shape.arguments()[:-1], "SEED", *options)


# Of a count neither release nor acquire can be missed: who writes over what it acknowledges has had a message, too.
# Of `grid` no epoch is compared: it is a counter, which goes back to zero in each kernel.
BUSY = replace(SMALL, hidden=8, iterations=20)
# At least as many ranks as a block has warps: its last warp then waits for an acknowledgement that all others need.
MANY_RANKS = Shape(ranks=4, blocks=4, warps=4, tokens=6, hidden=8, experts=4, topk=2, iterations=20)

ATTACKS = {
    "calls": Attack(
        "low_latency_stress",
        calls(BUSY),
        (
            *sites("message", *FLAGGED),
            *sites("count", "epoch", "acknowledgement"),
            *sites("results", *FLAGGED),
            *sites("grid", "release"),
        ),
        TSAN,
        WITH_TIME_OUT,
    ),
    "dropped": Attack(
        "low_latency_stress",
        calls(MANY_RANKS, "pattern=dropped"),
        sites("ack", "epoch", "acknowledgement"),
        TSAN,
        WITH_TIME_OUT,
    ),
    "again": Attack(
        "low_latency_stress",
        calls(MANY_RANKS, "pattern=again"),
        (*sites("ack", "release", "acquire", "value"), *sites("results", "value")),
        TSAN,
        WITH_TIME_OUT,
    ),
    # A rank with few tokens gets ahead of others, whose warps do not come to see its counts in time. What the acquire
    # guards are these flags alone: messages that a rank overwrites had a result each.
    "ranks": Attack(
        "low_latency_stress",
        ("fibers", *replace(BUSY, tokens=1, iterations=300).arguments()[:-1], "SEED", "pattern=fused"),
        sites("any_result", "epoch", "acknowledgement"),
        SLOW,
        WITH_TIME_OUT,
    ),
}
MUTANTS = [(name, site) for name, attack in ATTACKS.items() for site in attack.sites]
BESIDE_OTHERS = ("again", "ack:release")
"""One run by itself hardly ever notices it: what this flag orders, most often another one does, too."""


@pytest.mark.parametrize(
    ("name", "site"), [mutant for mutant in MUTANTS if mutant != BESIDE_OTHERS], ids=lambda value: value
)
def test_planted_fault_is_noticed(name, site):
    exits = ATTACKS[name].exits_until_noticed(site)
    assert exits[-1] in ATTACKS[name].noticed, f"{site} left out, and nothing noticed: exits {exits}"


@pytest.mark.soak  # a minute on two cores
def test_a_fault_that_hardly_any_run_notices_is_noticed_by_runs_side_by_side():
    """Threads that wait for a core see each other's stores in other orders."""
    name, site = BESIDE_OTHERS
    with ThreadPoolExecutor(6) as pool:
        runs = list(pool.map(lambda seed: ATTACKS[name].run(seed, f"plant={site}", MUTANT_TIMEOUT), SEEDS))
    exits = [done.returncode for done in runs]
    assert set(exits) & set(ATTACKS[name].noticed), f"{site} left out, and nothing noticed: exits {exits}"


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_fault_the_same_run_is_right(name):
    assert_right(ATTACKS[name].run(1))


# Dispatch's own guards nothing but what it acknowledges. Of the others one needs two groups in a block, and one many
# rows of a pair.
BARRIER_RUNS = {
    "dispatch": calls(MANY_RANKS, "pattern=dropped"),
    "others": calls(Shape(ranks=2, blocks=2, warps=8, tokens=16, hidden=8, experts=4, topk=2, iterations=40)),
}
BARRIERS = barriers_in(LOW_LATENCY_FILES)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> Path:
    return numbered_program(tmp_path_factory.mktemp("numbered"), "low_latency_stress", LOW_LATENCY_FILES)


def run_numbered(numbered: Path, name: str, seed: int) -> int:
    """The exit code."""
    return run_program(numbered, *(word.replace("SEED", str(seed)) for word in BARRIER_RUNS[name])).returncode


@pytest.mark.parametrize("site", range(len(BARRIERS)), ids=BARRIERS)
def test_left_out_barrier_is_noticed(numbered, site, monkeypatch):
    monkeypatch.setenv(LEFT_OUT, str(site))
    exits = []
    for seed in SEEDS:
        exits.append(run_numbered(numbered, "dispatch" if "dispatch.h" in BARRIERS[site] else "others", seed))
        if exits[-1] in NOTICED:
            return
    pytest.fail(f"barrier {site} left out, and nothing noticed: exits {exits}")


@pytest.mark.soak
@pytest.mark.parametrize("name", BARRIER_RUNS)
def test_with_all_barriers_the_same_run_is_right(numbered, name):
    assert run_numbered(numbered, name, 1) == RIGHT

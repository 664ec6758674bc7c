"""Two-hop dispatch back to back with no barrier in between: drawn shapes, the shortest rings, ranks that fall silent.

Every result is checked bit by bit, with random delays, where nodes share memory and over a network whose writes
overtake, under the race detector, and with one thing at a time left out.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import pytest
from attack import (
    COUNTED,
    FLAGGED,
    PLANTED,
    PROMPT,
    RACE_EXIT,
    RACES,
    RIGHT,
    SLOW,
    TIMED_OUT,
    USAGE,
    WITH_TIME_OUT,
    Attack,
    assert_right,
    in_process_options,
    run_program,
    sites,
)
from left_out import LEFT_OUT, TWO_HOP_FILES, barriers_in, numbered_program
from toolchains import SAMPLE, program

pytestmark = pytest.mark.programs("tests/cpp/two_hop_stress.cpp", "tests/cpp/in_process_fabric.cpp")

TSAN = (*RACES, *SAMPLE)
MEMORY = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *PLANTED, *SAMPLE)
NETWORKS = ("none", "in_process")
"""Between nodes. That in the process has writes that overtake each other."""


def over(network: str, *flags: str) -> tuple[str, ...]:
    """The options of a run. flags: what a network in the process is compiled with."""
    return in_process_options(*flags or ("-O2",)) if network == "in_process" else ()


@dataclass(frozen=True)
class Shape:
    """The numbers on the command line, in their order."""

    nodes: int = 2
    peers: int = 2
    channels: int = 1
    tokens: int = 12
    hidden: int = 16
    local_experts: int = 2
    topk: int = 2
    rdma_send: int = 1
    rdma_recv: int = 7
    nvl_send: int = 1
    nvl_recv: int = 2
    fp8: int = 0
    peer_warps: int = 1
    calls: int = 8
    seed: int = 1

    def arguments(self) -> list[str]:
        return [str(value) for value in astuple(self)]


def stress(flags: tuple[str, ...], executor: str, shape: Shape, *options: str) -> subprocess.CompletedProcess[str]:
    """two_hop_stress of the given build."""
    return run_program(program("two_hop_stress", *flags), "run", executor, *shape.arguments(), *options)


def faults_in(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    lines = (line for line in done.stderr.splitlines() if line.startswith("fault "))
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


# ---- results ----


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shapes", [20, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_shapes_that_are_drawn(network, shapes):
    """1x1 to 4x2 and 2x8 ranks, 1 to 12 channels, rings from the least that the proof allows to all tokens."""
    arguments = ("shapes", "fibers", str(shapes), "5", str(shapes), *over(network))
    assert_right(run_program(program("two_hop_stress", *SLOW), *arguments))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("calls", [200, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_delayed_calls_across_the_epoch_wrap(network, calls):
    shape = Shape(channels=2, tokens=6, calls=calls, seed=calls)
    assert_right(stress(SLOW, "fibers", shape, *over(network)))


# Heads that come back a token at a time, or for all tokens at once.
BATCHES = {
    "single_tokens": Shape(tokens=90, topk=1, rdma_send=1, rdma_recv=7, nvl_send=1, nvl_recv=1, calls=3),
    "whole_chunks": Shape(tokens=90, topk=1, rdma_send=6, rdma_recv=12, nvl_send=5, nvl_recv=5, calls=3),
    "all_at_once": Shape(tokens=90, topk=1, rdma_send=90, rdma_recv=180, nvl_send=180, nvl_recv=180, calls=3),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", BATCHES)
def test_all_tokens_to_one_rank(name, network):
    assert_right(stress(SLOW, "fibers", BATCHES[name], "traffic=hub", *over(network)))


# Warps of a block that add up for a node: a few with one to coordinate, one. On one node also those of a peer's team.
NODE_WARPS = {
    "teams_of_four": Shape(nodes=1, peers=4, tokens=60, nvl_send=2, nvl_recv=4, calls=6),
    "teams_of_two": Shape(nodes=1, peers=8, tokens=20, topk=5, nvl_send=3, nvl_recv=3, calls=6),
    "alone": Shape(nodes=1, peers=1, tokens=60, fp8=1, hidden=128, nvl_send=5, nvl_recv=5, calls=6),
    "two": Shape(nodes=4, peers=1, tokens=40, rdma_send=3, rdma_recv=9, calls=6),
    "one": Shape(nodes=6, peers=1, tokens=40, topk=3, rdma_send=2, rdma_recv=8, nvl_recv=1, calls=6),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", NODE_WARPS)
def test_a_node_has_any_number_of_warps_that_add_up(name, network):
    assert_right(stress(SLOW, "fibers", NODE_WARPS[name], "combine=always", *over(network)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_short_last_chunk_may_overtake_those_before_it(seed):
    """Its flag stands where a forwarder looks that is in the middle of the chunk a ring before."""
    shape = Shape(channels=8, tokens=136, local_experts=1, topk=3, rdma_send=6, rdma_recv=12, calls=100, seed=seed)
    assert_right(stress(SLOW, "fibers", shape, *over("in_process"), PROMPT))


# ---- the bound of docs/two_hop.md: rdma_recv >= rdma_send + 6 ----

SHORTEST = {send: replace(BATCHES["single_tokens"], rdma_send=send, rdma_recv=send + 6) for send in (1, 2, 3, 6)}
ONE_SLOT_LESS = replace(SHORTEST[1], rdma_recv=6, calls=1)


@pytest.mark.parametrize("send", SHORTEST)
def test_the_shortest_rings_never_block(send):
    for network in NETWORKS:
        for traffic in ("drawn", "hub"):
            options = (f"traffic={traffic}", *over(network))
            assert_right(stress(SLOW, "fibers", SHORTEST[send], *options))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_a_slot_less_they_block_each_time(seed, network):
    """The seventh token waits for a head, which needs a tail that only the senders behind it publish."""
    options = ("traffic=hub", *over(network), "timeout_ms=250")
    done = stress(SLOW, "fibers", replace(ONE_SLOT_LESS, seed=seed), *options)
    assert done.returncode == TIMED_OUT, done.stderr
    assert {fault["stage"] for fault in faults_in(done)} == {"dispatch"}


def test_a_ring_that_its_chunk_does_not_divide_is_refused():
    done = stress(SLOW, "fibers", Shape(rdma_send=2, rdma_recv=9))
    assert (done.returncode, done.stderr) == (USAGE, "two_hop_stress: rdma_recv: wanted a multiple of rdma_send\n")


# ---- ranks that fall silent ----


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("option", "stage"), [("absent=0", "notify_dispatch"), ("leaves=0", "dispatch"), ("leaves_combine=0", "combine")]
)
def test_all_others_give_up_on_a_rank_that_falls_silent(option, stage, network):
    options = (option, "combine=always", *over(network), "timeout_ms=1500")
    done = stress(SLOW, "fibers", Shape(calls=2), *options)
    assert done.returncode == TIMED_OUT, done.stderr
    found = faults_in(done)
    assert [fault["rank"] for fault in found if fault["cause"] == "1"]  # the others gave up because of these
    assert {fault["stage"] for fault in found} == {stage}
    assert sorted(fault["rank"] for fault in found) == ["1", "2", "3"]
    if stage == "notify_dispatch":  # in dispatch a rank has many waits, and the first of them is on record
        waits = {fault["rank"]: (fault["channel"], fault["peer"]) for fault in found}
        assert (waits["1"], waits["2"]) == (("peer_counts", "0"), ("counts", "0"))


def end_of(shape: Shape, look: int, *options: str) -> int | str:
    command = [str(program("two_hop_stress", *SLOW)), "run", "fibers", *shape.arguments(), f"abort_at={look}", *options]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode
    except subprocess.TimeoutExpired:
        return "hangs"


@pytest.mark.parametrize("network", NETWORKS)
def test_a_rank_that_gives_up_leaves_nobody_hanging(network):
    """One that gives up in notify has its dispatch launched behind it now and then, as in a graph."""
    shape = Shape(channels=2, tokens=30, calls=3)
    program("two_hop_stress", *SLOW)  # built once
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda look: end_of(shape, look, *over(network)), range(0, 1000, 25)))
    assert ends[0] == TIMED_OUT
    assert [end for end in ends if end not in (TIMED_OUT, RIGHT)] == []


# ---- the race detector: a thread a warp ----


@pytest.mark.parametrize("network", NETWORKS)
def test_recording_has_no_race(network):
    """Runs without records are the controls of the mutants below."""
    assert_right(stress(TSAN, "threads", Shape(), *over(network, *RACES), "trace=on"))


@pytest.mark.parametrize("option", ["absent=1", "leaves=1"])
def test_giving_up_has_no_race(option):
    assert stress(TSAN, "threads", Shape(calls=2), option, "timeout_ms=20").returncode == TIMED_OUT


@pytest.mark.soak
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_calls_have_no_race(network, seed):
    shape = Shape(tokens=24, hidden=128, rdma_send=2, rdma_recv=8, fp8=1, calls=30, seed=seed)
    assert_right(stress(TSAN, "threads", shape, *over(network, *RACES)))


def test_a_dispatch_behind_a_notify_that_gave_up_writes_over_nothing():
    """Peers may still read the rings of the call before."""
    shape = Shape(peers=1, calls=8)
    exits = {
        stress(TSAN, "threads", replace(shape, seed=look), f"abort_at={look}", "graph=on").returncode
        for look in range(20, 1520, 250)
    }
    assert exits <= {RIGHT, TIMED_OUT}


@pytest.mark.soak  # a build of its own
def test_memory_is_used_as_it_should():
    shape = Shape(channels=3, tokens=9, hidden=128, topk=3, rdma_send=2, rdma_recv=8, fp8=1, calls=3)
    for network in NETWORKS:
        assert_right(stress(MEMORY, "fibers", shape, *over(network), "trace=on"))


# ---- one thing left out at a time ----


def calls(shape: Shape, *options: str) -> tuple[str, ...]:
    return ("run", "threads", *shape.arguments()[:-1], "SEED", *options)


# Flags that are their own payload are raised relaxed: only their values can be missed.
OWN_PAYLOAD = ("epoch", "acknowledgement")
# Words in shared memory begin anew in each launch: none is of another epoch.
IN_BLOCK = ("release", "acquire", "acknowledgement", "value")
SITES = (
    *sites("counts", *FLAGGED),
    *sites("peer_counts", *FLAGGED),
    *sites("meta", *FLAGGED),
    *sites("tail", *COUNTED),
    *sites("head", *COUNTED),
    *sites("prefix", *OWN_PAYLOAD),
    *sites("peer_tail", *COUNTED),
    *sites("peer_head", *COUNTED),
    *sites("lock", *IN_BLOCK),
    *sites("ready", *IN_BLOCK, "as_published"),
    *sites("forwarded", *IN_BLOCK),
    *sites("received", *IN_BLOCK),
    *sites("host_counts", *OWN_PAYLOAD),
)
FAR_SITES = (
    *sites("counts", *FLAGGED),
    *sites("meta", *FLAGGED),
    *sites("tail", *COUNTED),
    *sites("head", *COUNTED),
    *sites("command", "release", "acquire", "epoch"),
)
BUSY = Shape(peer_warps=3)
ONE_NODE = Shape(nodes=1, tokens=40, topk=1, nvl_send=3, nvl_recv=4)
ATTACKS = {
    "mapped": Attack("two_hop_stress", calls(BUSY), SITES, TSAN, WITH_TIME_OUT),
    "far": Attack("two_hop_stress", calls(Shape(peers=1)), FAR_SITES, TSAN, WITH_TIME_OUT, RACES),
    # What is complete is told long after it has arrived.
    "answers_late": Attack(
        "two_hop_stress",
        calls(Shape(peers=1, tokens=6, calls=12), "combine=always"),
        sites("completed", "acquire", "acknowledgement"),
        TSAN,
        WITH_TIME_OUT,
        (*RACES, "-DTK_ANSWERS_LATE"),
    ),
    "combine": Attack(
        "two_hop_stress",
        calls(BUSY, "combine=always"),
        (
            *sites("return_tail", *COUNTED),
            *sites("return_head", *COUNTED),
            *sites("reduced", *IN_BLOCK),
            *sites("summed", *IN_BLOCK),
            *sites("returned", *IN_BLOCK),
        ),
        TSAN,
        WITH_TIME_OUT,
    ),
    # Rows go straight into the rings of peers.
    "one_node": Attack(
        "two_hop_stress",
        calls(ONE_NODE, "combine=always"),
        (
            *sites("peer_counts", "epoch", "acknowledgement"),
            *sites("prefix", *OWN_PAYLOAD),
            *sites("peer_tail", *COUNTED),
            *sites("peer_head", *COUNTED),
            *sites("return_tail", *COUNTED),
            *sites("return_head", *COUNTED),
            *sites("sent", *IN_BLOCK),
            *sites("received", *IN_BLOCK),
            *sites("summed", *IN_BLOCK),
            *sites("returned", *IN_BLOCK),
        ),
        TSAN,
        WITH_TIME_OUT,
    ),
    # Heads that are late: of tokens at the end of a call, while those of the next one are few.
    "late_heads": Attack(
        "two_hop_stress",
        (
            *("run", "fibers", *Shape(4, 1, tokens=10, topk=1, rdma_send=2, rdma_recv=8, calls=100).arguments()[:-1]),
            *("SEED", "traffic=hub", PROMPT),
        ),
        sites("head", "maximum"),
        SLOW,
        WITH_TIME_OUT,
        ("-O2",),
    ),
    # Channel 0 alone begins with token 0.
    "channels": Attack(
        "two_hop_stress", calls(Shape(channels=2, calls=2)), sites("lock", "as_published"), TSAN, WITH_TIME_OUT
    ),
}
MUTANTS = [(name, site) for name, attack in ATTACKS.items() for site in attack.sites]


@pytest.mark.parametrize(("name", "site"), [pytest.param(name, site, id=f"{name}-{site}") for name, site in MUTANTS])
def test_planted_fault_is_noticed(name, site):
    exits = ATTACKS[name].exits_until_noticed(site)
    assert exits[-1] in ATTACKS[name].noticed, f"{site} left out, and nothing noticed: exits {exits}"


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_fault_the_same_run_is_right(name):
    assert_right(ATTACKS[name].run(1))


# The first is missed where a wait gives up before the word that counts those was cleared.
BARRIERS = barriers_in(TWO_HOP_FILES)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> Path:
    return numbered_program(tmp_path_factory.mktemp("numbered"), "two_hop_stress", TWO_HOP_FILES)


def run_numbered(numbered: Path, nodes: int, *options: str) -> int:
    """The exit code."""
    shape = Shape(nodes=nodes, channels=3, calls=4)
    return run_program(numbered, "run", "threads", *shape.arguments(), "combine=always", *options).returncode


@pytest.mark.soak
@pytest.mark.parametrize("site", range(len(BARRIERS)), ids=BARRIERS)
def test_left_out_barrier_is_noticed(numbered, site, monkeypatch):
    monkeypatch.setenv(LEFT_OUT, str(site))
    nodes = 1 if "one_node" in BARRIERS[site] else 2
    exits = [
        run_numbered(numbered, nodes, *options) for options in (("timeout_ms=1500",), ("absent=1", "timeout_ms=20"))
    ]
    assert RACE_EXIT in exits or exits[0] in WITH_TIME_OUT, exits


@pytest.mark.soak
@pytest.mark.parametrize("nodes", [1, 2])
def test_with_all_barriers_the_same_runs_are_right(numbered, nodes):
    assert run_numbered(numbered, nodes) == RIGHT
    assert run_numbered(numbered, nodes, "absent=1", "timeout_ms=20") == TIMED_OUT

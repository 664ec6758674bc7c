"""Proxies: what ranks of two nodes tell each other over a network, whatever order it comes in."""

from __future__ import annotations

import re

import pytest
from attack import FLAGGED, NOTICED, SEEDS, TIMED_OUT, TSAN, WITH_TIME_OUT, assert_right, in_process, run_program, sites
from toolchains import AMD_TARGETS, ROOT, compile_cached, compile_sm_90, hip_command, program

from tracekern.errors import NotBuilt
from tracekern.fabric import library

try:
    LIBRARY = library.require_library() or "libfabric.so.1"
except NotBuilt as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.programs("tests/cpp/far_ranks.cpp", "tests/cpp/in_process_fabric.cpp")
FAST = ("-O2",)
NARROW = ("commands=1", "window=1")
"""Room for one command, and for one write on its way to a peer."""


def run(network: str, flags: tuple[str, ...], what: str, executor: str, rounds: int, *options: str):
    """Four ranks of two nodes. network: "in_process", whose writes overtake each other, or "tcp"."""
    fabric = in_process(flags) if network == "in_process" else LIBRARY
    return run_program(program("far_ranks", *flags), what, str(fabric), network, executor, str(rounds), *options)


@pytest.mark.parametrize("options", [(), NARROW], ids=["roomy", "narrow"])
@pytest.mark.parametrize("what", ["barrier", "clock"])
def test_proxies_have_no_race_whatever_order_writes_come_in(what, options):
    assert_right(run("in_process", TSAN, what, "threads", 60, *options))


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("what", ["barrier", "clock"])
def test_ranks_of_two_nodes_meet_and_compare_clocks_over_tcp(what, executor):
    assert_right(run("tcp", FAST, what, executor, 100))


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_epochs_go_on_whatever_order_writes_come_in(rounds):
    assert_right(run("in_process", FAST, "barrier", "threads", rounds, *NARROW))


def faults_of(text: str) -> list[dict[str, str]]:
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines()]


@pytest.mark.parametrize("network", ["in_process", "tcp"])
def test_ranks_of_the_other_node_hear_that_one_gave_up(network):
    done = run(network, FAST, "barrier", "threads", 3, "absent=0", "timeout_ms=500")
    assert done.returncode == TIMED_OUT, done.stderr
    assert sorted(fault["rank"] for fault in faults_of(done.stderr)) == ["1", "2", "3"]


def test_a_rank_whose_endpoint_is_gone_is_named_before_the_limit():
    done = run("in_process", FAST, "barrier", "threads", 3, "lost=3", "timeout_ms=60000")
    assert done.returncode == TIMED_OUT, done.stderr
    faults = faults_of(done.stderr)
    assert {fault["aborted_by"] for fault in faults} == {"4"}
    assert all(int(fault["waited_ms"]) < 30_000 for fault in faults)


@pytest.mark.compilers
def test_kernels_that_ask_proxies_compile_for_gpus():
    ptx = compile_sm_90(ROOT / "tests" / "cpp" / "far_barrier.cu")[0].read_text()
    assert ptx.count("st.release.sys.global.u32") >= 2  # the lap of a command, and the abort word


@pytest.mark.compilers
@pytest.mark.parametrize("target", AMD_TARGETS)
def test_kernels_that_ask_proxies_compile_for_amd(target):
    compile_cached((*hip_command(target), "-S"), ROOT / "tests" / "cpp" / "far_barrier.cu", f".{target}.s")


COMMAND = sites("command", "release", "acquire", "acknowledgement")


@pytest.mark.parametrize("site", [*sites("barrier", *FLAGGED), *COMMAND])
def test_what_is_left_out_is_noticed(site):
    exits = []
    for _ in SEEDS:
        exits.append(run("in_process", TSAN, "barrier", "threads", 60, f"plant={site}", "timeout_ms=1500").returncode)
        if exits[-1] in (WITH_TIME_OUT if site in COMMAND else NOTICED):
            return
    pytest.fail(f"{site} left out, and nothing noticed: exits {exits}")

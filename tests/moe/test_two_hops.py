"""Rings that pass tokens on from node to node, over a transport that delays and shuffles what is put.

The protocol is tests/cpp/ring_protocol.h; test_mutants.py leaves out one thing of it at a time.
"""

from __future__ import annotations

import re

import pytest
from attack import SLOW, TIMED_OUT, TSAN, assert_right, run_program
from toolchains import AMD_TARGETS, ROOT, compile_cached, compile_sm_90, hip_command, program

pytestmark = pytest.mark.programs("tests/cpp/rings.cpp", "tests/cpp/rings.cu")

TIMEOUT = "1"  # FaultCause: its own time ran out


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_hops_have_no_race_whatever_order_puts_come_in(seed):
    assert_right(run_program(program("rings", *TSAN), "threads", "2", "2", "1", "20", "30", str(seed)))


@pytest.mark.parametrize(("nodes", "locals_", "channels"), [(1, 1, 1), (1, 3, 2), (3, 1, 2), (4, 4, 1)])
def test_every_token_comes_once_in_any_layout(nodes, locals_, channels):
    assert_right(
        run_program(program("rings", *SLOW), "fibers", str(nodes), str(locals_), str(channels), "9", "30", "1")
    )


@pytest.mark.parametrize("absent", ["0", "3"])
def test_ranks_of_other_nodes_hear_over_the_transport_that_one_gave_up(absent):
    done = run_program(
        program("rings", *SLOW), "fibers", "2", "2", "1", "9", "3", "1", f"absent={absent}", "timeout_ms=500"
    )
    assert done.returncode == TIMED_OUT, done.stderr
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stderr.splitlines()]
    assert sorted(fault["rank"] for fault in found) == sorted({"0", "1", "2", "3"} - {absent})
    assert TIMEOUT in {fault["cause"] for fault in found}


@pytest.mark.compilers
def test_words_in_shared_memory_are_ordered_for_the_block_and_heads_for_all_ranks():
    ptx = compile_sm_90(ROOT / "tests" / "cpp" / "rings.cu")[0].read_text()
    assert "st.release.cta.shared.u64" in ptx
    assert "ld.acquire.cta.shared.u64" in ptx
    assert "st.release.sys.global.u64" in ptx


@pytest.mark.compilers
@pytest.mark.parametrize("target", AMD_TARGETS)
def test_two_hops_compile_for_amd(target):
    compile_cached((*hip_command(target), "-S"), ROOT / "tests" / "cpp" / "rings.cu", f".{target}.s")

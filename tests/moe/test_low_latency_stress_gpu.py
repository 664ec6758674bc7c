"""Low latency calls of all ranks side by side on one GPU, back to back with no barrier in between; skipped without one.

    python -m pytest -q -m gpu tests/moe/test_low_latency_stress_gpu.py     and the compiler's time
    python -m pytest -q -m soak tests/moe/test_low_latency_stress_gpu.py    10,000 calls

tests/cpp/low_latency_stress.cu says how one run is made by hand.
"""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from attack import RIGHT, TIMED_OUT, USAGE, Shape, assert_right
from devices import require_gpu
from test_low_latency_stress import MUTANTS
from test_stress_gpu import ALL_FORMATS, ATTACKED, NOTICED, SEEDS
from toolchains import ROOT, compile_cached, sanitizer

pytestmark = pytest.mark.timeout(900)  # the compiler's minutes included

PATTERNS = ("fused", "split", "two_handles", "dropped", "overlapped", "again")
SHARE = 0
"""As SMs: what the launch arithmetic gives a rank of the GPU, less 4."""
# An iteration is 1.6 calls on average.
SIDE_BY_SIDE = Shape(ranks=8, blocks=SHARE, warps=32, tokens=16, hidden=256, experts=32, topk=8, iterations=130)


@functools.cache
def binary() -> Path:
    return compile_cached((*ALL_FORMATS, *ATTACKED), ROOT / "tests" / "cpp" / "low_latency_stress.cu", "")


def stress(shape: Shape, *options: str, tool: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """low_latency_stress on the first GPU, run by `tool` if there is one."""
    require_gpu()
    command = [*tool, str(binary()), *shape.arguments(), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.soak  # half a minute and more
@pytest.mark.compilers
def test_the_program_compiles():
    assert binary().exists()


@pytest.mark.gpu
def test_two_hundred_delayed_calls_of_eight_ranks():
    assert_right(stress(SIDE_BY_SIDE))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS)
def test_calls_of_one_pattern(pattern):
    assert_right(stress(replace(SIDE_BY_SIDE, iterations=40), f"pattern={pattern}"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_delayed_calls_of_eight_ranks():
    assert_right(stress(replace(SIDE_BY_SIDE, iterations=6500)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_calls", [1, 5])
def test_a_graph_of_an_odd_number_of_calls_replayed_a_thousand_times(num_calls):
    """So that a replay begins in another slot than the one before, or in the slot that it has just used."""
    shape = replace(SIDE_BY_SIDE, tokens=8, iterations=1000)
    assert_right(stress(shape, f"graph={num_calls}"))


SHAPES = {
    "one_rank": Shape(ranks=1, blocks=SHARE, warps=32, tokens=64, hidden=256, experts=8, topk=8, iterations=60),
    "fourteen_groups": Shape(ranks=2, blocks=2, warps=28, tokens=16, hidden=8, experts=28, topk=16, iterations=60),
    "two_blocks_an_sm": Shape(
        ranks=8, blocks=SHARE, warps=32, tokens=8, hidden=256, experts=256, topk=8, iterations=60
    ),
    "idle_group": Shape(ranks=5, blocks=3, warps=16, tokens=9, hidden=136, experts=5, topk=4, iterations=60),
    "long_rows": Shape(ranks=4, blocks=SHARE, warps=32, tokens=8, hidden=7168, experts=16, topk=8, iterations=40),
    "no_tokens": Shape(ranks=8, blocks=8, warps=8, tokens=0, hidden=128, experts=8, topk=1, iterations=300),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_any_number_of_ranks_blocks_and_warps(name):
    assert_right(stress(SHAPES[name]))


@pytest.mark.gpu
def test_ranks_that_do_not_fit_together_are_refused():
    done = stress(Shape(ranks=8, blocks=1024, warps=32, tokens=2, hidden=8, experts=1024, topk=1))
    assert done.returncode == USAGE
    assert re.search(r"8 ranks of \d+ blocks of 32 warps; the device holds \d+ at once; take fewer", done.stderr)


@pytest.mark.gpu
@pytest.mark.parametrize("trace", ["on", "ring"])
def test_records_stay_in_their_region(trace):
    assert_right(stress(replace(SIDE_BY_SIDE, iterations=40), f"trace={trace}"))


@pytest.mark.gpu
def test_all_others_give_up_on_a_rank_that_never_comes():
    done = stress(replace(SIDE_BY_SIDE, iterations=4), "absent=3", "pattern=fused", "timeout_ms=500")
    assert done.returncode == TIMED_OUT, done.stderr
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stderr.splitlines()]
    assert {(fault["stage"], fault["channel"], fault["peer"]) for fault in found} == {("dispatch", "count", "3")}
    assert sorted(fault["rank"] for fault in found) == [str(rank) for rank in range(8) if rank != 3]


@pytest.mark.gpu
def test_compute_sanitizer_finds_nothing_in_two_hundred_calls():
    shape = Shape(ranks=2, blocks=2, warps=8, tokens=4, hidden=128, experts=4, topk=3, iterations=130)
    done = stress(shape, "timeout_ms=60000", tool=sanitizer("memcheck"))
    assert done.returncode == RIGHT, (done.stdout + done.stderr)[-6000:]


BUSY = Shape(ranks=4, blocks=4, warps=16, tokens=16, hidden=256, experts=16, topk=4, iterations=160)
# What attacks the channel, beside all patterns in turns. Few tokens: a rank that is ahead is not to be held up.
LOADS = {
    "ack": (replace(BUSY, tokens=4, iterations=400), "pattern=dropped"),
    "any_result": (replace(BUSY, tokens=1, iterations=400), "pattern=fused"),
}
# A release or an acquire left out: all stores meet in one L2, and no SM has a row in its own cache from before the flag
# came. They are for the race detector of test_low_latency_stress.py. Whether some show all the same, `make soak` tells.
# The number of a combine tells apart two of a handle, whose results have the same bits.
UNSEEN = [site for _, site in MUTANTS if site.endswith((":release", ":acquire", ":value"))]
PLANTED = [site for _, site in MUTANTS if site not in UNSEEN]


def load_of(site: str) -> tuple[Shape, tuple[str, ...]]:
    shape, *options = LOADS.get(site.split(":")[0], (BUSY,))
    return shape, tuple(options)


def exits_of_a_mutant(site: str) -> list[int]:
    """Of one seed after the other, until one of them notices."""
    shape, options = load_of(site)
    exits: list[int] = []
    for seed in SEEDS:
        exits.append(stress(replace(shape, seed=seed), *options, f"plant={site}", "timeout_ms=1000").returncode)
        if exits[-1] in NOTICED:
            break
    return exits


@pytest.mark.gpu
@pytest.mark.parametrize("site", PLANTED)
def test_planted_fault_is_noticed(site):
    exits = exits_of_a_mutant(site)
    assert exits[-1] in NOTICED, f"{site} left out, and nothing noticed: exits {exits}"


@pytest.mark.gpu
@pytest.mark.parametrize("channel", ["count", *LOADS])
def test_without_a_fault_the_same_run_is_right(channel):
    shape, options = load_of(channel)
    assert_right(stress(shape, *options, "timeout_ms=1000"))


@pytest.mark.soak
@pytest.mark.xfail(strict=False, reason="one GPU orders more than it promises")
@pytest.mark.parametrize("site", UNSEEN)
def test_a_missing_release_or_acquire_is_noticed(site):
    assert exits_of_a_mutant(site)[-1] in NOTICED

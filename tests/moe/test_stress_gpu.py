"""All ranks of the P2P pipeline side by side on one GPU, back to back with no barrier in between; skipped without one.

    python -m pytest -q -m gpu tests/moe/test_stress_gpu.py     a minute, and the compiler's time
    python -m pytest -q -m soak tests/moe/test_stress_gpu.py    10,000 calls of each variant, and planted faults of all

TRACEKERN_ALL_KERNELS=1 adds fp32 and fp16. tests/cpp/p2p_stress.cu says how one run is made by hand.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from attack import RIGHT, SAMPLED_NUMBERS, TIMED_OUT, USAGE, VARIANTS, WRONG_RESULT, Shape, assert_right
from devices import require_gpu
from gpu_mutants import SITES
from test_mutants import MUTANTS
from toolchains import NVCC, ROOT, SAMPLE, compile_cached, sanitizer

pytestmark = pytest.mark.timeout(900)  # the compiler's minutes included

RIVAL_TIMED_OUT, CUDA_ERROR = 5, 6

# One number type with all record formats, which SAMPLE would not have. The host's sums must stay two roundings.
ALL_FORMATS = tuple(word for word in NVCC if word not in SAMPLE)
ATTACKED = ("-O2", "-Xcompiler", "-ffp-contract=off", "-DTK_RANDOM_DELAYS", "-DTK_PLANTED_FAULTS", "--split-compile=0")
NUMBERS = () if SAMPLE else ("-DTK_ALL_NUMBERS",)

SIDE_BY_SIDE = Shape(ranks=8, blocks=4, warps=4, tokens=16, hidden=64, experts=32, topk=4, iterations=300)


@functools.cache
def binary() -> Path:
    return compile_cached((*ALL_FORMATS, *ATTACKED, *NUMBERS), ROOT / "tests" / "cpp" / "p2p_stress.cu", "")


def stress(
    variant: str, shape: Shape, *options: str, number: str = "bf16", tool: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """p2p_stress on the first GPU, run by `tool` if there is one."""
    require_gpu()
    command = [*tool, str(binary()), variant, number, *shape.arguments(), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def num_sms() -> int:
    require_gpu()
    driver = ctypes.CDLL("libcuda.so.1")
    device, count = ctypes.c_int(), ctypes.c_int()
    multiprocessor_count = 16
    assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert driver.cuDeviceGetAttribute(ctypes.byref(count), multiprocessor_count, device) == 0
    return count.value


@pytest.mark.soak  # half a minute and more
@pytest.mark.compilers
def test_the_program_compiles():
    assert binary().exists()


@pytest.mark.gpu
@pytest.mark.parametrize("number", SAMPLED_NUMBERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_ranks_side_by_side(variant, number):
    assert_right(stress(variant, SIDE_BY_SIDE, number=number))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_thousand_calls_side_by_side(variant):
    assert_right(stress(variant, replace(SIDE_BY_SIDE, iterations=10_000)))


SHAPES = {
    "one_rank": Shape(ranks=1, blocks=5, warps=3, tokens=9, experts=5, topk=4, iterations=60),
    "one_warp": Shape(ranks=2, blocks=1, warps=1, tokens=5, experts=4, topk=3, iterations=60),
    "many_blocks": Shape(ranks=3, blocks=24, warps=2, tokens=40, hidden=256, iterations=60),
    "large_blocks": Shape(ranks=2, blocks=8, warps=16, tokens=40, hidden=2880, experts=16, topk=6, iterations=40),
    "odd_row": Shape(ranks=8, blocks=3, warps=1, tokens=6, hidden=13, experts=8, topk=1, iterations=60),
    "no_tokens": Shape(ranks=8, blocks=2, warps=2, tokens=0, experts=8, topk=1, iterations=200),
}


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(variant, marks=pytest.mark.gpu) for variant in ("flag", "pipelined")),
        *(pytest.param(variant, marks=pytest.mark.soak) for variant in ("balanced", "reduce", "overlapped")),
    ],
)
@pytest.mark.parametrize("name", SHAPES)
def test_any_number_of_ranks_blocks_and_warps(name, variant):
    assert_right(stress(variant, SHAPES[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["pipelined", "overlapped"])
@pytest.mark.parametrize("partitions", range(1, 6))
def test_any_number_of_partitions(partitions, variant):
    shape = Shape(ranks=3, blocks=4, warps=4, tokens=13, hidden=64, iterations=100)
    assert_right(stress(variant, shape, f"partitions={partitions}"))


@pytest.mark.gpu
def test_a_gpu_without_an_idle_sm():
    # A block of 16 warps of the pipelined kernel takes all registers of an SM.
    shape = Shape(ranks=2, blocks=num_sms() // 2, warps=16, tokens=64, hidden=256, experts=8, topk=4, iterations=40)
    assert_right(stress("pipelined", shape))


@pytest.mark.gpu
def test_ranks_that_do_not_fit_together_are_refused():
    done = stress("balanced", Shape(ranks=8, blocks=num_sms(), warps=16, experts=8))
    assert done.returncode == USAGE
    assert re.search(r"8 ranks of \d+ blocks of 16 warps: this GPU holds \d+ blocks at once", done.stderr)


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["1", "8"])
def test_streams_may_share_a_queue_of_the_device(connections, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert_right(stress("balanced", replace(SIDE_BY_SIDE, iterations=100)))


@pytest.mark.gpu
@pytest.mark.parametrize("trace", ["on", "ring"])
@pytest.mark.parametrize("variant", ["flag", "dedup", "pipelined"])
def test_records_stay_in_their_region(variant, trace):
    assert_right(stress(variant, replace(SIDE_BY_SIDE, iterations=100), f"trace={trace}"))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["flag", "balanced"])
def test_all_others_give_up_on_a_rank_that_never_comes(variant):
    done = stress(variant, replace(SIDE_BY_SIDE, iterations=20), "absent=3", "timeout_ms=500")
    assert done.returncode == TIMED_OUT, done.stderr
    found = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in done.stderr.splitlines()]
    assert sorted(fault["rank"] for fault in found) == [str(rank) for rank in range(8) if rank != 3]
    assert {(fault["stage"], fault["channel"], fault["peer"]) for fault in found} == {("dispatch_send", "counts", "3")}


BLOCKS_OF_A_RIVAL = 4
TWO_RANKS = Shape(ranks=2, warps=16, tokens=64, hidden=256, experts=8, topk=4, iterations=8)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["balanced", "pipelined"])
def test_kernels_of_another_library_run_beside_ours(variant):
    shape = replace(SIDE_BY_SIDE, iterations=40)
    assert_right(stress(variant, shape, f"rival={BLOCKS_OF_A_RIVAL}"))


@pytest.mark.gpu
def test_as_many_sms_as_the_other_library_needs_are_enough():
    shape = replace(TWO_RANKS, blocks=num_sms() // 2 - BLOCKS_OF_A_RIVAL)
    assert_right(stress("pipelined", shape, f"rival={BLOCKS_OF_A_RIVAL}"))


# Rank 0's rival holds SMs that rank 1's last blocks need, rank 1's rival waits for an SM that nobody leaves.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ours_ms", "rival_ms", "code"), [(500, 20_000, TIMED_OUT), (20_000, 500, RIVAL_TIMED_OUT)], ids=["ours", "rival"]
)
def test_with_no_sm_left_free_both_libraries_wait_for_ever(ours_ms, rival_ms, code):
    limits = (f"timeout_ms={ours_ms}", f"rival_ms={rival_ms}")
    shape = replace(TWO_RANKS, blocks=num_sms() // 2)
    done = stress("pipelined", shape, f"rival={BLOCKS_OF_A_RIVAL}", *limits)
    assert done.returncode == code, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["balanced", "pipelined"])
def test_compute_sanitizer_finds_nothing_between_two_ranks(variant):
    shape = Shape(ranks=2, blocks=2, warps=2, tokens=4, hidden=64, experts=4, iterations=4)
    done = stress(variant, shape, "trace=on", "timeout_ms=60000", tool=sanitizer("memcheck"))
    assert done.returncode == RIGHT, (done.stdout + done.stderr)[-6000:]


# A fault can lead a kernel astray, too.
NOTICED = (WRONG_RESULT, TIMED_OUT, CUDA_ERROR)
SEEDS = range(1, 5)
BUSY = Shape(ranks=4, blocks=4, warps=4, tokens=64, hidden=512, experts=16, topk=4, iterations=160)
# Hardly a token: nothing but the acknowledgement keeps a fast rank from lapping a slow one.
LOADS = {"empty": ("token", Shape(ranks=4, blocks=1, warps=1, tokens=0, experts=4, topk=1, iterations=1000))}
# Barriers are no part of a call.
PLANTED = [(name, f"{channel}:{left_out}") for name in SITES if name != "barrier" for channel, left_out in SITES[name]]
# The others are for `make soak`.
SHORT = ("balanced", "pipelined", "empty")
# A release or an acquire left out: all stores meet in one L2, and no SM has a row in its own cache from before the flag
# came. They are for the race detector of test_mutants.py. Whether some show all the same, `make soak` tells.
UNSEEN = [
    (variant, f"{channel}:{mutation}")
    for variant, channels in {
        "token": ("token", "result"),
        "flag": ("rank", "results", "grid"),
        "dedup": ("row", "layout", "result"),
        "reduce": ("row", "partial"),
        "pipelined": ("row", "partial", "layout"),
    }.items()
    for channel in channels
    for mutation in ("release", "acquire")
]


def exits_of_a_mutant(name: str, site: str) -> list[int]:
    """Of one seed after the other, until one of them notices."""
    variant, shape = LOADS.get(name, (name, BUSY))
    exits: list[int] = []
    for seed in SEEDS:
        exits.append(stress(variant, replace(shape, seed=seed), f"plant={site}", "timeout_ms=1000").returncode)
        if exits[-1] in NOTICED:
            break
    return exits


def marks(name: str) -> pytest.MarkDecorator:
    return pytest.mark.gpu if name in SHORT else pytest.mark.soak


def test_every_site_of_the_cpu_is_planted_or_known_to_be_unseen():
    in_calls = {site for name, site in MUTANTS if name != "barrier"}
    assert {site for _, site in [*PLANTED, *UNSEEN]} == in_calls


@pytest.mark.parametrize(
    ("name", "site"), [pytest.param(name, site, id=f"{name}-{site}", marks=marks(name)) for name, site in PLANTED]
)
def test_planted_fault_is_noticed(name, site):
    exits = exits_of_a_mutant(name, site)
    assert exits[-1] in NOTICED, f"{site} left out, and nothing noticed: exits {exits}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in SITES if name != "barrier"])
def test_without_a_fault_the_same_run_is_right(name):
    variant, shape = LOADS.get(name, (name, BUSY))
    assert_right(stress(variant, shape, "timeout_ms=1000"))


@pytest.mark.soak
@pytest.mark.xfail(strict=False, reason="one GPU orders more than it promises")
@pytest.mark.parametrize(("name", "site"), UNSEEN, ids=lambda value: value)
def test_a_missing_release_or_acquire_is_noticed(name, site):
    assert exits_of_a_mutant(name, site)[-1] in NOTICED

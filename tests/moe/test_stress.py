"""Back to back with no barrier in between: all input changes every time, buffers turn to NaN when read."""

from __future__ import annotations

import os

import pytest
from attack import PROMPT, SAMPLED_NUMBERS, SLOW, VARIANTS, Shape, assert_right, stress

pytestmark = pytest.mark.programs("tests/cpp/p2p_stress.cpp")

LAYOUTS = [(1, 1, 1), (1, 5, 3), (2, 1, 1), (2, 8, 1), (3, 2, 4), (5, 1, 7), (8, 8, 4)]
"""ranks, blocks, warps"""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", SAMPLED_NUMBERS)
def test_a_thousand_calls_in_a_row(variant, number):
    shape = Shape(ranks=4, blocks=3, warps=2, tokens=12, hidden=24, experts=8, topk=3, iterations=1000)
    assert_right(stress(SLOW, variant, number, "fibers", shape, PROMPT))


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_with_delays_at_every_wait(variant):
    shape = Shape(ranks=4, blocks=2, warps=2, tokens=3, hidden=6, experts=4, topk=2, iterations=150)
    assert_right(stress(SLOW, variant, "bf16", "fibers", shape))


@pytest.mark.parametrize(("ranks", "blocks", "warps"), LAYOUTS)
@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_any_number_of_ranks_blocks_and_warps(executor, ranks, blocks, warps):
    shape = Shape(ranks, blocks, warps, tokens=6, hidden=10, experts=ranks * 2, topk=2)
    shape = Shape(**{**vars(shape), "iterations": 40 if executor == "fibers" else 4})
    for variant in VARIANTS:
        assert_right(stress(SLOW, variant, "bf16", executor, shape, PROMPT))


@pytest.fixture
def one_core():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.usefixtures("one_core")
def test_one_core_is_enough(executor):
    shape = Shape(ranks=4, blocks=3, warps=2, experts=8, iterations=8)
    for variant in VARIANTS:
        assert_right(stress(SLOW, variant, "bf16", executor, shape, PROMPT))


def test_tracks_that_overflow_stay_in_their_region():
    shape = Shape(ranks=2, blocks=1, warps=1, tokens=64, experts=4, topk=4, iterations=20)
    for variant in VARIANTS:
        assert_right(stress(SLOW, variant, "bf16", "fibers", shape, "trace=on", PROMPT))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", SAMPLED_NUMBERS)
def test_ten_thousand_calls_with_delays(variant, number):
    shape = Shape(ranks=8, blocks=4, warps=2, tokens=6, hidden=16, experts=16, topk=2, iterations=10_000)
    assert_right(stress(SLOW, variant, number, "fibers", shape))

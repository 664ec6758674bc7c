"""Leaves out one release, acquire, epoch, wait or block barrier at a time: some run has to notice.

Every mutant runs with the same shapes as its control, which is right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from attack import (
    FLAGGED,
    NOTICED,
    RIGHT,
    SEEDS,
    SLOW,
    TSAN,
    WITH_TIME_OUT,
    Attack,
    Shape,
    assert_right,
    run_program,
    sites,
)
from left_out import (
    INT4_RING_FILES,
    LEFT_OUT,
    LOW_LATENCY_FILES,
    P2P_FILES,
    TWO_HOP_FILES,
    barriers_in,
    numbered_program,
)
from toolchains import CSRC

pytestmark = pytest.mark.programs(*(f"tests/cpp/{name}.cpp" for name in ("p2p_stress", "barriers")))


def pipeline(variant: str, shape: Shape) -> tuple[str, ...]:
    return (variant, "bf16", "threads", *shape.arguments()[:-1], "SEED")


# The flags `counts` and `ack` order nothing but themselves and are raised relaxed: only their values can be missed.
RELAXED = ("epoch", "acknowledgement")

BUSY = Shape(tokens=4, iterations=150)
# Hardly a token: nothing but the acknowledgement keeps a fast rank from lapping a slow one.
EMPTY = ("token", "bf16", "fibers", *Shape(4, 1, 1, 0, 8, 4, 1, 1500).arguments()[:-1], "SEED")
ATTACKS = {
    "token": Attack("p2p_stress", pipeline("token", BUSY), sites("token", *FLAGGED) + sites("result", *FLAGGED)),
    "rank": Attack(
        "p2p_stress",
        pipeline("flag", BUSY),
        sites("rank", *FLAGGED) + sites("results", *FLAGGED) + sites("grid", "release", "acquire", "acknowledgement"),
    ),
    "counts": Attack("p2p_stress", pipeline("balanced", BUSY), sites("counts", *RELAXED), TSAN, WITH_TIME_OUT),
    "ack": Attack("p2p_stress", EMPTY, sites("ack", *RELAXED), SLOW, WITH_TIME_OUT),
    "dedup": Attack(
        "p2p_stress",
        pipeline("dedup", BUSY),
        sites("row", *FLAGGED) + sites("layout", *FLAGGED) + sites("result", *FLAGGED),
        noticed=WITH_TIME_OUT,
    ),
    "reduce": Attack("p2p_stress", pipeline("reduce", BUSY), sites("row", *FLAGGED) + sites("partial", *FLAGGED)),
    "pipelined": Attack(
        "p2p_stress",
        pipeline("pipelined", BUSY),
        sites("row", *FLAGGED) + sites("layout", *FLAGGED) + sites("partial", *FLAGGED),
        noticed=WITH_TIME_OUT,
    ),
    "overlapped": Attack(
        "p2p_stress",
        pipeline("overlapped", BUSY),
        sites("row", *FLAGGED) + sites("layout", "epoch") + sites("partial", *FLAGGED),
        noticed=WITH_TIME_OUT,
    ),
    "dedup_counts": Attack("p2p_stress", pipeline("reduce", BUSY), sites("counts", *RELAXED), TSAN, WITH_TIME_OUT),
    "dedup_ack": Attack("p2p_stress", ("pipelined", *EMPTY[1:]), sites("ack", *RELAXED), SLOW, WITH_TIME_OUT),
    "barrier": Attack("barriers", ("rank", "threads", "3", "1", "1", "200"), sites("barrier", *FLAGGED)),
    "grid": Attack(
        "barriers", ("grid", "threads", "1", "3", "2", "100"), sites("grid", "release", "acquire", "acknowledgement")
    ),
}
MUTANTS = [(name, site) for name, attack in ATTACKS.items() for site in attack.sites]
# `make test` holds the flags of the pipelined kernel and the barriers, `make soak` those of the older variants too.
LONG = ("token", "rank", "ack", "dedup", "reduce", "overlapped", "dedup_counts", "dedup_ack")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.soak] if name in LONG else []


@pytest.mark.parametrize(
    ("name", "site"), [pytest.param(name, site, id=f"{name}-{site}", marks=marks(name)) for name, site in MUTANTS]
)
def test_planted_fault_is_noticed(name, site):
    exits = ATTACKS[name].exits_until_noticed(site)
    assert exits[-1] in ATTACKS[name].noticed, f"{site} left out, and nothing noticed: exits {exits}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ATTACKS])
def test_without_a_fault_the_same_run_is_right(name):
    assert_right(ATTACKS[name].run(SEEDS[0]))


# More experts and choices than a warp has lanes, so that several warps share each loop.
WIDE = Shape(ranks=2, blocks=2, warps=3, tokens=24, experts=128, iterations=30)
# The flag variant uses the grid barrier too; in the others a block may have no token, and no barrier but its first.
BARRIER_VARIANTS = ("flag", "balanced", "pipelined")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> Path:
    return numbered_program(tmp_path_factory.mktemp("numbered"), "p2p_stress", P2P_FILES)


@pytest.mark.soak
@pytest.mark.parametrize("site", range(len(barriers_in(P2P_FILES))), ids=barriers_in(P2P_FILES))
def test_left_out_block_barrier_is_noticed(numbered, site, monkeypatch):
    monkeypatch.setenv(LEFT_OUT, str(site))
    exits = []
    for variant in BARRIER_VARIANTS:
        exits.append(run_program(numbered, *pipeline(variant, WIDE)[:-1], "1").returncode)
        if exits[-1] in NOTICED:
            return
    pytest.fail(f"barrier {site} left out, and nothing noticed: exits {exits}")


@pytest.mark.soak
def test_with_all_block_barriers_the_same_runs_are_right(numbered):
    for variant in BARRIER_VARIANTS:
        assert run_program(numbered, *pipeline(variant, WIDE)[:-1], "1").returncode == RIGHT


def test_all_block_barriers_are_numbered():
    kernels = [str(path.relative_to(CSRC)) for part in ("comm", "moe") for path in (CSRC / part).rglob("*.h")]
    # The others of moe/gemm guard shared memory alone, and no rank waits there: racecheck of compute-sanitizer is for
    # them.
    waiting = [name for name in kernels if name in INT4_RING_FILES or not name.startswith("moe/gemm/")]
    assert sorted(name for name in waiting if barriers_in((name,))) == sorted(
        P2P_FILES + LOW_LATENCY_FILES + TWO_HOP_FILES + INT4_RING_FILES
    )

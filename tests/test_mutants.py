"""Leaves out one release, acquire, epoch, wait or block barrier at a time: some run has to notice.

Every mutant runs with the same shapes as its control, which is right.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from attack import (
    DELAYS,
    RACE_EXIT,
    RIGHT,
    SLOW,
    TIMED_OUT,
    TSAN,
    WRONG_RESULT,
    Shape,
    assert_right,
    run_program,
)
from toolchains import CSRC, GXX, ROOT, SAMPLE, compile_cached, program

NOTICED = (RACE_EXIT, WRONG_RESULT)
SEEDS = range(1, 9)
"""Load hides a missing release from the race detector now and then; the first seed that shows it ends the test."""


@dataclass(frozen=True)
class Attack:
    """One way to run a program so that a fault in `sites` shows."""

    program: str
    arguments: tuple[str, ...]
    sites: tuple[str, ...]
    flags: tuple[str, ...] = TSAN
    noticed: tuple[int, ...] = NOTICED

    def run(self, seed: int, *options: str) -> subprocess.CompletedProcess[str]:
        arguments = (argument.replace("SEED", str(seed)) for argument in self.arguments)
        return run_program(program(self.program, *self.flags), *arguments, *options)


def pipeline(variant: str, shape: Shape) -> tuple[str, ...]:
    return (variant, "bf16", "threads", *shape.arguments()[:-1], "SEED")


def sites(channel: str, *mutations: str) -> tuple[str, ...]:
    return tuple(f"{channel}:{mutation}" for mutation in mutations)


FLAGGED = ("release", "acquire", "epoch", "acknowledgement")
# The flags `counts` and `ack` order nothing but themselves and are raised relaxed: only their values can be missed.
RELAXED = ("epoch", "acknowledgement")

BUSY = Shape(tokens=4, iterations=150)
# Hardly a token: nothing but the acknowledgement keeps a fast rank from lapping a slow one.
EMPTY = ("token", "bf16", "fibers", *Shape(4, 1, 1, 0, 8, 4, 1, 1500).arguments()[:-1], "SEED")
# Wrong counts and lapped flags end in a wait for what never comes.
WITH_TIME_OUT = (*NOTICED, TIMED_OUT)
MUTANT_TIMEOUT = "timeout_ms=4000"

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
    "dedup_counts": Attack("p2p_stress", pipeline("reduce", BUSY), sites("counts", *RELAXED), TSAN, WITH_TIME_OUT),
    "dedup_ack": Attack("p2p_stress", ("pipelined", *EMPTY[1:]), sites("ack", *RELAXED), SLOW, WITH_TIME_OUT),
    "barrier": Attack("barriers", ("rank", "threads", "3", "1", "1", "200"), sites("barrier", *FLAGGED)),
    "grid": Attack(
        "barriers", ("grid", "threads", "1", "3", "2", "100"), sites("grid", "release", "acquire", "acknowledgement")
    ),
}
MUTANTS = [(name, site) for name, attack in ATTACKS.items() for site in attack.sites]
# `make test` holds the flags of the pipelined kernel and the barriers, `make soak` those of the older variants too.
LONG = ("token", "rank", "ack", "dedup", "reduce", "dedup_counts", "dedup_ack")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.soak] if name in LONG else []


@pytest.mark.parametrize(
    ("name", "site"), [pytest.param(name, site, id=f"{name}-{site}", marks=marks(name)) for name, site in MUTANTS]
)
def test_planted_fault_is_noticed(name, site):
    seen = []
    for seed in SEEDS:
        seen.append(ATTACKS[name].run(seed, f"plant={site}", MUTANT_TIMEOUT).returncode)
        if seen[-1] in ATTACKS[name].noticed:
            return
    pytest.fail(f"{site} left out, and nothing noticed: exits {seen}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ATTACKS])
def test_without_a_fault_the_same_run_is_right(name):
    assert_right(ATTACKS[name].run(SEEDS[0]))


# More experts and choices than a warp has lanes, so that several warps share each loop.
WIDE = Shape(ranks=2, blocks=2, warps=3, tokens=24, experts=128, iterations=30)
BLOCK_SYNC = re.compile(r"\b(?:(warp)\.block_sync\(\)|TK_END_AFTER_BARRIER\(((?:context\.)?warp)\));")
BLOCK_SYNC_FILES = ("comm/barrier.h", "moe/p2p/dispatch.h", "moe/p2p/combine.h")
# The flag variant uses the grid barrier too; in the others a block may have no token, and no barrier but its first.
BLOCK_SYNC_VARIANTS = ("flag", "balanced", "pipelined")
NUM_BLOCK_SYNCS = sum(len(BLOCK_SYNC.findall((CSRC / name).read_text())) for name in BLOCK_SYNC_FILES)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> Path:
    """p2p_stress from a copy of the sources in which $LEFT_OUT names the block barrier that is left out."""
    copy = tmp_path_factory.mktemp("numbered") / "csrc"
    shutil.copytree(CSRC, copy)
    site = 0
    for name in BLOCK_SYNC_FILES:
        text = (copy / name).read_text()
        while found := BLOCK_SYNC.search(text):
            barrier = f"(left_out({site}) ? void() : {found[1] or found[2]}.block_sync ());"
            text = text[: found.start()] + barrier + text[found.end() :]
            site += 1
        (copy / name).write_text(text)
    perturb = copy / "comm/perturb.h"
    chosen = (
        "\n#include <cstdlib>\n"
        'inline const char* const left_out_site = std::getenv("LEFT_OUT");\n'
        "inline bool left_out(int site) { return left_out_site && std::atoi(left_out_site) == site; }\n"
    )
    perturb.write_text(perturb.read_text() + chosen)
    source = ROOT / "tests" / "cpp" / "p2p_stress.cpp"
    return compile_cached((*GXX, "-O1", "-g1", "-fsanitize=thread", *DELAYS, *SAMPLE), source, "", copy)


@pytest.mark.soak
@pytest.mark.parametrize("site", range(NUM_BLOCK_SYNCS))
def test_left_out_block_barrier_is_noticed(numbered, site, monkeypatch):
    monkeypatch.setenv("LEFT_OUT", str(site))
    exits = []
    for variant in BLOCK_SYNC_VARIANTS:
        exits.append(run_program(numbered, *pipeline(variant, WIDE)[:-1], "1").returncode)
        if exits[-1] in NOTICED:
            return
    pytest.fail(f"barrier {site} left out, and nothing noticed: exits {exits}")


@pytest.mark.soak
def test_all_block_barriers_are_numbered(numbered, monkeypatch):
    monkeypatch.setenv("LEFT_OUT", str(NUM_BLOCK_SYNCS))
    for variant in BLOCK_SYNC_VARIANTS:
        assert run_program(numbered, *pipeline(variant, WIDE)[:-1], "1").returncode == RIGHT
    kernels = [path for part in ("comm", "moe") for path in (CSRC / part).rglob("*.h")]
    calls = [path for path in kernels if BLOCK_SYNC.search(path.read_text())]
    assert sorted(str(path.relative_to(CSRC)) for path in calls) == sorted(BLOCK_SYNC_FILES)

"""A rank that gives up at any moment: whichever look at the abort word is the first to see it, every warp comes to its
barriers, and what is left undone is no result.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from attack import RIGHT, SLOW, TIMED_OUT, VARIANTS
from toolchains import program

pytestmark = pytest.mark.programs(*(f"tests/cpp/{name}_stress.cpp" for name in ("p2p", "low_latency", "two_hop")))

LIMIT_S = 20
"""Of a run that takes milliseconds: longer ones hang."""
ONE_RANK = ("1", "3", "3", "8", "8", "6", "2", "2", "1")
"""With blocks of several warps, and nobody to wait for: each look is that of the same warp in every run."""
RUNS = {variant: ("p2p_stress", variant, "bf16", "fibers", *ONE_RANK) for variant in VARIANTS} | {
    f"low_latency-{pattern}": ("low_latency_stress", "fibers", "1", "3", "6", *ONE_RANK[3:], f"pattern={pattern}")
    for pattern in ("fused", "split", "two_handles", "overlapped")
}
RUNS["two_hop"] = ("two_hop_stress", "run", "fibers", *map(str, (1, 1, 2, 9, 16, 2, 2, 1, 7, 1, 1, 0, 1, 2, 1)))


def end_of(run: str, look: int) -> int | str:
    name, *arguments = RUNS[run]
    try:
        command = [str(program(name, *SLOW)), *arguments, f"abort_at={look}"]
        return subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return "hangs"


@pytest.mark.parametrize("run", RUNS)
def test_an_abort_at_any_look_ends_the_call_and_is_on_record(run: str):
    program(RUNS[run][0], *SLOW)  # built once
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda look: end_of(run, look), range(72)))
    assert ends[0] == TIMED_OUT
    assert [(look, end) for look, end in enumerate(ends) if end not in (TIMED_OUT, RIGHT)] == []

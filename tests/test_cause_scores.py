"""What is injected into simulated ranks is charged to what was injected; benchmarks/causes.py has the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator import Case, Drain, LateHost, Latency, MovingWork, Shape, SlowWork, score, simulate
from simulator.run import causes_of

DELAY_NS = 5_000
LATE = (SlowWork(DELAY_NS, rank=1),)


@pytest.mark.parametrize(
    "case",
    [
        Case(Shape.CHAIN, 2, 5, LATE, noise=0.02, work_ns=4_000),
        Case(Shape.CHAIN, 12, 6, (SlowWork(DELAY_NS, rank=4),), noise=0.05, work_ns=6_000),
        Case(Shape.STREAM, 24, 6, (SlowWork(DELAY_NS, rank=0),), work_ns=4_000),
        Case(Shape.STREAM, 6, 40, (SlowWork(DELAY_NS, rank=2),), noise=0.03, work_ns=4_000, is_persistent=True),
        Case(Shape.STREAM, 8, 10, LATE, noise=0.05, work_ns=10_000),
        Case(Shape.RING, 6, 12, LATE, noise=0.02, work_ns=4_000),
        Case(Shape.RING, 4, 20, (Latency(DELAY_NS, source=1, destination=2),), noise=0.01, is_persistent=True),
        Case(Shape.CREDITS, 3, 30, (SlowWork(DELAY_NS, rank=2),), noise=0.04, work_ns=4_000, is_persistent=True),
        Case(Shape.CREDITS, 16, 30, (SlowWork(DELAY_NS, rank=5),), noise=0.02, work_ns=4_000, is_persistent=True),
        Case(Shape.BARRIER, 6, 8, LATE, noise=0.03, work_ns=4_000, is_persistent=True),
        Case(Shape.BARRIER, 5, 20, (MovingWork(DELAY_NS, num_ranks=5),), noise=0.03, work_ns=4_000),
        Case(Shape.BARRIER, 4, 8, (LateHost(DELAY_NS, rank=3),), noise=0.03, work_ns=4_000),
        Case(Shape.EXCHANGE, 5, 4, LATE, noise=0.04, work_ns=8_000),
        Case(Shape.EXCHANGE, 4, 6, (LateHost(2 * DELAY_NS, rank=2),), noise=0.03, work_ns=4_000),
        Case(Shape.EXCHANGE, 4, 8, (LateHost(20 * DELAY_NS, rank=1),), noise=0.04, launch_ns=40_000),
        Case(Shape.EXCHANGE, 3, 8, (Latency(DELAY_NS, source=2, destination=0),), noise=0.02, work_ns=4_000),
    ],
    ids=lambda case: f"{case.shape.value}-{case.num_ranks}-{type(case.injections[0]).__name__}",
)
@pytest.mark.parametrize("seed", [11, 12])
def test_what_is_injected_is_charged_to_it(case: Case, seed: int, tmp_path: Path):
    found = score(case, seed, tmp_path)
    assert found.score >= 0.95
    assert found.ratio <= 1.10
    assert found.elsewhere <= 0.05


@pytest.mark.parametrize("is_persistent", [False, True])
def test_stores_that_drain_slowly_to_one_peer_are_that_links(is_persistent: bool, tmp_path: Path):
    """Whether their own rank, which could not go on, or another one waited for it."""
    case = Case(Shape.EXCHANGE, 4, 6, (Drain(4 * DELAY_NS, source=3, destination=1),), 0.02, is_persistent)
    costs = causes_of(simulate(case, 4, tmp_path)).costs
    assert (costs[0].rank, costs[0].peer) == (3, 1)
    of_rank = sum(cost.total_ns for cost in costs if cost.rank == 3 and cost.phase.event == "signal_token")
    of_pair = sum(cost.total_ns for cost in costs if (cost.rank, cost.peer) == (3, 1) and cost.phase.event)
    assert of_pair >= 0.95 * of_rank > 0

"""What the round trips of one pair prove, and how sure that is."""

from __future__ import annotations

import numpy as np
import pytest
from clock_exchanges import ROW, SECOND, Clock, exchange, rank_of

from tracekern.timeline.clocks.pairs import MAX_WANDER_PER_NS, Burst, LocalClock, find_bursts, slope_between

TRUE = Clock(0, 0.0, 0.0, 0.0, resolution_ticks=1)


def bursts_of(clocks: dict[int, Clock], *rows: np.ndarray) -> list[Burst]:
    local = {rank: LocalClock.of(rank_of(rank, clock), clock.base_ns) for rank, clock in clocks.items()}
    return find_bursts(np.concatenate(rows), local)


def test_a_rate_is_known_as_well_forwards_as_backwards():
    rng = np.random.default_rng(1)
    clocks = {rank: Clock.draw(rng) for rank in range(2)}
    distance = 4 * SECOND
    rounds = (exchange(rng, clocks, 0, 1, number, number * distance, quiet=1.0) for number in range(2))
    one, other = bursts_of(clocks, *rounds)
    (forwards, error), (backwards, backwards_error) = slope_between(one, other), slope_between(other, one)
    assert (backwards, backwards_error) == pytest.approx((forwards, error))
    assert error == pytest.approx((one.width + other.width) / 2 / distance + MAX_WANDER_PER_NS * distance / 2, rel=1e-3)


@pytest.mark.parametrize("initiator", [0, 1])
def test_the_spread_is_that_of_the_midpoints(initiator):
    """Half of the round trips took 200 ns longer on their way there, the others back: midpoints 200 ns apart."""
    rows = np.zeros(40, ROW)
    rows["kind"], rows["initiator"], rows["responder"] = 1, initiator, 1 - initiator
    there = np.where(np.arange(40) % 2, 100, 300)
    rows["t0"] = np.arange(40) * 1_000
    rows["t1"] = rows["t2"] = rows["t0"] + there
    rows["t3"] = rows["t0"] + 400
    (burst,) = bursts_of({0: TRUE, 1: TRUE}, rows)
    assert burst.spread == pytest.approx(1.4826 * 100, rel=0.01)
    assert (burst.at_least, burst.at_most) == pytest.approx((-101, 101), abs=1)

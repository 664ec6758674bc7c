"""Clocks whose truth is known and the round trips between them, for the tests of what fits or bounds clocks."""

import dataclasses
import itertools
import math

import numpy as np

from tracekern.timeline.clocks.fit import apply_clock
from tracekern.timeline.model import Rank

SECOND = 10**9
WALL_NS = 1_760_000_000 * SECOND
ROW = np.dtype(
    [("kind", "<u4"), ("round_idx", "<u4"), ("initiator", "<i4"), ("responder", "<i4")]
    + [(f"t{i}", "<i8") for i in range(4)]
)


@dataclasses.dataclass(frozen=True)
class Clock:
    """True time (ns from the start of the capture) to ticks, in a way of its own: not csrc's simulation."""

    base_ns: int
    rate: float
    wander: float
    phase: float
    ticks_per_second: int = SECOND
    resolution_ticks: int = 32
    event_at: float = math.inf
    """True time from which it is ahead by jump_ns, and faster by rate_step."""
    jump_ns: float = 0.0
    rate_step: float = 0.0

    @classmethod
    def draw(cls, rng, **changes):
        clock = cls(
            WALL_NS + int(rng.integers(-250_000, 250_000)), rng.uniform(-4e-6, 4e-6), 1.2e-7, rng.uniform(0, 6.3)
        )
        return dataclasses.replace(clock, **changes)

    def ns(self, time):
        """[n] float64 ns since base_ns."""
        turn = math.pi / (20 * SECOND)
        steady = time * (1 + self.rate) + self.wander / turn * (np.cos(self.phase) - np.cos(self.phase + turn * time))
        after = np.maximum(np.asarray(time) - self.event_at, 0.0)
        return steady + np.where(time >= self.event_at, self.jump_ns, 0.0) + after * self.rate_step

    def ticks(self, time):
        """[n] int64, cut to the resolution."""
        ns_per_tick = SECOND // self.ticks_per_second
        whole = self.base_ns + np.floor(self.ns(np.asarray(time, np.float64))).astype(np.int64)
        return whole // ns_per_tick // self.resolution_ticks * self.resolution_ticks


def rank_of(index, clock, node="a", clock_id=""):
    rate, resolution = float(clock.ticks_per_second), clock.resolution_ticks
    return Rank(index, node, "cpu", "cpu", "closed", rate, resolution, clock_id=clock_id)


def exchange(rng, clocks, initiator, responder, round_idx, start, count=300, path_ns=150.0, quiet=0.3):
    """Round trips one after the other; only a `quiet` share of the ways is not preempted for up to 4 ms."""
    ways = (
        path_ns + rng.exponential(60, (count, 2)) + (rng.random((count, 2)) > quiet) * rng.uniform(5e3, 4e6, (count, 2))
    )
    turn = rng.uniform(20, 60, count)
    sent = start + np.concatenate([[0], np.cumsum(ways.sum(axis=1) + turn + 50)[:-1]])
    rows = np.zeros(count, ROW)
    rows["kind"], rows["round_idx"], rows["initiator"], rows["responder"] = 1, round_idx, initiator, responder
    rows["t0"] = clocks[initiator].ticks(sent)
    rows["t1"] = clocks[responder].ticks(sent + ways[:, 0])
    rows["t2"] = clocks[responder].ticks(sent + ways[:, 0] + turn)
    rows["t3"] = clocks[initiator].ticks(sent + ways.sum(axis=1) + turn)
    return rows


def sample(rng, clocks, times, pairs=None, **how):
    """All pairs, in every round one after the other."""
    rows = []
    for round_idx, start in enumerate(times):
        for step, (one, other) in enumerate(pairs or itertools.combinations(sorted(clocks), 2)):
            rows.append(exchange(rng, clocks, one, other, round_idx, start + step * 2e6, **how))
    return np.concatenate(rows)


def errors_ns(fits, clocks, reference, rank, times):
    """[n] axis time minus the reference's own reading, at the tick that `rank` would have recorded."""
    axis = apply_clock(fits[rank], clocks[rank].ticks(times)) - clocks[reference].base_ns
    return axis - clocks[reference].ns(times)


def spans_of(clocks, first, last):
    return {rank: (int(clock.ticks(first)), int(clock.ticks(last))) for rank, clock in clocks.items()}

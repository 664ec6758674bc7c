"""The simulator against itself: what its captures hold is what truly happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulator import Case, Shape, SlowWork, simulate

import tracekern
from tracekern.analysis.waits.analyze import analyze_waits


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("shape", list(Shape))
def test_a_capture_holds_what_happened(shape: Shape, is_persistent: bool, tmp_path: Path):
    num_warps = 4 if shape is Shape.PIPELINE else 0
    case = Case(shape, 4, 5, (SlowWork(5_000, rank=1),), 0.03, is_persistent=is_persistent, num_warps=num_warps)
    truth = simulate(case, 3, tmp_path)
    timeline = tracekern.load(truth.directory)
    assert not timeline.problems
    assert {rank.backend for rank in timeline.ranks} == {"cuda"}
    waits = analyze_waits(timeline)
    found = sorted(zip(waits.rank.tolist(), waits.wait_ns.tolist(), strict=True))
    true = sorted((wait.rank, wait.end_ns - wait.begin_ns) for wait in truth.waits)
    assert [rank for rank, _ in found] == [rank for rank, _ in true]
    np.testing.assert_allclose([ns for _, ns in found], [ns for _, ns in true], atol=33)  # a tick
    hard = max(rank.clock.hard_ns for rank in timeline.ranks if rank.clock)
    late = sum(max(wait.late_until_ns - wait.begin_ns, 0) for wait in truth.waits)
    assert waits.late_ns.sum() == pytest.approx(late, abs=2 * hard * len(waits))


def test_the_same_seed_gives_the_same_noise_with_and_without_an_injection(tmp_path: Path):
    case = Case(Shape.STREAM, 4, 5, (SlowWork(5_000, rank=3),), noise=0.05)
    slow, plain = (simulate(one, 7, tmp_path / name) for name, one in (("a", case), ("b", case.without_injections())))
    upstream = [[wait for wait in truth.waits if wait.rank < 3] for truth in (slow, plain)]
    assert upstream[0] == upstream[1]
    assert slow.makespan_ns > plain.makespan_ns


@pytest.mark.rotates
def test_512_ranks_fit_one_capture(tmp_path: Path):
    case = Case(Shape.BARRIER, 512, 2, noise=0.03)
    timeline = tracekern.load(simulate(case, 5, tmp_path).directory)
    assert (len(timeline.ranks), timeline.problems) == (512, ())
    assert max(rank.clock.hard_ns for rank in timeline.ranks if rank.clock) < 10_000

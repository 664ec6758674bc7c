"""The simulator against itself: what its captures hold is what truly happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulator import Case, ExtraKernel, Injection, MoreWork, Shape, SlowWork, simulate
from simulator.engine import Engine
from simulator.programs import programs_of

import tracekern
from tracekern.analysis.waits.analyze import analyze_waits


@pytest.mark.parametrize(
    ("shape", "is_persistent"),
    [(shape, is_persistent) for shape in Shape for is_persistent in (False, True)[: 1 + (shape is not Shape.STREAMS)]],
)
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


@pytest.mark.parametrize(
    ("shape", "injection"),
    [
        (Shape.STREAM, SlowWork(5_000, rank=3)),
        (Shape.RING, ExtraKernel(500_000, rank=3, iterations=(1, 3))),
        (Shape.PIPELINE, MoreWork(rank=3)),
    ],
)
def test_the_same_seed_gives_the_same_noise_with_and_without_an_injection(shape: Shape, injection: Injection):
    case = Case(shape, 4, 5, (injection,), noise=0.05, outliers=0.05, wander=0.8, has_host_jitter=True)
    (slow_ns, slow), (plain_ns, plain) = (_noise_of(one) for one in (case, case.without_injections()))
    assert slow_ns > plain_ns
    assert slow == pytest.approx(plain, abs=1e-3)


def _noise_of(case: Case) -> tuple[float, list[float]]:
    """When the run ends, and the gaps before kernels and what stores take, by rank: nothing is injected into these."""
    run = Engine(case, 7, 0.0).run(programs_of(case))
    found = list[float]()
    for rank in range(case.num_ranks):
        kernels = run.kernels[rank]
        last_ends = [0.0, *(kernel.end_ns for kernel in kernels)]
        found += [
            kernel.start_ns - end for kernel, end in zip(kernels, last_ends, strict=False) if kernel.name != "extra"
        ]
        signals = [one for one in run.records if one.warp.rank == rank and one.event.startswith("signal")]
        found += [one.end_ns - one.begin_ns for one in signals]
    return max(kernel.end_ns for kernels in run.kernels.values() for kernel in kernels), found


def test_a_kernel_after_two_streams_begins_when_both_have_ended(tmp_path: Path):
    truth = simulate(Case(Shape.STREAMS, 3, 6, noise=0.3), 2, tmp_path)
    for kernels in truth.kernels.values():
        ends = {(kernel.name, kernel.iteration): kernel.end_ns for kernel in kernels}
        for merge in (kernel for kernel in kernels if kernel.name == "merge"):
            both = [ends[name, merge.iteration] for name in ("experts", "exchange")]
            assert 0 < merge.start_ns - max(both) < 5_000


@pytest.mark.rotates
def test_512_ranks_fit_one_capture(tmp_path: Path):
    case = Case(Shape.BARRIER, 512, 2, noise=0.03)
    timeline = tracekern.load(simulate(case, 5, tmp_path).directory)
    assert (len(timeline.ranks), timeline.problems) == (512, ())
    assert max(rank.clock.hard_ns for rank in timeline.ranks if rank.clock) < 10_000

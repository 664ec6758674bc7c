"""Who is named, in simulated runs whose culprit is known: the right one, and nobody where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulator import Case, Drain, LateHost, MovingWork, Shape, SlowWork, simulate
from tracekern.analysis.naming.culprit import Culprit, Kind, Why
from tracekern.analysis.naming.exchangeable import leads, single_event

import tracekern
from tracekern.analysis.findings import Findings
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.verdict import part_of

SLOW = SlowWork(5_000, rank=2)


def findings_of(case: Case, seed: int, directory: Path) -> Findings:
    return Findings(tracekern.load(simulate(case, seed, directory).directory))


def named(case: Case, seed: int, directory: Path) -> Culprit:
    return findings_of(case, seed, directory).culprit


@pytest.mark.parametrize("shape", [Shape.CHAIN, Shape.STREAM, Shape.RING, Shape.CREDITS, Shape.BARRIER])
def test_a_slow_rank_is_named_and_nobody_where_all_are_alike(shape: Shape, tmp_path: Path):
    slow = named(Case(shape, 6, 12, (SLOW,), noise=0.05), 71, tmp_path / "slow")
    assert (slow.kind, slow.members, slow.phase.event) == (Kind.WORK, ((2,),), "compute")
    alike = named(Case(shape, 6, 12, noise=0.05), 72, tmp_path / "alike")
    assert (alike.kind, alike.why) == (None, Why.ALIKE)
    assert alike.suspects


def test_three_percent_over_50_iterations_are_named(tmp_path: Path):
    case = Case(Shape.RING, 8, 50, (SlowWork(0, rank=5, share=0.03),), noise=0.02)
    assert named(case, 73, tmp_path).rank == 5


def test_two_ranks_that_are_as_slow_are_named_together(tmp_path: Path):
    found = findings_of(Case(Shape.BARRIER, 8, 30, (SlowWork(5_000, rank=3), SlowWork(5_000, rank=7))), 74, tmp_path)
    assert {rank for (rank,) in found.culprit.members} == {3, 7}
    assert found.culprit.rank is None
    assert headlines(found)[0].text.startswith(("Ranks 3 and 7 are slow", "Ranks 7 and 3 are slow"))


def test_a_slow_link_is_named_and_not_its_victim(tmp_path: Path):
    case = Case(Shape.RING, 8, 20, (Drain(5_000, source=1, destination=2),), noise=0.05)
    found = findings_of(case, 75, tmp_path)
    assert (found.culprit.kind, found.culprit.members, found.culprit.rank) == (Kind.LINK, ((1, 2),), None)
    assert headlines(found)[0].text.startswith("The link 1 → 2 is slow. That costs ")


def test_one_event_is_named_as_such(tmp_path: Path):
    case = Case(Shape.RING, 6, 12, (SlowWork(50_000, rank=4, iterations=(3,)),), noise=0.05)
    found = findings_of(case, 76, tmp_path)
    assert (found.culprit.rank, found.culprit.event) == (4, 3)
    assert headlines(found)[0].text.startswith("Rank 4 was slow once, in iteration 3: step.compute. That costs ")


def test_work_that_moves_from_rank_to_rank_names_nobody(tmp_path: Path):
    case = Case(Shape.RING, 4, 20, (MovingWork(10_000, num_ranks=4),), noise=0.03)
    assert named(case, 77, tmp_path).why is Why.ALIKE


def test_one_iteration_is_described_and_not_judged(tmp_path: Path):
    found = findings_of(Case(Shape.RING, 6, 1, (SlowWork(20_000, rank=2),), noise=0.03), 78, tmp_path)
    assert (found.culprit.kind, found.culprit.why) == (None, Why.ONE_ITERATION)
    said = headlines(found)[0].text
    assert said.startswith("No culprit is named: 1 iteration is on record, which can be described, not judged.")
    assert "The largest cause, rank 2's step.compute, costs " in said


def test_repetitions_in_a_persistent_kernel_take_the_place_of_iterations(tmp_path: Path):
    case = Case(Shape.RING, 6, 15, (SLOW,), noise=0.05, is_persistent=True)
    assert named(case, 79, tmp_path).rank == 2


@pytest.mark.parametrize("has_host_lane", [True, False])
def test_a_host_is_named_only_where_a_lane_shows_it(has_host_lane: bool, tmp_path: Path):
    case = Case(Shape.RING, 6, 15, (LateHost(30_000, rank=1),), noise=0.05, has_host_lane=has_host_lane)
    found = findings_of(case, 80, tmp_path)
    assert (found.culprit.rank, found.culprit.kind) == (1, Kind.HOST if has_host_lane else Kind.GAP)
    wanted = "Rank 1's host launches late." if has_host_lane else "Kernels of rank 1 begin late (host or an unrecorded"
    assert headlines(found)[0].text.startswith(wanted)


def test_the_cpu_backend_names_nobody_and_says_why(tmp_path: Path):
    found = findings_of(Case(Shape.RING, 6, 15, (SLOW,), backend="cpu"), 81, tmp_path)
    assert (found.culprit.kind, found.culprit.why) == (None, Why.CPU)
    assert found.culprit.suspects[0].member == (2,)
    assert "the CPU backend shows order and coverage, never durations" in headlines(found)[0].text


def test_members_that_are_alike_seldom_stand_out():
    rng = np.random.default_rng(1)
    for members, iterations in ((2, 5), (4, 3), (8, 10), (32, 50)):
        found = [leads(rng.normal(100, 5, (members, iterations)), 0.0) for _ in range(200)]
        assert sum(any(lead.stands_out for lead in of) for of in found) <= 5  # 1 is expected


def test_a_lead_is_above_what_chance_explains():
    rng = np.random.default_rng(2)
    times = rng.normal(100, 5, (8, 50))
    times[3] += 4  # 4 sigma / sqrt(50) are 2.8
    assert [lead.stands_out for lead in leads(times, 0.0)] == [member == 3 for member in range(8)]
    assert not leads(times, 10.0)[3].stands_out


def test_members_and_times_that_are_missing_are_no_lead():
    times = np.full((4, 10), np.nan)
    times[0, :3], times[1, 2:6], times[2] = 50, 20, 20
    found = leads(times, 1.0)
    assert [lead.stands_out for lead in found] == [True, False, False, False]
    assert found[3].num_iterations == 0


def test_an_event_is_alone():
    times = np.random.default_rng(3).normal(100, 5, (8, 20))
    times[2, 7] += 100
    event = single_event(times, 2, 0.0)
    assert event is not None and event.iteration == 7  # noqa: PT018
    assert single_event(times, 1, 0.0) is None
    times[5, 9] += 80
    assert single_event(times, 2, 0.0) is None


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [(8.58e6, 25.6e6, "8.58 of 25.6 ms"), (620e3, 25.6e6, "620 us of 25.6 ms"), (5.0, 7.0, "5 of 7 ns")],
)
def test_a_part_is_said_in_the_unit_of_the_whole(part: float, whole: float, said: str):
    assert part_of(part, whole) == said

"""Ranks of several groups in one run: each is compared with those that do the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from simulator import Case, Injection, LateHost, MoreWork, Shape, SlowWork, simulate_groups

import tracekern
from tracekern.analysis.findings import Findings
from tracekern.analysis.why.candidates import CauseKind
from tracekern.timeline.facts.iterations import LaunchIterations, find_iterations
from tracekern.timeline.facts.stages import Stages, joined_ranks
from tracekern.timeline.model import Timeline

STRIDED = (0, 2, 4, 6), (1, 3, 5, 7)
PLAIN = Case(Shape.PIPELINE, 4, 10, num_warps=16, noise=0.03)
BUSY = dataclasses.replace(PLAIN, iterations=20, work_ns=45_000)


def causes(timeline: Timeline) -> list[tuple[CauseKind, tuple[int, ...]]]:
    return [(cause.candidate.kind, cause.candidate.ranks) for cause in Findings(timeline).answer.causes]


def with_one(case: Case, injection: Injection) -> Case:
    return dataclasses.replace(case, injections=(injection,))


@pytest.mark.parametrize(
    ("injection", "kind"),
    [(SlowWork(5_000, rank=2), CauseKind.PACE), (LateHost(40_000, rank=2), CauseKind.HOST)],
    ids=["slow", "late"],
)
def test_groups_that_are_alike_are_one_stage(injection: Injection, kind: CauseKind, tmp_path: Path):
    timeline = tracekern.load(
        simulate_groups({STRIDED[0]: PLAIN, STRIDED[1]: with_one(PLAIN, injection)}, 11, tmp_path)
    )
    assert causes(timeline) == [(kind, (5,))]
    stages = Stages(timeline)
    assert stages.names == stages.kernels
    assert stages.has_rank.all()
    assert joined_ranks(timeline) == STRIDED


@pytest.mark.parametrize(
    ("injections", "wanted"),
    [
        ((None, None), []),
        ((SlowWork(5_000, rank=1), None), [(CauseKind.PACE, (2,))]),
        ((None, SlowWork(5_000, rank=1)), [(CauseKind.PACE, (3,))]),
        ((None, MoreWork(1, rank=3)), [(CauseKind.AMOUNT, (7,))]),
    ],
    ids=["nobody", "in the short one", "in the long one", "more work in the long one"],
)
def test_groups_that_are_not_alike_are_not_compared(injections, wanted, tmp_path: Path):
    """One group makes half as many iterations, of half as much work."""
    groups = {
        ranks: with_one(case, injection) if injection else case
        for ranks, case, injection in zip(STRIDED, (PLAIN, BUSY), injections, strict=True)
    }
    timeline = tracekern.load(simulate_groups(groups, 12, tmp_path))
    assert causes(timeline) == wanted
    iterations = LaunchIterations(timeline)
    of_group = [{*iterations.of_launch[[launch.rank in ranks for launch in timeline.launches]]} for ranks in STRIDED]
    assert of_group == [{*range(10)}, {*range(20)}]
    assert len(find_iterations(timeline)) == 20
    assert iterations.set_up_stages == ()
    assert {name.partition(" ")[2] for name in iterations.stages} == {"(group 0)", "(group 1)"}
    assert {tuple(entry.busy_ns) for entry in Findings(timeline).imbalances} == {*STRIDED}


def test_what_a_group_as_a_whole_waits_for_elsewhere_names_none_of_its_ranks(tmp_path: Path):
    """The second stage of a pipeline: its hosts launch when the first one's tokens come, which is not on record."""
    late = tuple(LateHost(60_000, rank=rank) for rank in range(4))
    fed = dataclasses.replace(PLAIN, injections=late)
    timeline = tracekern.load(simulate_groups({(0, 1, 2, 3): PLAIN, (4, 5, 6, 7): fed}, 13, tmp_path))
    assert causes(timeline) == []


def test_a_group_of_one_rank_has_no_peers(tmp_path: Path):
    alone = Case(Shape.BARRIER, 1, 10, noise=0.03, work_ns=90_000)
    timeline = tracekern.load(simulate_groups({(0, 1, 2, 3): PLAIN, (4,): alone}, 14, tmp_path))
    assert causes(timeline) == []
    findings = Findings(timeline)
    assert [(group.ranks, group.awaited) for group in findings.groups][-1] == ((4,), -1)
    assert np.isfinite(findings.balance.ranks[4].busy_ns)

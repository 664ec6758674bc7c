"""Jobs of torchrun whose ranks are in several groups (examples/expert_groups): a rank is late, hangs, or is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracekern
from tests.toolchains import ROOT
from tracekern.analysis.findings import Findings, analyze
from tracekern.segment.salvage import find_leftovers, salvage_run
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.headlines import headlines

EXAMPLE = ROOT / "examples" / "expert_groups" / "main.py"
ODD_ONE = 2
"""The rank that is late, hangs or is killed."""
JOBS = [(layout, num_ranks) for num_ranks in (4, 8) for layout in ("disjoint", "overlapping", "pipeline")]
OFTEN = ("overlapping", 4)
"""Every run of the tests has this job of each kind."""
EVERY_JOB = [
    pytest.param(*job, id=f"{job[0]}-{job[1]}", marks=[] if job == OFTEN else [pytest.mark.rotates]) for job in JOBS
]


def run(directory: Path, layout: str, num_ranks: int, *what: str) -> tuple[int, str]:
    """Returns the status of torchrun and what it and the ranks said. What dead ranks left is salvaged."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(EXAMPLE), "-o", str(directory), "--layout", layout, *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    for run_id in {left.run_id for left in find_leftovers() if Path(left.directory) == directory}:
        salvage_run(run_id)
    return done.returncode, done.stdout + done.stderr


def groups_of(layout: str, num_ranks: int) -> set[tuple[int, ...]]:
    ranks = tuple(range(num_ranks))
    if layout == "pipeline":
        return {ranks[: num_ranks // 2], ranks[num_ranks // 2 :]}
    pairs = {ranks[first : first + 2] for first in range(0, num_ranks, 2)} if layout == "overlapping" else set()
    return pairs | {ranks[0::2], ranks[1::2]}


def load_checked(directory: Path, layout: str, num_ranks: int) -> Timeline:
    """Loads a capture in which messages went within groups only, as far as it goes."""
    timeline = tracekern.load(directory)
    assert [
        problem.text for problem in timeline.problems if "contradict" in problem.kind or "backwards" in problem.kind
    ] == []
    groups = groups_of(layout, num_ranks)
    assert {launch.members.ranks for launch in timeline.launches if launch.members} == groups
    rank = timeline.track_ranks()[timeline.spans.track]
    pairs = {*zip(rank[timeline.flows.signal].tolist(), rank[timeline.flows.wait].tolist(), strict=True)}
    within = {(one, other) for group in groups for one in group for other in group}
    assert pairs <= within
    return timeline


@pytest.mark.parametrize(("layout", "num_ranks"), EVERY_JOB)
def test_a_late_rank_is_named(layout: str, num_ranks: int, tmp_path: Path):
    status, said = run(tmp_path, layout, num_ranks, "--late-rank", str(ODD_ONE))
    assert status == 0, said
    findings = Findings(load_checked(tmp_path, layout, num_ranks))
    assert [problem.text for problem in findings.timeline.problems if problem.severity != "note"] == []
    assert len(findings.timeline.flows) > 100
    assert findings.blames[0].rank == ODD_ONE
    late = max(findings.groups, key=lambda group: group.awaited_ns if group.awaited == ODD_ONE else 0)
    assert late.awaited == ODD_ONE
    assert ODD_ONE in late.ranks


def test_a_late_rank_of_resident_ranks_is_named(tmp_path: Path):
    asked = ["--resident", "8", "--late-rank", str(ODD_ONE), "--layout", "overlapping", "-o", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, EXAMPLE, *asked], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = Findings(load_checked(tmp_path, "overlapping", 8))
    assert findings.blames[0].rank == ODD_ONE


@pytest.mark.parametrize(("layout", "num_ranks"), EVERY_JOB)
def test_a_rank_that_hangs_is_named(layout: str, num_ranks: int, tmp_path: Path):
    status, said = run(tmp_path, layout, num_ranks, "--hang", str(ODD_ONE))
    assert status != 0
    assert f"gave up on rank {ODD_ONE} after 3" in said
    lines = {line.word: line.text for line in headlines(analyze(load_checked(tmp_path, layout, num_ranks)))}
    assert lines["verdict"].startswith(f"Rank {ODD_ONE} did not come in time: rank "), lines


@pytest.mark.parametrize(("layout", "num_ranks"), EVERY_JOB)
def test_a_rank_that_is_killed_is_named(layout: str, num_ranks: int, tmp_path: Path):
    status, _ = run(tmp_path, layout, num_ranks, "--kill", str(ODD_ONE))
    assert status != 0
    findings = Findings(load_checked(tmp_path, layout, num_ranks))
    assert ODD_ONE in {death.then.rank for death in findings.deaths}
    # In a pipeline its partner's message fails, and torchrun ends the others soon, some maybe before they waited.
    ended = {ODD_ONE, (ODD_ONE + num_ranks // 2) % num_ranks} if layout == "pipeline" else {ODD_ONE}
    assert findings.hang is None or {holder.rank for holder in findings.hang.holders} <= ended

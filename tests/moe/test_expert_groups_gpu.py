"""Eight ranks resident on one GPU in groups (examples/expert_groups), one of which is late in each call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracekern
from tests.devices import require_gpus
from tests.paths import ROOT
from tracekern.analysis.findings import Findings
from tracekern.analysis.why.candidates import CauseKind
from tracekern.timeline.facts.stages import joined_ranks
from tracekern.viewers.report.headlines import headlines

pytestmark = pytest.mark.gpu
LATE = 5


@pytest.mark.parametrize("layout", ["disjoint", "overlapping"])
@pytest.mark.parametrize("late", [LATE, -1], ids=["late", "alike"])
def test_the_late_rank_is_named_and_no_other(layout: str, late: int, tmp_path: Path):
    require_gpus(1)
    example = ROOT / "examples" / "expert_groups" / "main.py"
    asked = f"--backend cuda --resident 8 --layout {layout} --late-rank {late} --late-us 5000 --calls 20 -o {tmp_path}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(example), *asked.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = Findings(tracekern.load(tmp_path))
    assert {problem.kind for problem in findings.timeline.problems if problem.severity != "note"} <= {"dense_probes"}
    joined = joined_ranks(findings.timeline)
    assert joined == (((0, 2, 4, 6), (1, 3, 5, 7)) if layout == "disjoint" else (tuple(range(8)),))
    named = [(cause.candidate.kind, cause.candidate.ranks) for cause in findings.answer.causes]
    is_late = late >= 0
    # Hosts of overlapping groups wait for each other before they launch, which may hide what a late one costs.
    may_be = ([], [(CauseKind.HOST, (LATE,))]) if layout == "overlapping" else ([(CauseKind.HOST, (LATE,))],)
    assert named in (may_be if is_late else ([],)), [line.text for line in headlines(findings)]
    longest = findings.groups[0]
    assert not is_late or (longest.awaited, LATE in longest.ranks) == (LATE, True)
    assert not is_late or longest.awaited_ns > 0.9 * longest.wait_ns

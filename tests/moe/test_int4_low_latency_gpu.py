"""int4 experts between low latency dispatch and combine of resident ranks on one GPU: the bits of one device."""

from __future__ import annotations

import os

import pytest
import torch

import tracekern
from tests.paths import ROOT
from tracekern.launcher.launch import launch_ranks
from tracekern.moe.low_latency.pipeline import DISPATCH_DTYPES
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run

RANKS = 8
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(("function", "ranks"), [("calls", RANKS), ("calls", 1), ("graph", 1)])
def test_nothing_is_wrong(function, ranks):
    lines: list[str] = []
    exits = launch_ranks(
        ranks,
        f"tests.int4_low_latency_gpu:{function}",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        on_line=lambda rank, line: lines.append(line),
        timeout_s=120,
        resident=ranks > 1,
    )
    assert [ended.returncode for ended in exits] == [0] * ranks, "\n".join(lines[-40:])
    assert sum(": 0 wrong" in line for line in lines) == ranks, "\n".join(lines)


@pytest.mark.parametrize("dispatch_dtype", [1, 2], ids=DISPATCH_DTYPES)
def test_a_run_is_the_reference_and_its_experts_are_on_record(tmp_path, dispatch_dtype):
    options = MoeRun(
        ranks=RANKS,
        variant="low_latency",
        backend="cuda",
        expert="int4_sparse",
        intermediate=256,
        tokens=32,
        hidden=1024,
        experts=64,
        iterations=6,
        family_options={"dispatch_dtype": dispatch_dtype},
    )
    report = run(options, tmp_path)
    assert report.ok, report.errors
    assert report.placement == f"{RANKS} ranks resident on one GPU"
    timeline = tracekern.load(tmp_path)
    assert {problem.kind for problem in timeline.problems} <= {"dense_probes", "held_up_launch"}
    assert {"copy_token", "preload", "sweep", "epilogue"} <= {event.name for event in timeline.events}
    assert ("dequantise" in {launch.name for launch in timeline.launches}) == (dispatch_dtype == 1)
    assert len(timeline.rows_of("scale_token")) == 0

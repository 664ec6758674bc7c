"""compute-sanitizer finds nothing in the bundled kernels on small shapes; skipped where it or a GPU is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from toolchains import ROOT, sanitizer

from tests.devices import require_gpus
from tracekern.moe.p2p.pipeline import STAGES
from tracekern.moe.workload.options import MoeRun


def sanitize(tool: str, variant: str, directory: str, expert: str = "scale") -> None:
    """One rank in one process, recording: what it sends goes to itself, through the same code."""
    options = MoeRun(
        ranks=1,
        variant=variant,
        tokens=4,
        hidden=128,
        experts=4,
        topk=2,
        expert=expert,
        intermediate=128,
        family_options={"partitions": 2} if variant in ("pipelined", "overlapped") else {},
        iterations=2,
        backend="cuda",
        timeout_ms=60_000,
    )
    require_gpus(1)
    environment = {
        **os.environ,
        "TRACEKERN_MOE_RUN": json.dumps(dataclasses.asdict(options)),
        "TRACEKERN_MOE_CAPTURE": directory,
    }
    command = [*sanitizer(tool), sys.executable, "-m", "tracekern.moe.workload.worker"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.gpu
@pytest.mark.timeout(150)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("variant", list(STAGES))
def test_compute_sanitizer_finds_nothing(tmp_path, variant, tool):
    sanitize(tool, variant, str(tmp_path))


@pytest.mark.gpu
@pytest.mark.timeout(150)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("variant", ["fused", "overlapped"])
def test_compute_sanitizer_finds_nothing_in_int4_experts(tmp_path, tool, variant):
    sanitize(tool, variant, str(tmp_path), "int4_sparse")


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing_in_prepared_weights(tool):
    """All tiles of all stagings: the tests that compare their bits, in a process of their own."""
    require_gpus(1)
    tests = [str(ROOT / "tests" / "moe" / "test_int4_fast.py"), "-m", "gpu", "-k", "few and many or abort"]
    command = [*sanitizer(tool), sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout

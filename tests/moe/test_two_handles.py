"""The demonstration: two handles on one buffer hang, the trace says why, and tagged flags do not hang."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.captures import CaptureSpec, write_capture
from tests.devices import require_gpus
from tests.paths import ROOT
from tests.toolchains import require
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END

pytestmark = pytest.mark.usefixtures("quick_builds")

EXAMPLE = ROOT / "examples" / "two_handles"


def start(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "run_it.py"), *options, "-o", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def run(directory: Path, *options: str) -> list[str]:
    """What it printed; it ended with 0."""
    require("g++")
    done = start(directory, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


BACKENDS = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.multigpu)]


@pytest.mark.rotates
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_handles_hang_and_the_trace_says_why_and_tagged_flags_do_not_hang(tmp_path, backend):
    if backend == "cuda":
        require_gpus(2)
    told = run(tmp_path / "hang", "--backend", backend)
    assert any("gave up on rank 0" in line and "channel message slot 1" in line for line in told)
    wanted = (
        r"rank 1 waits in call 3 \(handle 0\) for rank 0's flag in slot 1$",
        r"  rank 0 raised it at [\d,.]+ us$",
        r"  rank 1 wiped slot 1 at [\d,.]+ us, in call 2: handle 1 took it for its own next slot$",
        r"rank 0 went on in call 2 [\d,.]+ us before the flag of call 2 was raised: it took one that another call",
    )
    for line, pattern in zip(told[-len(wanted) :], wanted, strict=True):
        assert re.match(pattern, line), line
    timeline = load(tmp_path / "hang")
    assert {"fault", "open_span", "backwards_flow"} <= {problem.kind for problem in timeline.problems}
    (open_row,) = (
        row for row, end in enumerate(timeline.spans.end) if end == OPEN_END and timeline.spans.event[row] >= 0
    )
    assert timeline.events[timeline.spans.event[open_row]].name == "wait_count"

    tagged = tmp_path / "tagged"
    tagged.mkdir()
    built = f"built_{backend}"
    shutil.copytree(tmp_path / "hang" / built, tagged / built)  # what is built is not built again
    assert run(tagged, "--tagged", "--backend", backend) == ["every wait met its own signal"]
    timeline = load(tagged)
    assert [problem for problem in timeline.problems if problem.kind != "dense_probes"] == []
    assert len(timeline.flows) == 2 * 3  # ranks, calls


def test_a_backend_that_cannot_be_had_is_one_line_and_an_old_capture_is_not_explained(tmp_path):
    if torch.cuda.device_count() >= 2 and shutil.which("nvcc"):
        pytest.skip("this machine has the backend")
    for directory in (tmp_path / "new", write_capture(tmp_path / "old", CaptureSpec())):
        done = start(directory, "--backend", "cuda")
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"run_it: --backend cuda needs [^\n]+\n", done.stderr)
    assert not (tmp_path / "new").exists()


def test_ranks_that_fail_are_not_taken_for_hung(tmp_path):
    require("g++")
    directory = write_capture(tmp_path / "old", CaptureSpec())
    (directory / "built_cpu").mkdir()
    (directory / "built_cpu" / f"exchange{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("no library")
    done = start(directory)
    assert done.returncode == 2
    assert "every wait" not in done.stdout
    assert done.stderr.endswith("ended with 1; there is nothing to explain\n"), done.stderr

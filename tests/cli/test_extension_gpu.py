"""The example of a user's torch extension: built, launched from two streams at once, and read back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toolchains import NVCC, compile_cached

import tracekern
from tests.devices import require_gpus
from tests.paths import ROOT
from tracekern.timeline.model import Timeline, TrackKind

EXAMPLE = ROOT / "examples" / "torch_extension"
STEPS, BLOCKS, WARPS, ROWS = 10, 8, 4, 1024


@pytest.mark.programs("examples/torch_extension/square.cu", rotates=False)
@pytest.mark.compilers
def test_its_kernel_compiles_without_torch():
    compile_cached((*NVCC, "-c"), EXAMPLE / "square.cu", ".o", Path(tracekern.include_path()))


@pytest.mark.gpu
def test_two_streams_of_an_extension(tmp_path):
    require_gpus(1)
    copy = shutil.copytree(EXAMPLE, tmp_path / "torch_extension", ignore=shutil.ignore_patterns("*.so", "build"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(copy / "trace_it.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    timeline = tracekern.load(tmp_path / "my-capture", strict=True)
    assert [problem for problem in timeline.problems if problem.kind != "dense_probes"] == []
    assert timeline.ranks[0].backend == "cuda"
    assert [(launch.name, launch.sequence) for launch in timeline.launches] == [("square", n) for n in range(2 * STEPS)]

    streams = sorted({launch.stream for launch in timeline.launches})
    assert len(streams) == 2
    spans, tracks = timeline.spans, timeline.tracks
    for stream in streams:
        on_stream = np.array([track.stream == stream and track.kind == TrackKind.DEVICE for track in tracks])
        assert on_stream.sum() == BLOCKS * WARPS
        names = [timeline.events[event].name for event in spans.event[on_stream[spans.track]]]
        assert names.count("square_row") == STEPS * ROWS
        assert names.count("wait_block") == STEPS * BLOCKS * WARPS
    first, second = ([extent(timeline, n) for n, on in enumerate(timeline.launches) if on.stream == s] for s in streams)
    assert any(a[0] < b[1] and b[0] < a[1] for a in first for b in second), "no two launches ran at once"


def extent(timeline: Timeline, launch: int) -> tuple[int, int]:
    """When the spans of a launch began and ended."""
    rows = timeline.spans.launch == launch
    return int(timeline.spans.start[rows].min()), int(timeline.spans.end[rows].max())


@pytest.mark.gpu
def test_the_quick_start_is_an_extension_of_ten_minutes(tmp_path):
    """The two files of docs/quickstart_gpu.md, as a reader saves them."""
    require_gpus(1)
    page = (ROOT / "docs" / "quickstart_gpu.md").read_text("utf-8")
    kernel, program = re.findall(r"```(?:cuda|python)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "scale.cu").write_text(kernel)
    (tmp_path / "trace_scale.py").write_text(program)
    command = [sys.executable, "trace_scale.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    timeline = tracekern.load(tmp_path / "scale-capture", strict=True)
    assert len(timeline.rows_of("scale_row")) == 10 * 1024 * 8
    assert len(timeline.rows_of("wait_block")) == 10 * 32 * 8
    assert timeline.host_names == ("scale",)

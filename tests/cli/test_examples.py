"""The examples do what the documentation says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tracekern
from tests.paths import ROOT
from tests.toolchains import NVCC, compile_cached, require
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.load import load

pytestmark = pytest.mark.usefixtures("quick_builds")

EXAMPLE = ROOT / "examples" / "my_kernel"
SIGNALS = ROOT / "examples" / "signals"
RING = ROOT / "examples" / "ring"
EXTENSION = ROOT / "examples" / "torch_extension"


@pytest.mark.rotates
def test_a_kernel_of_your_own(tmp_path, command_line):
    require("g++")
    copy = shutil.copytree(EXAMPLE, tmp_path / "my_kernel", ignore=shutil.ignore_patterns("*.so"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, copy / "trace_it.py"], cwd=tmp_path, check=True, env=environment)
    (rank,) = json.loads(command_line("info", tmp_path / "my-capture", "--json").stdout)["ranks"]
    assert {event["event"]: event["count"] for event in rank["events"]} == {
        "square_row": 3 * 64,  # launches, rows
        "wait_block": 3 * 4 * 2,  # launches, blocks, warps
    }
    assert rank["records_lost"] == 0
    keep_last = f"{copy / 'trace_it.py'}"
    flight = Path(keep_last).read_text().replace('capture("my-capture")', 'capture("flight", keep="last")')
    subprocess.run(
        [sys.executable, "-c", flight.replace("__file__", repr(keep_last))], cwd=tmp_path, check=True, env=environment
    )
    assert load(tmp_path / "flight").problems == ()  # such as keeps_first, of another body
    other = "import numpy, my_kernel; my_kernel.square(numpy.ones((2, 3), numpy.float32).T, 0, 1, 1)"
    refused = subprocess.run([sys.executable, "-c", other], cwd=copy, capture_output=True, text=True)
    assert "incompatible function arguments" in refused.stderr


@pytest.mark.rotates
def test_kernels_that_wait_for_other_ranks(tmp_path):
    require("g++")
    copy = shutil.copytree(SIGNALS, tmp_path / "signals", ignore=shutil.ignore_patterns("*.so"))

    def start(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, copy / "trace_it.py", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)

    done = start()
    assert done.returncode == 0, done.stdout + done.stderr
    timeline = load(tmp_path / "signals-capture")
    assert timeline.problems == ()
    assert len(timeline.flows) == 2 * 3  # ranks, calls
    assert set(timeline.track_ranks()[timeline.spans.track[timeline.flows.wait]]) == {0, 1}

    hung = start("--hang")
    assert hung.returncode == 3, hung.stdout + hung.stderr
    told, shown = (
        re.sub(r"after [\d.]+ s", "", next(line for line in text.splitlines() if line.startswith("[rank 0]")))
        for text in (hung.stdout, (ROOT / "docs" / "instrumenting.md").read_text())
    )
    assert told == shown
    timeline = load(tmp_path / "signals-capture")
    assert {"fault", "open_span"} <= {problem.kind for problem in timeline.problems}
    assert len(timeline.flows) == 2 * 2


@pytest.mark.rotates
def test_a_ring_is_right_under_delays_and_a_slow_receiver_is_named(tmp_path, command_line):
    require("g++")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, RING / "run_it.py", "--delays", "--slow", "1", "-o", tmp_path / "ring"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d received all", done.stdout)) == ["rank 0 received all", "rank 1 received all"]
    timeline = load(tmp_path / "ring")
    assert timeline.problems == ()
    told = json.loads(command_line("report", tmp_path / "ring", "--json").stdout)
    worst = {"channel": "credit", "slots": 12, "sender": 0, "receiver": 1, "num_rings": 2}
    assert worst.items() <= told["full_rings"][0].items()
    named = r"rank 1's ring of 12 slots \(channel credit, the fullest of 2\) is full [\d.]+ % of the time of rank 0's"
    assert re.search(named, told["waiting"]), told["waiting"]
    waits = analyze_waits(timeline)
    events = [timeline.events[idx].name for idx in timeline.spans.event[waits.row]]
    last = [peer >= 0 for peer, event in zip(waits.peer, events, strict=True) if event == "wait_arrival"]
    assert last == [True] * (2 * 4 * 2)  # ranks, calls, channels: of each barrier it is known who came last
    tails = timeline.rows_of("signal_tail")
    served = timeline.flows.wait[np.isin(timeline.flows.signal, tails)]
    assert len(served) == 2 * 4 * 2 * 2 * 25 > len(tails)  # ranks, calls, channels, warps, chunks taken


def test_the_page_on_libraries_compiles(tmp_path):
    page = (ROOT / "docs" / "libraries.md").read_text()
    named = "tracekern::Recorder<true, static_cast<tracekern::RecordFormat>(0)>::Args"  # as trace_type() writes it
    used = f"template __global__ void combine(float*, {named});\n"
    source = tmp_path / "library.cu"
    source.write_text("#include <tracekern.h>\n" + "\n".join(re.findall(r"```cuda\n(.*?)```", page, re.DOTALL)) + used)
    command = tuple(word.replace("c++20", "c++17") for word in NVCC)
    compile_cached((*command, "-ptx"), source, ".ptx", Path(tracekern.include_path()))


def test_the_page_on_cpu_kernels_runs(tmp_path):
    require("g++")
    page = (ROOT / "docs" / "cpu_kernels.md").read_text()
    (kernel,) = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pairs.cpp").write_text(kernel)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    timeline = load([tmp_path / "pairs-capture"])
    assert timeline.problems == ()
    assert len(timeline.flows) == len(timeline.rows_of("wait_row")) == (3 + 1) * 20
    assert len(timeline.rows_of("wait_block")) == (3 + 1) * 2


def test_the_guide_shows_the_example_as_it_is():
    guide = (ROOT / "docs" / "instrumenting.md").read_text()
    kernel = (EXAMPLE / "my_kernel.cpp").read_text() + (EXTENSION / "square.cu").read_text()
    kernel += (ROOT / "examples" / "two_handles" / "exchange.cpp").read_text() + (SIGNALS / "signals.cpp").read_text()
    kernel += (RING / "ring.h").read_text()
    script = "".join((folder / "trace_it.py").read_text() for folder in (EXAMPLE, EXTENSION, SIGNALS))
    blocks = [block.split("\n", 1) for block in guide.split("```")[1::2]]
    shown = {"cpp": kernel, "python": script}
    quoted = [(language, text) for language, text in blocks if language in shown]
    assert len(quoted) >= 3
    for language, text in quoted:
        for line in text.strip().splitlines():
            assert line.strip() in shown[language], line

"""docs/low_latency.md does what it says: its commands and its Python run, its numbers are those of code and trace."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.main import get_command

import tracekern
from tests.paths import ROOT
from tracekern.cli.app import app
from tracekern.moe.low_latency import Buffer
from tracekern.moe.low_latency.settings import FACTS, LaunchShape
from tracekern.timeline.model import Timeline

PAGE = (ROOT / "docs" / "low_latency.md").read_text("utf-8")
COMMANDS = re.findall(r"^ {4}tracekern (.+)$", PAGE, re.MULTILINE)
NOT_RUN = ("open",)
"""Commands that end when a browser does."""


def rows_below(head: str) -> list[list[str]]:
    lines = PAGE.split(head, 1)[1].splitlines()[2:]
    table = lines[: next(place for place, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


OF_THE_COMMANDS = pytest.mark.rotates("test_docs_low_latency")
"""Tests of what the commands of the page leave take one turn together."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Where all commands of the page were run, one after the other."""
    path = tmp_path_factory.mktemp("page")
    for line in COMMANDS:
        if not line.startswith(NOT_RUN):
            words = [sys.executable, "-m", "tracekern", *shlex.split(line)]
            ran = subprocess.run(words, cwd=path, capture_output=True, text=True)
            assert ran.returncode == 0, line + ran.stdout + ran.stderr
    return path


@pytest.fixture(scope="module")
def timeline(directory) -> Timeline:
    return tracekern.load(directory / "ll-capture")


@OF_THE_COMMANDS
def test_its_commands_run_and_leave_what_they_name(directory):
    named = {"ll-capture", "ll-report.html", "ll-late", "ll-late.html", "ll-int4", "ll-hosts"}
    assert {path.name for path in directory.iterdir()} == named


def test_its_other_commands_exist():
    others = [shlex.split(line) for line in COMMANDS if line.startswith(NOT_RUN)]
    assert others == [["open", "ll-capture"]]
    assert set(NOT_RUN) <= set(get_command(app).commands)


def test_its_python_runs(tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "decode.py").write_text(source)
    (call,) = re.findall(r"`(tracekern\.launch_ranks\([^`]*\))`", PAGE)
    program = f"import tracekern\nprint([ended.returncode for ended in {call}])"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == ["[0, 0, 0, 0]"], ran.stdout + ran.stderr
    assert len(tracekern.load(tmp_path / "decode-capture").ranks) == 4


def test_launch_shapes():
    shown = rows_below("| experts | SMs |")
    assert len(shown) == 5
    for row in shown:
        *asked, groups, warps, blocks, threads = (int(cell.replace(",", "")) for cell in row)
        shape = LaunchShape.of(*asked)
        assert (groups, warps, blocks) == (shape.num_warp_groups, shape.num_warps_per_group, shape.num_sms)
        assert threads == 32 * shape.num_warps


def test_sizes():
    hidden, tokens, experts, ranks = 7168, 128, 256, 8
    heap_bytes = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
    sizes = [*(f"{FACTS.message_bytes(hidden, fp8):,}" for fp8 in (True, False)), f"{heap_bytes / 2**30:.2f} GiB"]
    assert [size for size in sizes if size not in PAGE] == []


@OF_THE_COMMANDS
def test_spans_of_a_call_are_as_many_as_the_page_says(timeline):
    spans, number = timeline.spans, Counter()
    for event, launch, track in zip(spans.event.tolist(), spans.launch.tolist(), spans.track.tolist(), strict=True):
        if timeline.tracks[track].rank == 0 and launch >= 0:
            number[timeline.launches[launch].name, timeline.events[event].name] += 1
    kernel, shown = "", {}
    for name, event, _, spans_told in rows_below("| kernel | event |"):
        kernel = name.strip("`") or kernel
        for one in re.findall(r"`(\w+)`", event):
            shown[kernel, one] = int(spans_told)
    recorded = {key: value for key, value in number.items() if key[0] in {name for name, _ in shown}}
    unshown = {
        key for key in recorded if key[1] in ("wait_sub_warps", key[0])
    }  # told of in the text, and the kernel's own
    assert shown == {key: value for key, value in recorded.items() if key not in unshown}

"""The public names: what a full flow needs, nothing else, and one line for what is missing."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tracekern
from tests.captures import EVENT_TABLE
from tests.kernels import run_kernel

ROOT = Path(__file__).resolve().parent.parent


def test_dir_shows_what_is_public_and_all_of_it_is_there():
    assert dir(tracekern) == sorted(tracekern.__all__)
    assert [name for name in tracekern.__all__ if not callable(getattr(tracekern, name))] == []
    with pytest.raises(AttributeError, match="has no attribute 'rnage'; it has BadInput"):
        _ = tracekern.rnage


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.parent.name)
def test_examples_import_nothing_deeper(path: Path):
    deeper = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name.startswith("tracekern.")
    ]
    assert deeper == []


def test_a_flow_from_kernels_to_a_file_and_an_answer(tmp_path: Path):
    with tracekern.capture(tmp_path / "capture") as capture:
        for _ in range(3):
            launch = capture.launch("demo", grid=2, warps=2, events=EVENT_TABLE)
            assert (launch.grid, launch.warps, launch.stream) == (2, 2, 0)
            run_kernel(launch.descriptor, launch.grid, launch.warps, 4)
    timeline = tracekern.load(tmp_path / "capture")
    stats = tracekern.save(timeline, tmp_path / "trace.pftrace")
    assert stats.spans == len(timeline.spans)
    assert tracekern.analyze(timeline).summary.num_spans == len(timeline.spans)
    with pytest.raises(tracekern.BadInput, match="the suffix picks the format"):
        tracekern.save(timeline, tmp_path / "trace.txt")


@tracekern.range("decorated")
def countdown(number: int) -> int:
    return countdown(number - 1) if number else 7


def test_ranges_are_spans_where_a_capture_is_open_and_nothing_where_none_is(tmp_path: Path):
    assert countdown(2) == 7
    with tracekern.range("before"):
        pass
    with tracekern.capture(tmp_path / "capture"), tracekern.range("inside"):
        assert countdown(2) == 7
    with tracekern.range("after"):
        pass
    timeline = tracekern.load(tmp_path / "capture")
    rows = timeline.rows_of("host")
    labels = [timeline.host_names[label] for label in timeline.spans.begin_payload[rows].tolist()]
    assert sorted(labels) == ["decorated"] * 3 + ["inside"]


def test_without_the_compiled_part_it_says_how_to_build_it(tmp_path: Path):
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "include")
    shutil.copytree(ROOT / "tracekern", tmp_path / "tracekern", ignore=left_out)
    for name in ("capture", "Communicator", "launch_ranks", "range"):
        program = f"import sys; sys.modules['fcntl'] = None; import tracekern; tracekern.{name}"
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(
            "tracekern.errors.NotBuilt: tracekern was installed without its compiled extension, which recording, "
        ), last

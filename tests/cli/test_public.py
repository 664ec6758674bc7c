"""The public names: what a full flow needs, nothing else, and one line for what is missing."""

from __future__ import annotations

import ast
import dataclasses
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tracekern
from tests.captures import EVENT_TABLE
from tests.kernels import run_kernel
from tests.paths import ROOT
from tracekern.analysis.statistics import phase_statistics
from tracekern.dump.reader import read_dump
from tracekern.gate.run import read_run


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
        if name.startswith("tracekern.") and name not in ("tracekern.fabric", "tracekern.moe.low_latency")
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


def reachable(value: object, met: dict[int, object]) -> dict[int, object]:
    """All dataclasses behind a value, by their id."""
    if isinstance(value, tuple | list | dict):
        for item in list(value.values() if isinstance(value, dict) else value)[:50]:
            reachable(item, met)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and id(value) not in met:
        met[id(value)] = value
        answers = [name for name, kind in vars(type(value)).items() if isinstance(kind, functools.cached_property)]
        for name in (*answers, *(field.name for field in dataclasses.fields(value))):
            reachable(getattr(value, name), met)
    return met


@pytest.mark.parametrize("capture", ["h200x4_late_host", "h100_low_latency"])
def test_whatever_a_session_prints_is_a_few_lines(capture):
    """It was 167,000 characters of the first, 684,000 of the second."""
    place = ROOT / "traces" / capture
    findings = tracekern.analyze(tracekern.load(place))
    met = reachable(
        [findings, findings.waits, read_dump(place / "rank_00000.tkdump"), phase_statistics(findings.timeline)], {}
    )
    met |= reachable(read_run(place), {})
    assert {"Findings", "Timeline", "Spans", "Rank", "Answer", "Waits", "Dump", "Run"} <= {
        type(value).__name__ for value in met.values()
    }
    assert {type(value).__name__: len(repr(value)) for value in met.values() if len(repr(value)) > 1000} == {}


def test_a_misspelt_name_is_an_error_that_names_what_is_near():
    timeline = tracekern.load(ROOT / "traces" / "h200x4_late_host")
    with pytest.raises(tracekern.BadInput, match="event 'wait_tokn' is not in this timeline; similar are wait_token"):
        timeline.rows_of("wait_tokn")
    with pytest.raises(tracekern.BadInput, match="rank 7 is not in this timeline, which has ranks 0, 1, 2 and 3"):
        timeline.rows_of("copy_token", 7)
    rows = timeline.rows_of("copy_token", 1)
    assert set(timeline.track_ranks()[timeline.spans.track[rows]]) == {1}
    with pytest.raises(tracekern.BadInput, match="event copy_token has no field 'slott'; similar are slot"):
        timeline.field(rows, "slott")


WITHOUT = """
import sys, importlib.abc
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import tracekern
def said(call):
    try:
        call()
    except tracekern.BadInput as error:
        print(error)
    else:
        print("done")
"""


def without(names: tuple[str, ...], calls: dict[str, str]) -> dict[str, str]:
    """What each call of the API says in a process that lacks some packages; "done" where it needs none of them."""
    program = WITHOUT.format(names=names) + "".join(f"said(lambda: {call})\n" for call in calls.values())
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return dict(zip(calls, ended.stdout.splitlines(), strict=True))


def test_calls_name_the_extra_of_a_package_that_is_missing(tmp_path):
    timeline = "tracekern.load('traces/h200x4_late_host')"
    page = tmp_path / "spans.parquet"
    said = without(
        ("pyarrow", "plotly", "junitparser", "typer", "rich", "polars"),
        {
            "analyze": f"tracekern.analyze({timeline})",
            "parquet": f"tracekern.save({timeline}, {str(page)!r})",
            "json": f"tracekern.save({timeline}, {str(page.with_suffix('.json'))!r})",
        },
    )
    lacks = "needs {}, which is not installed here; install tracekern[read], or `python -m pip install {}`"
    assert said == {
        "analyze": "done",
        "parquet": f"writing Parquet {lacks.format('pyarrow', 'pyarrow')}",
        "json": "done",
    }
    said = without(
        ("torch",),
        {
            "load": f"len({timeline}.spans)",
            "capture": f"tracekern.capture({str(tmp_path / 'capture')!r}).__enter__().__exit__(None, None, None)",
            "gpu": "tracekern.Communicator(tracekern.Group(0, 1), 1 << 12, 1.0, backend='cuda')",
            "ranks": "__import__('tracekern.launcher.rendezvous').launcher.rendezvous.join_ranks()",
        },
    )
    lacks = "needs torch, which is not installed here; install tracekern[run], or `python -m pip install torch`"
    assert said == {
        "load": "done",
        "capture": "done",
        "gpu": f"looking for GPUs {lacks}",
        "ranks": f"connecting ranks {lacks}",
    }

"""The benchmarks start: what they import is there, small runs work, and what they cannot do is refused in a line."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_all
import harness

PROGRAMS = sorted(
    path
    for folder in ("benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if path.is_file() and "toys" not in path.parts
)


def imported(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of every `from tracekern... import name`, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tracekern":
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def missing_names(path: Path) -> list[str]:
    return [
        f"{path}:{line}: {module}.{name} is not there"
        for line, module, name in imported(path)
        if (module, name) != ("tracekern", "_cuda") and not is_there(module, name)  # built where nvcc is
    ]


def test_what_a_program_imports_is_there():
    assert [fault for path in PROGRAMS for fault in missing_names(path)] == []


def test_a_name_that_is_gone_is_found(tmp_path):
    (tmp_path / "program.py").write_text("def run():\n    from tracekern.formatting import duration, no_such_name\n")
    (fault,) = missing_names(tmp_path / "program.py")
    assert fault.endswith("program.py:2: tracekern.formatting.no_such_name is not there")


@pytest.mark.skipif(harness.count_gpus() > 0, reason="a GPU is here")
@pytest.mark.parametrize(
    "command",
    [
        "python benchmarks/clocks_gpu.py --ranks 4",
        "python benchmarks/graphs.py",
        "python benchmarks/links.py",
        "python benchmarks/moe.py --ranks 2",
        "python benchmarks/overhead.py low_latency --ranks 2",
        "python benchmarks/recorder.py",
        "python examples/torch_extension/trace_it.py",
        "sh traces/record_gpu.sh",
    ],
)
def test_a_program_for_gpus_says_in_one_line_that_there_is_none(command):
    assert "GPU" in refusal(command)


def test_a_size_that_is_refused_is_told_in_one_line():
    assert refusal("python benchmarks/flows.py --ranks 65") == "flows: ranks is 65; wanted 1 to 64"


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree whose benchmarks leave their results in it, not among those that are kept."""
    tree = tmp_path_factory.mktemp("beside")
    shutil.copytree(ROOT / "benchmarks", tree / "benchmarks", ignore=shutil.ignore_patterns("results"))
    (tree / "benchmarks" / "results").mkdir()
    for name in ("csrc", "tests", "traces", "tracekern", "viewers"):
        (tree / name).symlink_to(ROOT / name)
    return tree


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("analysis", "--sizes 0.02 --rounds 1"),
        ("flows", "--ranks 2 --backend cpu --iterations 2 --tokens 6 --hidden 64"),
        ("moe", "--ranks 2 --backend cpu --tokens 6 --many 9 --hidden 64 --experts 8 --topk 2 --samples 3"),
        ("launch", "--ranks 1 2 --launches 80"),
        ("slow_link", "--ranks 4 --tokens 4 --hidden 128 --experts 8 --topk 2 --slow-link 0.01 --rounds 2"),
    ],
)
def test_a_small_run_prints_a_table_and_leaves_its_figures(beside, name, arguments):
    run_small(beside, name, arguments)


def run_small(beside: Path, name: str, arguments: str) -> tuple[list[str], dict[str, Any]]:
    """The lines that a benchmark prints, and the figures that it leaves."""
    command = [sys.executable, beside / "benchmarks" / f"{name}.py", *shlex.split(arguments)]
    environment = {**os.environ, "PYTHONPATH": str(beside)}
    done = subprocess.run(command, cwd=beside, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: a bound is missed
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) > 3
    (path,) = (beside / "benchmarks" / "results").glob(f"{name}*.json")
    figures = json.loads(path.read_text())
    assert {"device", "date", "command"} <= figures.keys()
    return done.stdout.splitlines(), figures


def test_each_step_of_gpu_check_names_a_file_that_is_there_and_a_step_before_it():
    names = [step.name for step in gpu_all.STEPS]
    assert len(set(names)) == len(names)
    for number, step in enumerate(gpu_all.STEPS):
        assert not step.needs or step.needs in names[:number]
        files = [word for word in step.arguments.split() if word.endswith(".py")]
        assert files
        assert all((ROOT / file).is_file() for file in files)


def refusal(command: str) -> str:
    """The one line that a program ends with, and with 2."""
    program, *arguments = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable if program == "python" else program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line

"""Programs that no test starts without a GPU or a quarter of an hour: what they import from tracekern is there."""

from __future__ import annotations

import ast
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolchains import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import harness

PROGRAMS = sorted(
    path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py") if path.is_file()
)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from tracekern... import name`, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tracekern":
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_imports_is_there(path):
    names = [found for found in imported(path) if found != ("tracekern", "_cuda")]  # built where nvcc is
    assert [".".join(found) for found in names if not is_there(*found)] == []


def test_a_name_that_is_gone_is_found(tmp_path):
    (tmp_path / "program.py").write_text("def run():\n    from tracekern.formatting import duration, no_such_name\n")
    with pytest.raises(AssertionError, match="no_such_name"):
        test_what_a_program_imports_is_there(tmp_path / "program.py")


@pytest.mark.skipif(harness.count_gpus() > 0, reason="a GPU is here")
@pytest.mark.parametrize(
    "command",
    [
        "python benchmarks/clocks_gpu.py --ranks 4",
        "python benchmarks/graphs.py",
        "python benchmarks/links.py",
        "python benchmarks/moe.py --ranks 2",
        "python benchmarks/overhead_pipeline.py --ranks 2",
        "python benchmarks/recorder.py",
        "python examples/torch_extension/trace_it.py",
        "sh traces/record_gpu.sh",
    ],
)
def test_a_program_for_gpus_says_in_one_line_that_there_is_none(command):
    assert "GPU" in refusal(command)


def test_a_size_that_is_refused_is_told_in_one_line():
    assert refusal("python benchmarks/flows.py --ranks 65") == "flows: ranks is 65; wanted 1 to 64"


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


def test_gpus_are_counted_as_nvidia_smi_lists_them(tmp_path, monkeypatch, capsys):
    """A slice of one stands in a line of its own below it."""
    listed = tmp_path / "nvidia-smi"
    gpu = "GPU {}: NVIDIA H200 (UUID: GPU-0)\n  MIG 1g.18gb Device 0: (UUID: MIG-0)\n"
    listed.write_text(f"#!/bin/sh\ncat <<END\n{''.join(gpu.format(i) for i in range(2))}END\n")
    listed.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "argv", ["benchmarks/links.py"])
    assert harness.count_gpus() == 2
    harness.require_gpus(2)
    with pytest.raises(SystemExit, match="2"):
        harness.require_gpus(3)
    assert capsys.readouterr().err == "links: needs 3 GPUs, nvidia-smi names 2; run it where they are\n"

"""Programs that no test starts without a GPU or a quarter of an hour: what they import from tracekern is there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolchains import ROOT

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
    (tmp_path / "program.py").write_text("def run():\n    from tracekern.words import duration, no_such_name\n")
    with pytest.raises(AssertionError, match="no_such_name"):
        test_what_a_program_imports_is_there(tmp_path / "program.py")

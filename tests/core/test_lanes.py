"""Which lane a file is in follows from what it imports."""

from __future__ import annotations

import importlib

import pytest
from lanes import uses_compiler


@pytest.mark.parametrize(
    ("module", "is_native"),
    [
        ("tests.moe.test_mutants", True),  # by attack.py
        ("tests.core.test_host_without_python", True),  # by toolchains.py, under its other name
        ("tests.cli.test_benchmarks", False),
    ],
)
def test_a_file_that_compiles_is_native(module: str, is_native: bool):
    assert uses_compiler(importlib.import_module(module)) is is_native

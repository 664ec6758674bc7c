"""The programs of benchmarks/fabric.py: each compiles, moves every byte, and prints its figure."""

from __future__ import annotations

import json
import subprocess

import pytest
from fabric_pairs import LOOPBACK
from toolchains import GXX, ROOT, compile_cached

from tracekern.fabric.library import require_library

FIGURES = {"single 65536 1024 4": "gb_per_s", "paged 65536 1024 192": "gb_per_s", "ping 8 100 16": "p50_us"}


@pytest.mark.parametrize("name", ["raw", "engine"])
def test_a_program_of_the_benchmark_says_how_fast_it_was(name):
    program = compile_cached((*GXX, "-O0", "-ldl", "-DTRACED"), ROOT / "benchmarks" / f"fabric_{name}.cpp", "")
    for arguments, figure in FIGURES.items():
        command = [program, require_library(), LOOPBACK.provider, LOOPBACK.source, *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)[figure] > 0

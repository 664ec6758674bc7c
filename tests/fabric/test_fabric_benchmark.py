"""benchmarks/fabric.py and its parts: each moves every byte and says how fast, or says why it did not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import rehearsal
from fabric_pairs import LOOPBACK
from toolchains import GXX, ROOT, compile_cached

from tracekern.fabric.library import require_library

sys.path.insert(0, str(ROOT / "benchmarks"))
import fabric_nixl
import fabric_paper

FIGURES = {"single 65536 1024 4": "gb_per_s", "paged 65536 1024 192": "gb_per_s", "ping 8 100 16": "p50_us"}
REQUESTS = (fabric_nixl.Request("16 x 4 KiB", 4096, 16, 3), fabric_nixl.Request("1 MiB", 1 << 20, 1, 3))


def program(name: str) -> str:
    return str(compile_cached((*GXX, "-O0", "-ldl", "-DTRACED"), ROOT / "benchmarks" / f"fabric_{name}.cpp", ""))


def figures_of(name: str, library: str) -> None:
    for arguments, figure in FIGURES.items():
        command = [program(name), library, LOOPBACK.provider, LOOPBACK.source, *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)[figure] > 0


@pytest.mark.programs("benchmarks/fabric_engine.cpp", "benchmarks/fabric_raw.cpp", "tests/cpp/efa_rules.cpp")
@pytest.mark.parametrize("name", ["raw", "engine"])
def test_a_program_of_the_benchmark_says_how_fast_it_was(name):
    figures_of(name, os.environ.get("SHIM_LIBRARY") or require_library())  # in a rehearsal raw would break the rules


@pytest.mark.programs("benchmarks/fabric_engine.cpp", "benchmarks/fabric_raw.cpp", "tests/cpp/efa_rules.cpp")
def test_the_engine_runs_in_rehearsal(monkeypatch):
    variables = rehearsal.variables("efa")
    monkeypatch.setenv("SHIM_LIBRARY", variables["SHIM_LIBRARY"])
    figures_of("engine", variables["TRACEKERN_LIBFABRIC"])


def test_the_engine_does_what_nixl_is_asked_for():
    assert all(seconds > 0 for seconds in fabric_nixl.run_system("engine", "", REQUESTS))


def test_without_nixl_its_rows_say_so():
    rows = fabric_nixl.measure("", 1)
    assert [row["status"] for row in rows] == ["not run"] * 6
    assert all("pip install --no-deps" in row["how"] for row in rows)
    with pytest.raises(SystemExit, match="--nixl /nowhere: has no nixl_cu12"):
        fabric_nixl.measure("/nowhere", 1)


def test_a_case_of_the_papers_tables_is_whole_rounds_of_the_memory():
    for shape in ("single", "paged"):
        for size in fabric_paper.SIZES:
            case = fabric_paper.case_of(shape, size)
            assert case.count * size % fabric_paper.MEMORY_BYTES == 0
            assert case.count <= fabric_paper.MAX_WRITES

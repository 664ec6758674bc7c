"""Warps of the CPU backend have stacks of their own."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from kept_builds import build
from toolchains import CSRC, GXX, compile_cached, program, require

pytestmark = pytest.mark.programs("csrc/platform/cpu_executor.hpp", "tests/cpp/overflow.cpp")


def test_a_stack_that_overflows_spoils_no_other():
    assert subprocess.run([program("overflow", "-O1")], timeout=60).returncode == -signal.SIGSEGV


MANY = """#include "platform/cpu_executor.hpp"
#include <cstdio>
int main() {
    int ran = 0;
    const auto count = [&](tracekern::Warp&) { ++ran; };
    try {
        tracekern::launch_cpu({.num_blocks = 1u << 22}, count);
    } catch (const std::bad_alloc& error) {
        std::puts(error.what());
    }
    tracekern::launch_cpu({.num_blocks = 3}, count);
    return ran;
}
"""


def test_more_warps_than_there_can_be_stacks_are_refused_and_the_next_launch_runs(tmp_path: Path):
    (tmp_path / "many.cpp").write_text(MANY)
    done = subprocess.run([compile_cached(GXX, tmp_path / "many.cpp", "")], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.startswith("no memory for the stack of one more warp: each takes two mappings")


LAUNCH = """#include "platform/cpu_executor.hpp"
int NAME() {
    int sum = 0;
    tracekern::launch_cpu({.num_blocks = 3}, [&](tracekern::Warp& warp) { sum += static_cast<int>(warp.block); });
    return sum;
}
"""


def test_files_that_launch_may_be_optimised_as_one(tmp_path: Path):
    require("g++")
    (tmp_path / "first.cpp").write_text(LAUNCH.replace("NAME", "first"))
    (tmp_path / "main.cpp").write_text("int first();\n" + LAUNCH.replace("NAME", "second"))
    with (tmp_path / "main.cpp").open("a") as file:
        file.write("int main() { return first() * 10 + second(); }\n")
    sources = [tmp_path / "first.cpp", tmp_path / "main.cpp"]
    both = build((*GXX, "-O2", "-flto=1", f"-I{CSRC}"), sources)
    assert both.returncode == 0, both.stderr
    assert subprocess.run([both.result]).returncode == 33

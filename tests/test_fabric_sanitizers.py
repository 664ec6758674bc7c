"""Engines under the sanitizers. libfabric is not instrumented: what it does alone is not seen."""

from __future__ import annotations

import pytest
from attack import run_program
from fabric_pairs import library
from toolchains import program

BUILDS = {
    "address": ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-O0", "-g1", "-fsanitize=thread"),
}


@pytest.mark.parametrize("build", BUILDS)
def test_engines_are_clean(build: str):
    ended = run_program(program("fabric_stress", *BUILDS[build], "-ldl"), library.require_library(), "2")
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr[-6000:]

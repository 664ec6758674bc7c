"""The copy loop of GPUs, which the CPU backend does without."""

from __future__ import annotations

import pytest
from attack import run_program
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/copy.cpp")


def test_it_copies_every_vector_and_nothing_beyond():
    assert run_program(program("copy", "-O1", "-g1", "-fsanitize=address")).returncode == 0

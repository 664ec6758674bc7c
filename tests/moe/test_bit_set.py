"""Sets of ranks and choices that a lane keeps in registers."""

from __future__ import annotations

import pytest
from attack import run_program
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/bit_set.cpp")


def test_sets_of_one_word_and_of_several_hold_what_was_added():
    assert run_program(program("bit_set", "-O1")).returncode == 0

"""The roles of warps in kernels: which warps have which, and what their rows are called."""

from __future__ import annotations

import pytest
from attack import run_program
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/roles.cpp")


def roles_of_warps(blocks: int, warps: int) -> dict[str, list[list[str]]]:
    """Kernel -> the roles of each warp, block by block; its row's name is the first."""
    done = run_program(program("roles", "-O1"), str(blocks), str(warps))
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[str]]] = {}
    for line in done.stdout.splitlines():
        kernel, _, _, *roles = line.split()
        found.setdefault(kernel, []).append(roles)
    return found


def test_the_first_block_counts_and_each_half_of_the_others_has_a_role():
    assert roles_of_warps(2, 3) == {
        "dispatch_send": [["count"]] * 3 + [["send"]] * 3,
        "dispatch": [["count"]] * 3 + [["send"], ["receive"], ["receive"]],
        "combine": [["reduce"], ["send"], ["send"]] * 2,
        "dispatch_combine": [["count"]] * 3 + [["token"], ["expert"], ["expert"]],
        "low_latency": [["dispatch"], ["dispatch"], ["count"]] * 2,
    }


def test_a_block_of_one_warp_has_the_roles_of_both_halves():
    assert roles_of_warps(2, 1) == {
        "dispatch_send": [["count"], ["send"]],
        "dispatch": [["count"], ["send", "receive"]],
        "combine": [["send", "reduce"]] * 2,
        "dispatch_combine": [["count"], ["token", "expert"]],
        "low_latency": [["count"]] * 2,
    }

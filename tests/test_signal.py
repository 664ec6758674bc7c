"""A warp that waits for many flags, a lane each: whichever lane gives up says so. test_barriers.py waits for one."""

from __future__ import annotations

import pytest
from attack import RIGHT, TIMED_OUT, run_program
from toolchains import program

NEVER = 0xFFFFFFEF


@pytest.mark.parametrize("absent", [0, 5, 31, 39])
def test_a_wait_that_any_lane_gives_up_is_on_record(absent):
    done = run_program(program("lanes", "-O1"), "40", str(absent))
    assert (done.returncode, done.stderr) == (TIMED_OUT, f"cause=1 stage=3 slot={absent} seen={NEVER}\n")


def test_flags_that_come_leave_no_fault():
    assert run_program(program("lanes", "-O1"), "40", "40").returncode == RIGHT

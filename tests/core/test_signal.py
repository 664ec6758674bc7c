"""A warp that waits for flags, one or a lane each: whichever lane gives up says so. test_barriers.py waits for one."""

from __future__ import annotations

import pytest
from attack import RIGHT, TIMED_OUT, run_program
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/lanes.cpp")

LONG_AGO = FIRST_EPOCH = 0xFFFFFFF0
"""What a fault keeps of the epoch that a flag has which stays away."""


def lanes(*arguments: object):
    return run_program(program("lanes", "-O1"), *map(str, arguments))


@pytest.mark.parametrize("absent", [0, 5, 31, 39])
def test_a_wait_that_any_lane_gives_up_is_on_record(absent):
    done = lanes("all", 40, absent)
    assert (done.returncode, done.stderr) == (TIMED_OUT, f"cause=1 stage=3 slot={absent} seen={LONG_AGO} value=7\n")


def test_flags_that_come_leave_no_fault():
    assert lanes("all", 40, 40).returncode == RIGHT


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_wait_for_any_flag_ends_with_the_one_that_comes(count):
    for present in {0, count // 2, count - 1}:
        assert lanes("any", count, present).returncode == RIGHT


def test_a_wait_for_any_flag_that_none_ends_is_on_record():
    done = lanes("any", 8, 8)
    assert (done.returncode, done.stderr) == (TIMED_OUT, f"cause=1 stage=3 slot=9 seen={LONG_AGO} value=7\n")


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_wait_for_any_flag_that_is_far_enough_takes_no_other(count):
    for present in {0, count // 2, count - 1}:
        assert lanes("least", count, present).returncode == RIGHT


def test_flags_of_this_call_that_are_not_far_enough_are_on_record():
    done = lanes("least", 8, 8)
    assert (done.returncode, done.stderr) == (TIMED_OUT, f"cause=1 stage=3 slot=9 seen={FIRST_EPOCH} value=9\n")


@pytest.mark.parametrize("value", [5, 6, 0xFFFFFF])
def test_a_wait_for_a_position_ends_at_it_or_behind_it(value):
    assert lanes("one", value, 5).returncode == RIGHT


def test_a_position_that_is_not_reached_is_on_record():
    done = lanes("one", 4, 5)
    assert (done.returncode, done.stderr) == (TIMED_OUT, f"cause=1 stage=3 slot=9 seen={FIRST_EPOCH} value=4\n")

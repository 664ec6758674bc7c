"""In which order warps take the rows that come: each row once, equal shares, all sources in turns, none waited for."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from attack import run_program
from hypothesis import given, settings
from hypothesis import strategies as st
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/incoming.cpp")

Order = list[tuple[int, int]]
"""(source, row) of one warp, in the order in which it takes them."""


def orders(counts: list[int], rank: int = 0, warps: int = 8, late: int = -1) -> list[Order]:
    """The order of every warp. Rows of the rank `late` come when a warp has no other row left."""
    done = run_program(program("incoming", "-O1"), str(rank), str(warps), str(late), *map(str, counts))
    assert done.returncode == 0, done.stderr
    pairs = [[pair.split(":") for pair in line.split()] for line in done.stdout.splitlines()]
    return [[(int(source), int(row)) for source, row in line] for line in pairs]


def assert_dealt_out(dealt: list[Order], counts: list[int]) -> None:
    taken = sorted(itertools.chain(*dealt))
    assert taken == [(source, row) for source, count in enumerate(counts) for row in range(count)]
    shares = [len(order) for order in dealt]
    assert max(shares) - min(shares) <= 1
    for source in range(len(counts)):
        parts = [sum(taken == source for taken, _ in order) for order in dealt]
        assert max(parts) - min(parts) <= 1, f"source {source}"


COUNTS = [
    [256, 0, 1, 0],
    [0, 0, 0, 0],
    [1],
    [300],
    [7, 7, 7, 7, 7, 7, 7, 7],
    [0] * 63 + [90],
    [rank * 5 % 17 for rank in range(64)],
    [3] * 40,
]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("warps", [1, 3, 8, 64])
def test_every_row_is_taken_once_and_shares_differ_by_one(counts, warps):
    for rank in {0, len(counts) // 2, len(counts) - 1}:
        assert_dealt_out(orders(counts, rank, warps), counts)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_counts_are_dealt_out(data):
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=64))
    rank = data.draw(st.integers(0, len(counts) - 1))
    late = data.draw(st.integers(-1, len(counts) - 1))
    assert_dealt_out(orders(counts, rank, data.draw(st.integers(1, 20)), late), counts)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16, 64])
def test_a_warp_takes_all_sources_in_turns(num_ranks):
    """From the first row to the last: between two rows of a source there is one of each other that has some left."""
    rows_each = 12
    (order,) = orders([rows_each] * num_ranks, rank=1, warps=1)
    sources = [source for source, _ in order]
    first_lanes = min(num_ranks, 32)  # a lane that has two sources takes them one after the other
    for at in range(0, rows_each * first_lanes, first_lanes):
        assert len(set(sources[at : at + first_lanes])) == first_lanes
    assert sources[0] == 2 % num_ranks, "begins behind its own rank"


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_at_no_time_do_the_warps_of_all_ranks_go_for_one(num_ranks):
    """Warps in step: at each step a rank's rows are for all sources alike, and so no receiver gets more than others."""
    warps, rows_each = 64, 128
    dealt = [order for rank in range(num_ranks) for order in orders([rows_each] * num_ranks, rank, warps)]
    for step in itertools.zip_longest(*dealt):
        sources = Counter(row[0] for row in step if row is not None)
        fair = sum(sources.values()) / num_ranks
        assert max(sources.values()) <= 1.25 * fair + 1


@pytest.mark.parametrize("late", [0, 3, 7])
def test_rows_of_a_late_rank_are_passed_over(late):
    """A warp takes them last, and they are dealt out among all warps."""
    counts = [40, 41, 39, 40, 38, 42, 40, 40]
    dealt = orders(counts, rank=2, warps=16, late=late)
    assert_dealt_out(dealt, counts)
    for order in dealt:
        is_late = [source == late for source, _ in order]
        assert is_late == sorted(is_late)

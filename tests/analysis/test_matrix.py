"""Who waits for whom: what is in the cells, and what stands out of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import SEE_NS, Scenario, exchange
from wait_oracle import any_runs

from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.analysis.waits.matrix import (
    MIN_CELLS,
    Locality,
    WaitMatrix,
    find_abnormal,
    polish_medians,
    wait_matrix,
)
from tracekern.timeline.model import Timeline


def matrix_of(timeline: Timeline) -> WaitMatrix:
    return wait_matrix(timeline, analyze_waits(timeline))


def outliers(timeline: Timeline) -> list[tuple[int | None, int | None]]:
    """(rank that waits, rank waited for) of what stands out, None for all of them."""
    return [(one.rank, one.peer) for one in find_abnormal(matrix_of(timeline))]


def test_rows_wait_and_columns_are_waited_for():
    run = Scenario(3)
    run.launch("dispatch")
    run.work(2, 700)
    run.signal(2, peer=0, ns=40)
    run.wait(0, peer=2)
    matrix = matrix_of(run.timeline())
    expected = np.zeros((3, 3), np.int64)
    expected[0, 2] = 740 + SEE_NS
    assert np.array_equal(matrix.sum_ns, expected)
    assert np.array_equal(matrix.count, expected > 0)


def test_nothing_injected_nothing_stands_out():
    assert outliers(exchange(num_ranks=6).timeline(hard_ns=300, sigma_ns=30)) == []


def test_a_late_rank_is_a_column():
    timeline = exchange(num_ranks=6, late={4: 50_000}).timeline(hard_ns=300, sigma_ns=30)
    assert outliers(timeline) == [(None, 4)]


def test_a_rank_that_starts_early_waits_for_all_and_is_a_row():
    late = dict.fromkeys(range(1, 6), 50_000)
    assert outliers(exchange(num_ranks=6, late=late).timeline(hard_ns=300, sigma_ns=30)) == [(0, None)]


def test_a_slow_link_is_a_point():
    timeline = exchange(num_ranks=6, slow_link={(1, 3): 9000}).timeline(hard_ns=300, sigma_ns=30)
    assert outliers(timeline) == [(3, 1)]
    (point,) = find_abnormal(matrix_of(timeline))
    assert point.factor == pytest.approx((9000 + SEE_NS) / SEE_NS)
    assert point.excess_ns == pytest.approx(5 * 9000)
    assert point.locality is Locality.SAME_NODE


def by_hand(factors: np.ndarray, nodes: str = "aaaaaa", doubt_ns: int = 1) -> WaitMatrix:
    """Six ranks; the sums are 10 us, times a factor of the row (1 to 1.2), times `factors`."""
    sums = (10_000 * np.linspace(1, 1.2, 6)[:, None] * factors).astype(np.int64)
    locality = np.array(
        [[Locality.SAME_NODE if one == other else Locality.OTHER_NODE for other in nodes] for one in nodes]
    )
    np.fill_diagonal(locality, Locality.SELF)
    return WaitMatrix(tuple(range(6)), sums, np.ones_like(sums), np.full_like(sums, doubt_ns), locality)


@pytest.mark.parametrize("factor", [1.2, 1.3])
def test_a_line_stands_out_from_its_factor_on(factor: float):
    factors = np.ones((6, 6))
    factors[:, 4] = factor
    found = find_abnormal(by_hand(factors))
    assert [(one.rank, one.peer) for one in found] == ([(None, 4)] if factor > 1.25 else [])
    if found:
        assert found[0].factor == pytest.approx(factor, rel=1e-3)
        others = np.arange(6) != 4
        assert found[0].excess_ns == pytest.approx(by_hand(factors - 1).sum_ns[others, 4].sum(), rel=0.01)
    found = find_abnormal(by_hand(factors.T))  # the factor comes on top of that of the row
    assert [(one.rank, one.peer) for one in found] == ([(4, None)] if factor * 1.16 / 1.1 > 1.25 else [])


@pytest.mark.parametrize("factor", [1.8, 2.2])
def test_a_point_stands_out_from_its_factor_on(factor: float):
    factors = np.ones((6, 6))
    factors[2, 5] = factor
    assert [(one.rank, one.peer) for one in find_abnormal(by_hand(factors))] == ([(2, 5)] if factor > 2 else [])


def test_the_largest_excess_comes_first():
    factors = np.ones((6, 6))
    factors[2, 5], factors[4, 1] = 3, 9
    factors[:, 3] = 2
    found = find_abnormal(by_hand(factors))
    assert [(one.rank, one.peer) for one in found] == [(4, 1), (None, 3), (2, 5)]
    assert [one.excess_ns for one in found] == sorted((one.excess_ns for one in found), reverse=True)


def test_what_is_low_does_not_stand_out():
    factors = np.ones((6, 6))
    factors[:, 1] = 0.2
    factors[3, 4] = 0.1
    assert find_abnormal(by_hand(factors)) == ()


def test_an_excess_within_the_doubt_does_not_stand_out():
    factors = np.ones((6, 6))
    factors[2, 5] = 4
    assert len(find_abnormal(by_hand(factors, doubt_ns=1000))) == 1
    assert find_abnormal(by_hand(factors, doubt_ns=40_000)) == ()


def test_a_cell_in_more_doubt_than_the_others_does_not_stand_out_for_that():
    matrix = by_hand(np.ones((6, 6)))
    matrix.doubt_ns[2, 5] = 90_000
    assert find_abnormal(matrix) == ()


def test_a_waiting_time_of_few_ticks_is_no_ratio():
    """20 ns against 40 ns is a factor of two, and two ticks of the clock."""
    timeline = exchange(num_ranks=6).timeline()
    coarse = tuple(type(rank)(**{**vars(rank), "resolution_ticks": 32}) for rank in timeline.ranks)
    matrix = matrix_of(timeline.replace(ranks=coarse))
    assert set(matrix.doubt_ns[matrix.count > 0]) == {5 * 2 * 32}
    sums = matrix.sum_ns.copy()
    sums[2, 5] *= 3
    assert find_abnormal(WaitMatrix(matrix.ranks, sums, matrix.count, matrix.doubt_ns, matrix.locality)) == ()


def test_links_between_nodes_are_compared_with_each_other():
    nodes = "aaaabbbb"
    slow = {(a, b): 5000 for a in range(8) for b in range(8) if nodes[a] != nodes[b]}
    assert outliers(exchange(num_ranks=8, slow_link=slow, nodes=nodes).timeline()) == []
    assert outliers(exchange(num_ranks=8, slow_link={**slow, (2, 6): 15_000}, nodes=nodes).timeline()) == [(6, 2)]
    (point,) = find_abnormal(
        matrix_of(exchange(num_ranks=8, slow_link={**slow, (2, 6): 15_000}, nodes=nodes).timeline())
    )
    assert point.locality is Locality.OTHER_NODE


def test_how_long_somebody_waited_is_a_matter_of_one_clock():
    run = exchange(num_ranks=6, late={4: 1000})
    assert outliers(run.timeline(hard_ns=3000, sigma_ns=2000)) == [(None, 4)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_few_ranks_are_not_judged(num_ranks: int):
    if num_ranks == 1:
        run = Scenario(1)
        run.launch("dispatch")
    else:
        run = exchange(num_ranks=num_ranks, late={1: 90_000})
    matrix = matrix_of(run.timeline())
    assert matrix.sum_ns.shape == (num_ranks, num_ranks)
    assert find_abnormal(matrix) == ()


def test_a_rank_that_waits_for_itself_is_not_judged():
    factors = np.ones((6, 6))
    np.fill_diagonal(factors, 50)
    assert find_abnormal(by_hand(factors)) == ()


@given(any_runs())
def test_cells_are_the_sums_of_plain_loops(timeline: Timeline):
    waits = analyze_waits(timeline)
    matrix = wait_matrix(timeline, waits)
    for i, rank in enumerate(matrix.ranks):
        for j, peer in enumerate(matrix.ranks):
            mine = [k for k in range(len(waits)) if (waits.rank[k], waits.peer[k]) == (rank, peer)]
            assert matrix.sum_ns[i, j] == sum(int(waits.wait_ns[k]) for k in mine)
            assert matrix.count[i, j] == len(mine)
    find_abnormal(matrix)


@given(st.integers(3, 7), st.integers(3, 7), st.integers(0, 2**32))
def test_polish_takes_a_table_apart(num_rows: int, num_columns: int, seed: int):
    random = np.random.default_rng(seed)
    values = random.normal(size=(num_rows, num_columns))
    values[random.random(values.shape) < 0.15] = np.nan
    polish = polish_medians(values)
    again = polish.level + polish.row[:, None] + polish.column[None, :] + polish.rest
    kept = np.isfinite(polish.rest)
    assert np.allclose(again[kept], values[kept])
    for lines, effect in ((kept, polish.row), (kept.T, polish.column)):
        assert all(
            line.sum() >= MIN_CELLS or (not line.any() and step == 0) for line, step in zip(lines, effect, strict=True)
        )
    if np.isfinite(values).all():
        assert kept.all()


def test_polish_finds_the_effects_behind_an_outlier():
    row, column = np.array([0.5, -0.2, 0.0, 0.1, -0.4]), np.array([0.3, 0.0, -0.1, 0.2, -0.6])
    values = 7 + row[:, None] + column[None, :]
    values[1, 3] += 4
    np.fill_diagonal(values, np.nan)
    polish = polish_medians(values)
    assert np.allclose(polish.row, row - np.median(row))
    assert np.allclose(polish.column, column - np.median(column))
    assert polish.rest[1, 3] == pytest.approx(4)

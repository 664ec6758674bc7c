"""Who waits for whom: what is in the cells, and what is framed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from scenarios import SEE_NS, Scenario, exchange
from simulator import Case, Drain, Injection, Shape, SlowWork, simulate
from wait_oracle import any_runs

import tracekern
from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.analysis.waits.matrix import WaitMatrix, wait_matrix
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.frame import Figure
from tracekern.viewers.report.questions.matrix import draw


def matrix_of(timeline: Timeline) -> WaitMatrix:
    return wait_matrix(timeline, analyze_waits(timeline))


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


def test_a_sum_is_in_doubt_by_two_ticks_a_wait():
    timeline = exchange(num_ranks=6).timeline()
    coarse = tuple(type(rank)(**{**vars(rank), "resolution_ticks": 32}) for rank in timeline.ranks)
    matrix = matrix_of(timeline.replace(ranks=coarse))
    assert set(matrix.doubt_ns[matrix.count > 0]) == {5 * 2 * 32}


@pytest.mark.parametrize(
    ("injection", "frame"),
    [
        (Drain(20_000, source=1, destination=3), (0.5, 1.5, 2.5, 3.5)),
        (SlowWork(20_000, rank=2), (1.5, 2.5, -0.5, 3.5)),
    ],
    ids=["a link is a cell", "a rank is a column"],
)
def test_what_the_answer_names_is_framed(injection: Injection, frame: tuple[float, ...], tmp_path: Path):
    truth = simulate(Case(Shape.EXCHANGE, 4, 20, (injection,), 0.02), 5, tmp_path)
    (figure,) = (part for part in draw(analyze(tracekern.load(truth.directory))).body if isinstance(part, Figure))
    (shape,) = figure.layout["shapes"]
    assert tuple(shape[edge] for edge in ("x0", "x1", "y0", "y1")) == pytest.approx(frame, abs=0.1)


@given(any_runs())
def test_cells_are_the_sums_of_plain_loops(timeline: Timeline):
    waits = analyze_waits(timeline)
    matrix = wait_matrix(timeline, waits)
    for i, rank in enumerate(matrix.ranks):
        for j, peer in enumerate(matrix.ranks):
            mine = [k for k in range(len(waits)) if (waits.rank[k], waits.peer[k]) == (rank, peer)]
            assert matrix.sum_ns[i, j] == sum(int(waits.wait_ns[k]) for k in mine)
            assert matrix.count[i, j] == len(mine)

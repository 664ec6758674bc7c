"""Imbalance is work, not wait."""

from __future__ import annotations

import numpy as np
from scenarios import Scenario, exchange
from timelines import make_timeline

from tracekern.analysis.imbalance import work_imbalance
from tracekern.analysis.waits import Phase, analyze_waits


def test_uneven_tokens_are_imbalance_and_not_wait():
    timeline = exchange(num_ranks=4, num_launches=3, tokens={1: 30_000}).timeline()
    totals = analyze_waits(timeline).totals()
    assert {name for name, ns in totals.items() if ns} == {"visibility"}
    worst, *others = work_imbalance(timeline)
    assert (worst.phase, worst.busiest_rank) == (Phase("dispatch", "receive_token"), 1)
    assert worst.imbalance_ns == 3 * 3 * 30_000 * 3 / 4  # max - mean of 3 launches of 3 warps
    assert [other.imbalance_ns for other in others] == [0]


def test_imbalance_leaves_out_the_waits_inside_work():
    timeline = make_timeline(2)
    spans = timeline.spans
    start, end = spans.start.copy(), spans.end.copy()
    work = np.flatnonzero(spans.event == 0)
    end[work] = end[work] + 5000  # now every copy encloses the signal and the wait behind it, 140 and 1360 ns
    timeline = timeline.replace(
        spans=type(spans)(spans.track, spans.event, spans.launch, start, end, *[spans.begin_payload] * 2)
    )
    (row,) = work_imbalance(timeline)
    assert row.busy_ns == dict.fromkeys((0, 1), 4 * (5500 - 1360))


def test_work_of_no_length_has_no_waits_inside():
    run = Scenario(1)
    run.launch("dispatch")
    start = run.now[0, 0]
    run.wait_other(0, 500)
    run.now[0, 0] = start
    run.work(0, 0)
    (row,) = work_imbalance(run.timeline())
    assert row.busy_ns == {0: 0}


def test_no_work_no_rows():
    assert work_imbalance(Scenario(2).timeline()) == ()

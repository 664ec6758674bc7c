"""Imbalance is work, not wait."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from scenarios import Scenario, exchange
from timelines import COPY, WAIT, make_spans, make_timeline, timelines

from tracekern.analysis.questions.imbalance import work_imbalance
from tracekern.analysis.waits.analyze import Phase, analyze_waits
from tracekern.timeline.model import OPEN_END, Flows, Timeline


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


@pytest.mark.parametrize(
    ("waits", "busy_ns"),
    [
        ([(10, 90), (20, 80)], 20),
        ([(10, 30), (60, 70)], 70),
        ([(90, 300)], 90),
        ([(-50, 200)], 100),
        ([(-50, 200), (10, 40)], 70),
        ([(-50, 200), (10, 40), (20, 30), (50, 120)], 20),
    ],
    ids=["nested", "apart", "outlives the work", "around the work", "around and inside", "all of it"],
)
def test_time_in_which_several_waits_are_open_is_left_out_once(waits: list[tuple[int, int]], busy_ns: int):
    rows = [(2, COPY, 0, 1000, 1100, 0, 0), *((2, WAIT, 0, 1000 + begin, 1000 + end, 0, 0) for begin, end in waits)]
    (row,) = work_imbalance(make_timeline(1, spans=make_spans(rows), flows=Flows()))
    assert row.busy_ns == {0: busy_ns}


@given(timelines())
def test_work_is_that_of_plain_loops(timeline: Timeline):
    spans, rank_of_track = timeline.spans, timeline.track_ranks()
    closed = spans.end != OPEN_END
    expected, found = Counter(), Counter()
    for row in np.flatnonzero(closed & (spans.event == COPY)):
        reach, end = spans.start[row], spans.end[row]
        waits = np.flatnonzero(closed & (spans.event == WAIT) & (spans.track == spans.track[row]))
        for wait in waits[waits > row]:  # by their starts
            expected[rank_of_track[spans.track[row]]] += max(0, min(spans.start[wait], end) - reach)
            reach = max(reach, min(spans.end[wait], end))
        expected[rank_of_track[spans.track[row]]] += end - reach
    for phase in work_imbalance(timeline):
        found.update(phase.busy_ns)
    assert +found == +expected


def test_no_work_no_rows():
    assert work_imbalance(Scenario(2).timeline()) == ()

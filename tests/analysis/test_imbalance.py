"""Imbalance is work, not wait."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from scenarios import Scenario, exchange
from timelines import COPY, WAIT, timelines

from tracekern.analysis.questions.imbalance import work_imbalance
from tracekern.analysis.waits.analyze import Phase, analyze_waits
from tracekern.timeline.model import OPEN_END, Timeline


def test_uneven_tokens_are_imbalance_and_not_wait():
    timeline = exchange(num_ranks=4, num_launches=3, tokens={1: 30_000}).timeline()
    totals = analyze_waits(timeline).totals()
    assert {name for name, ns in totals.items() if ns} == {"visibility"}
    worst, *others = work_imbalance(timeline)
    assert (worst.phase, worst.busiest_rank) == (Phase("dispatch", "receive_token"), 1)
    assert worst.imbalance_ns == 3 * 3 * 30_000 * 3 / 4  # max - mean of 3 launches of 3 warps
    assert [other.imbalance_ns for other in others] == [0]


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

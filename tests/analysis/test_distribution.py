"""The distribution of waits at few points, against the function counted out."""

from __future__ import annotations

import dataclasses

import numpy as np
from timelines import WAIT, make_timeline, overwrite_begins

from tracekern.analysis.waits.analyze import PhaseNumbers, Waits, analyze_waits
from tracekern.analysis.waits.distribution import Distribution, distribute
from tracekern.analysis.waits.statistics import WaitSums
from tracekern.timeline.model import Timeline


def distributions(timeline: Timeline, waits: Waits, max_points: int = 160) -> tuple[Distribution, ...]:
    durations = WaitSums.of(waits, by=("phase",)).durations
    return distribute(durations, PhaseNumbers(timeline), waits.phases, max_points)


def test_points_lie_on_the_true_function():
    timeline = make_timeline(4)
    waits = analyze_waits(timeline)
    values = np.random.default_rng(3).integers(0, 40, len(waits)) * 32
    waits = dataclasses.replace(waits, wait_ns=values)
    for max_points in (3, 1000):
        (found,) = distributions(timeline, waits, max_points)
        assert found.count == len(waits)
        assert len(found.wait_ns) <= max_points
        assert found.share.tolist() == [(values <= value).mean() for value in found.wait_ns]
        assert found.share[-1] == 1
        assert found.wait_ns[0] == values.min()


def test_waits_whose_begin_was_overwritten_have_no_known_length():
    timeline = make_timeline(2)
    rows = np.flatnonzero(timeline.spans.event == WAIT)
    some, every = (overwrite_begins(timeline, chosen) for chosen in (rows[:3], rows))
    assert [found.count for found in distributions(some, analyze_waits(some))] == [len(rows) - 3]
    assert distributions(every, analyze_waits(every)) == ()

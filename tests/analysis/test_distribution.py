"""The distribution of waits at few points, against the function counted out."""

from __future__ import annotations

import dataclasses

import numpy as np
from timelines import WAIT, make_timeline, overwrite_begins

from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.analysis.waits.distribution import distribute


def test_points_lie_on_the_true_function():
    waits = analyze_waits(make_timeline(4))
    values = np.random.default_rng(3).integers(0, 40, len(waits)) * 32
    waits = dataclasses.replace(waits, wait_ns=values)
    for max_points in (3, 1000):
        (found,) = distribute(waits, waits.phases, max_points)
        assert found.count == len(waits)
        assert len(found.wait_ns) <= max_points
        assert found.share.tolist() == [(values <= value).mean() for value in found.wait_ns]
        assert found.share[-1] == 1
        assert found.wait_ns[0] == values.min()


def test_waits_whose_begin_was_overwritten_have_no_known_length():
    timeline = make_timeline(2)
    rows = np.flatnonzero(timeline.spans.event == WAIT)
    waits = analyze_waits(overwrite_begins(timeline, rows[:3]))
    assert [found.count for found in distribute(waits, waits.phases)] == [len(rows) - 3]
    waits = analyze_waits(overwrite_begins(timeline, rows))
    assert distribute(waits, waits.phases) == ()

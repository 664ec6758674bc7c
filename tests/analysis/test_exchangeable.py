"""Leads of members that are all alike, and of one that is not."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.why.evidence import weigh
from tracekern.analysis.why.exchangeable import leads


def test_members_that_are_alike_seldom_stand_out():
    rng = np.random.default_rng(1)
    for members, iterations in ((2, 5), (4, 3), (8, 10), (32, 50)):
        found = [leads(rng.normal(100, 5, (members, iterations)), 0.0) for _ in range(200)]
        assert sum(any(lead.stands_out for lead in of) for of in found) <= 5  # 1 is expected


def test_a_lead_is_above_what_chance_explains():
    rng = np.random.default_rng(2)
    times = rng.normal(100, 5, (8, 50))
    times[3] += 4  # 4 sigma / sqrt(50) are 2.8
    assert [lead.stands_out for lead in leads(times, 0.0)] == [member == 3 for member in range(8)]
    assert not leads(times, 10.0)[3].stands_out


def test_members_and_times_that_are_missing_are_no_lead():
    times = np.full((4, 10), np.nan)
    times[0, :3], times[1, 2:6], times[2] = 50, 20, 20
    found = leads(times, 1.0)
    assert [lead.stands_out for lead in found] == [True, False, False, False]
    assert found[3].num_iterations == 0


def test_an_event_is_alone():
    times = np.random.default_rng(3).normal(0, 5, (8, 20))
    times[2, 7] += 200
    event = weigh(times, 2, 1.0).event
    assert event.iteration == 7
    assert weigh(times, 1, 1.0).event is None
    times[5, 9] += 160
    assert weigh(times, 2, 1.0).event is None


def test_noise_that_persists_is_no_lead():
    """A random walk leads for long, by chance."""
    rng = np.random.default_rng(4)
    found = [weigh(rng.normal(0, 5, (4, 40)).cumsum(axis=1), 0, 1.0).stands_out for _ in range(100)]
    assert sum(found) <= 5

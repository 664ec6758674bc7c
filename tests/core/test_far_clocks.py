"""Clocks of unaligned ranks may lie years apart: what is said of one rank must not change with it."""

from __future__ import annotations

import dataclasses

import captures
import numpy as np
import pytest
from captures import CaptureSpec, write_capture
from hypothesis import given
from hypothesis import strategies as st
from timelines import make_rank, timelines

from tracekern.analysis.graph.activity import flatten
from tracekern.analysis.questions.balance import analyze_balance
from tracekern.analysis.questions.imbalance import work_imbalance
from tracekern.analysis.questions.time_shares import share_time
from tracekern.errors import BadInput
from tracekern.timeline.clocks.pairs import LocalClock
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, Timeline

YEARS = 10**17
"""Three of them, in ns."""
NEAR = 2 * 10**9
"""Later than any time drawn is early: no end that is moved becomes OPEN_END."""


def moved(timeline: Timeline, by: list[int]) -> Timeline:
    """by: [num_ranks] ns that the clock of each rank is ahead."""
    spans, marks, of_track = timeline.spans, timeline.marks, np.array(by, np.int64)[timeline.track_ranks()]
    of_span = of_track[spans.track]
    end = np.where(spans.end == OPEN_END, OPEN_END, spans.end + of_span)
    return timeline.replace(
        spans=dataclasses.replace(spans, start=spans.start + of_span, end=end),
        marks=dataclasses.replace(marks, time=marks.time + of_track[marks.track]),
        aligned=False,
    )


@given(timelines(), st.permutations([1, 3, 20]))
def test_what_is_said_of_a_rank_does_not_depend_on_other_clocks(timeline: Timeline, years: list[int]):
    near = moved(timeline, [NEAR] * 3)
    by = [NEAR + YEARS * number for number in years]
    far = moved(timeline, by)
    assert work_imbalance(far) == work_imbalance(near)
    assert dataclasses.astuple(analyze_balance(far)) == dataclasses.astuple(analyze_balance(near))
    for name, values in vars(share_time(near)).items():
        assert np.array_equal(getattr(share_time(far), name), values)
    pieces, moved_pieces = flatten(near), flatten(far)
    assert np.array_equal(moved_pieces.span, pieces.span)
    assert np.array_equal(moved_pieces.end - moved_pieces.start, pieces.end - pieces.start)
    stalled, moved_stalled = (
        {counter.rank: counter for counter in count_events(of) if counter.name == "stalled warps"} for of in (near, far)
    )
    assert {rank: counter.value.tolist() for rank, counter in moved_stalled.items()} == {
        rank: counter.value.tolist() for rank, counter in stalled.items()
    }
    for rank, counter in stalled.items():
        assert np.array_equal(counter.time - NEAR, moved_stalled[rank].time - by[rank])


@pytest.mark.parametrize("sampled", [False, True])
def test_ticks_that_are_no_time_are_refused_in_one_line(tmp_path, monkeypatch, sampled):
    """Of a clock of 10 ns a tick: they fit 62 bits, their ns do not."""
    about = captures.metadata
    monkeypatch.setattr(
        captures, "metadata", lambda *of: about(*of) | {"clock": {**about(*of)["clock"], "ticks_per_second": 10**8}}
    )
    spec = CaptureSpec(clock_offset_ns=1 << 61, clock_samples=sampled)
    for unaligned in (False, True):
        with pytest.raises(BadInput, match="start_ticks") as refused:
            load(write_capture(tmp_path / str(unaligned), spec), unaligned=unaligned)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ticks", [1 << 62, -1 << 62])
def test_a_clock_sample_that_is_no_time_is_refused(ticks):
    with pytest.raises(BadInput, match=r"rank 3: a clock sample at -?4611686018427387904 ticks is beyond 2\^62 ns"):
        LocalClock.of(make_rank(3, ticks_per_second=100_000_000), ticks)


def test_many_tracks_of_far_clocks(tmp_path):
    near, far = (
        load(
            write_capture(
                tmp_path / str(offset),
                CaptureSpec(num_ranks=4, num_blocks=60, clock_offset_ns=offset, clock_samples=False, killed_rank=0),
            ),
            unaligned=True,
        )
        for offset in (0, 3 * YEARS)
    )
    assert [row.busy_ns for row in work_imbalance(far)] == [row.busy_ns for row in work_imbalance(near)]
    stalled = [[c.value.tolist() for c in count_events(of) if c.name == "stalled warps"] for of in (near, far)]
    assert stalled[0] == stalled[1]

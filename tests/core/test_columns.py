"""Spans cut at tracks: nothing lost, nothing torn, and the same numbers however small the parts are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from timelines import make_timeline, timelines

from tracekern.analysis.questions.imbalance import work_imbalance
from tracekern.analysis.questions.summary import summarize
from tracekern.analysis.questions.time_shares import share_time
from tracekern.timeline.columns import parts_by_track, rows_of_ranges
from tracekern.timeline.model import Flows, Spans, Timeline

AT_ONCE = "tracekern.timeline.columns._SPANS_AT_ONCE"


@given(timelines())
def test_parts_are_the_whole(timeline: Timeline):
    spans = timeline.spans
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AT_ONCE, 3)
        parts = list(parts_by_track(spans))
    assert [start for start, _ in parts] == np.cumsum([0, *(len(part) for _, part in parts)])[:-1].tolist()
    assert sum(len(part) for _, part in parts) == len(spans)
    tracks = [set(part.track.tolist()) for _, part in parts]
    assert sum(map(len, tracks)) == len(set(spans.track.tolist()))


@given(timelines())
def test_small_parts_give_the_same_numbers(timeline: Timeline):
    def numbers() -> str:
        return repr((summarize(timeline).as_dict(), share_time(timeline), work_imbalance(timeline)))

    whole = numbers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AT_ONCE, 2)
        assert numbers() == whole


def test_no_spans_no_parts():
    assert list(parts_by_track(make_timeline(spans=Spans(), flows=Flows()).spans)) == []


def test_rows_of_ranges():
    assert rows_of_ranges(np.array([5, 0, 9, 2]), np.array([2, 0, 1, 3])).tolist() == [5, 6, 9, 2, 3, 4]
    assert rows_of_ranges(np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []

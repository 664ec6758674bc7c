"""Warp time by what the warp did, on a Timeline small enough to count by hand."""

from __future__ import annotations

from hypothesis import given
from timelines import BARRIER, COPY, LAUNCH, SIGNAL, WAIT, make_spans, make_timeline, timelines

from tracekern.analysis.questions.time_shares import share_time
from tracekern.timeline.model import OPEN_END, Flows

WARP, OTHER_WARP = 2, 3  # device tracks of rank 0; track 8 is the first warp of rank 1


def shares_of(rows) -> dict[str, list[int]]:
    shares = share_time(make_timeline(spans=make_spans(rows), flows=Flows()))
    return {
        name: getattr(shares, name).tolist() for name in ("work", "wait", "signal", "sync", "between_spans", "total")
    }


def test_every_part_is_counted_once():
    found = shares_of(
        [
            (0, LAUNCH, 0, 0, 10_000, 0, 0),  # no warp
            (WARP, COPY, 0, 100, 200, 0, 0),
            (WARP, WAIT, 0, 120, 150, 0, 0),  # inside the copy
            (WARP, SIGNAL, 0, 210, 260, 0, 0),
            (WARP, WAIT, 0, 220, 230, 0, 0),  # inside the signal: stays a signal
            (WARP, BARRIER, 0, 260, 300, 0, 0),
            (OTHER_WARP, WAIT, 0, 50, 90, 0, 0),
            (OTHER_WARP, COPY, 0, 95, OPEN_END, 0, 0),  # never closed
            (8, COPY, 1, 0, 7, 0, 0),
        ]
    )
    assert found == {
        "work": [70, 7],
        "wait": [30 + 40, 0],
        "signal": [50, 0],
        "sync": [40, 0],
        "between_spans": [10, 0],
        "total": [200 + 40, 7],
    }


def test_time_between_launches_belongs_to_no_warp():
    found = shares_of([(WARP, COPY, 0, 0, 10, 0, 0), (WARP, COPY, 1, 1000, 1010, 0, 0)])
    assert (found["total"], found["between_spans"]) == ([20, 0], [0, 0])


def test_spans_that_overlap_in_part_are_counted_once():
    found = shares_of([(WARP, COPY, 0, 0, 2, 0, 0), (WARP, WAIT, 0, 1, 4, 0, 0)])
    assert (found["work"], found["wait"], found["total"]) == ([1, 0], [3, 0], [4, 0])


@given(timeline=timelines())
def test_no_part_is_negative_and_all_make_the_whole(timeline):
    shares = share_time(timeline)
    parts = [shares.work, shares.wait, shares.signal, shares.sync, shares.between_spans]
    assert all((part >= 0).all() for part in parts)
    assert (sum(parts) == shares.total).all()

"""A part of a Timeline is a Timeline: its indices point at the same things as before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import COPY, make_spans, make_timeline, timelines

from tracekern.errors import BadInput
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.model import OPEN_END, Flows, Marks, Problem, Timeline
from tracekern.timeline.select import select, take_tracks

Described = tuple


def describe(timeline: Timeline, span: int) -> Described:
    """A span by what it means, not by indices."""
    spans = timeline.spans
    launch = timeline.launches[spans.launch[span]] if spans.launch[span] >= 0 else None
    columns = (spans.start, spans.end, spans.event, spans.begin_payload, spans.end_payload)
    return timeline.tracks[spans.track[span]], launch, *(int(column[span]) for column in columns)


def spans_of(timeline: Timeline) -> Counter[Described]:
    return Counter(describe(timeline, span) for span in range(len(timeline.spans)))


def flows_of(timeline: Timeline) -> Counter[tuple[Described, Described]]:
    edges = zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True)
    return Counter((describe(timeline, signal), describe(timeline, wait)) for signal, wait in edges)


def kept_flows(timeline: Timeline, kept: Counter[Described]) -> Counter[tuple[Described, Described]]:
    return Counter({pair: count for pair, count in flows_of(timeline).items() if pair[0] in kept and pair[1] in kept})


@given(timeline=timelines(), ranks=st.sets(st.integers(0, 2), min_size=1))
def test_ranks(timeline: Timeline, ranks: set[int]):
    ranks &= {rank.rank for rank in timeline.ranks}
    if not ranks:
        return
    part = select(timeline, ranks=sorted(ranks))
    wanted = Counter({span: count for span, count in spans_of(timeline).items() if span[0].rank in ranks})
    assert spans_of(part) == wanted
    assert flows_of(part) == kept_flows(timeline, wanted)
    assert {rank.rank for rank in part.ranks} == ranks
    assert {launch.rank for launch in part.launches} == ranks
    marks = [timeline.tracks[track].rank for track in timeline.marks.track]
    assert [part.tracks[track].rank for track in part.marks.track] == [rank for rank in marks if rank in ranks]


@given(timeline=timelines(), first=st.integers(-30, 50), length=st.integers(1, 40))
def test_window(timeline: Timeline, first: int, length: int):
    last = first + length
    part = select(timeline, window=(first, last))
    wanted: Counter[Described] = Counter()
    ends = known_ends(timeline)  # of a span that never ended: until when it is known to have lasted
    for span in range(len(timeline.spans)):
        if int(timeline.spans.start[span]) <= last and int(ends[span]) >= first:
            wanted[describe(timeline, span)] += 1
    assert spans_of(part) == wanted
    assert flows_of(part) == kept_flows(timeline, wanted)
    assert part.marks.time.tolist() == [time for time in timeline.marks.time.tolist() if first <= time <= last]


def test_a_mark_at_the_number_of_an_open_end_has_its_own_time():
    time = np.array([OPEN_END, 7])
    marks = Marks(*np.zeros((3, 2), np.int32), time, np.zeros(2, np.uint64))
    assert select(make_timeline(marks=marks), window=(0, 10)).marks.time.tolist() == [7]


def test_a_span_that_never_closed_may_be_known_to_end_at_the_number_of_an_open_end():
    timeline = make_timeline(spans=make_spans([(2, COPY, -1, -1, int(OPEN_END), 0, 0)]), flows=Flows())
    assert len(select(timeline, window=(0, 10)).spans) == 0


def test_problems_follow_their_tracks():
    problems = (Problem("error", "lost_records", 1, 8, "on rank 1"), Problem("warning", "x", 0, -1, "on rank 0"))
    timeline = make_timeline(problems=problems)
    part = select(timeline, ranks=[1])
    assert [problem.text for problem in part.problems] == ["on rank 1", "1 of 2 ranks left out: 0"]
    assert part.tracks[part.problems[0].track] == timeline.tracks[8]
    assert part.problems[1].track == -1


def test_problems_of_tracks_that_are_left_out_go_with_them():
    problems = tuple(Problem("warning", "x", 0, track, f"on track {track}") for track in range(3))
    kept = np.arange(len(make_timeline().tracks)) == 2
    (left,) = take_tracks(make_timeline(problems=problems), kept).problems
    assert left == Problem("warning", "x", 0, 0, "on track 2")


def test_no_rank_at_all_is_refused():
    with pytest.raises(BadInput, match=r"no rank selected; choose from 0-2$"):
        select(make_timeline(num_ranks=3), ranks=[])


def test_ranks_that_follow_each_other_are_told_as_a_range():
    part = select(make_timeline(num_ranks=9), ranks=[0, 1, 2, 4, 6, 7])
    assert part.problems[-1].text == "3 of 9 ranks left out: 3, 5, 8"
    with pytest.raises(BadInput, match=r"which has ranks 0-2, 4, 6-7$"):
        select(part, ranks=[9])


@pytest.mark.parametrize("window", [(5, 5), (9, 3)])
def test_empty_window(window: tuple[int, int]):
    with pytest.raises(BadInput, match="is empty"):
        select(make_timeline(), window=window)

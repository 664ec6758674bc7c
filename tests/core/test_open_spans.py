"""Until when a wait counts whose end was never recorded."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.timelines import COPY, WAIT, make_rank, make_spans, timeline_of
from tracekern.analysis.questions.hang import find_hang
from tracekern.analysis.questions.time_shares import share_time
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.facts.open_spans import end_waits, known_ends
from tracekern.timeline.model import OPEN_END, EventClass, Timeline, TrackKind
from tracekern.timeline.select import select


def waiting(launch_end: int = int(OPEN_END)) -> Timeline:
    """Rank 0 waits for rank 1 from 4,000 on; a range of rank 0's host ended at 9,000."""
    timeline = timeline_of([(0, WAIT, 1, 4_000)], num_ranks=2)
    lane = next(i for i, t in enumerate(timeline.tracks) if t.rank == 0 and t.kind is TrackKind.LAUNCH)
    launch = next(i for i, event in enumerate(timeline.events) if event.event_class is EventClass.LAUNCH)
    return with_span(timeline, (lane, launch, 0, 1_000, launch_end, 0, 0))


def with_span(timeline: Timeline, row: tuple[int, ...]) -> Timeline:
    columns = [getattr(timeline.spans, name).tolist() for name in vars(timeline.spans)]
    return timeline.replace(spans=make_spans([*zip(*columns, strict=True), row]))


def end_of_wait(timeline: Timeline) -> int:
    (row,) = np.flatnonzero(timeline.spans.is_open & (timeline.spans.event == WAIT))
    return int(known_ends(timeline)[row])


def test_a_wait_that_gave_up_lasts_until_its_kernel_ended():
    timeline = waiting(launch_end=6_000)
    assert end_of_wait(timeline) == 6_000
    assert find_hang(timeline).longest.lasts_ns == 2_000


def test_a_wait_that_hangs_lasts_until_its_rank_was_last_heard_of():
    timeline = waiting()
    assert end_of_wait(timeline) == 9_000
    died = make_rank(0, state="salvaged", died_ns=20_000)
    assert end_of_wait(timeline.replace(ranks=(died, make_rank(1)), origin_ns=0)) == 20_000


def test_the_next_launch_on_the_track_ends_it():
    timeline = timeline_of([(0, WAIT, 1, 4_000)], num_ranks=2)
    (row,) = np.flatnonzero(timeline.spans.is_open)
    following = (int(timeline.spans.track[row]), COPY, 1, 5_000, 5_500, 0, 0)
    assert end_of_wait(with_span(timeline, following)) == 5_000


def test_a_wait_whose_end_found_no_room_is_no_endless_one():
    timeline = waiting()
    launches = tuple(dataclasses.replace(launch, records_lost=1) for launch in timeline.launches)
    timeline = timeline.replace(launches=launches)
    assert end_waits(timeline) is timeline
    waits = analyze_waits(timeline)
    assert (len(waits), waits.num_open) == (0, 1)


def test_a_window_after_it_was_given_up_has_none_of_it():
    timeline = waiting(launch_end=6_000)
    for window, share in (((5_000, 5_500), 2_000), ((6_500, 9_500), 0)):
        assert share_time(select(timeline, window)).wait[0] == share

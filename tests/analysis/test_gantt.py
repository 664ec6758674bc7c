"""Which spans of an iteration are drawn when not all can be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.paths import TRACES
from tracekern.analysis.questions.gantt import choose_spans
from tracekern.timeline.facts.iterations import find_iterations
from tracekern.timeline.load import load
from tracekern.timeline.model import EventClass, Timeline, TrackKind


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return load(TRACES / "h200x4")


def test_all_ranks_get_rows_and_the_longest_waiter_is_there(timeline):
    iterations = find_iterations(timeline)
    chosen = choose_spans(timeline, iterations, 0)
    ranks = Counter(timeline.tracks[track].rank for track in chosen.tracks)
    assert len(set(ranks.values())) == 1
    assert set(ranks) == {0, 1, 2, 3}
    spans = timeline.spans
    launches = np.flatnonzero(iterations.of_launch == iterations.number[0])
    waits = [i for i, event in enumerate(timeline.events) if event.event_class == EventClass.WAIT]
    rows = np.flatnonzero(np.isin(spans.launch, launches) & np.isin(spans.event, waits))
    for rank in ranks:
        waited = Counter()
        for row in rows.tolist():
            if timeline.tracks[spans.track[row]].rank == rank:
                waited[int(spans.track[row])] += int(spans.end[row] - spans.start[row])
        assert waited.most_common(1)[0][0] in chosen.tracks


def test_rows_stand_rank_by_rank_with_the_kernels_first(timeline):
    chosen = choose_spans(timeline, find_iterations(timeline), 1)
    tracks = [timeline.tracks[track] for track in chosen.tracks]
    assert [track.rank for track in tracks] == sorted(track.rank for track in tracks)
    for rank in range(4):
        kinds = [track.kind for track in tracks if track.rank == rank]
        assert kinds.count(TrackKind.LAUNCH) == 1
        assert kinds[0] == TrackKind.LAUNCH


@pytest.mark.parametrize("max_spans", [20, 100, 1000, 100_000])
def test_the_limit_holds_and_what_is_left_out_is_counted(timeline, max_spans):
    iterations = find_iterations(timeline)
    chosen = choose_spans(timeline, iterations, 2, max_spans)
    assert 0 < len(chosen.spans) <= max_spans
    sequence = np.array([*(launch.sequence for launch in timeline.launches), -1])  # index -1: no launch
    in_iteration = int((sequence[timeline.spans.launch] == 2).sum())
    assert len(chosen.spans) + chosen.num_spans_left_out == in_iteration

"""Runs of the event graph against plain loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from timelines import COPY, LAUNCH, WAIT, make_launch, make_spans, make_timeline, make_tracks, timelines

from tracekern.analysis.findings import Findings
from tracekern.analysis.graph.events import EventGraph
from tracekern.timeline.model import OPEN_END, Flows, Timeline, TrackKind


def events_of(timeline: Timeline) -> EventGraph:
    return Findings(timeline).recorded.parts[0].events


def runs_by_hand(timeline: Timeline, graph: EventGraph) -> list[int]:
    """The first run of each span's track and launch."""
    nameless = graph.program.nameless.tolist()
    runs: dict[tuple[int, int], int] = {}
    for number, key in enumerate(zip(graph.runs.track.tolist(), graph.runs.launch.tolist(), strict=True)):
        runs.setdefault(key, number)
    spans = zip(timeline.spans.track.tolist(), timeline.spans.launch.tolist(), strict=True)
    return [runs.get((track, launch if launch >= 0 else nameless[track]), -1) for track, launch in spans]


@given(timelines())
def test_runs_of_any_spans(timeline: Timeline):
    graph = events_of(timeline)
    found = graph.run_of_spans(timeline, np.arange(len(timeline.spans)))
    assert found.tolist() == runs_by_hand(timeline, graph)


def test_a_wait_that_was_given_up_takes_the_time_until_its_launch_ended():
    kinds = [track.kind for track in make_tracks(1)]
    lane, writer = kinds.index(TrackKind.LAUNCH), kinds.index(TrackKind.DEVICE)
    rows = [
        (lane, LAUNCH, 0, 0, 100, 0, 0),
        (lane, LAUNCH, 1, 200, OPEN_END, 0, 0),
        (writer, COPY, 0, 10, 20, 0, 0),
        (writer, WAIT, 0, 30, OPEN_END, 0, 0),
        (writer, COPY, 1, 210, 220, 0, 0),
        (writer, WAIT, 1, 230, OPEN_END, 0, 0),
    ]
    launches = (make_launch(0, "dispatch"), make_launch(0, "combine"))
    graph = events_of(make_timeline(1, launches=launches, spans=make_spans(rows), flows=Flows()))
    pieces = zip(graph.activity.start.tolist(), graph.activity.end.tolist(), graph.phase.tolist(), strict=True)
    assert [(start, end, str(graph.program.phases[phase])) for start, end, phase in pieces] == [
        (10, 20, "dispatch.copy_token"),
        (30, 100, "dispatch.wait_token"),
        (210, 220, "combine.copy_token"),
    ]


def test_a_last_span_of_no_length_ends_its_launch_though_others_are_nested():
    writer = next(number for number, track in enumerate(make_tracks(1)) if track.kind == TrackKind.DEVICE)
    times = [(0, 0, 20), (0, 5, 10), (0, 7, 7), (0, 30, 30)]
    rows = [(writer, COPY, *entry, 0, 0) for entry in times]
    timeline = make_timeline(1, launches=(make_launch(0),), spans=make_spans(rows), flows=Flows())
    findings = Findings(timeline)
    graph = findings.recorded.parts[0].events
    pieces = zip(graph.activity.start.tolist(), graph.activity.end.tolist(), strict=True)
    assert list(pieces) == [(0, 5), (5, 10), (10, 20), (30, 30)]
    assert findings.recorded.schedule.end[0] == 30
    assert findings.critical_path.whole.end_ns == 30


def test_a_launch_that_comes_back_on_its_track():
    writer = next(number for number, track in enumerate(make_tracks(1)) if track.kind == TrackKind.DEVICE)
    times = [(0, 0, 10), (1, 10, 20), (0, 20, 30), (1, 30, OPEN_END)]
    rows = [(writer, COPY, *entry, 0, 0) for entry in times]
    launches = (make_launch(0, "dispatch"), make_launch(0, "combine"))
    timeline = make_timeline(launches=launches, spans=make_spans(rows), flows=Flows())
    graph = events_of(timeline)
    assert len(graph.runs) == 3
    assert graph.run_of_spans(timeline, np.arange(4)).tolist() == [0, 1, 0, 1] == runs_by_hand(timeline, graph)

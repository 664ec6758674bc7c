"""The numbers of `tracekern info`, on a Timeline small enough to count by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from captures import CaptureSpec, write_capture

from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.summary import summarize
from tracekern.cli.commands.info import clock as clock_text
from tracekern.formatting import count
from tracekern.timeline.load import load
from tracekern.timeline.model import (
    OPEN_END,
    ClockFit,
    EventClass,
    EventType,
    Field,
    Flows,
    Launch,
    Marks,
    Problem,
    Rank,
    Spans,
    Timeline,
    Track,
    TrackKind,
    told_once,
)
from tracekern.viewers.report import headlines
from tracekern.viewers.report.questions import trust

COPY, WAIT = 0, 1


def spans_of(rows: list[tuple[int, int, int, int, int]]) -> Spans:
    """Rows of (track, event, start, end, peer)."""
    track, event, start, end, peer = np.array(rows, np.int64).T
    return Spans(
        track=track.astype(np.int32),
        event=event.astype(np.int32),
        launch=np.zeros(len(rows), np.int32),
        start=start,
        end=end,
        begin_payload=peer.astype(np.uint64),
        end_payload=np.zeros(len(rows), np.uint64),
    )


@pytest.fixture
def timeline() -> Timeline:
    peer = (Field("peer", 10),)
    tracks = (
        Track(0, TrackKind.DEVICE, "block 0 warp 0", block=0, warp=0),
        Track(0, TrackKind.DEVICE, "block 0 warp 1", block=0, warp=1),
        Track(1, TrackKind.DEVICE, "block 0 warp 0", block=0, warp=0),
        Track(1, TrackKind.HOST, "main"),
    )
    rows = [
        (0, COPY, 0, 100, 1),  # 40 of its 100 ns are a wait
        (0, WAIT, 20, 60, 1),
        (0, WAIT, 30, 40, 2),  # inside the other wait: no more waiting than that
        (1, COPY, 100, 200, 1),
        (2, WAIT, 0, 50, 0),
        (2, WAIT, 50, 80, 3),
        (2, WAIT, 90, int(OPEN_END), 0),
        (3, COPY, 0, 1000, 0),  # the host's time is not the device's
    ]
    return Timeline(
        unit="ns",
        ranks=tuple(
            Rank(rank, "node", "simulated", "cpu", "closed", 1e9, 32, ClockFit("ping-pong", 900.0, 40.0))
            for rank in range(2)
        ),
        tracks=tracks,
        events=(
            EventType("copy_token", EventClass.WORK, "issue", begin_fields=peer),
            EventType("wait_token", EventClass.WAIT, "completion", begin_fields=peer),
        ),
        launches=(
            Launch(0, 0, "dispatch", 0, 0, 1, 1, 2, 2, 16, 5, 21),
            Launch(0, 1, "combine", 0, 0, 1, 1, 2, 2, 1024, 0, 21),
            Launch(1, 0, "dispatch", 0, 0, 1, 1, 1, 1, 16, 0, 7),
        ),
        spans=spans_of(rows),
        marks=Marks(*(np.zeros(1, dtype) for dtype in (np.int32, np.int32, np.int32, np.int64, np.uint64))),
        flows=Flows(np.array([0]), np.array([4])),
        problems=(
            Problem("error", "lost_records", 0, -1, "launch dispatch #0: 5 records found no room", 5),
            Problem("error", "lost_records", 0, 0, "block 0 warp 0: 5 records lost", 5),
            Problem("error", "open_span", 1, 2, ""),
        ),
    )


def test_counts_and_losses(timeline):
    summary = summarize(timeline)
    assert (summary.num_spans, summary.num_flows, summary.duration_ns) == (8, 1, 1000)
    assert summary.problems == {"lost_records": 5, "open_span": 1}
    first, second = summary.ranks
    assert (first.num_spans, first.num_marks, first.num_open_spans) == (4, 1, 0)
    assert (second.num_spans, second.num_marks, second.num_open_spans) == (4, 0, 1)
    assert (first.num_device_tracks, second.num_device_tracks, second.num_host_tracks) == (2, 1, 1)
    assert (first.records_lost, first.records_per_track, first.records_needed) == (5, 16, 21)
    assert (second.records_lost, second.records_needed) == (0, 0)
    assert (first.clock_method, first.clock_hard_ns, first.clock_sigma_ns) == ("ping-pong", 900.0, 40.0)


def test_no_error_is_shown_beyond_what_is_proven(timeline):
    """Flows had proven 103 us where samples repeated within 708."""
    fit = ClockFit("ping-pong", 103e3, 708e3)
    ranks = tuple(dataclasses.replace(rank, clock=fit) for rank in timeline.ranks)
    assert [rank.clock_sigma_ns for rank in summarize(timeline.replace(ranks=ranks)).ranks] == [103e3, 103e3]


def test_wait_share_counts_nested_waits_once(timeline):
    first, second = summarize(timeline).ranks
    assert first.wait_share == pytest.approx(40 / 200)
    assert second.wait_share == pytest.approx(1.0)


def test_events_name_the_peer_of_the_longest(timeline):
    first, second = summarize(timeline).ranks
    copy, wait = first.events
    assert (copy.event, copy.count, copy.total_ns, copy.longest_ns, copy.longest_peer) == ("copy_token", 2, 200, 100, 1)
    assert (wait.event_class, wait.count, wait.total_ns, wait.longest_ns) == ("wait", 2, 50, 40)
    assert [(event.event, event.count, event.longest_ns, event.longest_peer) for event in second.events] == [
        ("wait_token", 3, 50, 0)
    ]


def test_a_peer_that_only_the_end_tells_is_the_peer_of_the_longest_wait(timeline):
    copy, wait = timeline.events
    events = (copy, dataclasses.replace(wait, begin_fields=(), end_fields=wait.begin_fields))
    spans = dataclasses.replace(timeline.spans, end_payload=np.ones(len(timeline.spans), np.uint64))
    _, second = summarize(timeline.replace(events=events, spans=spans)).ranks
    assert [event.longest_peer for event in second.events] == [1]


def test_an_empty_timeline_has_a_summary_that_json_takes(timeline):
    empty = timeline.replace(spans=Spans(), marks=Marks(), flows=Flows(), problems=())
    summary = summarize(empty)
    assert (summary.num_spans, summary.duration_ns) == (0, 0)
    assert json.loads(json.dumps(summary.as_dict(), allow_nan=False))["ranks"][0]["wait_share"] is None


def test_clocks_that_are_years_apart_change_no_share_of_waiting(timeline: Timeline):
    apart = np.where(timeline.track_ranks()[timeline.spans.track] == 1, 4 * 10**18, 0)
    end = np.where(timeline.spans.end == OPEN_END, OPEN_END, timeline.spans.end + apart)
    spans = dataclasses.replace(timeline.spans, start=timeline.spans.start + apart, end=end)
    shares = [[rank.wait_share for rank in summarize(one).ranks] for one in (timeline, timeline.replace(spans=spans))]
    assert shares[0] == shares[1]
    assert 0 < min(shares[0]) <= max(shares[0]) <= 1


def test_ranks_of_one_clock_are_said_to_have_one(tmp_path):
    timeline = load(write_capture(tmp_path, CaptureSpec(num_ranks=4, clocks=(0, 1, 0, 1))))
    summary = summarize(timeline)
    said = [clock_text(rank) for rank in summary.ranks]
    assert (said[0], said[2], said[3]) == ("reference", "one clock with rank 0", "one clock with rank 1")
    assert said[1].startswith("ping-pong ±")
    found = analyze(timeline)
    assert headlines.clocks(found).startswith("clocks within ±")
    page = "".join(trust.draw(found).body)
    assert "<td>one clock with rank 1</td>" in page
    twins = timeline.replace(ranks=tuple(dataclasses.replace(rank, clock_id="a") for rank in timeline.ranks))
    assert headlines.clocks(analyze(twins)) == "one clock"


def test_problems_that_differ_in_rank_and_number_are_told_once():
    def of_rank(rank: int, text: str, kind: str = "lost_host_spans", number: int = 1) -> Problem:
        return Problem("error", kind, rank, -1, f"rank {rank}: {text}", number)

    room = "found no room; raise host_spans"
    problems = [of_rank(rank, f"{count(1 + 1200 * rank, 'host range')} {room}", number=rank) for rank in (0, 1, 2, 5)]
    problems[2:2] = [
        of_rank(0, "waited 33.6 us", "x"),
        of_rank(3, "waited 1.20 ms", "x"),
        of_rank(3, "gave up on rank 1", "fault"),
    ]
    problems += [
        of_rank(4, "gave up on rank 0", "fault"),
        of_rank(0, f"2 tracks {room}"),
        of_rank(0, f"9 tracks {room}"),
    ]
    told = told_once(problems)
    assert [problem.text for problem in told] == [
        f"rank 0: 1 host range {room} (and 3 more like this, of ranks 1-2, 5)",
        "rank 0: waited 33.6 us (and 1 more like this, of rank 3)",
        "rank 3: gave up on rank 1",
        "rank 4: gave up on rank 0",
        f"rank 0: 2 tracks {room} (and 1 more like this)",
    ]
    assert told[0].count == 8
    assert told_once([]) == []

"""How long ranges of several threads were open side by side, and what the report says of it."""

from __future__ import annotations

from timelines import HOST, make_spans, make_timeline

import tracekern
from tracekern.analysis.questions.overlap import RankThreads, ThreadOverlap, thread_overlaps
from tracekern.timeline.model import OPEN_END, Flows, Timeline, Track, TrackKind
from tracekern.viewers.report.questions.overlap import describe_threads, draw

NAMES = ("copy a", "copy b", "write a")


def timeline_of(
    rows: list[tuple[int, int, int, int]], names: tuple[str, ...] = ("python", "python thread 7")
) -> Timeline:
    """One rank with threads. rows: (thread, name, start, end)."""
    tracks = tuple(Track(0, TrackKind.HOST, name) for name in names)
    spans = make_spans((thread, HOST, -1, start, end, name, 0) for thread, name, start, end in rows)
    return make_timeline(1, tracks=tracks, launches=(), spans=spans, flows=Flows(), host_names=NAMES)


def test_time_beside_other_threads_counts_once():
    nested = [(0, 0, 0, 100), (0, 1, 10, 60), (1, 2, 60, 260), (0, 1, 300, 400), (0, 0, 500, OPEN_END)]
    assert thread_overlaps(timeline_of(nested)) == (
        RankThreads(0, 360, 40, (ThreadOverlap(("copy",), 200, 40), ThreadOverlap(("write",), 200, 40))),
    )
    three = [(0, 0, 0, 100), (1, 2, 0, 50), (2, 2, 25, 75)]
    (rank,) = thread_overlaps(timeline_of(three, ("python", "python thread 7", "python thread 8")))
    assert (rank.covered_ns, rank.several_ns) == (100, 75)
    assert [thread.beside_ns for thread in rank.threads] == [75, 50, 50]


def test_one_thread_and_lanes_of_a_profiler_have_no_overlap():
    assert thread_overlaps(timeline_of([(0, 0, 0, 100), (0, 1, 10, 60)])) == ()
    assert thread_overlaps(timeline_of([(0, 0, 0, 100), (1, 2, 0, 50)], ("python", "torch thread 7"))) == ()


def test_the_report_says_for_which_share_they_were_open_together():
    findings = tracekern.analyze(timeline_of([(0, 0, 0, 1000), (1, 2, 500, 1500)]))
    told = "ranges of several threads were open side by side for 33 % of 1.50 us on rank 0"
    assert describe_threads(findings.threads) == told
    answer = draw(findings)
    assert answer.text == told[0].upper() + told[1:] + "."
    assert "ranges of a thread" in str(answer.body)
    assert findings.overlap == ()

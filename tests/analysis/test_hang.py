"""Who holds up whom in a capture that ends in the middle of waits, and the line of the report that says so."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter
from tests.timelines import (
    COPY,
    HOST,
    SIGNAL,
    WAIT,
    make_launch,
    make_rank,
    make_spans,
    make_timeline,
    timeline_of,
)
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.hang import Holder, find_hang
from tracekern.comm.ranks.group import Group
from tracekern.export.drawing import prepare
from tracekern.record.session import capture
from tracekern.segment.snapshot import snapshot_run
from tracekern.timeline.columns import join_rows
from tracekern.timeline.load import load
from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    EventClass,
    EventType,
    Field,
    Flows,
    Spans,
    Timeline,
    TrackKind,
)
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.questions import summary
from tracekern.viewers.report.report_page import report_page


def line_of(timeline: Timeline) -> str | None:
    return next((line.text for line in headlines(analyze(timeline)) if line.word == "hang"), None)


SENT = "; the waiter has not seen it (stopped, or it does not run)"


END = 2_000_005_000
"""The last recorded time where a signal was sent long ago."""


def with_spans(timeline: Timeline, rows: list[tuple[int, int, int, int]], event: int = SIGNAL) -> Timeline:
    """More spans of a second warp: rank, payload, start, end."""
    ranks = timeline.track_ranks()
    track = [np.flatnonzero((ranks == rank) & timeline.tracks_of(TrackKind.DEVICE))[3] for rank, *_ in rows]
    more = [
        (at, event, rank, start, end, payload, 0) for at, (rank, payload, start, end) in zip(track, rows, strict=True)
    ]
    columns = [getattr(timeline.spans, name).tolist() for name in vars(timeline.spans)]
    return timeline.replace(spans=make_spans([*zip(*columns, strict=True), *more]))


def test_a_signal_that_was_sent_holds_the_rank_that_has_not_seen_it():
    """Rank 1 was stopped inside its wait: neither waits for what the other has yet to do."""
    waits = [(1, WAIT, 0 | 7 << 10, 4_000), (0, WAIT, 1 | 8 << 10, 5_000)]
    timeline = timeline_of(waits, 2, END)
    timeline = with_spans(timeline, [(0, 1 | 7 << 10, 4_200, 4_500)])
    hang = find_hang(timeline)
    assert (hang.longest.rank, hang.longest.lasts_ns, hang.longest.sent_ns) == (1, END - 4_000, END - 4_500)
    assert [holder.rank for holder in hang.holders] == [1]
    assert line_of(timeline) == (
        f"rank 1 has waited 2.00 s for rank 0 (dispatch.wait_token slot=7), sent 2.00 s ago{SENT}; 2 waits of ranks 0 "
        "and 1 have not ended; rank 0 waits for rank 1 (dispatch.wait_token slot=8)"
    )


def test_the_rank_that_all_wait_for_at_the_end_has_what_it_waits_for():
    """Rank 2's wait is neither the longest nor the only one of its rank."""
    waits = [(0, WAIT, 1, 3_000), (1, WAIT, 2, 4_000), (2, WAIT, 0 | 3 << 10, 5_000), (2, WAIT, 0 | 4 << 10, 5_500)]
    timeline = with_spans(timeline_of(waits, 3, END), [(0, 2 | 3 << 10, 2_100, 2_200)])
    assert str(line_of(timeline)).startswith(
        f"rank 2 has waited 2.00 s for rank 0 (dispatch.wait_token slot=3), sent 2.00 s ago{SENT}; 4 waits of "
    )


@pytest.mark.parametrize(
    "signals",
    [
        [(0, 1 | 6 << 10, 4_200, 4_500)],  # of another slot
        [(0, 1 | 7 << 10, 4_200, int(OPEN_END))],  # its flag is not stored yet
        [(0, 1 | 7 << 10, 4_200, 4_500), (0, 1 | 7 << 10, 4_600, 4_700)],  # two: nothing says which
        [],
    ],
)
def test_what_was_not_sent_for_sure_is_still_waited_for(signals: list[tuple]):
    timeline = timeline_of([(1, WAIT, 0 | 7 << 10, 4_000), (0, WAIT, 1 | 8 << 10, 5_000)], 2, END)
    hang = find_hang(with_spans(timeline, signals))
    assert (hang.holders, hang.longest.sent_ns) == ((), None)


def test_a_signal_that_came_a_moment_ago_is_on_its_way():
    waits = [(1, WAIT, 0 | 7 << 10, 4_000), (0, WAIT, 1 | 8 << 10, 5_000)]
    for age_ns, sent in ((999_999, None), (1_000_000, 1_000_000)):
        hang = find_hang(with_spans(timeline_of(waits, 2, 4_500 + age_ns), [(0, 1 | 7 << 10, 4_200, 4_500)]))
        assert (hang.longest.sent_ns, len(hang.holders)) == (sent, sent is not None)


def test_a_signal_that_a_wait_has_taken_is_none_for_the_next_of_that_key():
    timeline = timeline_of([(1, WAIT, 0 | 7 << 10, 4_000), (0, WAIT, 1 | 8 << 10, 5_000)], 2, END)
    timeline = with_spans(timeline, [(0, 1 | 7 << 10, 3_000, 3_100)])
    assert find_hang(timeline).longest.sent_ns is not None  # type: ignore[union-attr]
    (open_wait,) = (i for i in np.flatnonzero(timeline.spans.is_open) if timeline.spans.start[i] == 4_000)
    rows = [
        tuple(getattr(timeline.spans, name)[i] for name in vars(timeline.spans)) for i in range(len(timeline.spans))
    ]
    rows.append((rows[open_wait][0], WAIT, 1, 3_000, 3_200, 0 | 7 << 10, 0))
    assert find_hang(timeline.replace(spans=make_spans(rows))).longest.sent_ns is None


@pytest.mark.parametrize(
    ("kind", "values", "sent"),
    [
        (ChannelKind.CREDIT, [3, 4], None),
        (ChannelKind.CREDIT, [3, 5], END - 5_000),
        (ChannelKind.CREDIT, [6, 9], END - 4_500),
        (ChannelKind.BARRIER, [0], None),
        (ChannelKind.BARRIER, [0, 0], END - 5_000),
    ],
)
def test_credits_and_barriers_count_what_came(kind: ChannelKind, values: list[int], sent: int | None):
    """Rank 2 wants a credit of 5, or two arrivals as in the call before; signals ended at 4,500 and 5,000."""
    channel = Channel("pages", kind, ())
    to, value = (Field("peer", 10),), (Field("value", 20),)
    give_one = EventType("give", EventClass.SIGNAL, "completion", channel, to, value)
    is_credit = kind is ChannelKind.CREDIT
    wait = EventType("wait_give", EventClass.WAIT, "completion", channel, (*to * is_credit, Field("wanted", 20)))
    timeline = timeline_of([], 3, END)
    timeline = timeline.replace(
        events=(*timeline.events, give_one, wait),
        launches=tuple(make_launch(r, epoch=e) for e in (7, 6) for r in range(3)),
    )
    device = timeline.tracks_of(TrackKind.DEVICE)
    first = [int(np.flatnonzero((timeline.track_ranks() == rank) & device)[0]) for rank in range(3)]
    give, take = len(timeline.events) - 2, len(timeline.events) - 1
    rows = [(first[2], take, 2, 3_000, int(OPEN_END), 0 | 5 << 10 if is_credit else 5, 0)]
    for at, number in enumerate(values):
        source = 0 if is_credit else at
        rows.append((first[source], give, source, 4_000 + at * 500, 4_500 + at * 500, 2, number))
    if not is_credit:  # the call before
        rows += [(first[source], give, 3 + source, 500, 600, 2, 0) for source in range(2)]
        rows.append((first[2], take, 5, 400, 700, 5, 0))
    hang = find_hang(timeline.replace(spans=join_rows([timeline.spans, make_spans(rows)], Spans())))
    assert hang.longest.sent_ns == sent


def test_where_clocks_were_not_aligned_the_time_is_by_the_clock_of_the_sender():
    timeline = timeline_of([(1, WAIT, 0 | 7 << 10, 4_000)], 2, END)
    timeline = with_spans(timeline, [(0, 1 | 7 << 10, 6_200, 6_500)])
    shift = np.array([0, 10**15])[timeline.track_ranks()[timeline.spans.track]]
    is_open = timeline.spans.is_open
    spans = dataclasses.replace(
        timeline.spans,
        start=timeline.spans.start + shift,
        end=np.where(is_open, OPEN_END, timeline.spans.end + shift),
    )
    assert find_hang(timeline.replace(spans=spans, aligned=False)).longest.sent_ns == END - 6_500


def test_a_signal_after_the_copy_of_the_waiter_says_nothing():
    """A snapshot copies rank by rank: rank 1 was copied at 4,100, its signal came at 4,500, rank 0 was copied last."""
    timeline = timeline_of([(1, WAIT, 0 | 7 << 10, 4_000)], 2, END)
    timeline = with_spans(timeline, [(0, 1 | 7 << 10, 4_200, 4_500)])
    lane = next(i for i, track in enumerate(timeline.tracks) if track.rank == 1 and track.kind is TrackKind.HOST)
    for copied, sent in ((4_100, None), (4_600, END - 4_500)):
        running = timeline.replace(
            ranks=(make_rank(0, state="running"), make_rank(1, state="running")),
            spans=join_rows([timeline.spans, make_spans([(lane, HOST, -1, copied, copied, 0, 0)])], Spans()),
        )
        assert find_hang(running).longest.sent_ns == sent


def stop_in_a_wait(group: Group, directory: str, release: str) -> None:
    """Rank 1 stops inside its wait for item 7, which rank 0 then sends; and rank 0 waits for rank 1."""
    with capture(directory, keep="last", max_bytes=1 << 20) as session:
        launch = session.launch("recv", grid=1, warps=1, events=json.dumps(EVENT_TABLE), epoch=1)
        writer = TrackWriter(launch.descriptor, 0, 0)
        stopped = Path(f"{release}.stopped")
        if group.rank == 1:
            writer.begin(3, 0 | 7 << 10)
            stopped.write_text(session.run_id)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            while not stopped.exists():
                time.sleep(0.01)
            writer.span(2, 1 | 7 << 10)
            writer.begin(3, 1 | 8 << 10)
            time.sleep(0.01)
            Path(f"{release}.sent").touch()
            while not Path(release).exists():
                time.sleep(0.01)


def test_a_snapshot_of_a_rank_that_was_stopped_inside_its_wait(pools, tmp_path):
    pool, release = pools(2), tmp_path / "release"
    for pipe in pool._pipes:
        pipe.send((stop_in_a_wait, (str(tmp_path / "capture"), str(release))))
    try:
        while not Path(f"{release}.sent").exists():
            time.sleep(0.01)
        snapshot_run(Path(f"{release}.stopped").read_text(), tmp_path / "now")
    finally:
        os.kill(pool.pids[1], signal.SIGCONT)
        release.touch()
    assert [pool._answer(rank, pipe) for rank, pipe in enumerate(pool._pipes)] == [(True, None)] * 2
    findings = analyze(load(tmp_path / "now"))
    line = next(line.text for line in headlines(findings) if line.word == "hang")
    assert line.startswith("rank 1 has waited ")
    assert " for rank 0 (recv.wait_token slot=7), sent " in line
    assert (
        f" ago{SENT}; 2 waits of ranks 0 and 1 have not ended; rank 0 waits for rank 1 (recv.wait_token slot=8" in line
    )
    assert SENT in report_page(findings, "now", "now", "open now")


def test_where_all_waits_ended_there_is_no_hang():
    assert find_hang(make_timeline()) is None
    assert line_of(make_timeline()) is None
    assert find_hang(timeline_of([(0, COPY, 1, 5_000)])) is None
    empty = make_timeline().spans.take(np.zeros(0, np.int64))
    assert find_hang(make_timeline(spans=empty, launches=(), flows=Flows())) is None


def test_the_rank_that_all_others_wait_for_is_described():
    """Rank 3 waits for rank 0, which waits for rank 2."""
    timeline = timeline_of([(0, WAIT, 2, 4_000), (1, WAIT, 2, 5_000), (3, WAIT, 0, 3_000), (3, WAIT, 2, 6_000)])
    hang = find_hang(timeline)
    assert (hang.ranks, hang.num_waits) == ((0, 1, 3), 4)
    assert hang.holders == (Holder(2, True, "", 0, "dispatch", 6_998),)
    assert (hang.longest.lasts_ns, hang.longest.rank, hang.longest.peer) == (6_000, 3, 0)
    assert line_of(timeline) == (
        "rank 3 has waited 6.00 us for rank 0 (dispatch.wait_token slot=0); "
        "4 waits of ranks 0, 1 and 3 have not ended; rank 2 runs no kernel; its last, dispatch, ended 7.00 us ago"
    )


def test_what_it_is_doing_is_said():
    timeline = timeline_of([(0, WAIT, 1, 4_000), (1, COPY, 0, 5_000), (1, COPY, 0, 6_000)], num_ranks=2)
    assert find_hang(timeline).holders == (Holder(1, True, "dispatch.copy_token", 2, "dispatch", 0),)
    assert line_of(timeline) == (
        "rank 0 has waited 5.00 us for rank 1 (dispatch.wait_token slot=0); rank 1 is in dispatch.copy_token (2 warps)"
    )


def test_of_nested_spans_a_warp_is_in_the_innermost():
    timeline = timeline_of([(0, WAIT, 1, 4_000), (1, COPY, 0, 5_000), (1, SIGNAL, 0, 6_000)], num_ranks=2)
    timeline.spans.track[-1] = timeline.spans.track[-2]
    assert find_hang(timeline).holders == (Holder(1, True, "dispatch.signal_token", 1, "dispatch", 0),)


def test_ranks_that_wait_for_each_other_are_all_described():
    """Rank 0 is a call ahead: what they want does not fit, and that is the mistake."""
    timeline = timeline_of([(0, WAIT, 1, 4_500), (0, WAIT, 1 | 8 << 10, 4_200), (1, WAIT, 0 | 7 << 10, 4_000)], 2)
    hang = find_hang(timeline)
    assert (hang.ranks, hang.holders) == ((0, 1), ())
    assert line_of(timeline) == (
        "rank 1 has waited 5.00 us for rank 0 (dispatch.wait_token slot=7); 3 waits of ranks 0 and 1 have not ended; "
        "rank 0 waits for rank 1 (dispatch.wait_token slot=8)"
    )


def test_a_rank_that_died_has_waited_at_least_so_long():
    timeline = timeline_of([(0, WAIT, 1, 9_000 - 2 * 10**9)], num_ranks=2)
    dead = timeline.replace(ranks=(timeline.ranks[0], make_rank(1, state="salvaged")))
    assert "has waited 2.00 s for" in str(line_of(timeline))
    assert "has waited at least 2.00 s for" in str(line_of(dead))


def test_a_death_comes_first_and_a_moment_that_it_cut_short_is_no_hang():
    timeline = timeline_of([(0, WAIT, 1, 8_000), (1, COPY, 0, 8_500), (2, WAIT, 1, 8_500)], num_ranks=4)
    dead = [make_rank(rank, state="salvaged", metadata={"killed_by": by}) for rank, by in enumerate(("", "SIGKILL"))]
    findings = analyze(timeline.replace(ranks=(*dead, *timeline.ranks[2:])))
    first, second, third, *_ = headlines(findings)
    assert (first.word, first.text) == (
        "died",
        "rank 0 ended without closing the capture (killed or crashed) in dispatch.wait_token; "
        "rank 1 was killed by SIGKILL in dispatch.copy_token",
    )
    assert (second.word, third.word) == ("open", "verdict")
    assert second.text.startswith("rank 0 has waited at least 1.00 us for rank 1 ")
    assert "Rank 0 ended" in summary.draw(findings).text
    assert findings.held_up is None
    seen = [dataclasses.replace(rank, died_ns=9_500) for rank in dead]
    known = analyze(timeline.replace(ranks=(*seen, *timeline.ranks[2:]), origin_ns=0))
    assert [line.word for line in headlines(known)][:2] == ["died", "verdict"]
    many = [make_rank(rank, state="salvaged", metadata={"killed_by": f"signal {40 + rank}"}) for rank in range(4)]
    (died,) = [line.text for line in headlines(analyze(timeline.replace(ranks=tuple(many)))) if line.word == "died"]
    assert died.endswith("in dispatch.wait_token; rank 3 died, too")


def test_a_rank_whose_time_of_death_is_known_has_waited_until_then():
    """Rank 2 died long after all that was recorded, and rank 0 before: what rank 2 waited is not its."""
    timeline = timeline_of([(0, WAIT, 1, 4_000), (2, WAIT, 1, 4_000)], num_ranks=3)
    dead = [make_rank(rank, state="salvaged", died_ns=at) for rank, at in ((0, 9_500), (2, 50_000))]
    hang = find_hang(timeline.replace(ranks=(dead[0], make_rank(1), dead[1]), origin_ns=0))
    assert not hang.at_least
    assert [(wait.rank, wait.lasts_ns) for wait in (hang.longest, *hang.others)] == [(2, 46_000), (0, 5_500)]
    moved = find_hang(timeline.replace(ranks=(dead[0], make_rank(1), dead[1]), origin_ns=20_000))
    assert moved.longest.lasts_ns == 26_000
    damaged = [dataclasses.replace(rank, died_ns=(-1) ** rank.rank * (1 << 63)) for rank in dead]
    for origin_ns in (-1 << 62, 1 << 62):
        assert find_hang(timeline.replace(ranks=(damaged[0], make_rank(1), damaged[1]), origin_ns=origin_ns))


def test_warps_that_wait_for_their_own_rank_are_told_where_no_rank_waits_for_another():
    """At a barrier of a block that one warp does not reach."""
    waits = [(0, WAIT, 0, 4_000), (0, WAIT, 0, 5_000)]
    timeline = timeline_of([*waits, (0, COPY, 1, 5_500)])
    hang = find_hang(timeline)
    assert (hang.ranks, hang.num_waits, hang.longest.peer) == ((0,), 2, 0)
    assert hang.holders == (Holder(0, True, "dispatch.copy_token", 1, "dispatch", 0),)
    longest = "rank 0 has waited 5.00 us for another warp of its own (dispatch.wait_token slot=0)"
    said = f"{longest}; 2 waits of rank 0 have not ended"
    assert line_of(timeline) == f"{said}; rank 0 is in dispatch.copy_token (1 warp)"
    assert line_of(timeline_of(waits)) == f"{said}; rank 0 is in no other span"
    two = timeline_of([*waits, (1, WAIT, 1, 5_000)], num_ranks=2)
    assert "; 3 waits of ranks 0 and 1 have not ended; " in str(line_of(two))
    waiting = next(line.text for line in headlines(analyze(timeline_of(waits))) if line.word == "waiting")
    assert waiting.endswith("; 9.00 us in 2 waits that never ended")


def test_waits_within_a_rank_count_for_nothing_where_ranks_wait_for_each_other():
    hang = find_hang(timeline_of([(0, WAIT, 0, 1_000), (0, WAIT, 1, 4_000)], num_ranks=2))
    assert (hang.num_waits, hang.longest.lasts_ns, [holder.rank for holder in hang.holders]) == (1, 5_000, [1])


@pytest.mark.parametrize("lost", [0, 3])
def test_an_end_that_found_no_room_is_no_hang(lost):
    timeline = timeline_of([(0, WAIT, 1, 4_000)], num_ranks=2)
    launches = tuple(
        type(launch)(**{**vars(launch), "records_lost": lost}) if launch.rank == 0 else launch
        for launch in timeline.launches
    )
    assert (find_hang(timeline.replace(launches=launches)) is None) == bool(lost)


def test_clocks_that_were_not_aligned_are_never_mixed():
    """Rank 0's clock is years ahead and rank 2's an hour; the last time of each is 11,000 on its own clock."""
    timeline = timeline_of([(0, WAIT, 2, 4_000), (1, WAIT, 2, 3_000)], num_ranks=3)
    spans, ranks = timeline.spans, timeline.track_ranks()
    host = [(i, 4, -1, 11_000, 11_000, 0, 0) for i, track in enumerate(timeline.tracks) if track.kind is TrackKind.HOST]
    columns = [getattr(spans, name).tolist() for name in vars(spans)]
    spans = make_spans([*zip(*columns, strict=True), *host])
    shift = np.array([10**17, 0, 3600 * 10**9])[ranks[spans.track]]
    moved = dataclasses.replace(
        spans, start=spans.start + shift, end=np.where(spans.end == OPEN_END, OPEN_END, spans.end + shift)
    )
    hang = find_hang(timeline.replace(spans=moved, aligned=False))
    assert (hang.longest.lasts_ns, hang.longest.rank) == (8_000, 1)
    assert hang.holders == (Holder(2, True, "", 0, "dispatch", 8_998),)
    drawing = prepare(timeline.replace(spans=moved, aligned=False))
    is_open = drawing.timeline.spans.end == OPEN_END
    assert (drawing.draw_end - drawing.timeline.spans.start)[is_open].tolist() == [7_000, 8_000]
    assert find_hang(timeline.replace(spans=spans)) == hang


def test_a_rank_in_work_that_never_ended_runs_a_kernel():
    """Work is on record when it ends; that the kernel never finished is known all the same."""
    timeline = timeline_of([(0, WAIT, 1, 4_000)], num_ranks=2)
    lane = next(i for i, t in enumerate(timeline.tracks) if t.rank == 1 and t.kind is TrackKind.LAUNCH)
    launch = next(i for i, event in enumerate(timeline.events) if event.event_class is EventClass.LAUNCH)
    running = make_spans([(lane, launch, 1, 3_000, int(OPEN_END), 0, 0)])
    timeline = timeline.replace(spans=join_rows([timeline.spans, running], Spans()))
    assert find_hang(timeline).holders == (Holder(1, True, "dispatch", 0, "dispatch", 0),)
    said = "rank 0 has waited 5.00 us for rank 1 (dispatch.wait_token slot=0); rank 1 is in dispatch"
    assert line_of(timeline) == said

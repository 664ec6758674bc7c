"""Who holds up whom in a capture that ends in the middle of waits, and the line of the report that says so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.timelines import (
    COPY,
    SIGNAL,
    WAIT,
    make_launch,
    make_rank,
    make_spans,
    make_timeline,
    make_tracks,
    overwrite_begins,
)
from tracekern.analysis.findings import analyze
from tracekern.analysis.hang import Holder, find_hang
from tracekern.export.drawing import prepare
from tracekern.timeline.columns import join_rows
from tracekern.timeline.model import OPEN_END, EventClass, Spans, Timeline, TrackKind
from tracekern.viewers.report.headlines import headlines

Row = tuple[int, int, int, int]
"""Rank, event, peer, start; the end is open."""


def timeline_of(open_spans: list[Row], num_ranks: int = 4, last_end: int = 9_000) -> Timeline:
    """Rank r's last closed span ended at 2,000 + r; a range of rank 0's host ended at last_end."""
    tracks = make_tracks(num_ranks, num_blocks=1, num_warps=4)
    device = [[i for i, t in enumerate(tracks) if t.rank == r and t.kind is TrackKind.DEVICE] for r in range(num_ranks)]
    host = next(i for i, t in enumerate(tracks) if t.kind is TrackKind.HOST)
    rows = [(host, 4, -1, last_end, last_end, 0, 0)]
    rows += [(device[rank][0], COPY, rank, 1_000, 2_000 + rank, 0, 0) for rank in range(num_ranks)]
    used = [0] * num_ranks
    for rank, event, peer, start in open_spans:
        rows.append((device[rank][used[rank]], event, rank, start, int(OPEN_END), peer, 0))
        used[rank] += 1
    return make_timeline(num_ranks).replace(
        tracks=tracks,
        spans=make_spans(rows),
        flows=type(make_timeline().flows)(),
        launches=tuple(make_launch(rank) for rank in range(num_ranks)),
        ranks=tuple(make_rank(rank) for rank in range(num_ranks)),
    )


def line_of(timeline: Timeline) -> str | None:
    return next((line.text for line in headlines(analyze(timeline)) if line.word == "hang"), None)


def test_where_all_waits_ended_there_is_no_hang():
    assert find_hang(make_timeline()) is None
    assert line_of(make_timeline()) is None
    assert find_hang(timeline_of([(0, COPY, 1, 5_000)])) is None


def test_the_rank_that_all_others_wait_for_is_described():
    """Rank 3 waits for rank 0, which waits for rank 2."""
    timeline = timeline_of([(0, WAIT, 2, 4_000), (1, WAIT, 2, 5_000), (3, WAIT, 0, 3_000), (3, WAIT, 2, 6_000)])
    hang = find_hang(timeline)
    assert hang is not None
    assert (hang.ranks, hang.num_waits) == ((0, 1, 3), 4)
    assert hang.holders == (Holder(2, True, "", 0, "dispatch", 6_998),)
    assert (hang.longest.lasts_ns, hang.longest.rank, hang.longest.peer) == (6_000, 3, 0)
    assert line_of(timeline) == (
        "rank 3 has waited 6.00 us for rank 0 (dispatch.wait_token slot=0); "
        "4 waits of ranks 0, 1 and 3 have not ended; rank 2 runs no kernel; its last, dispatch, ended 7.00 us ago"
    )


def test_what_it_is_doing_is_said():
    timeline = timeline_of([(0, WAIT, 1, 4_000), (1, COPY, 0, 5_000), (1, COPY, 0, 6_000)], num_ranks=2)
    hang = find_hang(timeline)
    assert hang is not None
    assert hang.holders == (Holder(1, True, "dispatch.copy_token", 2, "dispatch", 0),)
    assert line_of(timeline) == (
        "rank 0 has waited 5.00 us for rank 1 (dispatch.wait_token slot=0); rank 1 is in dispatch.copy_token (2 warps)"
    )


def test_of_nested_spans_a_warp_is_in_the_innermost():
    timeline = timeline_of([(0, WAIT, 1, 4_000), (1, COPY, 0, 5_000), (1, SIGNAL, 0, 6_000)], num_ranks=2)
    timeline.spans.track[-1] = timeline.spans.track[-2]
    hang = find_hang(timeline)
    assert hang is not None
    assert hang.holders == (Holder(1, True, "dispatch.signal_token", 1, "dispatch", 0),)


def test_the_only_span_of_a_rank_tells_since_when_it_runs_no_kernel():
    timeline = timeline_of([(1, WAIT, 0, 4_000)], num_ranks=2)
    without_host = timeline.spans.take(np.arange(1, len(timeline.spans)))
    hang = find_hang(timeline.replace(spans=without_host))
    assert hang is not None
    assert hang.holders == (Holder(0, True, "", 0, "dispatch", 2_000),)


def test_ranks_are_told_in_their_order():
    waiting = find_hang(timeline_of([(8, WAIT, 0, 4_000), (1, WAIT, 0, 4_000)], num_ranks=9))
    held = find_hang(timeline_of([(0, WAIT, 8, 4_000), (2, WAIT, 1, 4_000)], num_ranks=9))
    assert waiting is not None
    assert held is not None
    assert (waiting.ranks, [holder.rank for holder in held.holders]) == ((1, 8), [1, 8])


def test_ranks_that_wait_for_each_other_are_all_described():
    """Rank 0 is a call ahead: what they want does not fit, and that is the mistake."""
    timeline = timeline_of([(0, WAIT, 1, 4_500), (0, WAIT, 1 | 8 << 10, 4_200), (1, WAIT, 0 | 7 << 10, 4_000)], 2)
    hang = find_hang(timeline)
    assert hang is not None
    assert (hang.ranks, hang.holders) == ((0, 1), ())
    assert line_of(timeline) == (
        "rank 1 has waited 5.00 us for rank 0 (dispatch.wait_token slot=7); 3 waits of ranks 0 and 1 have not ended; "
        "rank 0 waits for rank 1 (dispatch.wait_token slot=8)"
    )


def test_a_rank_that_died_has_waited_at_least_so_long():
    timeline = timeline_of([(0, WAIT, 1, 4_000)], num_ranks=2)
    dead = timeline.replace(ranks=(timeline.ranks[0], make_rank(1, state="salvaged")))
    assert "has waited 5.00 us for" in str(line_of(timeline))
    assert "has waited at least 5.00 us for" in str(line_of(dead))


def test_a_rank_whose_time_of_death_is_known_has_waited_until_then():
    """Rank 2 died long after all that was recorded, and rank 0 before: what rank 2 waited is not its."""
    timeline = timeline_of([(0, WAIT, 1, 4_000), (2, WAIT, 1, 4_000)], num_ranks=3)
    dead = [make_rank(rank, state="salvaged", died_ns=at) for rank, at in ((0, 9_500), (2, 50_000))]
    hang = find_hang(timeline.replace(ranks=(dead[0], make_rank(1), dead[1]), origin_ns=0))
    assert hang is not None
    assert not hang.at_least
    assert [(wait.rank, wait.lasts_ns) for wait in (hang.longest, *hang.others)] == [(2, 46_000), (0, 5_500)]
    moved = find_hang(timeline.replace(ranks=(dead[0], make_rank(1), dead[1]), origin_ns=20_000))
    assert moved is not None
    assert moved.longest.lasts_ns == 26_000
    damaged = [dataclasses.replace(rank, died_ns=(-1) ** rank.rank * (1 << 63)) for rank in dead]
    for origin_ns in (-1 << 62, 1 << 62):
        assert find_hang(timeline.replace(ranks=(damaged[0], make_rank(1), damaged[1]), origin_ns=origin_ns))


def test_a_wait_whose_begin_was_overwritten_names_no_fields():
    timeline = timeline_of([(0, WAIT, 0, 4_000)], num_ranks=2)
    (row,) = np.flatnonzero(timeline.spans.end == OPEN_END).tolist()
    assert " slot=0); " in str(line_of(timeline))
    hang = find_hang(overwrite_begins(timeline, [row]))
    assert hang is not None
    assert hang.longest.fields == ""


def test_a_rank_whose_dump_is_missing_is_named():
    timeline = timeline_of([(0, WAIT, 7, 4_000)], num_ranks=2)
    assert str(line_of(timeline)).endswith("rank 7 is not in this capture")


def test_warps_that_wait_for_their_own_rank_are_told_where_no_rank_waits_for_another():
    """At a barrier of a block that one warp does not reach."""
    waits = [(0, WAIT, 0, 4_000), (0, WAIT, 0, 5_000)]
    timeline = timeline_of([*waits, (0, COPY, 1, 5_500)])
    hang = find_hang(timeline)
    assert hang is not None
    assert (hang.ranks, hang.num_waits, hang.longest.peer) == ((0,), 2, 0)
    assert hang.holders == (Holder(0, True, "dispatch.copy_token", 1, "dispatch", 0),)
    longest = "rank 0 has waited 5.00 us for another warp of its own (dispatch.wait_token slot=0)"
    said = f"{longest}; 2 waits of rank 0 have not ended"
    assert line_of(timeline) == f"{said}; rank 0 is in dispatch.copy_token (1 warp)"
    assert line_of(timeline_of(waits)) == f"{said}; rank 0 is in no other span"
    two = timeline_of([*waits, (1, WAIT, 1, 5_000)], num_ranks=2)
    assert "; 3 waits of ranks 0 and 1 have not ended; " in str(line_of(two))
    waiting = next(line.text for line in headlines(analyze(timeline_of(waits))) if line.word == "waiting")
    assert waiting.startswith("no wait on record has ended; ")


def test_waits_within_a_rank_count_for_nothing_where_ranks_wait_for_each_other():
    hang = find_hang(timeline_of([(0, WAIT, 0, 1_000), (0, WAIT, 1, 4_000)], num_ranks=2))
    assert hang is not None
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
    assert hang is not None
    assert (hang.longest.lasts_ns, hang.longest.rank) == (8_000, 1)
    assert hang.holders == (Holder(2, True, "", 0, "dispatch", 8_998),)
    drawing = prepare(timeline.replace(spans=moved, aligned=False))
    is_open = drawing.timeline.spans.end == OPEN_END
    assert (drawing.draw_end - drawing.timeline.spans.start)[is_open].tolist() == [7_000, 8_000]
    assert find_hang(timeline.replace(spans=spans)) == hang


def test_an_empty_timeline_is_no_hang():
    spans = make_timeline().spans.take(np.zeros(0, np.int64))
    assert find_hang(make_timeline().replace(spans=spans, launches=(), flows=type(make_timeline().flows)())) is None


def test_a_rank_in_work_that_never_ended_runs_a_kernel():
    """Work is on record when it ends; that the kernel never finished is known all the same."""
    timeline = timeline_of([(0, WAIT, 1, 4_000)], num_ranks=2)
    lane = next(i for i, t in enumerate(timeline.tracks) if t.rank == 1 and t.kind is TrackKind.LAUNCH)
    launch = next(i for i, event in enumerate(timeline.events) if event.event_class is EventClass.LAUNCH)
    running = make_spans([(lane, launch, 1, 3_000, int(OPEN_END), 0, 0)])
    timeline = timeline.replace(spans=join_rows([timeline.spans, running], Spans()))
    hang = find_hang(timeline)
    assert hang is not None
    assert hang.holders == (Holder(1, True, "dispatch", 0, "dispatch", 0),)
    said = "rank 0 has waited 5.00 us for rank 1 (dispatch.wait_token slot=0); rank 1 is in dispatch"
    assert line_of(timeline) == said

"""Device time by stage and rank, and the time in which no warp works: small Timelines, and captures that are kept."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import BARRIER, COPY, LAUNCH, SIGNAL, WAIT, make_launch, make_spans, make_timeline, timelines

from tests.paths import TRACES
from tracekern.analysis.findings import Findings, analyze
from tracekern.analysis.questions.stages import StageTimes, stage_times
from tracekern.analysis.questions.time_shares import share_time
from tracekern.formatting import duration
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, Flows, TrackKind
from tracekern.viewers.report.questions.stages import draw
from tracekern.viewers.report.report_page import report_page
from tracekern.viewers.report.stage_grid import about_times, describe_idle, stage_grid

LANE, WARP, OTHER_WARP = 0, 2, 3  # tracks of rank 0; those of rank 1 come 6 later


def times_of(*rows: tuple[int, int, int, int, int], launches=None) -> StageTimes:
    """rows: (track, event, launch, start, end)."""
    changes = {"launches": launches} if launches else {}
    spans = make_spans((*row, 0, 0) for row in rows)
    return stage_times(make_timeline(spans=spans, flows=Flows(), **changes))


def test_no_warp_works_while_all_wait_have_not_begun_or_have_ended():
    found = times_of(
        (LANE, LAUNCH, 0, 0, 1000),  # idle until 100
        (WARP, COPY, 0, 100, 200),
        (WARP, WAIT, 0, 250, 500),  # 200 to 250 is between spans: it may do what has none
        (OTHER_WARP, WAIT, 0, 150, 300),
        (OTHER_WARP, SIGNAL, 0, 300, 320),  # idle from 250 to 300 and from 320 to 500
        (WARP, BARRIER, 0, 600, 700),  # idle
        (WARP, COPY, 0, 700, 900),
        (WARP, WAIT, 0, 750, 800),  # within work: idle. And from 900 on
    )
    assert found.kernel_ns == (1000, 0)
    assert found.idle_ns == (100 + 50 + 180 + 100 + 50 + 100, 0)


SPAN = st.tuples(
    st.integers(0, 1), st.integers(0, 1), st.sampled_from([COPY, WAIT, BARRIER]), st.integers(0, 40), st.integers(0, 15)
)
"""Rank, warp, event, begin, length."""


@given(st.lists(SPAN, max_size=12))
def test_time_without_work_is_that_of_marked_ticks(drawn: list[tuple[int, int, int, int, int]]):
    rows = [(6 * rank + WARP + warp, event, rank, start, start + length) for rank, warp, event, start, length in drawn]
    found = times_of(*rows, *((6 * rank + LANE, LAUNCH, rank, 5, 50) for rank in (0, 1)))
    for rank in (0, 1):
        works = set()
        for track in (6 * rank + WARP, 6 * rank + OTHER_WARP):
            own = [row for row in rows if row[0] == track]
            alive = range(min((row[3] for row in own), default=0), max((row[4] for row in own), default=0))
            stops = {tick for row in own if row[1] != COPY for tick in range(row[3], row[4])}
            works |= set(alive) - stops
        has_spans = any(row[0] in (6 * rank + WARP, 6 * rank + OTHER_WARP) for row in rows)
        assert found.idle_ns[rank] == (45 - len(works & set(range(5, 50))) if has_spans else 0)


@given(timelines())
def test_no_kernel_is_idle_for_longer_than_it_lasts(timeline):
    found = stage_times(timeline)
    assert all(0 <= idle <= whole for idle, whole in zip(found.idle_ns, found.kernel_ns, strict=True))
    assert len(stage_grid(found).rows) == len(found.stages) + (found.together is not None)
    json.dumps(found.as_dict(), allow_nan=False)


LAUNCHES = tuple(
    dataclasses.replace(make_launch(rank, name), sequence=sequence)
    for rank in (0, 1)
    for name in ("send", "receive")
    for sequence in range(4)
)
"""8 of each rank: 4 of `send`, then 4 of `receive`."""


def lanes(send: list[list[int]], receive: list[list[int]]) -> list[tuple[int, int, int, int, int]]:
    """How long each call takes: [rank][call]."""
    rows = []
    for rank in (0, 1):
        for idx, length in enumerate([*send[rank], *receive[rank]]):
            rows.append((6 * rank + LANE, LAUNCH, 8 * rank + idx, 10_000 * idx, 10_000 * idx + length))
    return rows


def test_medians_leave_out_the_first_iteration_and_the_sum_evens_out():
    found = times_of(
        *lanes(send=[[9000, 30, 10, 20], [8000, 60, 60, 70]], receive=[[7000, 50, 51, 52], [6000, 10, 10, 10]]),
        launches=LAUNCHES,
    )
    send, receive = found.stages
    assert (send.stage, send.num_calls, send.median_ns, send.imbalance) == ("send", (3, 3), (20, 60), 1.5)
    assert (receive.stage, receive.median_ns, receive.mean_ns) == ("receive", (51, 10), 30.5)
    assert found.together.median_ns == (72, 70)
    assert found.is_first_left_out
    assert found.kernel_ns[0] == 9000 + 60 + 7000 + 153


def test_launches_that_did_not_end_are_left_out_and_of_those_that_lack_records_no_idle_time_is_told():
    lossy = (
        dataclasses.replace(LAUNCHES[1], records_lost=3),
        dataclasses.replace(LAUNCHES[2], records_overwritten=8),
    )
    rows = lanes(send=[[10, 99, 99, 20], [10, 60, 70, 80]], receive=[[10, 50, 51, 52], [10, 10, 10, 10]])
    rows = [(*row[:4], OPEN_END) if row[2] == 15 else row for row in rows]
    found = times_of(*rows, launches=(LAUNCHES[0], *lossy, *LAUNCHES[3:]))
    assert [row.num_calls for row in found.stages] == [(3, 3), (3, 2)]
    assert found.stages[0].median_ns == (99, 70)
    assert found.together.num_calls == (2, 2)  # the last iteration lacks a launch
    assert about_times(found).endswith(", without those of the first iteration and 1 launch that did not end")
    assert [cells[0] for cells, _ in stage_grid(found).rows] == ["3", "2-3", "2"]
    assert found.kernel_ns[0] == 10 + 20 + 10 + 153
    assert describe_idle(found).endswith("; not known of 2 launches that lack records")


def test_where_all_launches_lack_records_device_times_are_told_alone():
    launches = tuple(dataclasses.replace(launch, records_overwritten=1) for launch in LAUNCHES)
    found = times_of(*lanes(send=[[10] * 4, [20] * 4], receive=[[30] * 4, [40] * 4]), launches=launches)
    assert found.together.median_ns == (40, 60)
    assert found.as_dict()["together"]["idle_ns"] == [None, None]
    assert stage_grid(found, idle=True).rows == ()
    assert describe_idle(found).endswith(": -; not known of 16 launches that lack records")


def test_a_rank_without_a_stage_has_no_time_there():
    rows = lanes(send=[[10] * 4, [20] * 4], receive=[[30] * 4, []])
    found = times_of(*rows, launches=LAUNCHES)
    assert found.as_dict()["stages"][1]["median_ns"] == [30, None]
    assert found.stages[1].imbalance == 1
    assert stage_grid(found).rows[1] == (("0-3", "30 ns", "-", "30 ns", "30 ns", "1.00 x"), ("receive", "rank 0"))


def test_many_ranks_show_the_ends_and_where_they_are():
    timeline = make_timeline(64)
    spans, end = timeline.spans, timeline.spans.end.copy()
    for idx in np.flatnonzero(spans.event == LAUNCH):
        end[idx] += 10 * ((timeline.tracks[spans.track[idx]].rank + 37) % 64)
    found = stage_times(timeline.replace(spans=dataclasses.replace(spans, end=end)))
    grid = stage_grid(found)
    assert grid.words == ("stage", "shortest on", "longest on")
    assert grid.rows[0][1] == ("dispatch", "rank 27", "rank 26")
    assert grid.rows[0][0][1:4] == (duration(8100), duration(8415), duration(8730))
    assert describe_idle(found).count(" on rank ") == 3


@pytest.mark.parametrize("command", ["report", "info"])
def test_report_and_info_print_the_table(command, command_line):
    found = stage_times(load(TRACES / "h200x4_late_host"))
    printed = command_line(command, TRACES / "h200x4_late_host").stdout.splitlines()
    place = printed.index(about_times(found))
    about = "median of its calls, p90 of those on the rank that takes longest, without those of the first iteration"
    assert printed[place].endswith(about)
    head = "calls rank 0 rank 1 rank 2 rank 3 p90 mean longest / mean stage longest on"
    assert " ".join(printed[place + 1].split()) == head
    send = found.stages[0]
    of_rank_3 = duration(send.p90_ns[3])
    cells = [
        "5",
        *map(duration, send.median_ns),
        of_rank_3,
        duration(send.mean_ns),
        "1.46 x",
        "dispatch_send",
        "rank 3",
    ]
    assert " ".join(printed[place + 2].split()) == " ".join(cells)


def test_medians_are_those_of_the_launches_on_record():
    """And of an iteration: by plain loops over a capture of four GPUs."""
    timeline = load(TRACES / "h200x4_late_host")
    found, spans, took = stage_times(timeline), timeline.spans, {}
    for idx, track in enumerate(spans.track.tolist()):
        if timeline.tracks[track].kind == TrackKind.LAUNCH:
            launch = timeline.launches[spans.launch[idx]]
            took[launch.name, launch.rank, launch.sequence] = int(spans.end[idx] - spans.start[idx])
    names = [name for name in dict.fromkeys(name for name, *_ in took) if name != "rank_barrier"]
    for row in found.stages:
        for rank, median in zip(found.ranks, row.median_ns, strict=True):
            calls = sorted(took[row.stage, rank, call] for call in range(1, 6))
            assert median == np.median(calls)
            assert row.p90_ns[found.ranks.index(rank)] == calls[-1]  # of five, 9 of 10 are all
    for rank, median in zip(found.ranks, found.together.median_ns, strict=True):
        assert median == np.median([sum(took[name, rank, call] for name in names) for call in range(1, 6)])


def test_both_have_it_as_data_and_of_a_window_the_calls_that_reach_into_it_count(command_line):
    whole = stage_times(load(TRACES / "h200x4"))
    assert json.loads(command_line("info", TRACES / "h200x4", "--json").stdout)["stages"] == whole.as_dict()
    window = "2689us:3874us"  # leaves out the first iteration
    told = json.loads(command_line("report", TRACES / "h200x4", "--window", window, "--json").stdout)["stages"]
    assert [row["median_ns"] for row in told["stages"]] == [list(row.median_ns) for row in whole.stages]
    assert not told["is_first_left_out"]
    assert all(of_window < of_all for of_window, of_all in zip(told["kernel_ns"], whole.kernel_ns, strict=True))


def test_the_page_says_where_ranks_differ_most_and_for_how_much_nobody_works():
    found = analyze(load(TRACES / "h200x4_late_host"))
    page = report_page(found, "late", "late", "open").replace("\u00a0", " ")
    part = page[page.index('id="stages"') :].partition("</section>")[0]
    assert "The slowest rank exceeds the mean most in <b>dispatch_send</b>: <b>1.46 x</b> 147 us." in part
    assert "no warp works in this share of the kernels&#x27; time: 57 % on rank 0 (233 us)" in part.replace("No", "no")
    cells = "".join(f'<td class="number">{duration(ns)}</td>' for ns in found.stages.stages[0].idle_ns)
    assert f'<td>dispatch_send</td><td>rank 3</td><td class="number">5</td>{cells}' in part


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cpu_8_ranks", "<b>combine_send</b>: <b>1.55 x</b>"),
        ("h100x2_pipelined", "<b>dispatch_combine</b>: <b>1.70 x</b>"),
    ],
)
def test_a_barrier_at_the_start_counts_nowhere(name: str, said: str):
    found = Findings(load(TRACES / name))
    assert "rank_barrier" not in [row.stage for row in found.stages.stages]
    assert f"The slowest rank exceeds the mean most in {said}" in draw(found).text.replace("\u00a0", " ")
    timeline = found.timeline
    is_barrier = np.array([*(launch.name == "rank_barrier" for launch in timeline.launches), False])
    without = share_time(timeline.replace(spans=timeline.spans.take(~is_barrier[timeline.spans.launch])))
    assert without.total.tolist() == found.time.total.tolist()
    assert found.phases
    assert not any(phase.phase.stage == "rank_barrier" for phase in found.phases)
    waits = sum(phase.sum_ns for phase in found.phases)
    assert 0 < waits < int(found.waits.wait_ns.sum())

"""The numbers of a run, on Timelines small enough to count by hand and on a real capture."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import numpy as np
import pytest
from captures import CaptureSpec, write_capture
from hypothesis import given
from hypothesis import strategies as st
from launched import COPY_NS, ITERATIONS, SPANS, WARPS, record
from timelines import EVENTS, make_rank, make_spans, make_timeline, overwrite_begins

import tracekern
from tests.paths import TRACES
from tracekern.analysis.difference import differences
from tracekern.analysis.statistics import Lengths, SpanSums, phase_statistics, statistics_of
from tracekern.errors import BadInput
from tracekern.timeline.model import OPEN_END, ClockFit, Launch, Problem, Timeline, Track, TrackKind
from tracekern.timeline.windowed import load_windows

COPY, WAIT, LAUNCH = 0, 2, 5
OPEN = int(OPEN_END)


def timeline_of(launches: list[tuple[str, int]], rows: list[tuple[int, int, int, int]], **changes: object) -> Timeline:
    """One rank. launches: (name, sequence); rows: (event, launch, start, end); launch spans go on their own track."""
    spans = make_spans((1 if event == LAUNCH else 0, event, launch, a, b, 0, 0) for event, launch, a, b in rows)
    values = {
        "unit": "ns",
        "ranks": (make_rank(0),),
        "tracks": (Track(0, TrackKind.DEVICE, "block 0"), Track(0, TrackKind.LAUNCH, "kernels")),
        "events": EVENTS,
        "launches": tuple(
            Launch(0, i, name, sequence, 0, 1, 1, 2, 2, 64, 0, 12) for i, (name, sequence) in enumerate(launches)
        ),
        "spans": spans,
        **changes,
    }
    return Timeline(**values)


def test_phases_by_hand():
    timeline = timeline_of(
        [("send", 0), ("send", 1), ("send", 2)],
        [
            (LAUNCH, 0, 0, 1000),
            (COPY, 0, 0, 900),  # warms up
            (LAUNCH, 1, 2000, 2100),
            (COPY, 1, 2000, 2010),
            (WAIT, 1, 2010, 2050),
            (LAUNCH, 2, 3000, 3300),
            (COPY, 2, 3000, 3020),
            (COPY, 2, 3020, 3060),
            (WAIT, 2, 3100, 3180),
            (WAIT, 2, 3200, OPEN),  # never ended: no duration
        ],
    )
    statistics = phase_statistics(timeline)
    copy, wait = statistics.phases
    assert (copy.name, copy.num_spans, copy.total_ns, copy.p50_ns) == ("send.copy_token", 3, 70, 20)
    assert copy.p99_ns == pytest.approx(np.quantile([10, 20, 40], 0.99))
    assert (wait.name, wait.num_spans, wait.total_ns, wait.p50_ns) == ("send.wait_token", 2, 120, 60)
    assert wait.wait_share == pytest.approx(120 / (2 * 400))  # two writers, launches of 100 and 300 ns
    assert np.isnan(copy.wait_share)
    assert statistics.end_to_end_ns == (100, 300)
    assert statistics.metrics() == {
        "send.copy_token.p50": 20,
        "send.copy_token.p99": copy.p99_ns,
        "send.wait_token.p50": 60,
        "send.wait_token.p99": wait.p99_ns,
        "send.wait_token.wait_share": 0.15,
        "send.wait_token.wait_per_iteration": 60,  # of two measured iterations, the second of which did not wait
        "end_to_end.p50": 200,
    }
    assert (statistics.num_iterations, statistics.num_measured, statistics.resolution_ns) == (3, 2, 32)


def test_what_is_launched_less_often_is_set_up_and_more_often_is_several_times_an_iteration():
    names = [
        ("barrier", 0),
        *((name, i) for i in range(2) for name in ("send", "recv")),
        *(("gemm", i) for i in range(4)),
    ]
    rows = [(LAUNCH, i, 1000 * i, 1000 * i + 500) for i in range(len(names))]
    rows += [(COPY, i, 1000 * i, 1000 * i + 100 + i) for i in range(len(names))]
    statistics = phase_statistics(timeline_of(names, rows))
    assert statistics.set_up_stages == ("barrier",)
    assert {phase.name: phase.num_spans for phase in statistics.phases} == {
        "send.copy_token": 1,
        "recv.copy_token": 1,
        "gemm.copy_token": 2,
    }
    # The second iteration is launches 3 and 4 and the last two of gemm, 7 and 8.
    assert statistics.end_to_end_ns == (8500 - 3000,)


def test_a_single_iteration_is_measured():
    statistics = phase_statistics(timeline_of([("send", 0)], [(LAUNCH, 0, 0, 100), (COPY, 0, 0, 50)]))
    assert (statistics.num_iterations, statistics.num_measured) == (1, 1)
    assert statistics.metrics()["send.copy_token.p50"] == 50


def test_iterations_of_several_ranks_reach_from_the_first_to_the_last():
    timeline = make_timeline(num_ranks=3)
    assert phase_statistics(timeline).end_to_end_ns == (9000 - 900,)
    assert phase_statistics(timeline.replace(aligned=False)).end_to_end_ns == ()
    assert "end_to_end.p50" not in phase_statistics(timeline.replace(aligned=False)).metrics()


@pytest.mark.parametrize(
    ("launches", "rows"),
    [([], []), ([("send", 0), ("send", 1)], []), ([("send", 0)], [(COPY, 0, 10, OPEN)])],
    ids=["nothing", "empty iterations", "nothing closed"],
)
def test_nothing_to_measure_gives_no_metrics(launches, rows):
    statistics = phase_statistics(timeline_of(launches, rows))
    assert statistics.phases == ()
    assert statistics.metrics() == {}


def test_waits_in_launches_of_no_length_have_no_share():
    statistics = phase_statistics(timeline_of([("send", 0)], [(LAUNCH, 0, 5, 5), (WAIT, 0, 5, 5)]))
    assert sorted(statistics.metrics()) == ["end_to_end.p50", "send.wait_token.p50", "send.wait_token.p99"]


def test_waits_inside_each_other_are_no_more_than_all_of_the_time():
    rows = [(LAUNCH, 0, 0, 100), (WAIT, 0, 0, 100), (WAIT, 0, 0, 99), (WAIT, 0, 50, 60)]
    (wait,) = phase_statistics(timeline_of([("send", 0)], rows)).phases
    assert (wait.num_spans, wait.total_ns) == (3, 209)
    assert wait.wait_share == pytest.approx(100 / (2 * 100))  # two writers


def test_one_name_of_two_classes_is_two_phases():
    same_name = dataclasses.replace(EVENTS[WAIT], name=EVENTS[COPY].name)
    events = (*EVENTS[:WAIT], same_name, *EVENTS[WAIT + 1 :])
    rows = [(LAUNCH, 0, 0, 100), (COPY, 0, 0, 10), (WAIT, 0, 10, 40)]
    rows += [(LAUNCH, 1, 200, 300), (COPY, 1, 200, 220)]
    statistics = phase_statistics(timeline_of([("send", 0), ("take", 0)], rows, events=events))
    metrics = statistics.metrics()
    medians = {name: value for name, value in metrics.items() if name.endswith(".p50")}
    assert medians == {
        "send.copy_token (work).p50": 10,
        "send.copy_token (wait).p50": 30,
        "take.copy_token.p50": 20,
        "end_to_end.p50": 300,
    }
    assert metrics["send.copy_token (wait).wait_share"] == 30 / (2 * 100)


def test_no_waits_at_all():
    timeline = timeline_of([("send", 0)], [(LAUNCH, 0, 0, 100), (COPY, 0, 0, 50)])
    assert not [name for name in phase_statistics(timeline).metrics() if name.endswith("wait_share")]


def test_ticks_are_refused():
    with pytest.raises(BadInput, match="in ticks"):
        phase_statistics(make_timeline(unit="ticks"))


def test_losses_are_told(tmp_path):
    whole = phase_statistics(tracekern.load(write_capture(tmp_path / "whole", CaptureSpec(run_id="whole"))))
    assert whole.losses == ()
    lossy = CaptureSpec(records_per_track=10, run_id="lossy")
    assert phase_statistics(tracekern.load(write_capture(tmp_path / "lossy", lossy))).losses
    killed = CaptureSpec(killed_rank=1, run_id="killed")
    assert phase_statistics(tracekern.load(write_capture(tmp_path / "killed", killed))).losses


@pytest.mark.parametrize(
    ("kind", "proves_nothing"),
    [
        ("surplus_warps", True),
        ("surplus_blocks", True),
        ("launch_lost", True),
        ("cycle_rate_unknown", True),
        ("backwards_flow", True),
        ("contradicting_flows", True),
        ("lost_host_spans", False),  # no number is made of them
        ("cycle_clock", False),
        ("idle_tracks", False),
    ],
)
def test_problems_that_leave_numbers_unproven(kind, proves_nothing):
    told = timeline_of([], [], problems=(Problem("error", kind, 0, -1, "what happened"),))
    assert phase_statistics(told).losses == (("what happened",) if proves_nothing else ())


def test_a_real_capture(tmp_path):
    statistics = phase_statistics(tracekern.load(record(tmp_path / "run")))
    assert {phase.name for phase in statistics.phases} == {
        f"{stage}.{event}" for stage in ("dispatch", "combine") for event in ("copy_token", "wait_token")
    }
    assert all(phase.num_spans == WARPS * SPANS * (ITERATIONS - 1) for phase in statistics.phases)
    assert statistics.metrics()["dispatch.copy_token.p50"] == pytest.approx(COPY_NS, rel=0.08)
    assert len(statistics.end_to_end_ns) == ITERATIONS - 1


@pytest.mark.parametrize(("warps", "cost"), [(2, 31.0), (4, 31.0), (5, 56.0), (64, 122.0)])
def test_what_a_probe_costs_is_taken_from_the_capture(warps, cost):
    measured = {"overhead_ns": {"16": 56.0, "4": 31.0, "32": 122.0}}
    launch = Launch(0, 0, "send", 0, 0, 1, 1, warps, 2, 64, 0, 12)
    timeline = timeline_of([], [], ranks=(make_rank(0, metadata=measured),)).replace(launches=(launch,))
    assert phase_statistics(timeline).probe_cost_ns == cost
    assert phase_statistics(timeline.replace(ranks=(make_rank(0),))).probe_cost_ns == 0


def test_the_kept_capture_of_gpus():
    statistics = phase_statistics(tracekern.load(TRACES / "h200x4"))
    assert statistics.set_up_stages == ("rank_barrier",)
    metrics = statistics.metrics()
    shares = [value for name, value in metrics.items() if name.endswith("wait_share")]
    assert shares
    assert all(0 <= share <= 1 for share in shares)
    assert len(statistics.end_to_end_ns) == 2


def test_spans_whose_begin_was_overwritten_are_in_no_number():
    timeline = timeline_of([("send", 0)], [(LAUNCH, 0, 0, 100), (WAIT, 0, 0, 10), (WAIT, 0, 10, 50), (WAIT, 0, 50, 70)])
    cut = overwrite_begins(timeline, [0])
    cut = cut.replace(launches=(dataclasses.replace(cut.launches[0], records_overwritten=7),))
    (wait,) = phase_statistics(cut).phases
    assert (wait.num_spans, wait.total_ns, wait.p50_ns) == (2, 60, 30)
    assert math.isnan(wait.wait_share), "of 100 ns nobody knows all waits"
    assert phase_statistics(overwrite_begins(cut, [0, 1, 2])).phases == ()


def test_differences_of_two():
    first = phase_statistics(timeline_of([("a", 0)], [(LAUNCH, 0, 0, 100), (COPY, 0, 0, 50), (WAIT, 0, 50, 50)]))
    second = phase_statistics(timeline_of([("b", 0), ("a", 0)], [(COPY, 1, 0, 60), (COPY, 0, 60, 70)]))
    found = {d.metric: d for d in differences(first, second)}
    assert found["a.copy_token.p50"].change == pytest.approx(0.2)
    assert np.isnan(found["b.copy_token.p50"].first)
    assert np.isnan(found["b.copy_token.p50"].change)
    assert np.isnan(found["a.wait_token.p50"].change)


INF = math.inf


@pytest.mark.parametrize(
    ("hard_ns", "together"),
    [((), 0), ((INF,), 0), ((0, 700), 700), ((0, 700, 300, 741), 1441), ((0, None), INF), ((INF, INF), INF)],
)
def test_times_of_two_ranks_are_apart_by_both_bounds(hard_ns, together):
    clocks = (None if bound is None else ClockFit("ping-pong", bound, 20.0) for bound in hard_ns)
    ranks = tuple(make_rank(number, clock=clock) for number, clock in enumerate(clocks))
    assert phase_statistics(timeline_of([], [], ranks=ranks, tracks=())).clock_hard_ns == together


@pytest.mark.parametrize(("clocks", "together"), [("aaa", 0), ("aab", 700), ("abb", 700), ("aba", 700), ("abc", 1400)])
def test_ranks_of_one_clock_are_not_apart(clocks, together):
    bound = {"a": 0.0, "b": 700.0, "c": 700.0}
    ranks = tuple(
        make_rank(number, clock=ClockFit("ping-pong", bound[clock], 20.0), clock_id=clock)
        for number, clock in enumerate(clocks)
    )
    assert phase_statistics(timeline_of([], [], ranks=ranks, tracks=())).clock_hard_ns == together


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1), min_size=2, max_size=4), st.integers(1, 3))
def test_lengths_of_parts_have_the_quantiles_of_all(parts: list[list[int]], wide: int):
    parts = [[value // 10 ** (4 * wide) for value in part] for part in parts]
    whole = np.array([value for part in parts for value in part], np.int64)
    lengths = functools.reduce(operator.add, (Lengths(np.array(part, np.int64)) for part in parts))
    shares = (0.0, 0.25, 0.5, 0.99, 1.0)
    assert lengths.quantiles(shares) == Lengths(whole).quantiles(shares) == np.quantile(whole, shares).tolist()
    assert (lengths.num_spans, lengths.total_ns) == (len(whole), whole.sum())


@pytest.mark.parametrize("name", ["h200_resident", "h200x4_late_host", "h200x4_two_hop", "two_hosts", "kv_cache"])
def test_statistics_of_windows_are_those_of_the_whole(tmp_path, name):
    run = load_windows(TRACES / name, tmp_path, 1)
    assert len(run.windows) > 1 or name in ("two_hosts", "kv_cache")  # of engines, to which no window belongs
    sums = functools.reduce(operator.add, (SpanSums.of(run.part(number)) for number in range(1 + len(run.windows))))
    found, wanted = statistics_of(run.skeleton, sums), phase_statistics(tracekern.load(TRACES / name))
    assert repr(vars(found)) == repr(vars(wanted))  # nan equals nan there

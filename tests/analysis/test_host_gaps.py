"""How much of a gap before a kernel was its host's: what the launch, a lane and the profiler say."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
from captures import CaptureSpec, write_capture
from scenarios import Scenario
from scenarios_causes import CallScenario

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import Findings
from tracekern.analysis.graph.host_gaps import MAX_LAUNCH_NS, host_gaps
from tracekern.timeline.columns import join_rows
from tracekern.timeline.model import ClockFit, EventClass, EventType, Spans, Timeline, Track, TrackKind
from tracekern.viewers.report.headlines import trust

GAP_NS, WALL_NS = 100_000, 1_000_000_000
CLOCK = ClockFit(
    "reference",
    0.0,
    0.0,
    host_anchor_ns=(WALL_NS, WALL_NS + 10**9),
    host_axis_ns=(0, 10**9),
    host_hard_ns=100.0,
)


def run() -> Timeline:
    """Two kernels a rank, GAP_NS apart."""
    of: Scenario = CallScenario(1)
    for late in (0, GAP_NS - 800):
        of.launch("step", late={0: late})
        of.work(0, 1_000)
    timeline = of.timeline()
    return timeline.replace(ranks=(dataclasses.replace(timeline.ranks[0], clock=CLOCK),))


def gaps_of(timeline: Timeline) -> list[int]:
    schedule = Findings(timeline).recorded.schedule
    return host_gaps(timeline, schedule.gap_start[:2], schedule.start[:2], schedule.asked[:2]).tolist()


def with_lanes(timeline: Timeline, *lanes: tuple[str, list[tuple[int, int]]]) -> Timeline:
    """Each lane with its (begin, end)."""
    count = len(timeline.tracks)
    rows = [
        Spans(
            np.full(len(times), count + number, np.int32),
            np.full(len(times), len(timeline.events), np.int32),
            np.full(len(times), -1, np.int32),
            np.array([begin for begin, _ in times]),
            np.array([end for _, end in times]),
            np.zeros(len(times), np.uint64),
            np.zeros(len(times), np.uint64),
        )
        for number, (_, times) in enumerate(lanes)
    ]
    return timeline.replace(
        tracks=(*timeline.tracks, *(Track(0, TrackKind.HOST, name) for name, _ in lanes)),
        events=(*timeline.events, EventType("host", EventClass.HOST, "completion")),
        spans=join_rows([timeline.spans, *rows], Spans()),
        host_names=("call",),
    )


def second_start(timeline: Timeline) -> int:
    return int(Findings(timeline).recorded.schedule.start[1])


def asked(timeline: Timeline, before_ns: int) -> Timeline:
    """The second launch was asked for so long before it began."""
    host_ns = WALL_NS + second_start(timeline) - before_ns
    launches = timeline.launches
    return timeline.replace(launches=(launches[0], dataclasses.replace(launches[1], host_ns=host_ns)))


def test_nothing_says_so():
    assert gaps_of(run()) == [0, 0]


def test_until_the_launch_was_asked_for_it_was_the_hosts():
    assert gaps_of(asked(run(), 30_000)) == [0, GAP_NS - 30_000 - 100]


def test_the_rest_of_a_launch_is_no_kernel():
    assert gaps_of(asked(run(), MAX_LAUNCH_NS - 200)) == [0, GAP_NS]


def test_a_time_that_cannot_be_proves_nothing():
    assert gaps_of(asked(run(), -5_000)) == [0, 0]  # behind the kernel's begin: another clock
    assert gaps_of(asked(run(), 2 * GAP_NS)) == [0, 0]  # before the gap: the host was ahead


def test_a_host_that_nothing_relates_to_the_axis_proves_nothing():
    timeline = asked(run(), 30_000)
    unrelated = dataclasses.replace(CLOCK, host_anchor_ns=(), host_axis_ns=(), host_hard_ns=float("nan"))
    rank = dataclasses.replace(timeline.ranks[0], clock=unrelated)
    assert gaps_of(timeline.replace(ranks=(rank,))) == [0, 0]


def test_recording_that_takes_much_of_the_gaps_is_told_of():
    def told(gap_ns: int) -> str:
        late = CallScenario(1)
        for before in (0, gap_ns - 800):
            late.launch("step", late={0: before})
            late.work(0, 1_000)
        timeline = late.timeline()
        rank = dataclasses.replace(timeline.ranks[0], clock=CLOCK, backend="cuda")
        return trust(tracekern.analyze(asked(timeline.replace(ranks=(rank,)), 2_000)))

    wanted = "recording, at 3.00 us a launch, takes about 10 % of the 30.0 us in which GPUs wait for their hosts"
    assert wanted in told(30_000)
    assert "recording, at" not in told(100_000)


def test_a_range_for_each_launch_made_it():
    timeline = run()
    start = second_start(timeline)
    both = [(0, 900), (start - 20_000, start + 5_000)]
    assert gaps_of(with_lanes(timeline, ("python", both))) == [0, GAP_NS - 20_000 - 100]
    assert gaps_of(with_lanes(timeline, ("python", both[1:]))) == [0, 0]  # which of the two?


def test_where_the_profiler_shows_no_kernel_there_was_none():
    timeline = run()
    start = second_start(timeline)
    around = ("torch thread 1", [(0, start + 50_000)])
    kernels = [(900, 2_900), (start - 500, start + 1_500)]
    idle = with_lanes(timeline, around, ("torch stream 7", kernels))
    assert gaps_of(idle) == [0, GAP_NS]
    with_copy = [kernels[0], (start - 60_000, start - 20_000), kernels[1]]
    copied = with_lanes(timeline, around, ("torch stream 7", with_copy))
    assert gaps_of(copied) == [0, GAP_NS - 40_000]


def test_a_launch_keeps_when_its_host_asked_for_it(tmp_path: Path):
    before = time.time_ns()
    directory = write_capture(tmp_path / "capture", CaptureSpec(num_ranks=2, launches=2))
    times = [launch.host_ns for launch in tracekern.load(directory).launches]
    assert len(times) >= 4
    assert all(before <= host_ns <= time.time_ns() for host_ns in times)
    old = tracekern.load(TRACES / "h200x4")
    assert {launch.host_ns for launch in old.launches} == {0}  # made before there was such a time

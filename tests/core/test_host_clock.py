"""The wall clock of a host is set between captures, or in the middle of one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.sessions import launch
from tracekern.host_clock import Moment
from tracekern.record.session import capture
from tracekern.timeline.load import load
from tracekern.timeline.model import EventClass, TrackKind

STEP_NS = 500_000_000

AHEAD = """
import sys, time
ahead_ns, real = int(sys.argv[1]), time.time_ns
time.time_ns = lambda: real() + ahead_ns
from tests.sessions import launch
from tracekern.record.session import capture
with capture(sys.argv[2], device="cpu", max_bytes=1 << 20) as session:
    launch(session)
"""


def test_a_capture_follows_one_that_was_made_before_the_clock_was_set_back(tmp_path: Path):
    for ahead_s in (600, 0):
        program = [sys.executable, "-c", AHEAD, str(ahead_s * 10**9), str(tmp_path)]
        ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("step_ns", "way"), [(STEP_NS, "ahead"), (-STEP_NS, "back")])
def test_a_clock_that_is_set_in_a_capture_moves_no_lane_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ns: int, way: str
):
    wall_ns = time.time_ns
    with capture(tmp_path, device="cpu", max_bytes=1 << 20) as session:
        for number in range(4):
            if number == 2:
                monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + step_ns)
                session.sample_clocks()
            with session.range(f"step {number}"):
                launch(session)
    timeline = load(tmp_path)
    host = timeline.tracks_of(TrackKind.HOST)[timeline.spans.track]
    kernel = timeline.events_of(EventClass.LAUNCH)[timeline.spans.event]
    steps, kernels = timeline.spans.take(host), timeline.spans.take(kernel)
    assert len(steps) == len(kernels) == 4
    assert (steps.start <= kernels.start).all()
    assert (kernels.end <= steps.end + 1000).all()
    (told,) = [problem.text for problem in timeline.problems if problem.kind == "wall_clock_step"]
    assert told.startswith("rank 0: the wall clock of ")
    assert f" was set {way} by 500 ms between " in told


def test_moments_of_one_clock_are_ordered_by_it_and_others_by_the_wall_clock():
    def moment(clock_id: str, anchor_ns: int, host_ns: int) -> Moment:
        return Moment.of({"host_time": {"id": clock_id, "anchor_ns": anchor_ns}}, host_ns)

    early, late = moment("a", 1_000, 1_010), moment("a", 400, 430)
    assert early.is_before(late)
    assert not late.is_before(early)
    assert late.is_before(moment("b", 900, 1_000))
    assert Moment.of({}, 5).is_before(Moment.of({}, 9), by_ns=3)
    assert not Moment.of({}, 5).is_before(Moment.of({}, 9), by_ns=4)

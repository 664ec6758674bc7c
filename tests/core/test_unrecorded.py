"""Launches that ran and left no record: every reader says why, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_snapshot import start  # noqa: F401, a fixture

from tests.sessions import TABLE, launch
from tracekern.analysis.findings import analyze
from tracekern.comm.devices.device import HostDevice
from tracekern.dump.reader import peek_metadata
from tracekern.moe.calls.call import num_counted
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run
from tracekern.record.session import capture
from tracekern.segment.unrecorded import why_refused
from tracekern.timeline.load import load
from tracekern.viewers.report.headlines import headlines

STILL_COUNTS = """
    with session.counting():
        run_kernel(launch(), 2, 2, 3)
        print(session.run_id, flush=True)
        sys.stdin.readline()
"""
TOLD = "all launches so far (1) ran inside counting(); with records_per_track=256"


def test_launches_inside_counting_are_told(tmp_path: Path, command_line):
    with capture(tmp_path) as session, session.counting():
        launch(session)
    said = command_line("info", tmp_path).stdout
    assert TOLD in said
    assert "capture.launch() was not called" not in said
    (waiting,) = [line.text for line in headlines(analyze(load(tmp_path))) if line.word == "waiting"]
    assert TOLD in waiting


def test_once_something_is_recorded_nothing_is_said_of_counting(tmp_path: Path):
    with capture(tmp_path) as session:
        with session.counting():
            launch(session)
        launch(session)
    assert load(tmp_path).problems == ()


def test_launches_that_found_no_room_did_not_run_inside_counting(tmp_path: Path):
    with capture(tmp_path, max_bytes=1 << 16, records_per_track=10_000) as session:
        with session.counting():
            launch(session)
        assert not launch(session).traced
    assert [problem.kind for problem in load(tmp_path).problems] == ["launch_not_recorded"]


def test_a_rank_that_still_counts_says_so_alive_and_dead(start, tmp_path: Path, command_line):  # noqa: F811
    process, run_id = start(STILL_COUNTS)
    assert TOLD in command_line("snapshot", run_id, "-o", tmp_path / "now").stderr
    process.kill()
    process.wait()
    assert TOLD in command_line("salvage", run_id, "-o", tmp_path / "dead").stderr


def test_a_flight_recorder_of_run_moe_records_from_its_first_call_on(tmp_path: Path):
    small = {"ranks": 1, "tokens": 4, "hidden": 16, "experts": 4, "topk": 2, "iterations": 2, "blocks": 2, "warps": 2}
    launches = {}
    for keep in ("first", "last"):
        options = MoeRun(**small, keep=keep, command="tracekern run moe", backend="cpu")
        assert run(options, tmp_path / keep).ok
        launches[keep] = peek_metadata(tmp_path / keep / "rank_00000.tkdump")["launches_counted"]
    assert launches == {"first": 2 * 4, "last": 0}, "two calls of four kernels"
    assert len(load(tmp_path / "last").launches) == 2 * 4 + 1, "and the barrier of the communicator"
    assert [num_counted(MoeRun(keep=keep, iterations=5), "cuda") for keep in ("first", "last")] == [5, 1]


def test_the_size_that_is_named_is_enough(tmp_path: Path, command_line, caplog: pytest.LogCaptureFixture):
    def record(max_bytes: int) -> list[bool]:
        with capture(tmp_path, max_bytes=max_bytes, records_per_track=1000) as session:
            return [launch(session, grid=8).traced for _ in range(20)]

    assert False in record(1 << 20)
    (said,) = {
        match[0] for text in (caplog.text, command_line("info", tmp_path).stdout) for match in [TOO_SMALL.search(text)]
    }
    enough = int(said.split("=")[1])
    assert record(enough) == [True] * 20
    assert enough < 8 << 20  # 20 launches of 8 x 2 tracks of 16,000 bytes


TOO_SMALL = re.compile(r"16 launches ran unrecorded; max_bytes=(\d+)(?= would have been enough)")


class PreparesAhead(HostDevice):
    """As a GPU: a larger arena has more regions reserved ahead of their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.streams.max_regions_ahead = 32


def test_the_size_that_is_named_is_enough_for_regions_that_are_reserved_ahead(tmp_path: Path):
    def record(max_bytes: int) -> str:
        with capture(tmp_path, max_bytes=max_bytes, records_per_track=256, device=PreparesAhead()) as session:
            for grid in (1, 4, 16, 64, 132):
                for _ in range(17):
                    session.launch(f"grid of {grid}", grid=grid, warps=4, events=TABLE)
            return why_refused(session.segment.header.copy(), "first")

    enough = int(record(1 << 20).partition("max_bytes=")[2].split()[0])
    assert record(enough) == ""


def test_a_flight_recorder_is_not_told_to_keep_all(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It named room for every launch that ever ran: 38 GB for an hour."""
    with capture(tmp_path, keep="last", max_bytes=20_000, records_per_track=1000) as session:
        size = 0
        for _ in range(5):
            assert not launch(session, grid=8).traced
            size = max(size, int(session.segment.header["refused_bytes"]) // 5)
    assert size > 8 * 2 * 1000 * 16
    said = (
        "5 launches ran unrecorded; a flight recorder uses its regions again, and max_bytes=20480 has room for too few "
        f"of {size} bytes: raise it, or lower records_per_track"
    )
    assert said in caplog.text

"""Launches reserved ahead: they cost little, take each its own region, and leave no trace where nobody came."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.captures import EVENT_TABLE
from tests.kernels import run_kernel
from tracekern.comm.devices.device import HostDevice
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.record.session import Capture, capture
from tracekern.segment import writer
from tracekern.timeline.decode.problems import held_up
from tracekern.timeline.load import load

TABLE = json.dumps(EVENT_TABLE)


REGIONS_AHEAD = 8


class AheadDevice(HostDevice):
    """The CPU backend, with launches prepared as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.streams.max_regions_ahead = REGIONS_AHEAD


@pytest.fixture(autouse=True)
def _no_multiple_of_4_gib_inside(monkeypatch):
    """Where a segment lies is chance; once in thousands of times such a multiple makes a batch smaller."""
    monkeypatch.setattr(writer, "_CARRY_BYTES", 1 << 60)


def num_reserved(session: Capture) -> int:
    return int(session.segment.header["num_launches"])


def launch(session: Capture, name: str = "demo", spans: int = 1) -> bool:
    launched = session.launch(name, grid=2, warps=2, events=TABLE)
    if launched.traced:
        run_kernel(launched.descriptor, 2, 2, spans)
    return launched.traced


def launches_of(directory: Path) -> list[tuple[str, int, int]]:
    launches = read_dump(directory / "rank_00000.tkdump").launches
    return [(entry.name, entry.sequence, entry.records_count) for entry in launches]


def test_a_launch_that_was_not_counted_reserves_its_own_region_and_no_other(tmp_path: Path):
    reserved = [0]
    with capture(tmp_path, device=AheadDevice()) as session:
        for spans in range(1, 20):
            launch(session, spans=spans)
            reserved.append(num_reserved(session))
    assert reserved == list(range(20))
    assert launches_of(tmp_path) == [("demo", n, 4 * (n + 1)) for n in range(19)]


def test_two_kernels_take_turns(tmp_path: Path):
    with capture(tmp_path, device=AheadDevice(), every=2) as session:
        for _ in range(6):
            launch(session, "first", spans=1)
            launch(session, "second", spans=2)
    # In the order in which they were launched, whichever regions they had.
    assert launches_of(tmp_path) == [entry for n in (0, 2, 4) for entry in (("first", n, 4), ("second", n, 8))]


def test_as_many_launches_fit_as_one_by_one(tmp_path: Path):
    fitted = []
    for device in (HostDevice(), AheadDevice()):
        with capture(tmp_path, device=device, max_bytes=1 << 20, records_per_track=1000) as session:
            fitted.append([launch(session) for _ in range(20)])
    assert fitted[0] == fitted[1]
    assert 10 < sum(fitted[0]) < 20


def test_counting_changes_the_size_of_regions_that_were_ready(tmp_path: Path):
    with capture(tmp_path, device=AheadDevice()) as session:
        for _ in range(2):
            launch(session)
        with session.counting():
            launch(session, spans=7)
        launch(session, spans=7)
    launches = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert [entry.records_per_track for entry in launches] == [1024, 1024, 9]


def test_a_launch_in_a_graph_that_the_capture_does_not_know_runs_unrecorded(tmp_path: Path, caplog):
    device = AheadDevice()
    with capture(tmp_path, device=device) as session:
        assert launch(session)
        device.streams.is_captured = lambda: True
        assert not launch(session)
        device.streams.is_captured = lambda: False
        assert launch(session)
    assert [(name, number) for name, number, _ in launches_of(tmp_path)] == [("demo", 0), ("demo", 1)]
    assert "graph that capture.graph() did not make" in caplog.text


def test_the_cpu_backend_has_no_memory_of_its_own(tmp_path: Path):
    with pytest.raises(BadInput, match="sink='device'"), capture(tmp_path, device="cpu", sink="device"):
        pass
    with pytest.raises(BadInput, match="wanted 'cpu', 'cuda'"), capture(tmp_path, device="tpu"):
        pass


def test_what_was_counted_finds_its_regions_ready(tmp_path: Path):
    """The first launches behind counting() take no longer than those to come."""
    with capture(tmp_path, device=AheadDevice(), every=2) as session:
        with session.counting():
            for _ in range(10):
                launch(session, "long", spans=3)
            launch(session, "short")
        reserved = num_reserved(session)
        for _ in range(10):
            launch(session, "long", spans=3)
        assert num_reserved(session) == reserved, "5 of 10 launches are recorded"
        launch(session, "long")
        assert num_reserved(session) > reserved
    assert launches_of(tmp_path) == [("long", n, 12) for n in range(0, 10, 2)] + [("long", 10, 4)]


def test_all_launches_that_were_counted_have_their_regions_before_the_first(tmp_path: Path):
    with capture(tmp_path, device=AheadDevice()) as session:
        with session.counting(repeats=3):
            for _ in range(20):
                launch(session)
        assert num_reserved(session) == 20 + 3 * 20
        for _ in range(61):
            launch(session)
    launches = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert not any(entry.waited_ns for entry in launches[:60])
    assert launches[60].records_count == 4, "nobody had counted this one"


def test_without_room_for_all_that_was_counted_each_kernel_gets_its_part(tmp_path: Path):
    with capture(tmp_path, device=AheadDevice(), max_bytes=1 << 20, records_per_track=400) as session:
        with session.counting(repeats=100):
            launch(session, "first")
            launch(session, "second")
        taken = [launch(session, name) for _ in range(10) for name in ("first", "second")]
    assert sum(taken[::2]) - sum(taken[1::2]) in (0, 1)
    assert sum(taken) > 10


def test_launches_that_the_recorder_held_up_are_told_of(tmp_path: Path, monkeypatch):
    back = writer.SegmentWriter._back

    def slowly(*arguments):
        time.sleep(0.001)
        return back(*arguments)

    monkeypatch.setattr(writer, "_ARENA_AT_ONCE", 0)  # pages of one region at a time
    monkeypatch.setattr(writer.SegmentWriter, "_back", slowly)
    with capture(tmp_path, device=AheadDevice()) as session:
        for _ in range(3):
            launch(session)
    timeline = load(tmp_path)
    assert held_up(timeline) == [], "kernels of the CPU backend run on the host anyway"
    (told,) = held_up(replace(timeline, ranks=(replace(timeline.ranks[0], backend="cuda"),)))
    assert (told.severity, told.count) == ("note", 3)
    held_ms = re.search(r"the recorder held up 3 launches by ([\d.]+) ms", told.text)
    assert float(held_ms[1]) >= 1

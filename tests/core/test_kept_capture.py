"""Captures whose device memory a keeper holds, opened as a rank does: whatever dies or hangs, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kept_device import KeptDevice, fork, leave_stand_in, record
from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump, read_dump
from tracekern.errors import BadInput
from tracekern.record.session import capture
from tracekern.segment import keeper
from tracekern.segment.names import list_segments
from tracekern.segment.salvage import find_leftovers, salvage_run
from tracekern.segment.snapshot import snapshot_run
from tracekern.segment.writer import SegmentWriter

LIMIT_S = 120.0
FLIGHT: dict[str, Any] = {"keep": "last", "sink": "device", "max_bytes": 1 << 20, "clocks": False}


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(leave_stand_in(tmp_path / "stand_in")))


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes of the keepers that were started."""
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


def dump_in(directory: Path) -> Dump:
    return read_dump(directory / "rank_00000.tkdump")


def counts_in(directory: Path) -> list[int]:
    return [launch.records_count for launch in dump_in(directory).launches]


def open_sockets() -> set[str]:
    with os.scandir("/proc/self/fd") as entries:
        return {target for entry in entries if (target := os.readlink(entry.path)).startswith("socket:")}


def test_one_capture_after_the_other_leaves_nothing_behind(tmp_path, keepers):
    sockets = open_sockets()
    for number in range(2):
        with capture(tmp_path / str(number), device=KeptDevice(), **FLIGHT) as session:
            assert record(session)
        assert counts_in(tmp_path / str(number)) == [2 * 2 * 3 * 2]
        assert list_segments(session.run_id) == []
        assert keepers[number].returncode == 0
        assert open_sockets() == sockets


@pytest.mark.parametrize("when", ["before", "while it closes"])
def test_a_lost_device_is_the_keepers_to_copy(tmp_path, keepers, when):
    device = KeptDevice()
    with capture(tmp_path / "capture", device=device, **FLIGHT) as session:
        record(session)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a job's end reaches all its processes
            keepers[0].send_signal(number)
        device.memory.lost = "the kernel trapped"
        if when == "before":
            device.error = lambda: device.memory.lost  # type: ignore[method-assign]
    dump = dump_in(tmp_path / "capture")
    assert [launch.records_count for launch in dump.launches] == [24]
    assert not dump.metadata["launches_lost"]
    assert keepers[0].returncode == 0


def test_a_lost_device_and_a_lost_keeper_are_told_and_the_capture_closes(tmp_path, keepers, caplog):
    device = KeptDevice()
    with capture(tmp_path / "capture", device=device, **FLIGHT) as session:
        with session.counting():
            record(session)
        record(session)
        device.memory.lost = "the kernel trapped"
        keepers[0].kill()
        keepers[0].wait()
    dump = dump_in(tmp_path / "capture")
    assert dump.launches == ()
    assert dump.metadata["launches_lost"] == 1
    assert not dump.metadata["counted_text"], "one launch ran outside counting()"
    assert "; lost with its memory: 1 launch" in caplog.text
    assert list_segments(session.run_id) == []


def test_forks_of_the_rank_keep_nobody_waiting(tmp_path, keepers):
    children = []
    try:
        with capture(tmp_path / "capture", device=KeptDevice(), **FLIGHT) as session:
            record(session)
            children.append(fork(lambda: time.sleep(10 * keeper.COLLECT_TIMEOUT_S)))
        assert keepers[0].returncode == 0  # by itself: it was not killed after a minute
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("sink", ["device", "auto"])
def test_a_keeper_that_does_not_come_is_ended(tmp_path, keepers, monkeypatch, caplog, sink):
    sockets = open_sockets()
    monkeypatch.setattr(keeper, "START_TIMEOUT_S", 0.1)
    monkeypatch.setenv("KEEPER_STARTS_IN_S", "60")
    if sink == "device":
        with pytest.raises(BadInput, match="the keeper said nothing .timed out.; take sink='host'"):
            capture(tmp_path / "capture", device=KeptDevice(), **FLIGHT).__enter__()
    else:
        monkeypatch.setattr("tracekern.record.sinks.MAX_HOST_STORES_PER_S", 0.0)
        with capture(tmp_path / "capture", device=KeptDevice(), **(FLIGHT | {"sink": sink})) as session:
            with session.counting():
                record(session)
            record(session)
        assert dump_in(tmp_path / "capture").metadata["sinks"] == {"demo": ["host"]}
        assert "records stay in host memory: the keeper said nothing (timed out)" in caplog.text
    assert keepers[0].returncode == -signal.SIGKILL
    assert open_sockets() == sockets


@pytest.mark.parametrize(("why", "said"), [("", "nothing: it ended"), ("no such GPU", "RuntimeError: no such GPU")])
def test_a_keeper_that_ends_at_once_is_told_with_its_reason(tmp_path, monkeypatch, why, said):
    """It is not waited for: that would end in another line."""
    monkeypatch.setenv("KEEPER_FAILS", why)
    with pytest.raises(BadInput, match=f"the keeper said {said}; take sink='host'"):
        capture(tmp_path / "capture", device=KeptDevice(), **FLIGHT).__enter__()


def test_kernels_found_to_be_dense_record_in_device_memory_from_then_on(tmp_path, monkeypatch):
    """What they recorded in host memory until then stays as it is."""
    monkeypatch.setattr("tracekern.record.sinks.MAX_HOST_STORES_PER_S", 0.0)
    with capture(tmp_path / "capture", device=KeptDevice(), **(FLIGHT | {"sink": "auto"})) as session:
        record(session)
        with session.counting():
            record(session)
        record(session)
        flags = [int(entry["flags"]) for entry in session.segment.recorded_launches()]
        assert [bool(flag & fmt.ENTRY_MIRRORED) for flag in flags] == [False, True]
    assert counts_in(tmp_path / "capture") == [24, 24]


def test_one_that_hangs_is_waited_for_no_longer_than_told(tmp_path, keepers, monkeypatch, caplog):
    monkeypatch.setattr(keeper, "COLLECT_TIMEOUT_S", 0.2)
    monkeypatch.setenv("KEEPER_COPIES_IN_S", "60")
    device = KeptDevice()
    with capture(tmp_path / "capture", device=device, **FLIGHT) as session:
        record(session)
        taker = fork(lambda: snapshot_run(session.run_id, tmp_path / "now"))
        assert os.waitpid(taker, 0)[1] == 0
        device.memory.lost = "the kernel trapped"
    assert dump_in(tmp_path / "now").metadata["launches_lost"] == 1
    assert dump_in(tmp_path / "capture").metadata["launches_lost"] == 1
    assert "the keeper said nothing (timed out)" in caplog.text
    assert keepers[0].returncode == -signal.SIGKILL


def record_until_killed(directory: Path, is_ready: int) -> None:
    os.setsid()
    with capture(directory, device=KeptDevice(), **FLIGHT) as session:
        record(session)
        fork(lambda: time.sleep(2.0))  # and holds what it inherits beyond the rank's end
        os.write(is_ready, session.run_id.encode())
        time.sleep(1000)


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_killed_rank_is_salvaged_though_nobody_has_buried_it(tmp_path, kill):
    """Alone, or with its process group: so a launcher ends ranks that do not end in time."""
    ready, is_ready = os.pipe()
    rank = fork(lambda: record_until_killed(tmp_path / "capture", is_ready))
    run_id = os.read(ready, 100).decode()
    (leftover,) = find_leftovers(run_id)
    assert (leftover.pid, leftover.is_running) == (rank, True)
    kill(rank, signal.SIGKILL)
    os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{rank}").exists()  # a zombie
    deadline = time.monotonic() + LIMIT_S
    while find_leftovers(run_id)[0].is_running:  # until a fork that had not given up its copy of the lock is dead, too
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert salvage_run(run_id) == {0}
    assert counts_in(tmp_path / "capture") == [24]
    assert list_segments(run_id) == []
    os.waitpid(rank, 0)


def test_a_snapshot_of_a_dead_rank_waits_for_its_keeper(tmp_path, monkeypatch):
    monkeypatch.setenv("KEEPER_COPIES_IN_S", "0.5")
    ready, is_ready = os.pipe()
    rank = fork(lambda: record_until_killed(tmp_path / "capture", is_ready))
    run_id = os.read(ready, 100).decode()
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert snapshot_run(run_id, tmp_path / "now") == [0]
    assert counts_in(tmp_path / "now") == [24]
    assert salvage_run(run_id) == {0}


@pytest.mark.parametrize("pid", [1, 1 << 30])
def test_who_records_is_not_told_by_a_pid(tmp_path, pid):
    """It may be that of another container, or one that was given again."""
    ready, is_ready = os.pipe()
    rank = fork(lambda: record_until_killed(tmp_path / "capture", is_ready))
    run_id = os.read(ready, 100).decode()
    (name,) = list_segments(run_id)
    SegmentWriter.attach(name).header["pid"] = pid
    assert find_leftovers(run_id)[0].is_running
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert not find_leftovers(run_id)[0].is_running
    assert salvage_run(run_id) == {0}

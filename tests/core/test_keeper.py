"""The keeper's protocol between real processes, a file in the place of device memory; on GPUs test_gpu_flight.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.captures import EVENT_TABLE, CaptureSpec, make_segment, metadata, removed_after
from tests.kept_device import fork
from tracekern.dump import format as fmt
from tracekern.dump.reader import read_dump
from tracekern.segment.keeper import collect_or_let, keep
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.names import await_segment, hold_segment, remove_segment
from tracekern.segment.pack import write_dump
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter

LIMIT_S = 120.0
PLAN = LaunchPlan(
    name="kernel",
    num_blocks=1,
    warps_per_block=2,
    records_per_track=4,
    blocks=range(1),
    events=json.dumps(EVENT_TABLE).encode(),
    flags=fmt.ENTRY_MIRRORED,
)


class FileMirror:
    """What KeptMirror is on a GPU."""

    def __init__(self, path: Path, arena: int) -> None:
        self._bytes = np.fromfile(path, np.uint8)
        self._arena = arena

    def copy(self, arena: int, offset: int, num_bytes: int) -> None:
        assert arena == self._arena
        target = (np.ctypeslib.ctypes.c_uint8 * num_bytes).from_address(arena + offset)
        target[:] = self._bytes[offset : offset + num_bytes].tolist()


class Pair:
    """A rank and its keeper, two processes; the rank does `act(segment, link)` when a launch stands in the mirror."""

    def __init__(self, directory: Path, act: Callable[[SegmentWriter, socket.socket], None]) -> None:
        self.run_id = f"keeper-{os.getpid()}-{'long' * 30}"  # longer than the address of a socket may be
        self.name = fmt.segment_name(self.run_id, 0)
        self._mirror = directory / "mirror"
        self._ours, self._theirs = socket.socketpair()
        self._act = act
        ready, is_ready = os.pipe()
        self.rank = fork(lambda: self._run_rank(is_ready))
        os.close(is_ready)
        assert os.read(ready, 1) == b"r"
        os.close(ready)
        self._ours.close()
        self._theirs.close()

    def _run_rank(self, is_ready: int) -> None:
        segment = SegmentWriter.create(self.run_id, 0, metadata(CaptureSpec(), 0), 1 << 16)
        (region,) = segment.reserve_regions(PLAN, 1)
        segment.start_launch(region, sequence=0, epoch=0)
        entry = segment.recorded_launches()[0]
        arena_offset = int(segment.header["arena_offset"])
        mirror = np.zeros(int(segment.header["arena_bytes"]), np.uint8)
        headers_at = int(entry["headers_offset"]) - arena_offset
        headers = mirror[headers_at : headers_at + 2 * fmt.TRACK_HEADER.itemsize].view(fmt.TRACK_HEADER)
        headers["start_ticks"], headers["started"], headers["role"] = 100, fmt.STARTED, 3
        mirror.tofile(self._mirror)
        keeper = fork(self._run_keeper)
        self._theirs.close()
        assert self._ours.recv(100) == b"ready\n"
        os.write(is_ready, b"r")
        self._act(segment, self._ours)
        self._ours.close()
        os.waitpid(keeper, 0)

    def _run_keeper(self) -> None:
        self._ours.close()
        segment = SegmentWriter.attach(self.name)
        arena = segment.address + int(segment.header["arena_offset"])
        with hold_segment(self.name):
            keep(segment, self._theirs, FileMirror(self._mirror, arena))

    def entry(self) -> Any:
        """Of the launch."""
        return SegmentView.attach(self.name).launches()[0]

    def roles(self) -> list[int] | None:
        """Of the tracks in a dump made now; None where the launch is lost."""
        assert await_segment(self.name, LIMIT_S)
        path = self._mirror.with_suffix(".tkdump")
        write_dump(path, SegmentView.attach(self.name))
        dump = read_dump(path)
        if not dump.launches:
            assert dump.metadata["launches_lost"] == 1
            return None
        return dump.track_headers(dump.launches[0])["role"].tolist()

    def end(self) -> None:
        remove_segment(self.name)


def wait_to_be_killed(segment: SegmentWriter, link: socket.socket) -> None:
    time.sleep(1000)


def fork_and_wait_to_be_killed(segment: SegmentWriter, link: socket.socket) -> None:
    """A child that lives on holds the rank's end of the link open."""
    fork(lambda: time.sleep(3.0))
    wait_to_be_killed(segment, link)


@pytest.mark.parametrize("act", [wait_to_be_killed, fork_and_wait_to_be_killed])
def test_what_a_killed_rank_recorded_is_collected(tmp_path, act):
    pair = Pair(tmp_path, act)
    try:
        assert not await_segment(pair.name, 0.2)  # its keeper is there
        os.kill(pair.rank, signal.SIGKILL)
        os.waitpid(pair.rank, 0)
        killed_ns = time.monotonic_ns()
        assert pair.roles() == [3, 3]
        died_ns = int(SegmentView.attach(pair.name).header["died_ns"])
        assert abs(died_ns - killed_ns) < LIMIT_S * 1e9
    finally:
        pair.end()


def collect_and_stay(segment: SegmentWriter, link: socket.socket) -> None:
    link.sendall(b"collect\n")
    assert link.recv(100) == b"done\n"
    found = segment.track_headers(segment.recorded_launches()[0])
    assert found["role"].tolist() == [3, 3]
    found["role"] = 7  # a second copy would undo it


def close_without_it(segment: SegmentWriter, link: socket.socket) -> None:
    segment.header["state"] = fmt.SegmentState.CLOSED


@pytest.mark.parametrize(("act", "left"), [(collect_and_stay, [7, 7]), (close_without_it, None)])
def test_it_collects_when_it_is_told_and_not_twice(tmp_path, act, left):
    pair = Pair(tmp_path, act)
    try:
        assert os.waitpid(pair.rank, 0)[1] == 0
        assert pair.roles() == left
    finally:
        pair.end()


def test_without_a_keeper_a_lost_device_is_told_and_nothing_counts_as_collected():
    with removed_after(make_segment("keeper-test", 1 << 16)) as segment:

        def fail() -> None:
            raise RuntimeError("the device is lost")

        with pytest.raises(RuntimeError, match="the device is lost"):
            collect_or_let(segment, fail, None)
        assert not segment.header["collected"]
        collect_or_let(segment, lambda: None, None)
        assert segment.header["collected"]

"""A descriptor that several launches used: every start of a track is on record, whoever wrote there last."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import TrackWriter
from tracekern import _core
from tracekern.record.session import Capture, capture
from tracekern.timeline.load import load

FORMATS = {
    "span": {},
    "cycles": {"clock": "cycles"},
    "ring": {"keep": "last", "records_per_track": 8},
    "recycled": {"keep": "last", "records_per_track": 8, "max_bytes": 1 << 13},
}
LAUNCHES_BEFORE = {"recycled": 60}
"""Enough to have every region of the capture used again."""


MEMORY = np.zeros(3 * _core.heap_control_bytes, np.uint8)


@pytest.fixture
def ranks() -> list[_core.CpuCommunicator]:
    """Two ranks on one heap, whose barrier is a kernel of one warp each."""
    first = -(-MEMORY.ctypes.data // _core.heap_control_bytes) * _core.heap_control_bytes
    heaps = [first, first + _core.heap_control_bytes]
    return [_core.CpuCommunicator(rank, heaps, timeout_ns=60_000_000_000) for rank in range(2)]


def barrier(ranks: list[_core.CpuCommunicator], *descriptors: int) -> None:
    """The kernels of both run at the same time: each waits for the other."""
    threads = [
        threading.Thread(target=rank.barrier, kwargs={"descriptor": descriptor})
        for rank, descriptor in zip(ranks, descriptors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def launch(session: Capture) -> int:
    return session.launch("barrier", grid=1, warps=1, events=_core.barrier_event_table()).descriptor


@contextlib.contextmanager
def one_launch(directory: Path, ranks: list[_core.CpuCommunicator], recorded: str) -> Iterator[int]:
    """Its descriptor, while the capture is open."""
    with capture(directory, **FORMATS[recorded]) as session:
        for _ in range(LAUNCHES_BEFORE.get(recorded, 0)):
            barrier(ranks, launch(session), 0)
        yield launch(session)


def shared(directory: Path) -> list[str]:
    return [problem.text for problem in load(directory).problems if problem.kind == "shared_tracks"]


@pytest.mark.parametrize("recorded", FORMATS)
@pytest.mark.parametrize("times", [1, 2, 10])
def test_launches_in_succession_with_one_descriptor_are_told(tmp_path: Path, ranks, recorded: str, times: int):
    """What the last launch records covers all that the first did: the region itself shows one writer."""
    with one_launch(tmp_path, ranks, recorded) as descriptor:
        for _ in range(times):
            barrier(ranks, descriptor, 0)
    told = shared(tmp_path)
    assert [text.split(": ")[1].split(",")[0] for text in told] == (
        ["1 launch of barrier had several writers of 1 track"] if times > 1 else []
    )


@pytest.mark.parametrize("recorded", FORMATS)
def test_launches_at_the_same_time_with_one_descriptor_are_told(tmp_path: Path, ranks, recorded: str):
    with one_launch(tmp_path, ranks, recorded) as descriptor:
        barrier(ranks, descriptor, descriptor)
    assert len(shared(tmp_path)) == 1


@pytest.mark.parametrize("recorded", FORMATS)
def test_launches_at_the_same_time_with_their_own_descriptors_are_not(tmp_path: Path, ranks, recorded: str):
    with capture(tmp_path, **FORMATS[recorded]) as session:
        for _ in range(40):
            barrier(ranks, launch(session), launch(session))
    assert shared(tmp_path) == []


@pytest.mark.parametrize("recorded", ["span", "ring", "recycled"])
def test_a_second_launch_that_hangs_is_told_by_what_the_first_left(tmp_path: Path, ranks, recorded: str):
    with one_launch(tmp_path, ranks, recorded) as descriptor:
        barrier(ranks, descriptor, 0)
        TrackWriter(descriptor, 0, 0).begin(1)
    assert len(shared(tmp_path)) == 1

"""Regions used again under a device that lags behind its host: nobody's records are mixed up, none are lost too early.

The device does what it is told in tiny steps, whenever the test lets it; its marks pass when it comes to them.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.captures import EVENT_TABLE, CaptureSpec, metadata
from tests.kernels import descriptor_of, memory
from tracekern import _core
from tracekern.comm.devices.device import HostDevice, HostMemory, HostStreams
from tracekern.dump import format as fmt
from tracekern.dump.reader import read_dump
from tracekern.record.launches import Kernel, Launches
from tracekern.record.selection import Selection
from tracekern.record.session import capture
from tracekern.record.sinks import SinkChoice
from tracekern.segment import pack
from tracekern.segment.keeper import collect_mirrored
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter

TABLE = json.dumps(EVENT_TABLE)
SLOTS = 4
WARPS = 2
STREAMS = (0, 7)
KERNELS = ("send", "receive", "reduce")
START = 5 << fmt.LAP_SHIFT | (1 << fmt.LAP_SHIFT) - 300  # the 48 bits of a ring's times wrap in the middle
NEVER = 1 << 30


@dataclass
class Work:
    """A launch, as the device sees it. plan: of each warp how many records it makes; -1: it never starts a track."""

    name: str
    sequence: int
    descriptor: np.ndarray
    """By value: what the host writes there later is not for this launch."""
    address: int
    plan: tuple[int, ...]
    hangs: bool
    made: dict[int, int] = field(default_factory=dict)
    """Track -> its records so far, once it has started."""
    ended: set[int] = field(default_factory=set)

    @property
    def is_through(self) -> bool:
        return len(self.ended) == WARPS

    @property
    def is_first(self) -> bool:
        """Whether no launch had the region before."""
        return not int(self.descriptor["generation"])

    @property
    def tag(self) -> int:
        return self.sequence << 4 | KERNELS.index(self.name)


class LateStreams(HostStreams):
    """Streams of launches and marks, each of which goes on when the test says so."""

    max_regions_ahead = 4

    def __init__(self) -> None:
        self.queues: dict[int, deque[Any]] = defaultdict(deque)

    def mark(self, stream: int) -> Callable[[], bool]:
        passed: list[bool] = []
        self.queues[stream].append(passed)
        self.pass_marks(stream)
        return lambda: bool(passed)

    def pass_marks(self, stream: int) -> None:
        queue = self.queues[stream]
        while queue and (isinstance(queue[0], list) or queue[0].is_through):
            head = queue.popleft()
            if isinstance(head, list):
                head.append(True)


class HastyStreams(LateStreams):
    """The fault to be found: its marks pass at once."""

    def mark(self, stream: int) -> Callable[[], bool]:
        return lambda: True


class MirrorOfBytes(HostMemory):
    """Its mirror is an array of this process."""

    def __init__(self) -> None:
        self.mirror = self
        self.bytes = b""

    def attach(self, segment: SegmentWriter) -> None:
        self.arena = segment.address + int(segment.header["arena_offset"])
        self.bytes = np.zeros(int(segment.header["arena_bytes"]), np.uint8)

    def offset(self) -> int:
        return (self.bytes.ctypes.data - self.arena) % (1 << 64)


class LateDevice(HostDevice):
    """Does one store of a launch at a time."""

    def __init__(self, ring: bool, streams: type[LateStreams] = LateStreams) -> None:
        super().__init__()
        self.ring = ring
        self.now = START
        self.streams = streams()
        self.memory = MirrorOfBytes()

    def step(self, stream: int, warp: int) -> None:
        """One store of one warp of the launch at work."""
        queue = self.streams.queues[stream]
        if queue:
            self.work(queue[0], warp)
            self.streams.pass_marks(stream)

    def work(self, work: Work, warp: int) -> None:
        self.now += 1
        launch = work.descriptor
        header = memory(int(launch["headers"]) + warp * fmt.TRACK_HEADER.itemsize, fmt.TRACK_HEADER)
        if warp in work.ended:
            return
        if work.plan[warp] < 0:
            work.ended.add(warp)
        elif warp not in work.made:
            work.made[warp] = 0
            header["start_ticks"], header["role"] = self.now, 0
            header["started"] = (fmt.STARTED_RING if self.ring else fmt.STARTED) | int(launch["generation"])
        elif work.made[warp] < work.plan[warp]:
            self.record(work, warp)
        elif not work.hangs:
            work.ended.add(warp)
            header["end_ticks"], header["attempted"] = self.now, work.made[warp]
            room = SLOTS if work.is_first else 0  # a body of spans stores nothing in a region used before
            header["written"] = work.made[warp] if self.ring else min(work.made[warp], room)

    def record(self, work: Work, warp: int) -> None:
        at = int(work.descriptor["records"]) + warp * SLOTS * fmt.WIDE_RECORD.itemsize
        lap, slot = divmod(work.made[warp], SLOTS)
        word = fmt.RecordKind.MARK | work.tag << fmt.PAYLOAD_SHIFT
        if self.ring:
            low = self.now % (1 << fmt.LAP_SHIFT)
            memory(at, fmt.WIDE_RECORD, SLOTS)[slot] = (lap << fmt.LAP_SHIFT | low, work.made[warp], word)
        elif lap == 0 and work.is_first:
            low = self.now & 0xFFFFFFFF
            memory(at, fmt.SPAN_RECORD, SLOTS)[slot] = (low, work.made[warp], low, word)
        work.made[warp] += 1


class Flight:
    """A flight recorder and its model: every launch ever asked for, and which of them a look must find."""

    def __init__(self, path: Path, device: LateDevice, sink: str, arena_bytes: int) -> None:
        self.path = path / "rank_00000.tkdump"
        self.device = device
        self.segment = SegmentWriter.create(
            f"recycle-{os.getpid()}-{id(self):x}", 0, metadata(CaptureSpec(), 0), arena_bytes
        )
        self.segment.unlink()
        device.memory.attach(self.segment)
        selection = Selection(records_per_track=SLOTS, keep="last")
        self.launches = Launches(self.segment, device, selection, SinkChoice(sink, True, together=True))
        self.sequence: dict[str, int] = defaultdict(int)
        self.holder: dict[int, Work] = {}
        """Address of a descriptor -> the launch that has it."""
        self.pools: dict[tuple[str, int], deque[Work]] = defaultdict(deque)

    def burst(self, stream: int, wanted: list[tuple[int, tuple[int, ...], bool]], tells: bool = True) -> int:
        """Asks for launches, all before the first is started; how many were refused."""
        asked = []
        for number, (kernel, plan, hangs) in enumerate(wanted):
            name = KERNELS[kernel]
            is_idle = not self.device.streams.queues[stream]
            ahead = tells and number > 0
            address = self.launches.take(Kernel(name, 1, WARPS, stream, TABLE, ()), 0, ahead)
            pool = self.pools[name, stream]
            if address:
                descriptor = descriptor_of(address).copy()
                work = Work(name, self.sequence[name], descriptor, address, plan, hangs)
                held = self.holder.get(address)
                assert held is None or held.is_through, "a region was handed out whose launch may still run"
                assert held is None or pool.popleft() is held, "it was not the oldest"
                self.holder[address] = work
                pool.append(work)
                asked.append(work)
            else:
                assert not pool or ahead or not is_idle, "a launch was refused, and no launch is in flight"
            self.sequence[name] += 1
        self.device.streams.queues[stream].extend(asked)
        return len(wanted) - len(asked)

    def look(self) -> None:
        """What a dump made now has of each launch is what that launch has recorded so far."""
        copy: Callable[[int, int], Any] = lambda offset, num_bytes: ctypes.memmove(  # noqa: E731
            self.device.memory.arena + offset, self.device.memory.bytes.ctypes.data + offset, num_bytes
        )
        collect_mirrored(self.segment, copy)
        self.segment.header["collected"] = 1
        write_dump(self.path, self.segment)
        dump = read_dump(self.path)
        wanted = {(work.name, work.sequence): work for work in self.holder.values()}
        assert {(entry.name, entry.sequence) for entry in dump.launches} == set(wanted)
        for entry in dump.launches:
            work = wanted[entry.name, entry.sequence]
            headers = dump.track_headers(entry)
            size = entry.records_count * fmt.RECORD_BYTES
            dtype = fmt.WIDE_RECORD if self.device.ring else fmt.SPAN_RECORD
            records = dump.payload[entry.records_offset : entry.records_offset + size].view(dtype)
            assert np.flatnonzero(headers["started"]).tolist() == sorted(work.made)
            of_tracks = np.split(records, np.cumsum(headers["written"])[:-1])
            for warp, found in enumerate(of_tracks):
                count = work.made.get(warp, 0) if self.device.ring or work.is_first else 0
                first = max(count - SLOTS, 0) if self.device.ring else 0
                assert (found["word"] >> fmt.PAYLOAD_SHIFT == work.tag).all()
                assert found["payload_high"].tolist() == list(range(first, min(count, first + SLOTS)))
                assert bool(headers["finished"][warp]) == (warp in work.ended and warp in work.made)


PLANS = st.tuples(*[st.integers(-1, 6)] * WARPS)
BURSTS = st.tuples(
    st.just("burst"),
    st.sampled_from(STREAMS),
    st.lists(st.tuples(st.integers(0, 2), PLANS, st.sampled_from([False] * 19 + [True])), min_size=1, max_size=6),
)
RUNS = st.tuples(st.just("run"), st.sampled_from(STREAMS), st.integers(0, 60))
Actions = list[tuple[str, int, Any]]


def play(flight: Flight, actions: Actions, tells: bool = True) -> int:
    refused = 0
    for turn, (action, stream, what) in enumerate(actions):
        if action == "burst":
            refused += flight.burst(stream, what, tells)
        for step in range(what if action == "run" else 0):
            flight.device.step(stream, (step + turn) % WARPS)
        flight.look()
    return refused


@given(
    actions=st.lists(st.one_of(BURSTS, RUNS), min_size=15, max_size=40),
    ring=st.booleans(),
    sink=st.sampled_from(["host", "device"]),
    arena_bytes=st.sampled_from([1 << 12, 1 << 13]),
)
def test_regions_are_used_again_and_never_too_early(tmp_path_factory, actions, ring, sink, arena_bytes):
    play(Flight(tmp_path_factory.getbasetemp(), LateDevice(ring), sink, arena_bytes), actions)


def random_actions(seed: int) -> Iterator[tuple[str, int, Any]]:
    """Much more of the same, with bursts and runs in balance."""
    rng = random.Random(seed)
    for _ in range(60):
        stream = rng.choice(STREAMS)
        plans = [tuple(rng.randint(-1, 6) for _ in range(WARPS)) for _ in range(rng.randint(1, 6))]
        yield "burst", stream, [(rng.randrange(3), plan, False) for plan in plans]
        yield "run", stream, rng.randrange(80)


@pytest.mark.parametrize("ring", [False, True])
def test_a_long_flight_refuses_some_and_records_most(tmp_path, ring):
    flight = Flight(tmp_path, LateDevice(ring), "device", 1 << 13)
    refused = play(flight, list(random_actions(1)))
    launched = sum(flight.sequence.values())
    assert len(flight.holder) < launched // 4  # regions went round
    assert 0 < refused < launched // 2


BURST = ["first", "second", "second"]


@pytest.mark.parametrize(
    ("every", "bursts", "traced"),
    [
        (1, [["only"]] * 3, [True] * 3),
        (1, [["only"] * 4] * 3, [True, True, False, False] * 3),
        # No room was left for the first; the last two of a burst find one mark, and then all they need.
        (1, [["second"]] * 2 + [BURST] * 3, [True, True] + [False, True, False] + [False, True, True] * 2),
        (2, [["first"]] + [BURST] * 3, [True, False, True, False, True, True, False, False, True, False]),
    ],
)
def test_whatever_comes_first_in_a_burst_the_others_get_their_regions_back(tmp_path, every, bursts, traced):
    """Marks stand before the first launch of a burst only, also where that one is not recorded. Room for two."""
    with capture(tmp_path, device=HostDevice(), keep="last", every=every, max_bytes=12 << 10) as session:
        found = [
            session.launch(name, grid=1, warps=1, events=TABLE, ahead=number > 0).traced
            for burst in bursts
            for number, name in enumerate(burst)
        ]
    assert found == traced


def test_counting_in_a_full_flight_recorder_takes_no_region_away(tmp_path):
    with capture(tmp_path, device=HostDevice(), keep="last", max_bytes=12 << 10) as session:
        for _ in range(4):
            assert session.launch("only", grid=1, warps=1, events=TABLE).traced
        with session.counting():
            session.launch("only", grid=1, warps=1, events=TABLE)
        assert session.launch("only", grid=1, warps=1, events=TABLE).traced
    assert [launch.sequence for launch in read_dump(tmp_path / "rank_00000.tkdump").launches] == [3, 4]


def test_after_4294967296_launches_it_goes_on(tmp_path):
    with capture(tmp_path, device=HostDevice(), keep="last", max_bytes=12 << 10) as session:
        session.segment.host_words[0] = (1 << 32) - 1
        launches = session._launches
        launches._counters["only", None] = launches.table.add_counter()
        launches.table.set_count(launches._counters["only", None], (1 << 32) - 1)
        assert all(session.launch("only", grid=1, warps=1, events=TABLE).traced for _ in range(4))
    assert [launch.sequence for launch in read_dump(tmp_path / "rank_00000.tkdump").launches] == [1, 2]


@pytest.mark.parametrize("fault", ["marks pass too early", "generations are not compared", "bursts are not told"])
def test_what_it_would_find(tmp_path, monkeypatch, fault):
    streams = HastyStreams if fault == "marks pass too early" else LateStreams
    if fault == "generations are not compared":
        monkeypatch.setattr(pack, "is_of_launch", lambda _, headers: np.ones(len(headers), bool))

    def play_all() -> None:
        for seed in range(20):
            flight = Flight(tmp_path, LateDevice(False, streams), "host", 1 << 12)
            play(flight, list(random_actions(seed)), tells=fault != "bursts are not told")

    with pytest.raises(AssertionError):
        play_all()


def test_a_stream_is_asked_for_its_progress_when_that_decides():
    marks: list[bool] = []

    def mark() -> Callable[[], bool]:
        marks.append(False)
        return lambda: marks[0]

    progress = _core.StreamProgress(mark)
    for _ in range(5):
        progress.before_launch(ahead=False)
        last = progress.count(spacing=1 << 30)
    assert marks == []
    assert not progress.is_through(last)
    assert marks == [False]
    marks[0] = True
    assert progress.is_through(last)
    assert progress.is_through(0)
    assert marks == [True]

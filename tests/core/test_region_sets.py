"""Regions of a graph's replays in a flight recorder, used again under a GPU that lags behind its host.

The GPU does what csrc/trace/graph.h does, whenever the test lets it; tests/cpp/graph.cpp has the same with the real
nodes, tests/core/test_graphs_gpu.py with a GPU.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.captures import EVENT_TABLE, make_segment, removed_after
from tests.kernels import memory
from tracekern.dump import format as fmt
from tracekern.dump.reader import read_dump
from tracekern.record.regions import RegionSets
from tracekern.segment import writer as segment_module
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter

NUM_LAUNCHES = 2
PLANS = [
    LaunchPlan(
        f"decode/{name}", 1, 1, 120, blocks=range(1), events=json.dumps(EVENT_TABLE).encode(), flags=fmt.ENTRY_IN_GRAPH
    )
    for name in ("first", "second")
]
SET_BYTES = sum(plan.region_bytes for plan in PLANS)
assert SET_BYTES == 4096, "a page, or there would be room for more"
ADDRESS_MASK = (1 << fmt.ADDRESS_BITS) - 1


class LateGpu:
    """The ring, and the replays that were asked for. One replay is under way at a time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.ring: deque[np.ndarray] = deque()
        self.num_placed = self.num_fetched = self.num_used = 0
        self.asked = self.begun = 0
        self.next: np.ndarray | None = None
        self.running: np.ndarray | None = None
        self.recorded: list[int] = []
        """Replays that got a set, counted from 1."""

    def place(self, regions: int) -> bool:
        if self.num_placed - self.num_fetched == self.slots:
            return False
        self.ring.append(memory(regions, fmt.REGION, NUM_LAUNCHES).copy())
        self.num_placed += 1
        return True

    def fetch(self) -> None:
        if self.next is None and self.ring:
            self.next = self.ring.popleft()
            self.num_fetched += 1

    def step(self) -> None:
        """Begins the next replay; the one before is through by then."""
        self.finish()
        if self.begun == self.asked:
            return
        self.begun += 1
        self.fetch()
        self.running, self.next = self.next, None
        if self.running is not None:
            self.recorded.append(self.begun)
            for region in self.running:
                header = memory(int(region["headers"]) & ADDRESS_MASK, fmt.TRACK_HEADER)
                descriptor = int(region["headers"] & ADDRESS_MASK) - fmt.LAUNCH_DESCRIPTOR.itemsize
                memory(descriptor, fmt.LAUNCH_DESCRIPTOR)["replay"] = self.begun
                header["started"] = fmt.STARTED_RING | int(region["headers"]) >> fmt.ADDRESS_BITS
                header["start_ticks"] = 10 * self.begun
                word = fmt.RecordKind.MARK | self.begun << fmt.PAYLOAD_SHIFT
                memory(int(region["records"]), fmt.WIDE_RECORD)[0] = (10 * self.begun + 1, 0, word)
        self.fetch()
        self.num_used = len(self.recorded)

    def finish(self) -> None:
        for region in () if self.running is None else self.running:
            header = memory(int(region["headers"]) & ADDRESS_MASK, fmt.TRACK_HEADER)
            header["end_ticks"], header["written"], header["attempted"] = 10 * self.begun + 2, 1, 1
        self.running = None


@contextmanager
def flight(
    num_sets: int, slots: int = 64, recycles: bool = True
) -> Iterator[tuple[SegmentWriter, LateGpu, RegionSets]]:
    """Room for so many sets."""
    tables = fmt.align_up(len(PLANS[0].events)) + fmt.align_up(len(PLANS[0].roles))
    with removed_after(make_segment("sets-test", num_sets * SET_BYTES + tables, host_spans=0)) as segment:
        gpu = LateGpu(slots)
        yield segment, gpu, RegionSets(segment, gpu, PLANS, 0, 32, recycles)


def replay(gpu: LateGpu, sets: RegionSets, times: int) -> None:
    """By a host that waits for each."""
    for _ in range(times):
        sets.lay_ready()
        gpu.asked += 1
        gpu.step()


def replays_on_record(segment: SegmentWriter, path: Path) -> list[int]:
    """Counted from 1; checks that each holds its own records and no others."""
    write_dump(path, segment)
    dump = read_dump(path)
    found = []
    for launch in dump.launches:
        (header,) = dump.track_headers(launch)
        assert launch.records_count == 1
        record = dump.payload[launch.records_offset :][: fmt.RECORD_BYTES].view(fmt.WIDE_RECORD)[0]
        assert int(record["word"]) >> fmt.PAYLOAD_SHIFT == launch.sequence + 1 == int(header["start_ticks"]) // 10
        found.append(launch.sequence + 1)
    assert found[::NUM_LAUNCHES] == found[1::NUM_LAUNCHES]
    return found[::NUM_LAUNCHES]


def test_the_last_replays_are_kept(tmp_path: Path):
    with flight(num_sets=6) as (segment, gpu, sets):
        for _ in range(100):
            segment.host_words[0] += 1  # other launches in between
            sets.lay_ready()
            gpu.asked += 1
            gpu.step()
        assert gpu.recorded == [*range(1, 101)], "none ran unrecorded"
        assert replays_on_record(segment, tmp_path / "dump") == [*range(96, 101)], "one set lies ready"


def test_without_a_flight_recorder_the_first_replays_are_kept(tmp_path: Path):
    with flight(num_sets=6, recycles=False) as (segment, gpu, sets):
        replay(gpu, sets, 20)
        assert replays_on_record(segment, tmp_path / "dump") == gpu.recorded == [*range(1, 7)]
        assert sets.without_room == 20 - 6


@pytest.mark.parametrize("recycles", [False, True])
def test_replays_that_find_all_slots_taken_are_told_apart_from_those_without_room(recycles: bool):
    with flight(num_sets=9, slots=3, recycles=recycles) as (_, gpu, sets):
        for _ in range(10):
            sets.lay_ready()
            gpu.asked += 1
        for _ in range(10):
            gpu.step()
        assert gpu.recorded == [1, 2, 3]
        assert (sets.without_slot, sets.without_room) == (10 - 3, 0)


def test_replays_leave_room_for_other_kernels(monkeypatch):
    monkeypatch.setattr(segment_module, "_CARRY_BYTES", 1 << 60)  # a multiple of 4 GiB inside makes a batch smaller
    with flight(num_sets=1000, recycles=False) as (segment, gpu, sets):
        reserved = [0]
        for _ in range(100):
            replay(gpu, sets, 1)
            reserved.append(int(segment.header["num_launches"]) // NUM_LAUNCHES)
        assert sorted(set(reserved)) == [0, 8, 24, 56, 88, 120], "batches of 8, 16, and then of 32"


def test_where_a_batch_is_cut_short_no_region_is_left_over(monkeypatch):
    """Of the first launches of a graph there were more regions than of the last, and replays ran unrecorded."""
    monkeypatch.setattr(segment_module, "_CARRY_BYTES", 10 * SET_BYTES)
    with flight(num_sets=200, recycles=False) as (segment, gpu, sets):
        replay(gpu, sets, 300)
        assert sets.without_room
        assert int(segment.header["num_launches"]) // NUM_LAUNCHES == len(gpu.recorded)


def test_where_a_graph_finds_no_room_it_takes_none():
    with flight(num_sets=2, recycles=False) as (segment, gpu, sets):
        segment.reserve_regions(PLANS[0], 2)
        replay(gpu, sets, 5)
        assert PLANS[0].region_bytes < segment.arena_room < SET_BYTES, "enough for one of its launches"
        assert sets.without_room == 4


def test_a_full_capture_says_that_no_set_will_ever_come():
    with flight(num_sets=6, recycles=False) as (_, gpu, sets):
        said = []
        for _ in range(20):
            said.append(sets.lay_ready())
            gpu.asked += 1
            gpu.step()
        assert said == [True] * 6 + [False] * 14, "the early one is used first"


@pytest.mark.parametrize(("num_sets", "recorded"), [(0, 0), (1, 1)])
def test_a_flight_recorder_with_too_few_sets_to_use_one_again_says_so(num_sets: int, recorded: int):
    with flight(num_sets) as (_, gpu, sets):
        said = []
        for _ in range(20):
            said.append(sets.lay_ready())
            gpu.asked += said[-1]
            gpu.step()
        assert said == [True] * recorded + [False] * (20 - recorded)
        assert len(gpu.recorded) == recorded


def test_the_fewest_sets_are_enough_for_a_host_that_waits_for_each_replay():
    with flight(num_sets=2) as (_, gpu, sets):
        assert sets.fewest == 2
        for _ in range(40):
            assert sets.lay_ready()
            gpu.asked += 1
            gpu.step()
        assert len(gpu.recorded) == 40


def test_a_host_that_is_late_is_not_a_full_capture():
    with flight(num_sets=9, slots=3, recycles=False) as (_, _, sets):
        assert all(sets.lay_ready() for _ in range(10))
        assert sets.without_slot


def test_what_led_to_a_hang_is_kept_however_far_the_host_goes_on(tmp_path: Path):
    with flight(num_sets=8) as (segment, gpu, sets):
        replay(gpu, sets, 30)
        for _ in range(100):
            sets.lay_ready()
            gpu.asked += 1
        assert replays_on_record(segment, tmp_path / "dump") == [*range(27, 31)]


@given(
    num_sets=st.integers(1, 9),
    slots=st.integers(1, 12),
    asked=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=5, max_size=40),
)
def test_no_replay_loses_its_regions_while_it_runs(tmp_path_factory, num_sets, slots, asked):
    path = tmp_path_factory.mktemp("sets") / "dump"
    with flight(num_sets, slots) as (segment, gpu, sets):
        for num_replays, num_steps in asked:
            for _ in range(num_replays):
                sets.lay_ready()
                gpu.asked += 1
            for _ in range(num_steps):
                gpu.step()
            found = replays_on_record(segment, path)
            assert found == gpu.recorded[len(gpu.recorded) - len(found) :], "the last that got a set, without a gap"
            assert not gpu.recorded or found, "the one under way is there, or the last one"
            if len(gpu.recorded) >= num_sets:
                assert len(found) >= num_sets // 2

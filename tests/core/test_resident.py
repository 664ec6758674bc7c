"""Resident ranks: messages, launches that go together, and runs and captures of several ranks in one process."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracekern
from tests.waiting import wait_until
from tracekern.comm.devices.this_thread import rank_of_thread
from tracekern.comm.ranks import resident
from tracekern.comm.ranks.group import Group
from tracekern.comm.ranks.resident import Residents
from tracekern.errors import BadInput, PeerLost
from tracekern.gate.run import read_run
from tracekern.launcher.launch import RankExit, launch_ranks
from tracekern.launcher.watch import Limits
from tracekern.record.session import capture, open_capture
from tracekern.timeline.decode.problems import _fault_text

LIMIT_S = 60.0


class Recorded:
    """A gate that notes what it was asked, beside the launches."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def hold(self, stream: int) -> None:
        self.events.append(("hold", stream))

    def open(self) -> None:
        self.events.append("open")


def on_ranks(num_ranks: int, function: Callable[[], Any], gate: Recorded | None = None) -> list[Any]:
    """What each rank returned, or the exception that it raised."""
    residents = Residents(num_ranks, lambda: gate or Recorded())
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        with residents.as_rank(rank):
            try:
                results[rank] = function()
            except Exception as error:  # noqa: BLE001 - a test looks at it
                results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def test_ranks_hear_each_other_in_every_group():
    def talk() -> list[list[Any]]:
        first, second = Group.discover(), Group.discover()
        heard = [group.all_gather([turn, group.rank]) for turn in range(50) for group in (first, second)]
        first.barrier()
        return heard

    wanted = [[[turn, rank] for rank in range(5)] for turn in range(50) for _ in range(2)]
    assert on_ranks(5, talk) == [wanted] * 5


def test_values_arrive_as_between_processes():
    heard = on_ranks(2, lambda: Group.discover().all_gather((b"\0", (1, None))))
    assert heard == [[[b"\0", [1, None]]] * 2] * 2


def test_a_rank_that_has_ended_is_missed_at_once():
    def leave() -> Any:
        group = Group.discover()
        return None if rank_of_thread() == 1 else group.all_gather(0)

    started = time.monotonic()
    first, _, third = on_ranks(3, leave)
    assert time.monotonic() - started < LIMIT_S
    assert isinstance(first, PeerLost)
    assert isinstance(third, PeerLost)
    texts = {str(first), str(third)}
    assert any("do not answer (rank 1 ended)" in text for text in texts), texts


def test_a_rank_that_is_late_is_named():
    has_given_up = threading.Event()

    def come_late() -> Any:
        group = Group.discover()
        if group.rank == 0:
            has_given_up.wait()
        try:
            return group.barrier(timeout_s=0.1)
        finally:
            has_given_up.set()

    first, second = on_ranks(2, come_late)
    assert str(second) == "rank 1: the other ranks do not answer (rank 0 came too late)"
    assert isinstance(first, PeerLost)


def launch(gate: Recorded, num_kernels: int, group: Group, timeout_s: float = 10.0) -> None:
    def run(first: int, last: int) -> None:
        gate.events.append((group.rank, first, last))

    group.launch(group.rank, num_kernels, run, timeout_s)


def test_each_kernel_is_launched_for_all_ranks_before_the_next():
    gate = Recorded()

    def call() -> None:
        group = Group.discover()
        for _ in range(20):
            launch(gate, 2, group)

    assert on_ranks(3, call, gate) == [None] * 3
    per_call = 3 + 6 + 1
    assert len(gate.events) == 20 * per_call
    for first in range(0, len(gate.events), per_call):
        held, launched = gate.events[first : first + 3], gate.events[first + 3 : first + 9]
        assert sorted(held) == [("hold", rank) for rank in range(3)]
        assert [kernel for _, kernel, _ in launched] == [0, 0, 0, 1, 1, 1]
        assert sorted(launched[:3]) == [(rank, 0, 1) for rank in range(3)]
        assert gate.events[first + 9] == "open"


def test_groups_talk_and_launch_without_the_others():
    gate = Recorded()

    def call() -> Any:
        rank = rank_of_thread()
        if rank == 4:
            return None  # of no group, and gone at once
        group = Group.of([2, 0] if rank % 2 == 0 else [1, 3])
        both = Group.of([0, 1, 2, 3])
        for _ in range(10):
            group.launch(rank, 1, lambda first, last: gate.events.append(rank), 1e6)
        return group.all_gather(group.world_rank), group.rank, group.num_residents, both.all_gather(rank)

    heard = on_ranks(5, call, gate)
    assert heard[:4] == [([rank % 2, rank % 2 + 2], rank // 2, 5, [0, 1, 2, 3]) for rank in range(4)]
    calls = [gate.events[first : first + 5] for first in range(0, len(gate.events), 5)]
    assert all(gate.events[idx] == "open" for idx in range(4, len(gate.events), 5))
    assert sorted(sorted(event for event in call if isinstance(event, int)) for call in calls) == (
        [[0, 2]] * 10 + [[1, 3]] * 10
    )


def test_a_group_without_this_rank_is_refused():
    def wrong() -> None:
        Group.of([(rank_of_thread() + 1) % 3])

    for rank, error in enumerate(on_ranks(3, wrong)):
        assert f"some of 0 to 2, each once, rank {rank} among them" in str(error)


def test_kernels_start_without_a_rank_that_is_late_or_gone(monkeypatch):
    monkeypatch.setattr(resident, "LATE_S", 0.2)
    gate = Recorded()

    def call() -> None:
        group = Group.discover()
        if group.rank == 2:
            return
        if group.rank == 1:
            wait_until(lambda: (0, 0, 1) in gate.events)
            monkeypatch.setattr(resident, "LATE_S", 1e6)
        launch(gate, 1, group)  # rank 1 comes when rank 0 has been launched
        launch(gate, 1, group, 1e6)  # and both together again

    assert on_ranks(3, call, gate) == [None] * 3
    assert gate.events[:2] == [(0, 0, 1), (1, 0, 1)]
    assert sorted(gate.events[2:4]) == [("hold", 0), ("hold", 1)]
    assert sorted(gate.events[4:6]) == [(0, 0, 1), (1, 0, 1)]


def test_after_a_call_of_one_rank_alone_launches_are_aligned_again(monkeypatch):
    monkeypatch.setattr(resident, "LATE_S", 0.1)
    gate = Recorded()

    def call() -> None:
        group = Group.discover()
        if group.rank == 0:
            launch(gate, 1, group)
        group.barrier()
        group.align_launches()
        group.barrier()
        monkeypatch.setattr(resident, "LATE_S", 1e6)
        for _ in range(10):
            launch(gate, 1, group, 1e6)  # would wait for ever for a rank that is one launch behind

    assert on_ranks(2, call, gate) == [None] * 2
    assert gate.events.count("open") == 10


def test_no_garbage_is_collected_while_streams_are_held():
    """Memory of a buffer that it freed would wait for them, in the thread that is to launch what they wait for."""
    seen: list[bool] = []

    def call() -> None:
        Group.discover().launch(0, 2, lambda first, last: seen.append(gc.isenabled()), 10.0)

    assert on_ranks(2, call) == [None] * 2
    assert (seen, gc.isenabled()) == ([False] * 4, True)


def test_a_launch_that_fails_fails_in_its_rank():
    gate = Recorded()

    def call() -> None:
        group = Group.discover()

        def run(first: int, last: int) -> None:
            gate.events.append(first)
            if group.rank == 1:
                raise ValueError("no")

        group.launch(0, 2, run, 10.0)

    first, second = on_ranks(2, call, gate)
    assert first is None
    assert isinstance(second, ValueError)
    assert [event for event in gate.events if isinstance(event, int)] == [0, 0, 1]


def test_each_rank_has_an_open_capture_of_its_own(tmp_path):
    def record() -> Any:
        with capture(tmp_path, max_bytes=1 << 20) as own:
            with own.range(f"rank {rank_of_thread()}"):
                time.sleep(0.001)
            assert open_capture() is own
            with pytest.raises(BadInput, match="close it first"), capture(tmp_path / "other"):
                pass
            ours = own.group.rank
        assert open_capture() is None
        return ours

    assert on_ranks(4, record) == [0, 1, 2, 3]
    timeline = tracekern.load(tmp_path)
    assert sorted(timeline.host_names) == [f"rank {rank}" for rank in range(4)]
    assert open_capture() is None


def start_resident(
    directory: Path, name: str, num_ranks: int = 4, limits: Limits | None = None
) -> tuple[list[RankExit], list[str]]:
    lines: list[str] = []
    exits = launch_ranks(
        num_ranks,
        f"tests.resident_ranks:{name}",
        env={"RESIDENT_DIR": str(directory), "PYTHONPATH": os.getcwd()},
        on_line=lambda _, line: lines.append(line),
        timeout_s=10 * LIMIT_S,
        limits=limits,
        resident=True,
    )
    return exits, lines


def test_a_pipeline_of_resident_ranks_equals_reference(tmp_path):
    exits, lines = start_resident(tmp_path, "calls")
    assert [end.returncode for end in exits] == [0] * 4, lines
    assert sorted(line for line in lines if "wrong" in line) == [f"rank {rank}: 0 wrong" for rank in range(4)]
    timeline = tracekern.load(tmp_path)
    assert len(timeline.ranks) == 4
    assert len(timeline.flows) > 100
    assert not [problem for problem in timeline.problems if problem.severity == "error"]
    assert read_run(tmp_path).device == "CPU, 4 resident ranks"  # to the gate, another device than a CPU


def test_resident_ranks_in_two_groups_exchange_within_them(tmp_path):
    exits, lines = start_resident(tmp_path, "calls_of_groups")
    assert [end.returncode for end in exits] == [0] * 4, lines
    timeline = tracekern.load(tmp_path)
    assert [problem.text for problem in timeline.problems if problem.severity != "note"] == []
    rank = timeline.track_ranks()[timeline.spans.track]
    pairs = {*zip(rank[timeline.flows.signal].tolist(), rank[timeline.flows.wait].tolist(), strict=True)}
    assert {pair for pair in pairs if pair[0] != pair[1]} == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_a_killed_process_leaves_the_records_of_all_its_ranks(tmp_path):
    exits, lines = start_resident(tmp_path, "killed")
    assert [(end.rank, end.returncode, end.salvaged) for end in exits] == [
        (rank, -signal.SIGKILL, True) for rank in range(4)
    ], lines
    timeline = tracekern.load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["salvaged"] * 4


def test_an_interrupt_ends_all_ranks_and_their_captures_are_closed(tmp_path):
    exits, lines = start_resident(tmp_path, "interrupted")
    assert {end.returncode for end in exits} == {-signal.SIGINT}, lines
    assert [rank.state for rank in tracekern.load(tmp_path).ranks] == ["closed"] * 4


def test_the_status_of_a_rank_is_that_of_the_process(tmp_path):
    exits, lines = start_resident(tmp_path, "one_fails")
    assert [end.returncode for end in exits] == [7] * 4, lines


def test_of_residents_that_make_no_progress_their_process_is_named(tmp_path):
    exits, lines = start_resident(tmp_path, "stopped", limits=Limits(run_s=1.0))
    told = "the process of all 4 ranks made no progress for 1 s during run: it is stopped"
    assert [(end.rank, end.late) for end in exits] == [(rank, told) for rank in range(4)], lines


@pytest.mark.parametrize(
    ("on_timeout", "num_residents", "backend", "is_told"),
    [("trap", 8, "cuda", True), ("trap", 1, "cuda", False), ("trap", 8, "cpu", False), ("raise", 8, "cuda", False)],
)
def test_the_fault_says_that_a_trap_ended_all_resident_ranks(on_timeout, num_residents, backend, is_told):
    metadata = {"fault_text": "rank 0 gave up", "fault": {"on_timeout": on_timeout}, "backend": backend}
    ended = "; that ended all 8 ranks, which are resident on one GPU"
    wanted = "rank 0 gave up" + (ended if is_told else "")
    assert _fault_text({**metadata, "num_residents": num_residents}) == wanted

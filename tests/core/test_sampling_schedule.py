"""How ranks agree on when to sample their clocks: with words in each other's segments, and never a wait in vain."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.captures import CaptureSpec, metadata
from tests.kept_device import fork
from tracekern.dump import format as fmt
from tracekern.record import sampling_schedule
from tracekern.record.sampling_schedule import SamplingSchedule
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter

NUM_COUPLED = 4
SAMPLES_TOGETHER = threading.Barrier(NUM_COUPLED)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine lets a thread stand still for seconds; what waits in vain here has a limit of its own."""
    for name in ("_LEADER_WAITS_S", "_FOLLOWER_WAITS_S", "_LEADER_WAITS_AT_MOST_S", "_FOLLOWER_PAUSES_S"):
        monkeypatch.setattr(sampling_schedule, name, 1e6)
    monkeypatch.setattr(sampling_schedule, "_LEADER_PAUSES", 10**6)


def soon(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Waits of these names end in vain after a moment."""
    for name in names:
        monkeypatch.setattr(sampling_schedule, name, 0.05)


@contextlib.contextmanager
def ranks_segments(num_ranks: int) -> Iterator[list[SegmentWriter]]:
    run = f"schedule-test-{os.getpid()}"
    made = [SegmentWriter.create(run, rank, metadata(CaptureSpec(), rank), 1 << 16) for rank in range(num_ranks)]
    try:
        yield made
    finally:
        for segment in made:
            segment.unlink()
            segment.close()


@pytest.fixture
def segments() -> Iterator[list[SegmentWriter]]:
    with ranks_segments(2) as made:
        yield made


def schedules(segments: list[SegmentWriter]) -> list[SamplingSchedule]:
    """Of all ranks; sampling is due."""
    return [SamplingSchedule(rank, segments) for rank in range(len(segments))]


def ask_for(schedule: SamplingSchedule, launches: int) -> list[bool]:
    return [schedule.before_launch() for _ in range(launches)]


@contextlib.contextmanager
def samples_with_others(schedule: SamplingSchedule) -> Iterator[None]:
    """Its rank stands before a launch meanwhile, and then samples."""
    answers: list[bool] = []
    waits = threading.Thread(target=lambda: answers.extend(ask_for(schedule, 1)))
    waits.start()
    yield
    waits.join()
    assert answers == [True]


def test_they_sample_before_a_launch_that_all_stand_ready_for(segments: list[SegmentWriter]):
    leader, follower = schedules(segments)
    leader.postpone(1000)
    assert ask_for(leader, 4) == ask_for(follower, 4) == [False] * 4, "not due"
    leader.postpone(0)
    with samples_with_others(follower):
        assert ask_for(leader, 1) == [True]
    assert segments[1].header["ready_launch"] == 0


def test_who_is_further_waits_for_rank_0_to_come_there(segments: list[SegmentWriter]):
    leader, follower = schedules(segments)
    leader.postpone(1000)
    ask_for(follower, 4)
    leader.postpone(0)
    with samples_with_others(follower):
        while segments[1].header["ready_launch"] != 5:
            time.sleep(0.001)
        assert ask_for(leader, 5) == [False] * 4 + [True]


def test_nobody_samples_where_one_does_not_come(segments: list[SegmentWriter], monkeypatch):
    soon(monkeypatch, "_LEADER_WAITS_S")
    leader, follower = schedules(segments)
    assert ask_for(leader, 1) == [False]
    assert int(segments[0].header["due_ns"]) > time.monotonic_ns(), "nor does rank 0 wait again at once"
    leader.postpone(0)
    assert ask_for(follower, 1) == [False], "rank 0 has gone on"


def test_who_waited_in_vain_for_rank_0_does_not_at_once_wait_again(segments: list[SegmentWriter], monkeypatch):
    soon(monkeypatch, "_LEADER_WAITS_S", "_FOLLOWER_WAITS_S")
    leader, follower = schedules(segments)
    assert ask_for(follower, 1) == [False], "rank 0 is still inside a kernel"
    monkeypatch.setattr(sampling_schedule, "_FOLLOWER_WAITS_S", 1e6)
    assert ask_for(follower, 1) == [False]
    leader.postpone(0)
    assert ask_for(leader, 1) == [False]


def test_rank_0_waits_for_all_of_them():
    with ranks_segments(3) as segments:
        segments[1].header["ready_launch"] = 1
        with samples_with_others(schedules(segments)[0]):
            time.sleep(0.1)
            segments[2].header["ready_launch"] = 1


def test_what_rank_0_says_as_one_gives_up_counts(segments: list[SegmentWriter], monkeypatch):
    """It had looked just before; it samples, and would wait for that rank."""
    soon(monkeypatch, "_FOLLOWER_WAITS_S")
    _, follower = schedules(segments)
    segments[0].header["ready_launch"] = 1
    segments[1].header["ready_launch"] = 7  # so that 0 is its own word
    with samples_with_others(follower):
        while segments[1].header["ready_launch"] != 0:
            time.sleep(0.001)
        time.sleep(0.3)  # rank 0 stands still
        segments[0].header["decision"] = 1 << 32 | 1


def test_a_rank_that_reads_late_what_rank_0_said_samples_with_it(segments: list[SegmentWriter]):
    """Ranks of one clock do not meet while they sample: rank 0 is at later launches by then."""
    leader, follower = schedules(segments)
    segments[1].header["ready_launch"] = 1
    assert ask_for(leader, 3) == [True, False, False]
    assert int(segments[0].header["due_ns"]) > time.monotonic_ns(), "nor does another wait at its next launch"
    leader.postpone(0)
    assert ask_for(follower, 3) == [True, False, False]


class CoupledRank(threading.Thread):
    """Passes its launches at a pace of its own, late now and then, but as kernels have it: three ahead at most."""

    def __init__(self, schedule: SamplingSchedule, passed: list[int], rank: int, seed: int, meets: bool) -> None:
        super().__init__()
        self.sampled: list[int] = []
        self._agreement, self._passed, self._rank, self._meets = schedule, passed, rank, meets
        self._delays = random.Random(f"{seed} {rank}")

    def run(self) -> None:
        for launch in range(300):
            while min(self._passed) < launch - 3:
                time.sleep(0.0001)
            if self._agreement.before_launch():
                self.sampled.append(launch)
                self._agreement.postpone(0.01)
                if self._meets:
                    SAMPLES_TOGETHER.wait(timeout=120)
            self._passed[self._rank] = launch
            time.sleep(self._delays.choice([0, 0, 0.0001, 0.001]) if self._delays.random() > 0.05 else 0.02)
        self._passed[self._rank] = 1 << 30


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("meets", [True, False])
def test_all_sample_before_the_same_launches(seed: int, meets: bool, monkeypatch):
    """Or those that meet would wait for the others for good. The delays are longer than rank 0 waits at first."""
    monkeypatch.setattr(sampling_schedule, "_LEADER_WAITS_S", 0.002)
    monkeypatch.setattr(sampling_schedule, "_LEADER_WAITS_AT_MOST_S", 1.0)
    monkeypatch.setattr(sampling_schedule, "_LEADER_PAUSES", 2)
    monkeypatch.setattr(sampling_schedule, "_FOLLOWER_WAITS_S", 2.0)
    with ranks_segments(NUM_COUPLED) as segments:
        passed = [-1] * NUM_COUPLED
        ranks = [CoupledRank(schedule, passed, rank, seed, meets) for rank, schedule in enumerate(schedules(segments))]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert len(ranks[0].sampled) > 3
    assert all(rank.sampled == ranks[0].sampled for rank in ranks)
    assert not SAMPLES_TOGETHER.broken


def test_they_close_in_order_only_together(segments: list[SegmentWriter]):
    first, second = (SamplingSchedule(rank, segments) for rank in (0, 1))
    segments[1].header["leaving"] = 1  # in order, and waits
    assert first.leave(in_order=True, limit_s=1e9) is True
    assert second.leave(in_order=False, limit_s=1e9) is False
    assert first.leave(in_order=True, limit_s=1e9) is False
    assert segments[0].header["leaving"] == 2, "whoever comes now does not wait for it"


def make_segment_and(leave: bool, run: str, is_made: int) -> None:
    """A rank 1 that comes to its end after a while, or is about to be killed."""
    segment = SegmentWriter.create(run, 1, metadata(CaptureSpec(), 1), 1 << 16)
    os.write(is_made, b"1")
    time.sleep(0.2 if leave else 600)
    segment.header["leaving"] = 1
    time.sleep(600)


@pytest.mark.parametrize("fate", ["comes", "is killed", "is killed and saved"])
def test_who_closes_waits_for_the_living_and_not_for_the_dead(fate: str):
    """Nobody has buried the dead one."""
    made, is_made = os.pipe()
    with ranks_segments(1) as segments:
        run = f"schedule-test-{os.getpid()}"
        peer = fork(lambda: make_segment_and(fate == "comes", run, is_made))
        os.read(made, 1)
        theirs = SegmentView.attach(fmt.segment_name(run, 1))
        schedule = SamplingSchedule(0, [*segments, theirs])
        try:
            if fate != "comes":
                os.kill(peer, signal.SIGKILL)
                os.waitid(os.P_PID, peer, os.WEXITED | os.WNOWAIT)
            if fate == "is killed and saved":
                theirs.unlink()
            assert schedule.leave(in_order=True, limit_s=1e9) is (fate == "comes")
        finally:
            os.kill(peer, signal.SIGKILL)
            os.waitpid(peer, 0)
            theirs.unlink()
            theirs.close()

"""The flight recorder: what it keeps, time limits, traps and resets, and what a dead rank leaves."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flight_pairs import make_pair

from tests.rank_pool import RankPool
from tests.waiting import in_a_while
from tests.warm_ranks import run_moe
from tracekern import _core
from tracekern.analysis.findings import analyze
from tracekern.comm.ranks.group import Group
from tracekern.dump import format as fmt
from tracekern.dump.fault import FAULT_RECORD, FLAG_VALUE_BITS, INTERRUPTED
from tracekern.errors import BadInput, CommTimeout, DeviceLost
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun
from tracekern.record.session import capture
from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, EventClass, Timeline, unpack_field
from tracekern.viewers.report.headlines import headlines

SHAPE = MoeShape(num_ranks=1, max_tokens=24, num_experts=4, topk=2, hidden=16, dtype="fp32")


def record_pipeline(directory: Path, **options: object) -> Timeline:
    """One rank's pipeline, three calls of the same shape."""
    pipeline = P2PPipeline(Group(0, 1), SHAPE, "balanced", num_blocks=2, warps_per_block=2)
    batch = draw_batch(SHAPE, seed=3, rank=0, iteration=0, routing="uniform", uneven=False)
    with capture(directory, device=pipeline.comm.device, **options) as session:
        for _ in range(3):
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, draw_experts(SHAPE), capture=session)
    return load(directory)


def test_the_last_launches_stay_where_room_ends(tmp_path):
    """Hundreds of launches in room for a few: those that are left are the last, whole, and nothing older shows."""
    pipeline = P2PPipeline(Group(0, 1), SHAPE, "balanced", num_blocks=2, warps_per_block=2)
    batch = draw_batch(SHAPE, seed=3, rank=0, iteration=0, routing="uniform", uneven=False)
    num_calls, experts = 200, draw_experts(SHAPE)
    how = {"keep": "last", "records_per_track": 32, "max_bytes": 1 << 16}
    with capture(tmp_path, device=pipeline.comm.device, **how) as session:
        for _ in range(num_calls):
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)
        assert session.footprint_bytes < 1 << 20
        assert int(session.segment.header["launches_refused"]) == 0
    timeline = load(tmp_path)
    by_name = defaultdict(list)
    for launch in timeline.launches:
        by_name[launch.name].append(launch)
    counts = set()
    for launches in by_name.values():
        sequences = [launch.sequence for launch in launches]
        assert sequences == list(range(num_calls - len(sequences), num_calls))
        assert [launch.epoch for launch in launches] == [(0xFFFFFFF0 + number) % (1 << 32) for number in sequences]
        counts.add(len(sequences))
    assert max(counts) > 2
    of_iteration = defaultdict(set)
    for launch, number in zip(timeline.launches, LaunchIterations(timeline).of_launch.tolist(), strict=True):
        of_iteration[number].add(launch.sequence)
    assert [len(calls) for calls in of_iteration.values()] == [1] * max(counts)
    assert {problem.severity for problem in timeline.problems} <= {"note"}
    whole = record_pipeline(tmp_path / "whole", records_per_track=32, keep="last")
    of_whole = {launch.name: launch.records_needed for launch in whole.launches}
    assert {launch.name: launch.records_needed for launch in timeline.launches} == of_whole
    spans = timeline.spans
    for idx, launch in enumerate(timeline.launches):
        of_launch = spans.start[(spans.launch == idx) & (spans.end != OPEN_END)]
        assert len(of_launch), launch
    assert (np.diff(spans.start)[np.diff(spans.track) == 0] >= 0).all()


def test_a_flight_recorder_counts_too(tmp_path):
    """What counting() finds decides where records go; the ring itself keeps its size."""
    pipeline = P2PPipeline(Group(0, 1), SHAPE, "balanced", num_blocks=2, warps_per_block=2)
    batch = draw_batch(SHAPE, seed=3, rank=0, iteration=0, routing="uniform", uneven=False)
    experts = draw_experts(SHAPE)
    with capture(tmp_path, device=pipeline.comm.device, keep="last", records_per_track=8) as session:
        with session.counting():
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)
        pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)
        counted = [entry for entry in session.segment.launches() if entry["flags"] & fmt.ENTRY_COUNTED_ONLY]
        needed = [int(session.segment.track_headers(entry)["attempted"].max()) for entry in counted]
    timeline = load(tmp_path)
    assert len(needed) == len(timeline.launches)
    assert max(needed) > 8
    assert all(launch.records_per_track == 8 for launch in timeline.launches)


def told_by_track(timeline: Timeline) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """(launch, track) -> (event, payload at its end) of its closed spans, in the order in which they ended."""
    spans, found = timeline.spans, defaultdict(list)
    for row in np.lexsort((-spans.start, spans.end)):
        if spans.end[row] != OPEN_END and timeline.tracks[spans.track[row]].block >= 0:
            event = timeline.events[spans.event[row]].name
            key = (timeline.launches[spans.launch[row]].launch_idx, int(spans.track[row]))
            found[key].append((event, int(spans.end_payload[row])))
    return found


def test_the_last_records_stay(tmp_path):
    whole = record_pipeline(tmp_path / "first", records_per_track=1 << 12)
    tail = record_pipeline(tmp_path / "last", records_per_track=10, keep="last")
    assert all(launch.records_per_track == 16 for launch in tail.launches)
    assert {problem.kind for problem in tail.problems} <= {"overwritten_records", "unmatched_wait"}
    assert all(problem.severity == "note" for problem in tail.problems)
    everything, kept = told_by_track(whole), told_by_track(tail)
    assert kept.keys() == everything.keys()
    for key, told in kept.items():
        assert sorted(told) == sorted(everything[key][-len(told) :]), key
    needed = {launch.launch_idx: launch.records_needed for launch in whole.launches}
    overwritten = {launch.launch_idx: launch.records_overwritten for launch in tail.launches}
    assert any(overwritten.values())
    assert all((needed[idx] > 16) == (count > 0) for idx, count in overwritten.items())
    assert not any(launch.records_lost for launch in tail.launches)


def test_a_span_whose_begin_was_overwritten_starts_at_the_oldest_record(tmp_path):
    tail = record_pipeline(tmp_path, records_per_track=1, keep="last")
    spans = tail.spans
    rows = np.flatnonzero(tail.headless_spans())
    assert len(rows)
    for row in rows:
        event = tail.events[spans.event[row]]
        assert event.channel is None
        assert unpack_field(event.begin_fields, "begin_overwritten", spans.begin_payload[row : row + 1]) == [1]
        same = (spans.track == spans.track[row]) & (spans.launch == spans.launch[row])
        assert spans.start[row] == spans.start[same].min()
    assert not [problem for problem in tail.problems if problem.kind == "orphan_end"]


@pytest.mark.parametrize(("keep", "kept", "severity"), [("last", [5, 6, 7], "note"), ("first", [0, 1, 2], "error")])
def test_the_last_host_ranges_stay(tmp_path, keep, kept, severity):
    with capture(tmp_path, device="cpu", keep=keep, host_spans=3) as session:
        for idx in range(8):
            with session.range(f"step {idx}"):
                pass
    timeline = load(tmp_path)
    assert [timeline.host_names[label] for label in timeline.spans.begin_payload] == [f"step {idx}" for idx in kept]
    (problem,) = [problem for problem in timeline.problems if problem.kind == "lost_host_spans"]
    assert (problem.severity, problem.count) == (severity, 5)


def test_what_cannot_be_a_ring_is_refused(tmp_path):
    with pytest.raises(BadInput, match="keep='newest': wanted 'first', or 'last'"):
        capture(tmp_path, keep="newest")
    with pytest.raises(BadInput, match="records_per_track=0 with keep='last': a ring keeps 1 record or more"):
        capture(tmp_path, keep="last", records_per_track=0)


SMALL = {"ranks": 4, "tokens": 12, "hidden": 64, "experts": 16, "topk": 3, "blocks": 3, "warps": 2}


def open_waits(timeline: Timeline) -> set[int]:
    """Ranks that stood in a wait."""
    spans, ranks = timeline.spans, timeline.track_ranks()
    is_wait = np.array([event.event_class is EventClass.WAIT for event in timeline.events])
    return set(ranks[spans.track[(spans.end == OPEN_END) & is_wait[spans.event]]].tolist())


def test_the_last_records_of_a_killed_rank_are_kept(tmp_path):
    options = MoeRun(**SMALL, iterations=5000, records_per_track=16, keep="last", timeout_ms=6000)
    pids: dict[int, int] = {}

    def kill_in_mid_run(done: int, _total: int) -> None:
        if done >= 20 and 2 in pids:
            os.kill(pids.pop(2), signal.SIGKILL)

    report = run_moe(options, tmp_path, kill_in_mid_run, on_start=pids.__setitem__)
    assert "rank 2 ended (killed by signal 9) during run" in report.errors
    timeline = load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["closed", "closed", "salvaged", "closed"]
    assert {0, 1, 3} <= open_waits(timeline)
    of_rank_2 = [launch for launch in timeline.launches if launch.rank == 2]
    assert sum(launch.records_overwritten for launch in of_rank_2) > 0
    told = {problem.kind for problem in timeline.problems if problem.severity != "note"}
    assert told == {"open_span", "salvaged", "fault"}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def time_out_and_reset(group: Group, directory: str) -> dict[str, Any]:
    """Rank 1 stays away; rank 0 gives up, is refused, and after a reset both work again, 1,000 times."""
    pipeline, call = make_pair(group, timeout_s=60.0)
    found: dict[str, Any] = {"said": []}
    with capture(directory, device=pipeline.comm.device, keep="last", records_per_track=16) as session:
        assert call(0, session)
        pipeline.comm.set_timeout(0.2)
        for _ in range(2 if group.rank == 0 else 0):
            with pytest.raises(CommTimeout) as caught:
                call(1, session)
            found["said"].append(str(caught.value))
            found["fault"] = caught.value.fault
            found["is_timeout_error"] = isinstance(caught.value, TimeoutError)
    pipeline.comm.set_timeout(60.0)
    pipeline.reset()
    found["right"] = sum(call(iteration) for iteration in range(1000))
    return found


def test_a_time_out_says_all_and_reset_repairs(pair, tmp_path):
    first, second = pair.call(time_out_and_reset, str(tmp_path))
    assert first["right"] == second["right"] == 1000
    assert second["said"] == []
    assert "rank 0 dispatch_send block 0 warp " in first["said"][0]
    assert first["said"][1].startswith("the communicator is out of use since: rank 0 dispatch_send")
    assert first["said"][1].endswith("call reset() on every rank")
    assert first["is_timeout_error"]
    fault = first["fault"]
    exact = {
        "cause": "timeout",
        "kernel": "dispatch_send",
        "channel": "counts",
        "rank": 0,
        "peer": 1,
        "block": 0,
        "aborted_by": 0,
        "on_timeout": "raise",
    }
    assert {key: fault[key] for key in exact} == exact
    assert fault["wanted_epoch"] == fault["seen_epoch"] + 1
    assert 200e6 <= fault["waited_ns"] < 60e9
    timeline = load(tmp_path)
    assert [problem.text for problem in timeline.problems if problem.kind == "fault"] == [first["said"][0]]
    assert open_waits(timeline) == {0}


def interrupt_the_other(group: Group, directory: str) -> str:
    """Rank 0 gets Ctrl-C while it waits for rank 1, which comes afterwards. Returns what each raises."""
    pipeline, call = make_pair(group, timeout_s=60.0)
    raised: BaseException | None = None
    with capture(directory, device=pipeline.comm.device, records_per_track=64) as session:
        assert call(0, session)
        if group.rank == 1:
            group.barrier()
        try:
            if group.rank == 0:
                in_a_while(lambda: os.kill(os.getpid(), signal.SIGINT))  # in its kernel by then
            call(1, session)
        except (KeyboardInterrupt, CommTimeout) as error:
            raised = error
        if group.rank == 0:
            group.barrier()
    pipeline.reset()
    return f"{type(raised).__name__}: {raised}"


def test_who_was_interrupted_is_told_by_all(pair, tmp_path):
    first, second = pair.call(interrupt_the_other, str(tmp_path))
    assert first == "KeyboardInterrupt: "
    assert re.search(
        r"^CommTimeout: rank 1 \w+ block 0 warp \d stopped .*: rank 0 was interrupted \(Ctrl-C\)", second
    ), second
    assert "waiting for rank 1" not in second
    verdict = next(line.text for line in headlines(analyze(load(tmp_path))) if line.word == "verdict")
    assert verdict == "Rank 0 was interrupted (Ctrl-C), and that ended the run."


def trap(group: Group, directory: str) -> dict[str, Any]:
    """Rank 1 stays away and rank 0 traps: its device is gone, its capture is not."""
    pipeline, call = make_pair(group, timeout_s=60.0)
    found: dict[str, Any] = {"said": []}
    with capture(directory, device=pipeline.comm.device) as session:
        assert call(0, session)
        pipeline.comm.set_timeout(0.2, on_timeout="trap")
        for _ in range(2 if group.rank == 0 else 0):
            with pytest.raises(CommTimeout) as caught:
                call(1, session)
            found["said"].append(str(caught.value))
    with pytest.raises(DeviceLost) as lost:
        pipeline.reset()
    return {**found, "reset": str(lost.value)}


def test_after_a_trap_the_capture_is_whole(pair, tmp_path, caplog):
    first, second = pair.call(trap, str(tmp_path))
    assert first["said"][0].endswith("the kernel trapped: this process can no longer use its device")
    assert first["said"][1].endswith("restart the process")
    lost = "reset: rank 0: a kernel trapped: this process can no longer use its device; restart all ranks"
    assert first["reset"] == second["reset"] == lost
    timeline = load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["closed", "closed"]
    assert open_waits(timeline) == {0}
    spans = timeline.spans
    rows = (spans.end == OPEN_END) & (timeline.track_ranks()[spans.track] == 0)
    names = {timeline.events[event].name for event in spans.event[rows]}
    assert "wait_counts" in names
    assert any(problem.kind == "fault" and "trapped" in problem.text for problem in timeline.problems)


def test_time_limits_that_are_none_are_refused():
    pipeline = P2PPipeline(Group(0, 1), SHAPE, "balanced")
    for arguments, words in (
        ({"timeout_s": 0.0}, "timeout_s is 0.0; wanted more than 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan; wanted more than 0"),
        ({"timeout_s": "2"}, "timeout_s is '2'; wanted more than 0"),
        ({"timeout_s": None}, "timeout_s is None; wanted more than 0"),
        ({"timeout_s": 1.0, "on_timeout": "abort"}, "on_timeout is 'abort'; wanted 'raise' or 'trap'"),
    ):
        with pytest.raises(BadInput, match=words):
            pipeline.comm.set_timeout(**arguments)


def test_the_fault_record_is_the_compiled_one():
    offsets = {name: offset for name, (_, offset) in FAULT_RECORD.fields.items() if name != "unused"}
    assert offsets == {name: _core.layout["fault_record"][name] for name in offsets}
    assert FAULT_RECORD.itemsize == _core.layout["fault_record_bytes"]
    assert (_core.flag_value_bits, _core.fault_interrupted) == (FLAG_VALUE_BITS, INTERRUPTED)

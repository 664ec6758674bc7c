"""The flight recorder on real GPUs: trap, time-out, a killed peer, keep-last, refusals; skipped without GPUs.

With records in host memory, and in device memory that a keeper holds.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import gpu_flight
from tests.devices import require_gpus
from tests.gpu_flight import NUM_RECYCLED, RING_SLOTS
from tests.paths import ROOT
from tracekern.analysis.questions.hang import find_hang
from tracekern.launcher.spawner import Spawner
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, EventClass, Timeline

SINKS = pytest.mark.parametrize("sink", ["host", "device"])


Play = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner | None]:
    """Imports torch once for all scenarios. None without a GPU, where all of them are skipped."""
    if not torch.cuda.device_count():
        yield None
        return
    with Spawner(gpu_flight.TARGET, {**os.environ, "PYTHONPATH": str(ROOT)}) as shared:
        yield shared


@pytest.fixture
def play(spawner: Spawner | None, monkeypatch: pytest.MonkeyPatch) -> Play:
    """play(scenario, directory, num_gpus, sink): how the ranks ended; they end by themselves, or are ended."""

    def run(scenario: str, directory: Path, num_gpus: int, sink: str = "host") -> dict[str, Any]:
        require_gpus(num_gpus)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        return gpu_flight.play(scenario, sink, directory, spawner)

    return run


def told_losses(ended: dict[str, Any]) -> list[int]:
    """The ranks whose captures told that the device was lost."""
    told = [re.search(r"rank (\d+): .*; what it recorded is kept", line) for line in ended["lines"]]
    return sorted(int(found[1]) for found in told if found)


def losers(ended: dict[str, Any]) -> list[int]:
    """The ranks that lose their device when rank 0 does."""
    return [0, 1] if ended["is_resident"] else [0]


def open_waits(timeline: Timeline) -> Counter[tuple[int, str]]:
    """(rank, event) of waits that never ended."""
    spans, ranks = timeline.spans, timeline.track_ranks()
    is_wait = np.array([event.event_class is EventClass.WAIT for event in timeline.events])
    rows = np.flatnonzero((spans.end == OPEN_END) & is_wait[spans.event])
    return Counter((int(ranks[spans.track[row]]), timeline.events[spans.event[row]].name) for row in rows)


def faults(timeline: Timeline) -> list[str]:
    return [problem.text for problem in timeline.problems if problem.kind == "fault"]


@pytest.mark.gpu
@SINKS
def test_a_time_out_says_all_and_reset_repairs(play, tmp_path, sink):
    ended = play("time_out", tmp_path, 1, sink)
    assert ended["codes"] == [0, 0], "\n".join(ended["lines"])
    first, second = ended["ranks"]
    assert (first["wrong"], second["wrong"], second["said"]) == (0, 0, [])
    assert first["said"][1].startswith("the communicator is out of use since: rank 0 ")
    fault = first["fault"]
    assert (fault["kernel"], fault["rank"], fault["peer"], fault["channel"]) == ("dispatch_send", 0, 1, "counts")
    assert fault["wanted_epoch"] == fault["seen_epoch"] + 1
    assert 0.5e9 <= fault["waited_ns"] < 5e9
    timeline = load(tmp_path / "capture")
    assert faults(timeline) == [first["said"][0]]
    assert {rank for rank, _ in open_waits(timeline)} == {0}


@pytest.mark.gpu
@SINKS
def test_a_snapshot_shows_who_is_late_while_the_kernel_waits(play, tmp_path, sink):
    ended = play("late_rank", tmp_path, 1, sink)
    assert ended["codes"] == [0, 0], "\n".join(ended["lines"])
    assert [rank["wrong"] for rank in ended["ranks"]] == [0, 0]
    now = load(tmp_path / "now")
    assert [rank.state for rank in now.ranks] == ["running", "running"]
    assert set(now.ranks[0].metadata["sinks"]["dispatch_send"]) == {sink}
    hang = find_hang(now)
    assert hang is not None
    assert (hang.ranks, [holder.rank for holder in hang.holders]) == ((0,), [1])
    assert hang.longest.phase.startswith("dispatch_send.")
    assert hang.longest.lasts_ns > 0.4e9
    assert hang.holders[0].doing == ""
    whole = load(tmp_path / "capture")
    assert not open_waits(whole)
    assert find_hang(whole) is None


@pytest.mark.gpu
@SINKS
def test_after_a_trap_the_capture_is_whole(play, tmp_path, sink):
    ended = play("trap", tmp_path, 1, sink)
    assert ended["codes"] == [0, 0], "\n".join(ended["lines"])
    first, second = ended["ranks"]
    assert first["said"][0].endswith("the kernel trapped: this process can no longer use its device")
    assert first["said"][1].endswith("restart the process")
    assert first["reset"] == second["reset"]
    assert re.match(r"reset: rank 0: .* is lost to this process: .*; restart all ranks", first["reset"])
    assert told_losses(ended) == losers(ended), "\n".join(ended["lines"])
    assert len(second["said"]) == len(losers(ended)) - 1
    assert all(re.match("rank 1: .* is lost to this process: ", text) for text in second["said"])
    timeline = load(tmp_path / "capture")
    assert [rank.state for rank in timeline.ranks] == ["closed", "closed"]
    waits = open_waits(timeline)
    assert waits[0, "wait_counts"] >= 1
    assert {rank for rank, _ in waits} == {0}
    (fault,) = faults(timeline)
    assert fault.endswith("; that ended all 2 ranks, which are resident on one GPU") == ended["is_resident"]


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", ["somebody_elses_trap", "trap_while_closing"])
@SINKS
def test_what_a_trap_of_somebody_elses_kernel_leaves(play, tmp_path, sink, scenario):
    ended = play(scenario, tmp_path, 1, sink)
    assert ended["codes"] == [0, 0], "\n".join(ended["lines"])
    assert told_losses(ended) == losers(ended), "\n".join(ended["lines"])
    if scenario == "somebody_elses_trap":
        assert all("device-side assert" in ended["ranks"][rank]["said"][0] for rank in losers(ended))
    timeline = load(tmp_path / "capture")
    assert [rank.state for rank in timeline.ranks] == ["closed", "closed"]
    assert open_waits(timeline)[0, "wait_counts"] >= 1
    assert not [problem for problem in timeline.problems if problem.kind == "launch_lost"]


@pytest.mark.gpu
@SINKS
def test_the_records_of_a_killed_peer_are_kept(play, tmp_path, sink):
    ended = play("calls_without_end", tmp_path, 1, sink)
    assert ended["codes"][1] == -9, "\n".join(ended["lines"])
    timeline = load(tmp_path / "capture")
    if ended["is_resident"]:
        assert [rank.state for rank in timeline.ranks] == ["salvaged", "salvaged"]
    else:
        assert "gave up on rank 1 after 5" in ended["ranks"][0]["said"][0], "\n".join(ended["lines"])
        assert [rank.state for rank in timeline.ranks] == ["closed", "salvaged"]
        assert 0 in {rank for rank, _ in open_waits(timeline)}
    assert not [problem for problem in timeline.problems if problem.kind == "launch_lost"]
    ranks = timeline.track_ranks()[timeline.spans.track]
    assert all(int((ranks == rank).sum()) > 1000 for rank in (0, 1))


@pytest.mark.gpu
@SINKS
def test_the_last_records_stay(play, tmp_path, sink):
    ended = play("keep_last", tmp_path, 1, sink)
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    whole, tail = load(tmp_path / "first"), load(tmp_path / "capture")
    expected = ("dense_probes",)  # the kernels are as short as the tests want them
    assert not [problem for problem in tail.problems if problem.severity != "note" and problem.kind not in expected]
    needed = {launch.launch_idx: launch.records_needed for launch in whole.launches}
    overwritten = {launch.launch_idx: launch.records_overwritten for launch in tail.launches}
    assert any(overwritten.values())
    assert not any(launch.records_lost for launch in [*whole.launches, *tail.launches])
    for idx, count in overwritten.items():  # which warp moves which token is not the same in both captures
        near = abs(needed[idx] - RING_SLOTS) <= 2
        assert near or (needed[idx] > RING_SLOTS) == (count > 0), (idx, needed[idx], count)
    held = np.bincount(tail.spans.launch[tail.spans.launch >= 0], minlength=len(tail.launches))
    assert held.max() <= max(launch.num_tracks for launch in tail.launches) * RING_SLOTS + 1
    assert ended["ranks"][0]["wrong"] == 0
    recycled = load(tmp_path / "recycled")
    assert not [problem for problem in recycled.problems if problem.severity != "note" and problem.kind not in expected]
    for name in {launch.name for launch in recycled.launches}:
        sequences = [launch.sequence for launch in recycled.launches if launch.name == name]
        assert 2 < len(sequences) < NUM_RECYCLED
        assert sequences == list(range(NUM_RECYCLED - len(sequences), NUM_RECYCLED))


def assert_recycled(directory: Path) -> None:
    """Regions were used again, up to the last launch."""
    sequences = [launch.sequence for launch in load(directory).launches if launch.name == "dispatch_send"]
    assert 2 < len(sequences) < NUM_RECYCLED
    assert sequences[-1] == NUM_RECYCLED - 1


@pytest.mark.gpu
def test_the_keeper_finds_a_gpu_that_was_hidden_since(play, tmp_path):
    ended = play("hidden_device", tmp_path, 1, "device")
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    assert ended["ranks"][0]["wrong"] == 0
    assert_recycled(tmp_path / "capture")


@pytest.mark.gpu
def test_a_keeper_that_fails_costs_no_memory(play, tmp_path):
    ended = play("keeper_that_fails", tmp_path, 1, "device")
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    (found,) = ended["ranks"]
    assert "the keeper said nothing (timed out); take sink='host'" in found["said"]
    assert found["lost_bytes"] < 1 << 29


@pytest.mark.gpu
@SINKS
def test_regions_are_used_again_beside_a_graph_capture(play, tmp_path, sink):
    ended = play("beside_a_graph_capture", tmp_path, 1, sink)
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    assert ended["ranks"] == [{"x": 2.0, "brackets": 100}]
    assert_recycled(tmp_path / "capture")


@pytest.mark.gpu
@SINKS
def test_a_capture_closes_while_a_kernel_runs_on(play, tmp_path, sink):
    ended = play("busy_at_the_end", tmp_path, 1, sink)
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    assert ended["ranks"] == [{"wrong": 0, "is_busy": True, "sum": 8.0}]
    assert any("after 1 s kernels still run; what it recorded is kept" in line for line in ended["lines"])
    timeline = load(tmp_path / "capture")
    assert [rank.state for rank in timeline.ranks] == ["closed"]
    assert {launch.name for launch in timeline.launches} >= {"dispatch_send", "combine_recv"}
    assert not (timeline.spans.end == OPEN_END).any()


@pytest.mark.multigpu
@SINKS
def test_another_current_device_changes_nothing(play, tmp_path, sink):
    require_gpus(2)
    ended = play("another_device", tmp_path, 1, sink)
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    (found,) = ended["ranks"]
    assert found["wrong"] == 0
    assert found["said"] == ["x is on cuda:1; wanted contiguous, on cuda:0"]
    timeline = load(tmp_path / "capture")
    assert [rank.state for rank in timeline.ranks] == ["closed"]
    assert not [problem for problem in timeline.problems if problem.severity == "error"]
    assert len([launch for launch in timeline.launches if launch.name == "dispatch_send"]) == 4
    assert not (timeline.spans.end == OPEN_END).any()


@pytest.mark.gpu
def test_facts_and_a_heap_that_no_gpu_holds(play, tmp_path):
    ended = play("refusals", tmp_path, 1)
    assert ended["codes"] == [0], "\n".join(ended["lines"])
    (found,) = ended["ranks"]
    assert found["name"].startswith("NVIDIA")
    assert found["driver"] >= 12000
    assert found["free"] > 1 << 30
    assert found["verdict"][0] == ""
    assert all(found["reachable"].values())
    assert re.match(
        r"rank 0: the symmetric heap wants 1024.0 TiB, \d+\.\d GiB of .* are free on NVIDIA", found["too_large"]
    )


@pytest.mark.multigpu
def test_where_a_driver_exports_no_descriptors_heaps_are_shared_by_ipc(play, tmp_path):
    ended = play("no_descriptors", tmp_path, 2)
    assert ended["codes"] == [0, 0], "\n".join(ended["lines"])
    assert [(rank["wrong"], rank["handle"]) for rank in ended["ranks"]] == [(0, 64), (0, 64)]
    assert len(load(tmp_path / "capture").flows) > 0

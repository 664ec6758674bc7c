"""Ranks without clock samples of each other: related by wall clocks, of two hosts by round trips of their engines."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabric_pairs import LIMIT_S

from tracekern.dump.format import CLOCK_SAMPLE, SampleKind
from tracekern.dump.reader import read_dump
from tracekern.timeline.clocks.by_hosts import fit_by_hosts, round_trips
from tracekern.timeline.clocks.fit import UnrelatedClocks, apply_clock
from tracekern.timeline.clocks.host_times import apply_host
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.load import load
from tracekern.timeline.model import Rank

SECOND = 10**9

ONE = """
import os, sys, time
from pathlib import Path
import torch
import tracekern
from tracekern.fabric import DoneFlag, MemoryRegionDescriptor, Net, TransferEngine

rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
engine = TransferEngine.builder().add_domains([Net("tcp", "127.0.0.1")]).build()
memory = torch.zeros(1 << 16, dtype=torch.uint8)
src, own = engine.register_tensor(memory)
written = directory / f"{rank}.part"
written.write_bytes(own.to_bytes())
written.rename(directory / f"{rank}.descriptor")
other = directory / f"{1 - rank}.descriptor"
while not other.exists():
    time.sleep(0.01)
dst = MemoryRegionDescriptor(other.read_bytes())
with tracekern.capture(directory / "capture", device="cpu") as capture, engine.traced(capture):
    counter = engine.make_imm_counter(1)
    for call in range(30):
        done = DoneFlag()
        engine.submit_write(src, dst, 1 << 16, imm=1, on_done=done)
        counter.wait(1, 60)
        done.wait(60)
        time.sleep(0.05)
engine.stop()
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of two processes that only their engines connect."""
    directory = tmp_path_factory.mktemp("apart")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE, str(directory)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "TRACEKERN_RUN_ID": f"apart-{os.getpid()}"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(4 * LIMIT_S) for rank in ranks] == [0, 0]
    return directory / "capture"


def apart(captured: Path, machines: tuple[str, str]) -> tuple[Any, Any, list[Rank]]:
    """(stamps, samples, ranks) as if the ranks read clocks of their own, on these machines."""
    dumps = [read_dump(path) for path in sorted(captured.glob("*.tkdump"))]
    samples = np.concatenate([dump.clock_samples() for dump in dumps])
    pieces = [decode(dump) for dump in dumps]
    ranks = [
        dataclasses.replace(rank, clock_id=f"own {rank.rank}", metadata=rank.metadata | {"machine": machine})
        for rank, machine in zip((piece.ranks[0] for piece in pieces), machines, strict=True)
    ]
    return round_trips(pieces), samples, ranks


def test_processes_that_only_engines_connect_make_one_capture(captured: Path):
    timeline = load(captured)
    assert [rank.rank for rank in timeline.ranks] == [0, 1]
    assert len(timeline.flows) >= 2 * 15  # of 2 * 30: what arrived before a peer recorded is not on record
    assert not [problem for problem in timeline.problems if problem.severity == "error"]


def test_two_hosts_are_related_by_what_their_engines_asked(captured: Path):
    stamps, samples, ranks = apart(captured, ("one", "two"))
    assert {*stamps["initiator"].tolist()} == {*stamps["responder"].tolist()} == {0, 1}
    fits = fit_by_hosts(stamps, samples, ranks, {})
    wall = np.array([int(stamps["t0"].min()), int(stamps["t3"].max())])
    off = np.abs(apply_host(fits[1], wall) - apply_host(fits[0], wall))  # of one wall clock in truth
    assert (off <= fits[1].host_hard_ns).all()
    assert fits[1].host_hard_ns < 50e6
    assert {fit.method for fit in fits.values()} == {"hosts"}


def test_ranks_of_one_machine_need_no_round_trips(captured: Path):
    _, samples, ranks = apart(captured, ("one", "one"))
    fits = fit_by_hosts(np.empty(0, CLOCK_SAMPLE), samples, ranks, {})
    now = np.array([samples["t1"][0]], np.int64)  # both read CLOCK_MONOTONIC
    off = abs(int(apply_clock(fits[1], now)[0] - apply_clock(fits[0], now)[0]))
    assert off <= fits[0].hard_ns + fits[1].hard_ns


def test_hosts_without_round_trips_stay_unrelated(captured: Path):
    _, samples, ranks = apart(captured, ("one", "two"))
    with pytest.raises(UnrelatedClocks, match="no clock samples relate it to rank 0"):
        fit_by_hosts(np.empty(0, CLOCK_SAMPLE), samples, ranks, {})
    with pytest.raises(UnrelatedClocks, match="nothing relates its clock to its host's"):
        fit_by_hosts(np.empty(0, CLOCK_SAMPLE), np.empty(0, CLOCK_SAMPLE), [ranks[0]], {0: (0, 1)})


@pytest.mark.parametrize("seed", range(8))
def test_the_truth_lies_within_the_bounds(seed: int):
    """Two hosts whose wall clocks are apart and drift, and ranks whose own clocks do too, of which all is known."""
    random = np.random.default_rng(seed)
    start = time.time_ns()
    drift, apart_ns = random.uniform(-10e-6, 10e-6, 2), random.integers(-SECOND, SECOND, 2)
    tick_base, tick_rate = random.integers(0, 1 << 50, 2), random.uniform(-10e-6, 10e-6, 2)

    def wall(host: int, at: Any) -> Any:
        return start + apart_ns[host] + np.rint(at * (1 + drift[host])).astype(np.int64)

    def ticks(rank: int, at: Any) -> Any:
        return tick_base[rank] + np.rint(at * (1 + tick_rate[rank])).astype(np.int64)

    rows = []
    for rank in range(2):
        for round_idx, at in enumerate((0, 5 * SECOND)):
            begin = at + 1000 * np.arange(20)
            rows.append(_rows(SampleKind.HOST_BRACKET, round_idx, rank, rank, begin, ticks, wall, random))
    samples = np.concatenate(rows)
    stamps = np.zeros(80, CLOCK_SAMPLE)
    asked = np.sort(random.integers(0, 5 * SECOND, 80))
    there, back = random.integers(5_000, 60_000, (2, 80))
    stamps["kind"], stamps["initiator"], stamps["responder"] = SampleKind.PING_PONG, 0, 1
    stamps["round_idx"] = asked // (SECOND // 2)
    stamps["t0"] = wall(0, asked) // 32 * 32
    stamps["t1"] = stamps["t2"] = wall(1, asked + there) // 32 * 32
    stamps["t3"] = wall(0, asked + there + back) // 32 * 32
    ranks = [
        Rank(rank, f"node {rank}", "CPU", "cpu", "closed", 1e9, 32, metadata={"machine": str(rank)}) for rank in (0, 1)
    ]
    spans = {rank: (int(ticks(rank, 0)), int(ticks(rank, 5 * SECOND))) for rank in (0, 1)}
    fits = fit_by_hosts(stamps, samples, ranks, spans)
    at = np.arange(0, 5 * SECOND, SECOND // 3)
    axis = [apply_clock(fits[rank], ticks(rank, at)) for rank in (0, 1)]
    assert (np.abs(axis[1] - axis[0]) <= fits[0].hard_ns + fits[1].hard_ns).all()
    hosts = [apply_host(fits[host], wall(host, at)) for host in (0, 1)]
    assert (np.abs(hosts[1] - hosts[0]) <= fits[1].host_hard_ns + 1).all()
    assert fits[1].host_hard_ns < 200_000


def _rows(
    kind: SampleKind, round_idx: int, initiator: int, responder: int, at: Any, ticks: Any, wall: Any, random: Any
) -> Any:
    """Brackets of a host's clock: read before and after the rank's."""
    rows = np.zeros(len(at), CLOCK_SAMPLE)
    rows["kind"], rows["round_idx"], rows["initiator"], rows["responder"] = kind, round_idx, initiator, responder
    width = random.integers(200, 2000, len(at))
    rows["t0"], rows["t3"] = wall(initiator, at), wall(initiator, at + width)
    rows["t1"] = rows["t2"] = ticks(initiator, at + width // 2) // 32 * 32
    return rows

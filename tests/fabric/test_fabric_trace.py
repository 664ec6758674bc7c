"""What transfer engines leave in a capture: every step of a transfer, who it was for, and why waits lasted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fabric_pairs import LIMIT_S, NETS, Pair, engine

from tests.paths import ROOT, TRACES
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.transfer_blame import blame_transfers
from tracekern.analysis.questions.transfers import TransferCause, divide_transfer_waits
from tracekern.analysis.statistics import phase_statistics
from tracekern.errors import BadInput
from tracekern.fabric import DoneFlag, MemoryRegionDescriptor, PageIndices, TransferError
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.rendezvous import join_ranks
from tracekern.record.session import capture
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.join.immediates import find_arrivals
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, Int64, Timeline, TrackKind
from tracekern.viewers.report.headlines import headlines


def write(pair: Pair, imm: int | None = None, num_bytes: int = 1 << 20) -> None:
    done = DoneFlag()
    pair.source.submit_write(pair.src, pair.dst, num_bytes, imm=imm, on_done=done)
    done.wait(LIMIT_S)


def ends(timeline: Timeline, rows: Int64) -> Int64:
    return timeline.spans.end[rows]


def test_every_step_of_a_transfer_is_on_record_in_its_order(pair: Pair, tmp_path: Path):
    domains = pair.source.num_domains
    counter = pair.target.make_imm_counter(7)
    with capture(tmp_path, device="cpu") as session, pair.source.traced(session), pair.target.traced(session):
        for _ in range(20):
            pair.source.submit_write(pair.src, pair.dst, len(pair.sent), imm=7, on_done=(done := DoneFlag()))
            counter.wait(domains, LIMIT_S)
            done.wait(LIMIT_S)
        write(pair, num_bytes=100)
    timeline = load(tmp_path)
    assert timeline.problems == ()
    start = timeline.spans.start
    transfers, queued, writes, waits = (
        timeline.rows_of(name) for name in ("transfer", "queued", "write_imm", "wait_imm")
    )
    order = np.argsort(start[transfers])
    transfers, queued = transfers[order], queued[np.argsort(start[queued])]
    assert timeline.field(transfers, "bytes").tolist() == [len(pair.sent)] * 20 + [100]
    assert timeline.field(queued, "writes").tolist() == [domains] * 21
    assert (start[transfers] == start[queued]).all()
    assert (ends(timeline, queued) <= ends(timeline, transfers)).all()
    assert len(writes) == 20 * domains
    assert set(timeline.field(writes, "peer").tolist()) == {0}, "the rank of the other engine"
    arrivals = find_arrivals(timeline)
    assert (arrivals.write >= 0).all()
    assert (start[arrivals.write] <= arrivals.time).all()
    assert domains > 1 or arrivals.is_sure.all()
    assert len(waits) == 20
    assert timeline.field(waits, "wanted").tolist() == [domains * (number + 1) for number in range(20)]
    assert len(timeline.flows) == 20
    assert sorted(timeline.flows.wait.tolist()) == waits.tolist()
    assert timeline.field(timeline.rows_of("write"), "bytes").sum() == 100


def test_what_overlaps_lies_on_tracks_of_its_own(pair: Pair, tmp_path: Path):
    pages = PageIndices(range(64), 4096)
    with capture(tmp_path, device="cpu") as session, pair.source.traced(session):
        flags = [DoneFlag() for _ in range(4)]
        for flag in flags:
            pair.source.submit_paged_writes(pair.src, pages, pair.dst, pages, 4096, imm=1, on_done=flag)
        for flag in flags:
            flag.wait(LIMIT_S)
    timeline = load(tmp_path)
    spans, is_engine = timeline.spans, timeline.tracks_of(TrackKind.ENGINE)
    assert is_engine.all()
    outer = np.flatnonzero(np.array([event.name != "queued" for event in timeline.events])[spans.event])
    same = np.diff(spans.track[outer]) == 0
    assert (spans.start[outer][1:] >= spans.end[outer][:-1])[same].all()
    assert len(timeline.rows_of("write_imm")) == 4 * 64
    counters = {counter.name: counter for counter in count_events(timeline)}
    assert int(counters["bytes under way"].value.max()) <= 4 * 64 * 4096
    assert int(counters["bytes under way"].value[-1]) == 0
    gated = {phase.name: phase.num_spans for phase in phase_statistics(timeline).phases}
    assert gated == {"transfers.transfer": 4, "transfers.queued": 4, "transfers.write_imm": 4 * 64}
    under_way = [counter for name, counter in counters.items() if name.startswith("writes under way, domain")]
    assert len(under_way) == pair.source.num_domains
    assert all(int(counter.value.max()) > 1 and int(counter.value[-1]) == 0 for counter in under_way)


def test_a_full_track_stops_recording_and_says_so(pair: Pair, tmp_path: Path):
    with capture(tmp_path, device="cpu") as session, pair.source.traced(session, records=10):
        for _ in range(50):
            write(pair, imm=3, num_bytes=64)
    timeline = load(tmp_path)
    lost = sum(problem.count for problem in timeline.problems if problem.kind == "lost_records")
    assert lost == (2 * 50 + 2 - 10) + pair.source.num_domains * (50 - 10)  # engine and peer are marks
    assert len(timeline.rows_of("write_imm")) == 10 * pair.source.num_domains


def test_recording_may_begin_and_end_while_transfers_are_under_way(tmp_path: Path):
    pair = Pair(NETS["tcp"])
    counter = pair.target.make_imm_counter(1)
    for number in range(3):
        flags = [DoneFlag() for _ in range(40)]
        for flag in flags:
            pair.source.submit_write(pair.src, pair.dst, 1 << 16, imm=1, on_done=flag)
        directory = tmp_path / str(number)
        with capture(directory, device="cpu") as session, pair.source.traced(session), pair.target.traced(session):
            flags[20].wait(LIMIT_S)
            counter.wait(20, LIMIT_S)
        for flag in flags:
            flag.wait(LIMIT_S)
        counter.wait(20, LIMIT_S)
        timeline = load(tmp_path / str(number))
        assert not [problem for problem in timeline.problems if problem.severity == "error"]
    pair.stop()


def test_a_wait_in_slices_is_one_wait(tmp_path: Path):
    pair, num_slices = Pair(NETS["tcp"]), 0
    counter = pair.target.make_imm_counter(1)
    with capture(tmp_path, device="cpu") as session, pair.target.traced(session):
        start_ns, late = time.monotonic_ns(), threading.Timer(0.3, write, (pair, 1))
        late.start()
        while True:
            num_slices += 1
            with contextlib.suppress(TransferError):
                counter.wait(1, 0.05)
                break
        waited_ns = time.monotonic_ns() - start_ns
        with pytest.raises(TransferError):
            counter.wait(1, 0.01)  # never comes
    timeline = load(tmp_path)
    reached, given_up = timeline.rows_of("wait_imm")
    assert num_slices > 2
    assert 0.25e9 < timeline.spans.end[reached] - timeline.spans.start[reached] <= waited_ns
    assert timeline.spans.is_open[given_up]
    pair.stop()


def test_a_recording_within_one_of_the_same_capture_goes_on(tmp_path: Path):
    pair = Pair(NETS["tcp"])
    with capture(tmp_path / "one", device="cpu") as session, pair.source.traced(session):
        write(pair)
        with pair.source.traced(session):
            write(pair)
        write(pair)
    assert len(load(tmp_path / "one").rows_of("transfer")) == 3
    pair.stop()


@pytest.mark.soak
def test_transfers_far_apart_are_far_apart(tmp_path: Path):
    """By more than the 137 s that the times of records can say."""
    pair, gap_s = Pair(NETS["tcp"]), 150
    with capture(tmp_path, device="cpu") as session, pair.source.traced(session):
        write(pair)
        time.sleep(gap_s)
        write(pair)
    timeline = load(tmp_path)
    first, second = timeline.spans.start[timeline.rows_of("transfer")]
    assert 0 <= (second - first) / 1e9 - gap_s < 5
    assert timeline.problems == ()
    pair.stop()


def test_nothing_is_recorded_outside_of_a_capture_and_a_stopped_engine_ends_its_tracks(tmp_path: Path):
    pair = Pair(NETS["tcp"])
    with capture(tmp_path, device="cpu") as session, pair.source.traced(session):
        write(pair)
        pair.source.stop()
    with pytest.raises(BadInput, match=r"outside the capture's `with` block"), pair.target.traced(session):
        pass
    timeline = load(tmp_path)
    assert timeline.problems == ()
    assert len(timeline.rows_of("transfer")) == 1
    pair.target.stop()


# ---- several ranks ----


def test_the_report_names_the_rank_that_submitted_late(tmp_path: Path, command_line: Any):
    arguments = ["--late-rank", 1, "--late-us", 150_000, "--iterations", 10, "--pages", 8, "--domains", 2]
    ended = command_line("run", "fabric", "-o", tmp_path, "--ranks", 3, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "every byte that arrived is what was written" in ended.stdout
    assert "rank 1 submitted late" in ended.stdout
    timeline = load(tmp_path)
    assert timeline.problems == ()
    waits = divide_transfer_waits(timeline)
    assert waits is not None
    assert (len(waits), waits.num_unmatched) == (3 * 10, 0)
    parts = sum(waits.of(cause) for cause in TransferCause)
    assert (parts == waits.wait_ns).all()
    assert (waits.transfer >= 0).all()
    for_late = waits.rank != 1
    assert set(waits.source[for_late].tolist()) == {1}
    first = blame_transfers(waits).named[0]
    assert (first.cause, first.rank) == (TransferCause.LATE, 1)
    assert first.waited_ns > 2 * 10 * 75e6
    assert first.excess_ns == pytest.approx(first.waited_ns / first.num_waits, rel=0.2)
    (verdict,) = [line.text for line in headlines(analyze(timeline)) if line.word == "verdict"]
    assert verdict.startswith("Rank 1 submitted late")


@pytest.mark.parametrize(
    ("name", "late", "said"),
    [
        ("fabric_late_rank", [1], "Rank 1 submitted late, 13.0 ms of waiting (13.0 ms more than its peers)."),
        (
            "kv_cache",
            [],
            "No cause is named: rank 1 alone sent what was waited for: there is no peer to compare it with.",
        ),
        ("weights_broadcast", [], "No cause is named: no rank, queue or link takes longer than chance explains"),
    ],
)
def test_transfers_of_kept_captures_accuse_whom_chance_does_not_explain(name: str, late: list[int], said: str):
    """A late rank holds up all waits, so all of them see its queue, which is no longer than that of the other."""
    findings = analyze(load(TRACES / name))
    assert findings.transfer_blames is not None
    named = findings.transfer_blames.named
    assert [blame.rank for blame in named if blame.cause is TransferCause.LATE] == late
    assert TransferCause.QUEUED not in {blame.cause for blame in named}
    (verdict,) = [line.text for line in headlines(findings) if line.word == "verdict"]
    assert verdict.startswith(said)


def test_a_late_proxy_is_named_with_what_it_took_longer():
    findings = analyze(load(TRACES / "two_hosts"))
    assert findings.transfer_blames is not None
    first, *others = findings.transfer_blames.named
    assert (first.cause, first.rank) == (TransferCause.NOT_TAKEN, 5)
    assert first.excess_ns == pytest.approx(2e6, rel=0.05), "it pauses for 2 ms before each turn"
    assert {(blame.cause, blame.peer) for blame in others} == {(TransferCause.UNDER_WAY, 5)}, "it also receives late"
    said = {line.word: line.text for line in headlines(findings)}
    assert "most beyond its peers: the proxy of rank 5 took commands late" in said["transfers"]


def test_too_few_waits_accuse_nobody():
    waits = divide_transfer_waits(load(TRACES / "fabric_late_rank"))
    assert waits is not None
    few = dataclasses.replace(waits, writes=waits.writes.take(waits.writes.wait % 12 < 7))
    assert (blame_transfers(few).named, blame_transfers(few).num_compared) == ((), 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", 1], "ranks is 1; wanted 2 to 64"),
        (["--provider", "efa"], "provider is 'efa'; wanted tcp or shm"),
        (["--domains", 5], "domains is 5; wanted 1 to 4"),
        (["--pages", 1 << 16, "--page-kib", 1024], "take fewer pages, or smaller ones"),
        (["--late-rank", 2], "late-rank is 2; wanted -1 to 1"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, command_line: Any, arguments: list[Any], said: str):
    ended = command_line("run", "fabric", "-o", tmp_path / "capture", *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "capture").exists()


def die_in_a_wait() -> None:
    """Rank 1 is killed while rank 0 waits for what it would have written."""
    join_ranks()
    rank = int(os.environ["RANK"])
    own = engine(NETS["tcp"])
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    src, descriptor = own.register_tensor(memory)
    with capture(os.environ["CAPTURE_DIR"], device="cpu") as session, own.traced(session):
        told = session.group.all_gather(descriptor.to_bytes(), "descriptors")
        counter = own.make_imm_counter(1)
        own.submit_write(src, MemoryRegionDescriptor(told[1 - rank]), 1 << 12, imm=1, on_done=(done := DoneFlag()))
        counter.wait(1, LIMIT_S)
        done.wait(LIMIT_S)
        session.group.barrier()
        if rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        counter.wait(1, LIMIT_S)


def test_what_a_killed_rank_had_recorded_is_kept(tmp_path: Path):
    env = {"CAPTURE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    exits = launch_ranks(2, "tests.fabric.test_fabric_trace:die_in_a_wait", env=env, kill_after_s=0.5, timeout_s=300)
    assert exits[1].signal_name == "SIGKILL"
    timeline = load(tmp_path)
    of_rank = timeline.track_ranks()[timeline.spans.track]
    for rank in (0, 1):
        mine = [timeline.events[event].name for event in timeline.spans.event[of_rank == rank].tolist()]
        assert {"transfer", "queued", "write_imm", "wait_imm"} <= set(mine)
    open_waits = timeline.rows_of("wait_imm", rank=0)
    assert (ends(timeline, open_waits) == OPEN_END).sum() == 1, "the wait for the dead rank"


def test_a_table_that_names_immediates_without_their_fields_is_refused(tmp_path: Path):
    table = {
        "name": "Mine",
        "events": [
            {
                **{"name": "wait_mine", "class": "wait", "ends_at": "completion", "level": "1"},
                **{"channel": "mine immediate imm", "begin_fields": "imm:32", "end_fields": ""},
            }
        ],
    }
    with (
        capture(tmp_path, device="cpu") as session,
        pytest.raises(BadInput, match=r"channel of kind immediate, wanted peer imm at the begin of a signal"),
    ):
        session.launch("mine", grid=1, warps=1, events=json.dumps(table))

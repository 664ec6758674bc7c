"""The main job end to end: ranks run, the capture merges, and Perfetto itself counts what the routing table demands."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from trace_processor import TraceProcessor, assert_no_loss

import tracekern
from tests.warm_ranks import run_moe
from tracekern.analysis.findings import analyze
from tracekern.dump.fault import describe_fault
from tracekern.errors import BadInput, CommTimeout, TracekernError
from tracekern.export.formats.perfetto import FLOWS_SQL, write_perfetto
from tracekern.launcher.rendezvous import free_port
from tracekern.moe.routing import draw_batch
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.reports import RankReport, RunReport
from tracekern.moe.workload.run import _explain, _find_followers
from tracekern.timeline.model import OPEN_END, EventClass
from tracekern.viewers.report.headlines import headlines

SMALL = {"ranks": 4, "tokens": 12, "hidden": 64, "experts": 16, "topk": 3, "iterations": 2, "blocks": 3, "warps": 2}


def choices_of(options: MoeRun) -> Iterator[tuple[int, list[int]]]:
    """(rank, experts) of each token of all iterations, from the routing alone."""
    drawn = {"routing": options.routing, "uneven": options.uneven}
    for iteration, rank in itertools.product(range(options.iterations), range(options.ranks)):
        batch = draw_batch(options.shape, seed=options.seed, rank=rank, iteration=iteration, **drawn)
        yield from ((rank, experts) for experts in batch.topk_idx.tolist())


def routed(options: MoeRun) -> Counter[tuple[int, int, int]]:
    """(source, destination, expert) -> tokens."""
    num_local = options.shape.num_local_experts
    return Counter((rank, expert // num_local, expert) for rank, experts in choices_of(options) for expert in experts)


def routed_rows(options: MoeRun) -> Counter[tuple[int, int, int]]:
    """(source, destination, -1) -> tokens that have experts there, each once."""
    num_local = options.shape.num_local_experts
    return Counter(
        (rank, peer, -1)
        for rank, experts in choices_of(options)
        for peer in {expert // num_local for expert in experts}
    )


class Loaded:
    """A trace in the trace processor: slices by id with their rank and arguments."""

    def __init__(self, path: Path) -> None:
        self.processor = TraceProcessor(path)
        assert_no_loss(self.processor)
        tracks = {row[0]: row[1:] for row in self.processor.query("select id, parent_id, name from track")}

        def rank_of(track: int | None) -> int:
            while track is not None:
                parent, name = tracks[track]
                if found := re.match(r"rank (\d+)", name or ""):
                    return int(found[1])
                track = parent
            return -1

        ranks = {track: rank_of(track) for track in tracks}
        arguments: dict[int, dict[str, int]] = {}
        for arg_set, key, value in self.processor.query(
            "select arg_set_id, key, int_value from args where key in ('debug.peer', 'debug.expert', 'debug.slot')"
        ):
            arguments.setdefault(arg_set, {})[key.removeprefix("debug.")] = value
        self.slices = {
            row[0]: (row[1], ranks[row[2]], arguments.get(row[3], {}))
            for row in self.processor.query("select id, name, track_id, arg_set_id from slice")
        }

    def count(self, event: str, *, rank_is_source: bool) -> Counter[tuple[int, int, int]]:
        """(source, destination, expert) -> slices of that name; expert -1 where they name none."""
        counts: Counter[tuple[int, int, int]] = Counter()
        for name, rank, arguments in self.slices.values():
            if name == event:
                peer, expert = arguments["peer"], arguments.get("expert", -1)
                counts[(rank, peer, expert) if rank_is_source else (peer, rank, expert)] += 1
        return counts

    def count_flows(self, signal_name: str, *, signal_is_source: bool) -> Counter[tuple[int, int, int]]:
        """(source, destination, expert) -> arrows from a signal of that name, checked for leading where they should."""
        counts: Counter[tuple[int, int, int]] = Counter()
        for signal_id, wait_id in self.processor.query(FLOWS_SQL):
            name, rank, arguments = self.slices[signal_id]
            if name != signal_name:
                continue
            wait_name, wait_rank, wait_arguments = self.slices[wait_id]
            assert wait_name == name.replace("signal_", "wait_")
            assert (wait_rank, wait_arguments["peer"]) == (arguments["peer"], rank)
            assert wait_arguments["slot"] == arguments["slot"]
            expert = arguments.get("expert", -1)
            counts[(rank, wait_rank, expert) if signal_is_source else (wait_rank, rank, expert)] += 1
        return counts


@pytest.mark.parametrize("variant", ["token", "fused", "balanced"])
def test_perfetto_counts_what_the_routing_demands(tmp_path, variant):
    options = MoeRun(**SMALL, variant=variant, seed=11)
    report = run_moe(options, tmp_path / "capture")
    report.raise_for_error()
    timeline = tracekern.load(tmp_path / "capture")
    write_perfetto(timeline, tmp_path / "trace.pftrace.gz")
    loaded = Loaded(tmp_path / "trace.pftrace.gz")
    wanted = routed(options)
    assert sum(wanted.values()) > 0
    for event in ("copy_token", "signal_token", "wait_result"):
        assert loaded.count(event, rank_is_source=True) == wanted, event
    for event in ("wait_token", "receive_token", "send_result", "signal_result"):
        assert loaded.count(event, rank_is_source=False) == wanted, event
    assert loaded.count_flows("signal_token", signal_is_source=True) == wanted
    assert loaded.count_flows("signal_result", signal_is_source=False) == wanted


@pytest.mark.parametrize("variant", ["dedup", "reduce", "pipelined", "overlapped"])
def test_a_token_goes_once_to_each_rank_of_its_experts(tmp_path, variant):
    own = {"partitions": 2} if variant in ("pipelined", "overlapped") else {}
    options = MoeRun(**SMALL, variant=variant, seed=11, family_options=own)
    run_moe(options, tmp_path / "capture").raise_for_error()
    timeline = tracekern.load(tmp_path / "capture")
    assert not [problem for problem in timeline.problems if problem.kind == "unmatched_wait"]
    write_perfetto(timeline, tmp_path / "trace.pftrace.gz")
    loaded = Loaded(tmp_path / "trace.pftrace.gz")
    rows, choices = routed_rows(options), routed(options)
    assert 0 < sum(rows.values()) < sum(choices.values())
    assert loaded.count("copy_row", rank_is_source=True) == rows
    assert loaded.count("wait_row", rank_is_source=False) == rows
    assert loaded.count_flows("signal_row", signal_is_source=True) == rows
    back, wanted = ("result", choices) if variant == "dedup" else ("partial", rows)
    assert loaded.count(f"send_{back}", rank_is_source=False) == wanted
    assert loaded.count(f"wait_{back}", rank_is_source=True) == wanted
    assert loaded.count_flows(f"signal_{back}", signal_is_source=False) == wanted


def test_rank_flags_release_every_wait_on_them(tmp_path):
    report = run_moe(MoeRun(**SMALL, variant="flag"), tmp_path)
    report.raise_for_error()
    timeline = tracekern.load(tmp_path)
    names = [event.name for event in timeline.events]
    waits = {i for i, event in enumerate(timeline.events) if event.channel and event.event_class is EventClass.WAIT}
    assert {"wait_rank", "wait_results", "wait_counts", "wait_ack", "wait_barrier"} <= {names[i] for i in waits}
    assert not [problem for problem in timeline.problems if problem.kind == "unmatched_wait"]
    num_waits = sum(int((timeline.spans.event == i).sum()) for i in waits)
    assert len(timeline.flows) == num_waits


@pytest.mark.parametrize("variant", ["reference", "sorted"])
def test_torch_variants_leave_host_lanes(tmp_path, variant):
    report = run_moe(MoeRun(**SMALL, variant=variant), tmp_path)
    report.raise_for_error()
    timeline = tracekern.load(tmp_path)
    assert timeline.host_names.count(f"{variant} call") == 1


def test_too_few_records_are_counted_drawn_and_told(tmp_path):
    report = run_moe(MoeRun(**{**SMALL, "tokens": 64}, records_per_track=16), tmp_path)
    report.raise_for_error()
    timeline = tracekern.load(tmp_path)
    lost = [launch for launch in timeline.launches if launch.records_lost]
    assert lost
    assert all(launch.records_needed > 16 for launch in lost)
    with pytest.raises(BadInput, match="would have been enough"):
        tracekern.load(tmp_path, strict=True)
    enough = max(launch.records_needed for launch in timeline.launches)
    report = run_moe(MoeRun(**{**SMALL, "tokens": 64}, records_per_track=enough), tmp_path / "again")
    report.raise_for_error()
    assert not any(launch.records_lost for launch in tracekern.load(tmp_path / "again").launches)


def test_settings_of_a_capture_are_the_work_alone(tmp_path):
    options = MoeRun(**SMALL)
    recorded = {"keep": "last", "every": 2, "records_per_track": 4096, "timeout_ms": 19_000, "command": "other"}
    told: list[tuple[int, int]] = []
    report = run_moe(
        dataclasses.replace(options, **recorded, backend="cpu"), tmp_path, lambda *progress: told.append(progress)
    )
    assert report.ok
    assert told[-1] == (options.iterations, options.iterations)
    timeline = tracekern.load(tmp_path)
    assert timeline.ranks[0].metadata["settings"] == options.workload
    grids = {
        (launch.num_blocks, launch.warps_per_block) for launch in timeline.launches if launch.name != "rank_barrier"
    }
    assert grids == {(options.blocks, options.warps)}
    for name, value in {"variant": "token", "tokens": 11, "seed": 8, "uneven": False, "routing": "uniform"}.items():
        assert dataclasses.replace(options, **{name: value}).workload == {**options.workload, name: value}
    parts = [
        MoeRun(**SMALL, variant="pipelined", family_options={"partitions": count}).workload["partitions"]
        for count in (2, 3)
    ]
    assert parts == [2, 3]
    with pytest.raises(BadInput, match="variant balanced has none, only pipelined and overlapped have"):
        MoeRun(**SMALL, family_options={"partitions": 3})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topk": 5, "experts": 4}, "top-k 5 of 4 experts: a token cannot choose more"),
        ({"tokens": 1 << 18, "topk": 16}, "4194304 rows for one rank; the slot field"),
        ({"variant": "sorted", "backend": "cuda"}, "variant sorted runs on the CPU only"),
        ({"records_per_track": 0}, "records-per-track is 0; wanted auto or 1 to 16777216"),
        ({"records_per_track": "some"}, "records-per-track is some; wanted auto"),
        ({"keep": "middle"}, "keep is 'middle'; wanted one of first, last"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        MoeRun(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("text", "said"), [("{", "TRACEKERN_MOE_RUN is '{': Expecting"), ('{"ranks": 0}', "ranks is 0; wanted 1 to 64\n")]
)
def test_a_rank_started_with_options_that_cannot_be_says_so_in_a_line(text, said):
    command = [sys.executable, "-m", "tracekern.moe.workload.worker"]
    ended = subprocess.run(command, env={**os.environ, "TRACEKERN_MOE_RUN": text}, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(said)
    assert ended.stderr.count("\n") == 1


def test_ranks_that_only_followed_are_counted():
    numbers = dict.fromkeys(("block", "warp", "slot", "wanted_epoch", "seen_epoch", "seen_value"), 0)
    fault = {**numbers, "kernel": "dispatch_send", "channel": "counts", "waited_ns": 20_004_000_000, "aborted_by": 2}
    causes = ("peer_aborted", "peer_aborted", "timeout")
    ranks = tuple(
        RankReport(
            rank,
            False,
            describe_fault({**fault, "rank": rank, "peer": 1, "cause": cause, "on_timeout": ""}),
            3,
            followed=cause == "peer_aborted",
        )
        for rank, cause in enumerate(causes)
    )
    report = RunReport(MoeRun(), False, ranks, 1.0, errors=tuple(rank.error for rank in ranks))
    with pytest.raises(CommTimeout) as failure:
        report.raise_for_error()
    assert str(failure.value).startswith("rank 2 dispatch_send block 0 warp 0 gave up on rank 1 after 20.0 s; channel")
    assert str(failure.value).endswith("; 2 more ranks stopped")
    report = dataclasses.replace(report, ranks=ranks[:2], errors=report.errors[:2])
    with pytest.raises(CommTimeout, match=r"^rank 0 .* stopped waiting for rank 1 .*; 1 more rank stopped$"):
        report.raise_for_error()


def timed_out(rank: int, peer: int) -> RankReport:
    return RankReport(rank, False, f"rank {rank} gave up on rank {peer}", CommTimeout.exit_code, waited_for=peer)


KILLED = RankReport(0, False, "rank 0 ended", -signal.SIGKILL)
LOST = RankReport(1, False, "rank 1 lost the others", 2, followed=True)


@pytest.mark.parametrize(
    ("reports", "own"),
    [
        ([KILLED, timed_out(1, 0)], [0]),
        ([KILLED, timed_out(1, 0), timed_out(2, 1)], [0]),
        ([KILLED, LOST, timed_out(2, 1)], [0]),
        ([KILLED, timed_out(1, 2), timed_out(2, 1)], [0, 1, 2]),
        ([RankReport(0, True), timed_out(1, 0)], [1]),
        ([timed_out(0, 1), LOST], [0]),
        ([dataclasses.replace(KILLED, wrong_elements=3, exit_code=1), timed_out(1, 0)], [0, 1]),
    ],
)
def test_a_timeout_for_a_rank_that_ended_only_followed(reports: list[RankReport], own: list[int]):
    found = _find_followers(reports, stopped=set())
    assert [report.rank for report in found if not (report.ok or report.followed)] == own


def test_a_timeout_for_a_rank_that_the_launcher_ended_is_told():
    late = RankReport(0, False, "rank 0 made no progress", -signal.SIGTERM)
    found = _find_followers([late, timed_out(1, 0)], stopped={0})
    assert [report.followed for report in found] == [False, False]


def test_what_the_launcher_ended_is_told_last():
    ended = RankReport(0, False, "rank 0 was ended by the launcher", -signal.SIGTERM, followed=True)
    assert _explain([ended, LOST]) == (LOST.error, ended.error)


def test_what_all_ranks_say_is_said_once():
    said = ["no GPU", "no GPU", "no room"]
    ranks = tuple(RankReport(rank, False, error=text, exit_code=2) for rank, text in enumerate(said))
    with pytest.raises(TracekernError, match="^no GPU; no room$"):
        RunReport(MoeRun(), False, ranks, 1.0, errors=tuple(said)).raise_for_error()


def test_a_killed_rank_is_named_and_its_part_is_kept(tmp_path):
    options = MoeRun(**{**SMALL, "iterations": 5000}, records_per_track=200, timeout_ms=6000)

    pids: dict[int, int] = {}

    def kill_in_mid_run(done: int, _total: int) -> None:
        if done >= 20 and 2 in pids:
            os.kill(pids.pop(2), signal.SIGKILL)

    report = run_moe(options, tmp_path, kill_in_mid_run, on_start=pids.__setitem__)
    assert not report.ok
    assert "rank 2 ended (killed by signal 9) during run" in report.errors
    with pytest.raises(TracekernError) as failure:
        report.raise_for_error()
    assert str(failure.value) == "rank 2 ended (killed by signal 9) during run; 3 more ranks stopped"
    assert failure.value.exit_code == 2
    said = [text for text in report.errors if "gave up on rank 2" in text]
    assert all(
        re.search(r"^rank [013] .* channel \w+ slot \d+: wanted call \d+, (has .* of call \d+|nothing has come)", text)
        for text in said
    )
    timeline = tracekern.load(tmp_path)
    died, first, second = headlines(analyze(timeline))[:3]
    assert (died.word, died.text.startswith("rank 2 was killed by SIGKILL ")) == ("died", True)
    assert (first.word, "gave up on rank 2" in first.text) == ("fault", True)
    assert len(re.findall(r"; rank \d waited [\d.]+ m?s for rank 2 \(", first.text)) == 2
    assert (second.word, second.text.startswith("Rank 2 did not come in time: rank ")) == ("verdict", True)
    assert [rank.state for rank in timeline.ranks] == ["closed", "closed", "salvaged", "closed"]
    spans = timeline.spans
    rank_2 = timeline.track_ranks()[spans.track] == 2
    assert int(rank_2.sum()) > 100
    is_wait = [event.event_class is EventClass.WAIT for event in timeline.events]
    ranks = timeline.track_ranks()[spans.track]
    open_waits = [
        int(rank)
        for rank, event, end in zip(ranks, spans.event, spans.end, strict=True)
        if end == OPEN_END and is_wait[event]
    ]
    assert {0, 1, 3} <= set(open_waits)
    assert not any(problem.kind in ("unmatched_wait", "lost_records") for problem in timeline.problems)


def test_an_interrupt_ends_ranks_inside_their_kernels(tmp_path):
    """One that waits for a rank which is gone would see it only after its time limit."""
    options = MoeRun(**{**SMALL, "iterations": 5000}, records_per_track=200, timeout_ms=100_000)

    interrupted: list[int] = []

    def interrupt(done: int, _total: int) -> None:
        if done >= 20 and not interrupted:
            interrupted.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    report = run_moe(options, tmp_path, interrupt)
    assert [rank.exit_code for rank in report.ranks] == [-signal.SIGINT] * options.ranks
    with pytest.raises(KeyboardInterrupt):
        report.raise_for_error()
    timeline = tracekern.load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["salvaged"] * options.ranks
    assert len(timeline.spans) > 100


def test_an_interrupt_before_the_capture_ends_ranks_without_a_word(tmp_path, capfd):
    """While they meet or draw their tokens."""
    options = MoeRun(**{**SMALL, "iterations": 5000}, trace=False)
    pids: list[int] = []

    def interrupt_all(_rank: int, pid: int) -> None:
        pids.append(pid)
        # None goes on, and misses another one, before all have heard it.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT) if len(pids) == options.ranks else ():
            for pid in pids:
                os.kill(pid, number)

    report = run_moe(options, tmp_path, on_start=interrupt_all)
    assert [rank.exit_code for rank in report.ranks] == [-signal.SIGINT] * options.ranks
    assert capfd.readouterr().err == ""


@pytest.mark.rotates
def test_torchrun_gives_the_same_capture(tmp_path):
    """Two agents play two nodes on this host."""
    options = MoeRun(**SMALL | {"ranks": 2})
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
    ]
    environment = {
        **os.environ,
        "TRACEKERN_MOE_RUN": json.dumps(dataclasses.asdict(options)),
        "TRACEKERN_MOE_CAPTURE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    port = free_port()
    agents = [
        subprocess.Popen(
            [*command, f"--master-port={port}", f"--node-rank={node}", "-m", "tracekern.moe.workload.worker"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]
    for agent in agents:
        _, errors = agent.communicate(timeout=300)
        assert agent.returncode == 0, errors.decode()[-2000:]
    timeline = tracekern.load(tmp_path)
    assert [rank.rank for rank in timeline.ranks] == [0, 1]
    names = [event.name for event in timeline.events]
    assert int((timeline.spans.event == names.index("copy_token")).sum()) == sum(routed(options).values())

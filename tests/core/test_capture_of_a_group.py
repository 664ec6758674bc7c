"""Captures of a group of the ranks alone, `capture(group=)` and `start(group=)`, while the others run untraced."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailed, RankPool

import tracekern
from tests.captures import removed_after
from tests.kernels import run_kernel
from tests.paths import ROOT
from tests.sessions import TABLE, launch
from tests.warm_ranks import run_ranks
from tracekern.analysis.findings import analyze
from tracekern.comm.ranks.group import Group
from tracekern.dump.format import SampleKind
from tracekern.dump.reader import peek_metadata, read_dump
from tracekern.errors import BadInput
from tracekern.moe.low_latency import Buffer
from tracekern.record.attempt_choice import Claim, choose_attempt
from tracekern.segment.names import find_dead
from tracekern.segment.salvage import find_leftovers
from tracekern.segment.snapshot import snapshot_run
from tracekern.segment.writer import SegmentWriter
from tracekern.viewers.report.headlines import headlines

LATE_S = 0.03
WORK = {"class": "work", "ends_at": "completion", "channel": "", "begin_fields": "", "end_fields": ""}
LOCAL = {"name": "Local", "events": [WORK | {"name": name} for name in ("begin", "compute")]}
"""The table of a kernel that exchanges no messages."""


def calls(buffer: Buffer, capture: Any, late_s: float) -> None:
    """Three calls of experts; this rank comes `late_s` late to each but the first."""
    x = torch.ones((8, 256), dtype=torch.bfloat16)
    ids = torch.stack([torch.arange(8) % 8, (torch.arange(8) + 4) % 8], dim=1)
    for number in range(3):
        time.sleep(late_s if number else 0.0)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, 8, use_fp8=False, capture=capture)
        buffer.low_latency_combine(rows, ids, torch.ones((8, 2)), handle, capture=capture)
        buffer.synchronize()


def new_buffer(group: Any) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(8, 256, 4, 8)
    return Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", timeout_s=10.0)


def capture_one_group(world: Group, directory: str, given: str) -> None:
    """Ranks 1 and 3 capture twice, rank 3 comes late; 0 and 2 make the same calls untraced. Clocks differ."""
    os.environ["TRACEKERN_SIMULATED_CLOCK"] = f"7:{time.monotonic_ns()}"
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    buffer = new_buffer(groups[world.rank % 2])
    own = {"ProcessGroup": groups[world.rank % 2], "list": [3, 1], "Group": buffer.comm.group}[given]
    for number in range(2):
        traced = tracekern.capture(f"{directory}/{number}", group=own, device=buffer.comm.device)
        with traced if world.rank % 2 else contextlib.nullcontext() as opened:
            calls(buffer, opened, LATE_S if world.rank == 3 else 0.0)
            if opened is not None:
                run_kernel(opened.launch("local", grid=1, warps=1, events=json.dumps(LOCAL)).descriptor, 1, 1, 2)
    calls(buffer, None, 0.0)  # its messages are its own
    del os.environ["TRACEKERN_SIMULATED_CLOCK"]


@pytest.mark.parametrize("given", ["ProcessGroup", "list", "Group"])
def test_a_group_captures_while_the_others_run_untraced(pools, given: str, tmp_path: Path, command_line):
    pools(4).call(capture_one_group, str(tmp_path), given)
    for directory in (tmp_path / "0", tmp_path / "1"):
        timeline = tracekern.load(directory, strict=True)
        assert [rank.rank for rank in timeline.ranks] == [1, 3]
        assert [problem.kind for problem in timeline.problems if problem.severity != "note"] == []
        assert json.loads((directory / "capture.json").read_text())["num_ranks"] == 2
        assert choose_attempt(directory, Claim()) == (0, ""), "it is whole, and may be replaced"
        samples = read_dump(directory / "rank_00001.tkdump").clock_samples()
        samples = samples[samples["kind"] == SampleKind.PING_PONG]
        assert {*samples["initiator"].tolist(), *samples["responder"].tolist()} == {1, 3}
        findings = analyze(timeline)
        assert findings.absent == []
        assert "what is not here" not in str(headlines(findings))
        late = {blame.rank: blame.late_ns for blame in findings.blames}
        assert max(late, key=late.__getitem__) == 3
        assert late[3] > LATE_S * 1e9
    said = command_line("info", tmp_path / "1").stdout
    assert "note group: the capture is of ranks 1 and 3 of 4 alone\n" in said
    (tmp_path / "0" / "rank_00003.tkdump").unlink()
    with pytest.raises(BadInput, match="1 of 2 ranks have no dump: 3; "):
        tracekern.load(tmp_path / "0")


def capture_both_groups(world: Group, directory: str) -> dict[str, Any]:
    """Each group captures, all at once under one name of a run, then each rank alone; then both into one directory."""
    os.environ["TRACEKERN_RUN_ID"] = f"both-{os.getppid()}"
    half, found = world.rank % 2, dict[str, Any]()
    with tracekern.capture(f"{directory}/{half}", group=[half, half + 2]) as opened:
        launch(opened)
        world.barrier()
        found["runs"] = {(one.run_id, one.rank): one.ranks for one in find_leftovers(os.environ["TRACEKERN_RUN_ID"])}
        if world.rank == half:
            found["copied"] = snapshot_run(opened.run_id, Path(f"{directory}/snapshot-{half}"))
        world.barrier()
    with tracekern.capture(f"{directory}/rank-{world.rank}", group=[world.rank]) as opened:
        launch(opened)
        world.barrier()
    with contextlib.ExitStack() as stack:
        for turn in range(2):
            world.barrier()
            try:
                if half == turn:
                    stack.enter_context(tracekern.capture(f"{directory}/one", group=[half, half + 2]))
            except BadInput as error:
                found["refused"] = str(error)
        world.barrier()
    del os.environ["TRACEKERN_RUN_ID"]
    return found


def test_groups_capture_at_the_same_time(pools, tmp_path: Path):
    found = pools(4).call(capture_both_groups, str(tmp_path))
    for half in range(2):
        timeline = tracekern.load(tmp_path / str(half), strict=True)
        assert [rank.rank for rank in timeline.ranks] == [half, half + 2]
        assert found[half]["copied"] == [half, half + 2]
        assert [rank.rank for rank in tracekern.load(tmp_path / f"snapshot-{half}").ranks] == [half, half + 2]
    runs = found[0]["runs"]
    assert {rank: ranks for (_, rank), ranks in runs.items()} == {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    assert len({run for run, _ in runs}) == 2
    for rank in range(4):
        assert [one.rank for one in tracekern.load(tmp_path / f"rank-{rank}", strict=True).ranks] == [rank]
    assert ["refused" in of_rank for of_rank in found] == [False, True, False, True]
    assert re.search(r"/one: run both-\d+\.g\w{8} .* is writing its capture there; choose", found[1]["refused"])


def start_on_a_group(world: Group, directory: str) -> tuple[list[bool], bool]:
    """The members start() in turn, and one that is none: what each launch recorded, and whether it was refused."""
    traced = []
    for number in range(200):
        if number == 5 * world.rank and world.rank != 0:
            is_refused = tracekern.start(directory, launches=3, group=[1, 2]) is None
        traced.append(tracekern.launch("demo", grid=1, warps=1, events=TABLE, key=f"step {number}").traced)
        time.sleep(0.002)
    tracekern.stop()
    return traced, world.rank != 0 and is_refused


def test_start_reaches_the_members_of_its_group(pools, tmp_path: Path):
    for directory in (tmp_path / "0", tmp_path / "1"):
        answers = pools(4).call(start_on_a_group, str(directory))
        assert [sum(traced) for traced, _ in answers] == [0, 3, 3, 0]
        assert [is_refused for _, is_refused in answers] == [False, False, False, True]
        timeline = tracekern.load(directory)
        assert {launch.rank for launch in timeline.launches} == {1, 2}
        assert {"unequal_keys"} & {problem.kind for problem in timeline.problems} == set()


def give_what_is_none(world: Group) -> list[str]:
    said = []
    others = [rank for rank in range(4) if rank != world.rank]
    made = [dist.new_group([rank]) for rank in range(4)]
    gone = made[world.rank]
    dist.destroy_process_group(gone)
    for group in (others, made[others[0]], gone, 7):
        with pytest.raises(BadInput) as refused, tracekern.capture("never-made", group=group):
            pass
        said.append(str(refused.value))
    return said


def test_what_is_no_group_of_this_rank_is_refused(pools):
    for rank, said in enumerate(pools(4).call(give_what_is_none)):
        assert f"wanted ranks of the run, some of 0 to 3, each once, rank {rank} among them" in said[0]
        assert said[1] == f"rank {rank} is not in the group that it gives; only the group's ranks may give it"
        assert said[2] == f"rank {rank}: the program has destroyed the process group that it gives"
        assert said[3] == "group is int; wanted tracekern.Group.discover()"
    assert not Path("never-made").exists()


def capture_a_part_of_all(world: Group, directory: str, members: list[int]) -> None:
    """Calls of all ranks, of which the members capture theirs; rank 3 comes late."""
    buffer = new_buffer(None)
    traced = tracekern.capture(directory, group=members, device=buffer.comm.device)
    with traced if world.rank in members else contextlib.nullcontext() as opened:
        calls(buffer, opened, LATE_S if world.rank == 3 else 0.0)


@pytest.mark.parametrize(
    ("members", "inside", "outside"),
    [([0, 1], "ranks 0 and 1", "ranks 2 and 3"), ([1, 3], "ranks 1 and 3", "ranks 0 and 2")],
)
def test_nobody_is_blamed_where_ranks_outside_may_have_been_waited_for(
    pools, members: list[int], inside: str, outside: str, tmp_path: Path, command_line
):
    pools(4).call(capture_a_part_of_all, str(tmp_path), members)
    timeline = tracekern.load(tmp_path, strict=True)
    findings = analyze(timeline)
    (absent,) = findings.absent
    told = r"the capture is of (.*) of 4 alone; (.*), with which \w+ exchanges messages, are not in it"
    assert re.fullmatch(told, absent).groups() == (inside, outside)
    assert not findings.answer.causes
    lines = {line.word: line.text for line in headlines(findings)}
    assert lines["verdict"] == f"No cause is named: {absent}, and what is not here may have been waited for."
    for command in (["report", tmp_path], ["info", tmp_path], ["merge", tmp_path, "-o", tmp_path / "t.pftrace.gz"]):
        ended = command_line(*command)
        assert ended.returncode == 0, ended.stderr
    assert "no dump" not in command_line("report", tmp_path).stdout


def die_in_a_capture(world: Group, directory: str) -> None:
    """Two groups capture under one name of a run, and the second rank is killed."""
    os.environ |= {"TRACEKERN_GROUP_TIMEOUT_S": "2", "TRACEKERN_RUN_ID": f"die-{os.getppid()}"}
    half = world.rank % 2
    with tracekern.capture(f"{directory}/{half}", group=[half, half + 2]) as opened:
        launch(opened)
        world.barrier()
        if world.rank > 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_what_killed_members_left_is_saved_group_by_group(tmp_path: Path, command_line):
    pool = RankPool(4)
    with pytest.raises(RankFailed, match="rank 3: the process is gone"):
        pool.call(die_in_a_capture, str(tmp_path))
    pool.close()
    runs = [str(peek_metadata(tmp_path / f"{rank}/rank_0000{rank}.tkdump")["run_id"]) for rank in range(2)]
    with pytest.raises(BadInput, match="1 of 2 ranks have no dump: 3; "):
        tracekern.load(tmp_path / "1")
    assert choose_attempt(tmp_path / "1", Claim())[0] == 1
    listed = command_line("salvage").stdout
    for half, run in enumerate(runs):
        assert f"{run}: rank {half + 2} of 2 records no more; opened" in listed
    refused = command_line("salvage", runs[0].partition(".")[0], "-o", tmp_path / "saved")
    assert "/saved: holds run" in refused.stderr
    assert "of other ranks; choose another directory" in refused.stderr
    (first,) = {str(peek_metadata(dump)["run_id"]) for dump in (tmp_path / "saved").glob("*.tkdump")}
    half = 1 - runs.index(first)
    saved = command_line("salvage", runs[half])
    assert f"run {runs[half]}: saved rank {half + 2} of 2" in saved.stdout
    assert "--partial" not in saved.stderr
    for directory, number in ((tmp_path / "saved", 1 - half), (tmp_path / str(half), half)):
        ranks = tracekern.load(directory).ranks
        assert [(rank.rank, rank.state) for rank in ranks] == [(number, "closed"), (number + 2, "salvaged")]
        listed = json.loads((directory / "capture.json").read_text())["ranks"]
        assert [entry["rank"] for entry in listed] == [number, number + 2]


def test_a_run_is_not_dead_while_a_group_of_its_ranks_records():
    """Who saves what is left of the run takes that of its groups along."""
    run, group = f"left-{os.getpid()}", f"left-{os.getpid()}.g01234567"
    with removed_after(SegmentWriter.create(run, 0, {}, 1 << 16)) as left:
        left.close()
        with removed_after(SegmentWriter.create(group, 1, {}, 1 << 16)) as recorded:
            assert find_dead(run) == {}
            recorded.close()
            assert find_dead(run) == {run: [0], group: [1]}
            assert find_dead(group) == {group: [1]}


IN_TWO_GROUPS = """
import os, signal, sys
sys.path[:0] = [{root!r}]
import torch.distributed as dist
import tracekern
from tests.sessions import launch
dist.init_process_group("gloo")
half = dist.get_rank() % 2
with tracekern.capture({directory!r} + f"/{{half}}", group=[half, half + 2]) as opened:
    launch(opened)
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if half == 0:
        dist.destroy_process_group()
"""


def test_the_launcher_saves_each_group_by_itself(tmp_path: Path):
    """One group loses a rank; the other destroys its process groups in the block."""
    codes, lines = run_ranks(
        4, IN_TWO_GROUPS.format(root=str(ROOT), directory=str(tmp_path)), env={"TRACEKERN_GROUP_TIMEOUT_S": "3"}
    )
    assert codes == [0, 0, 0, -signal.SIGKILL], lines
    for half, states in ((0, ["closed", "closed"]), (1, ["closed", "salvaged"])):
        timeline = tracekern.load(tmp_path / str(half))
        assert [(rank.rank, rank.state) for rank in timeline.ranks] == [(half, states[0]), (half + 2, states[1])]
        manifest = json.loads((tmp_path / str(half) / "capture.json").read_text())
        assert [entry["rank"] for entry in manifest["ranks"]] == [half, half + 2]
        assert manifest["num_ranks"] == 2
    assert timeline.ranks[1].metadata["killed_by"] == "SIGKILL"
    assert find_leftovers(timeline.ranks[0].metadata["run_id"]) == []


def capture_without_a_shared_disk(world: Group, directory: str) -> None:
    if world.rank:
        disks = mock.patch("tracekern.record.attempt_choice.directory_id", return_value=f"disk of {world.rank}")
        with disks, tracekern.capture(f"{directory}/{world.rank}", group=[1, 2, 3]) as opened:
            launch(opened)


def test_dumps_are_sent_to_the_first_rank_of_the_group(pools, tmp_path: Path):
    pools(4).call(capture_without_a_shared_disk, str(tmp_path))
    assert [rank.rank for rank in tracekern.load(tmp_path / "1", strict=True).ranks] == [1, 2, 3]
    assert not [*tmp_path.glob("[23]/*.tkdump")]

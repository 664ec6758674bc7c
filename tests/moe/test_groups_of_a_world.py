"""Groups of a world: ranks of a group exchange messages, and all that is said of them is in ranks of the world."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import analyze
from tracekern.comm.communicator import Communicator
from tracekern.comm.ranks.group import Group
from tracekern.dump.event_table import Members, parse_members
from tracekern.dump.format import SampleKind
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput, CommTimeout
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency import Buffer
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.reference import reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.two_hop.pipeline import TwoHopPipeline, count_wrong_elements
from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.join.members import name_world_ranks
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.headlines import headlines

STRIDED, NEIGHBOURS = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
"""Experts on a strided part of the ranks; and beside them other groups, so that each rank is in two."""
Partition = list[list[int]]
HOW = {"routing": "uniform", "uneven": True}


def calls_of_groups(
    world: Group, directory: str, partitions: list[Partition], late_rank: int, late_s: list[float], as_list: bool
) -> str:
    """Makes a call in each partition for each `late_s`, which one rank comes late to. Returns what a call says that
    gives up."""
    made = [[ranks if as_list else _new_group(ranks) for ranks in partition] for partition in partitions]
    own = [
        group
        for partition, groups in zip(partitions, made, strict=True)
        for ranks, group in zip(partition, groups, strict=True)
        if world.rank in ranks
    ]
    num_bytes = Buffer.get_low_latency_rdma_size_hint(8, 256, 2, 8)
    buffers = [Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", timeout_s=1.5) for group in own]
    x = torch.ones((8, 256), dtype=torch.bfloat16)
    ids = torch.stack([torch.arange(8) % 8, (torch.arange(8) + 4) % 8], dim=1)
    try:
        with tracekern.capture(directory, device=buffers[0].comm.device) as capture:
            for seconds in late_s:
                time.sleep(seconds if world.rank == late_rank else 0.0)
                for buffer in buffers:
                    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, 8, use_fp8=False, capture=capture)
                    buffer.low_latency_combine(rows, ids, torch.ones((8, 2)), handle, capture=capture)
                    buffer.synchronize()
    except CommTimeout as error:
        return str(error)
    return ""


def _new_group(ranks: list[int]) -> object:
    return dist.new_group(ranks, group_desc=f"of rank {ranks[0]}")


def joined_pairs(timeline: Timeline) -> set[tuple[int, int]]:
    """(source, destination) of all messages between ranks."""
    rank = timeline.track_ranks()[timeline.spans.track]
    pairs = zip(rank[timeline.flows.signal].tolist(), rank[timeline.flows.wait].tolist(), strict=True)
    return {(one, other) for one, other in pairs if one != other}


@pytest.mark.parametrize("as_list", [False, True], ids=["ProcessGroup", "list of ranks"])
@pytest.mark.parametrize("partitions", [[STRIDED], [NEIGHBOURS, STRIDED]], ids=["side by side", "overlapping"])
def test_ranks_wait_for_those_of_their_groups(pools, partitions: list[Partition], as_list: bool, tmp_path: Path):
    asked = str(tmp_path), partitions, 2, [0.0, 0.03, 0.03], as_list
    assert pools(4).call(calls_of_groups, *asked) == [""] * 4
    timeline = tracekern.load(tmp_path)
    assert [problem.text for problem in timeline.problems if problem.severity != "note"] == []
    groups = [tuple(ranks) for partition in partitions for ranks in partition]
    assert joined_pairs(timeline) == {pair for one, other in groups for pair in ((one, other), (other, one))}
    members = {
        (launch.rank, launch.members.name, launch.members.ranks) for launch in timeline.launches if launch.members
    }
    assert all(launch.members for launch in timeline.launches)
    names = {ranks: "" if as_list else f"of rank {ranks[0]}" for ranks in groups}
    assert members == {(rank, names[ranks], ranks) for ranks in groups for rank in ranks}
    late = {blame.rank: blame.late_ns for blame in analyze(timeline).blames}
    assert max(late, key=late.__getitem__) == 2
    assert late[2] > 50e6


def call(buffer: Buffer, capture: tracekern.Capture) -> bool:
    """Returns whether what came back is what went in."""
    num_experts = 4 * buffer.group_size
    first = torch.arange(8) % num_experts
    ids = torch.stack([first, (first + num_experts // 2) % num_experts], dim=1)
    x = torch.arange(8.0 * 256).remainder(100).reshape(8, 256).to(torch.bfloat16)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, num_experts, use_fp8=False, capture=capture)
    weights = torch.full((8, 2), 0.5)
    out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle, capture=capture)
    buffer.synchronize()
    return torch.equal(out, x)


def buffer_of(group: object, num_ranks: int) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(8, 256, num_ranks, 4 * num_ranks)
    return Buffer(group, num_rdma_bytes=num_bytes, backend="cpu", timeout_s=20.0)


def groups_that_come_and_go(world: Group, directory: str) -> bool:
    """Calls of all ranks, and between them one of a group that is made for it: of two ranks, or of one alone."""
    everybody, is_right = buffer_of(None, 4), True
    mine = [world.rank] if world.rank == 3 else [0, 2] if world.rank % 2 == 0 else [1]
    with tracekern.capture(directory, device=everybody.comm.device) as capture:
        for _ in range(4):
            is_right &= call(everybody, capture)
            for ranks in ([0, 2], [1], [3]):
                group = dist.new_group(ranks, group_desc=f"of rank {ranks[0]}")
                if ranks == mine:
                    buffer = buffer_of(group, len(ranks))
                    is_right &= call(buffer, capture)
                    buffer.destroy()
                if world.rank in ranks:
                    dist.destroy_process_group(group)
    return is_right


def test_groups_may_be_made_and_destroyed_while_a_capture_is_open(pools, tmp_path: Path):
    assert pools(4).call(groups_that_come_and_go, str(tmp_path)) == [True] * 4
    timeline = tracekern.load(tmp_path)
    assert [problem.text for problem in timeline.problems if problem.severity != "note"] == []
    made = [(launch.members.generation, launch.sequence) for launch in timeline.launches if launch.members]
    first = {number - sequence for number, sequence in made}  # other tests made some of these ranks before
    assert {sequence for _, sequence in made} == {*range(4)}
    assert len({*made}) == 4 * len(first)
    iterations = LaunchIterations(timeline)
    assert (iterations.count, iterations.set_up_stages) == (4, ())
    assert set(iterations.stages) >= {"dispatch (all ranks)", "dispatch (of rank 0)", "dispatch (of rank 1 and alike)"}
    of_groups = [launch.members is not None for launch in timeline.launches]
    launch, rank = timeline.spans.launch[timeline.flows.wait], timeline.track_ranks()[timeline.spans.track]
    inside = np.array([*of_groups, False])[launch]
    pairs = zip(rank[timeline.flows.signal[inside]], rank[timeline.flows.wait[inside]], strict=True)
    assert {(int(one), int(other)) for one, other in pairs if one != other} == {(0, 2), (2, 0)}


def test_exports_name_the_group_of_each_launch(pools, tmp_path: Path):
    pools(4).call(calls_of_groups, str(tmp_path / "run"), [STRIDED], -1, [0.0], False)
    timeline = tracekern.load(tmp_path / "run")
    tracekern.save(timeline, tmp_path / "trace.json")
    tracekern.save(timeline, tmp_path / "spans.parquet")
    spans = pytest.importorskip("polars").read_parquet(tmp_path / "spans.parquet")
    told = spans.filter(spans["event"] == "wait_count").select("rank", "communicator").unique().rows()
    assert sorted(told) == [(rank, f"of rank {rank % 2}") for rank in range(4)]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["communicator"] for event in events if "communicator" in event.get("args", {})} == {
        "of rank 0",
        "of rank 1",
    }


def calls_of_pipelines(world: Group, directory: str) -> int:
    """Makes calls of two families on every second rank. Returns how many elements are wrong."""
    group, wrong = Group.of([0, 2] if world.rank % 2 == 0 else [1, 3], f"part {world.rank % 2}"), 0
    shape = MoeShape(2, 8, 8, 2, 256, "bf16")
    experts = draw_experts(shape)
    balanced, two_hop = P2PPipeline(group, shape, "balanced"), TwoHopPipeline(group, shape, "two_hop", nodes=2)
    with tracekern.capture(directory, device=balanced.comm.device) as capture:
        for iteration in range(3):
            batches = [draw_batch(shape, seed=3, rank=rank, iteration=iteration, **HOW) for rank in range(2)]
            own = batches[group.rank]
            given = own.x, own.topk_idx, own.topk_weights, experts
            wrong += int((balanced(*given, capture=capture) != reference(own, experts)).sum())
            carried = two_hop(*given, capture=capture)
            wrong += count_wrong_elements(carried, batches, group.rank, experts, shape, two_hop.options)
    return wrong


def test_pipelines_of_groups_are_right(pools, tmp_path: Path):
    assert pools(4).call(calls_of_pipelines, str(tmp_path)) == [0] * 4
    timeline = tracekern.load(tmp_path)
    assert [problem.text for problem in timeline.problems if problem.severity != "note"] == []
    assert joined_pairs(timeline) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert {(group.name, group.ranks) for group in analyze(timeline).groups} == {
        ("part 0", (0, 2)),
        ("part 1", (1, 3)),
    }


def calls_with_own_clocks(world: Group, *asked: object) -> str:
    os.environ["TRACEKERN_SIMULATED_CLOCK"] = f"7:{time.monotonic_ns()}"
    try:
        return calls_of_groups(world, *asked)
    finally:
        del os.environ["TRACEKERN_SIMULATED_CLOCK"]


def test_clocks_are_exchanged_in_the_heap_within_a_group_and_in_messages_between_groups(pools, tmp_path: Path):
    assert pools(4).call(calls_with_own_clocks, str(tmp_path), [STRIDED], 2, [0.0, 0.03], True) == [""] * 4
    methods = [rank.clock.method for rank in tracekern.load(tmp_path).ranks]
    assert methods == ["reference", *["ping-pong"] * 3]
    samples = np.concatenate([read_dump(path).clock_samples() for path in sorted(tmp_path.glob("*.tkdump"))])
    trips = samples[samples["kind"] == SampleKind.PING_PONG]
    is_within = (trips["initiator"] + trips["responder"]) % 2 == 0
    lengths = trips["t3"] - trips["t0"]
    assert 2 * lengths[is_within].min() < lengths[~is_within].min()


@pytest.mark.parametrize("partitions", [[STRIDED], [NEIGHBOURS, STRIDED]], ids=["side by side", "overlapping"])
def test_a_rank_that_does_not_come_is_named_by_its_rank_in_the_world(
    pools, partitions: list[Partition], tmp_path: Path
):
    said = pools(4).call(calls_of_groups, str(tmp_path), partitions, 3, [0.0, 5.0], True)
    assert any(text.startswith("rank 1 ") for text in said)
    assert any(" gave up on rank 3 after " in text for text in said)
    lines = {line.word: line.text for line in headlines(analyze(tracekern.load(tmp_path)))}
    assert lines["verdict"].startswith("Rank 3 did not come in time: rank ")


def other_sizes(world: Group) -> str:
    """Makes a communicator whose size differs between the ranks of a group."""
    group = Group.of([0, 2] if world.rank % 2 == 0 else [1, 3])
    with pytest.raises(BadInput) as refused:
        Communicator(group, num_bytes=(1 << 20) * (1 + world.rank // 2), timeout_s=2.0)
    return str(refused.value)


def test_ranks_that_differ_are_named_by_their_ranks_in_the_world(pools):
    for rank, said in enumerate(pools(4).call(other_sizes)):
        assert f"rank {rank % 2} asks for 1048576 bytes, rank {rank % 2 + 2} for 2097152" in said


def groups_one_after_the_other(world: Group) -> list[list[int]]:
    """Ranks 0 and 1 are in a group more than the others, and come at another time."""
    more = [Group.of([0, 1])] if world.rank < 2 else []
    heard = []
    for number in range(3):
        time.sleep(0.05 * (world.rank == number))
        group = Group.of([0, 2] if world.rank % 2 == 0 else [1, 3])
        heard.append(group.all_gather(10 * number + world.rank))
        group.close()
    for group in more:
        group.close()
    return heard


def test_groups_of_the_same_ranks_can_follow_each_other(pools):
    """torch counts the groups of each rank for the name of the next one, and looks into the store by that name."""
    for rank, heard in enumerate(pools(4).call(groups_one_after_the_other)):
        assert heard == [[10 * number + rank % 2, 10 * number + rank % 2 + 2] for number in range(3)]


def wrong_groups(world: Group) -> list[str]:
    said = []
    for ranks in ([0, 0, world.rank], [4, world.rank], ["0", world.rank], [(world.rank + 1) % 4]):
        with pytest.raises(BadInput) as refused:
            Group.of(ranks)
        said.append(str(refused.value))
    return said


def test_a_list_that_is_no_group_of_this_rank_is_refused(pools):
    for rank, said in enumerate(pools(4).call(wrong_groups)):
        assert all(
            f"wanted ranks of the run, some of 0 to 3, each once, rank {rank} among them" in text for text in said
        )


@pytest.mark.parametrize(
    "told",
    [7, {}, {"ranks": []}, {"ranks": [0, 0]}, {"ranks": [-1]}, {"ranks": ["0"]}, {"ranks": [0], "name": 1}],
    ids=str,
)
def test_a_communicator_that_is_none_is_refused(told):
    with pytest.raises(BadInput, match="communicator .* wanted a name, a generation and the world's ranks"):
        parse_members("table", {"communicator": told})


def test_ranks_beyond_the_bits_of_a_field_get_more_bits():
    """Two hops give a peer 6 bits; the ranks of its group may be any of the world's."""
    plain = tracekern.load(TRACES / "h200x4_two_hop")
    members = Members("", 0, (700, 80, 3, 1000))
    launches = tuple(type(launch)(**{**vars(launch), "members": members}) for launch in plain.launches)
    (named,) = name_world_ranks([plain.replace(launches=launches)])
    num_checked = 0
    for idx, event in enumerate(plain.events):
        rows = np.flatnonzero(plain.spans.event == idx)
        for name in [field.name for field in (*event.begin_fields, *event.end_fields)]:
            ours, theirs = named.field(rows, name), plain.field(rows, name)
            if name in ("peer", "src_rank"):
                is_rank = (theirs >= 0) & (theirs < 4)
                theirs = np.where(is_rank, np.array(members.ranks)[np.where(is_rank, theirs, 0)], theirs)
                num_checked += int(is_rank.sum())
            np.testing.assert_array_equal(ours, theirs)
    assert num_checked > 1000

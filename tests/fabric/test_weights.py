"""examples/weights: the schedule, what arrives at the inference ranks, and what is said when a rank is lost."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import fabric_pairs  # noqa: F401  # skips this module where no libfabric is
import numpy as np
import pytest
import torch
from fabric_switch import Hosts, missing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT

sys.path.insert(0, str(ROOT))
from examples.weights import main
from examples.weights.controller import Ranks, RanksLost
from examples.weights.model import MeshGroup, Model, Parameter, Split, Weight, make_model, plain_parts, values_of
from examples.weights.ranks import Place
from examples.weights.schedule import RankGroup, Schedule, check, make_schedule, shard_rows, unit_of
from examples.weights.stages import Pipeline, Stage, Work, prepare
from examples.weights.ways import Options, gather_writes
from tracekern.fabric import TransferError
from tracekern.timeline.load import load

SMALL = Options(layers=3, hidden=32, block=4)

# ---- the schedule ----


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, int, int]:
    """A model with its numbers of training and inference ranks."""
    num_training, num_inference = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    block, groups = draw(st.integers(1, 3)), list[MeshGroup]()
    for group in range(draw(st.integers(1, 3))):
        mesh = draw(st.lists(st.integers(0, num_training - 1), min_size=1, unique=True))
        weights = []
        for number in range(draw(st.integers(1, 3))):
            split, is_fp8 = draw(st.sampled_from(Split)), draw(st.booleans())
            unit = block if is_fp8 else 1
            rows = unit * (num_inference if split is Split.ROWS else 1)
            cols = unit * (num_inference if split is Split.COLUMNS else 1) * draw(st.integers(1, 3))
            name = f"g{group}w{number}"
            parameters = [
                Parameter(f"{name}p{each}", rows * draw(st.integers(1, 4)), cols)
                for each in range(1 if split is Split.COLUMNS else draw(st.integers(1, 3)))
            ]
            weights.append(Weight(name, tuple(parameters), split, is_fp8))
        groups.append(MeshGroup(f"g{group}", tuple(mesh), tuple(weights)))
    return Model(tuple(groups), block), num_training, num_inference


def shards_of(model: Model, group: RankGroup, rank: int) -> torch.Tensor:
    """[num_elements] what a training rank has of a group, in version 1."""
    return torch.cat(
        [
            values_of(parameter, 1, *shard_rows(parameter, unit_of(weight, model.block), group.group.mesh, rank)).view(
                -1
            )
            for weight in group.group.weights
            for parameter in weight.parameters
        ]
    )


def send_without_engine(model: Model, schedule: Schedule) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """The memory of the inference ranks after all writes, and how often each byte of it was written."""
    memory = [torch.zeros(schedule.num_bytes, dtype=torch.uint8) for _ in range(schedule.num_inference)]
    counts = [np.zeros(schedule.num_bytes, int) for _ in memory]
    for rank, groups in schedule.ranks.items():
        for group in groups:
            slot = SimpleNamespace(
                copied=shards_of(model, group, rank), prepared=torch.zeros(group.prepared_bytes, dtype=torch.uint8)
            )
            prepare(model.block, Work(group, slot))  # type: ignore[arg-type]
            for to, src, dst, num_bytes in group.writes:
                memory[to][dst : dst + num_bytes] = slot.prepared[src : src + num_bytes]
                counts[to][dst : dst + num_bytes] += 1
    return memory, counts


@settings(max_examples=40, deadline=None)
@given(drawn=models(), is_whole=st.booleans())
def test_every_byte_is_written_once_and_is_what_plain_code_computes(drawn, is_whole):
    model, num_training, num_inference = drawn
    schedule = make_schedule(model, num_training, num_inference, is_whole)
    memory, counts = send_without_engine(model, schedule)
    assert all((count == 1).all() for count in counts)
    num_parts = 1 if is_whole else num_inference
    for weight in (weight for group in model.groups for weight in group.weights):
        place, parts = schedule.places[weight.name], plain_parts(weight, 1, model.block, num_parts)
        for rank, received in enumerate(memory):
            for wanted, at in zip(parts[rank % num_parts], (place.values, place.scales), strict=True):
                packed = wanted.contiguous().view(-1).view(torch.uint8)
                assert torch.equal(received[at : at + len(packed)], packed)


@settings(max_examples=20, deadline=None)
@given(drawn=models())
def test_shards_gathered_at_rank_0_are_the_parameters(drawn):
    model, num_training, num_inference = drawn
    shards = make_schedule(model, num_training, num_inference)
    for idx, group in enumerate(model.groups):
        wanted = torch.cat([values_of(parameter, 1).view(-1) for parameter in group.parameters]).view(torch.uint8)
        gathered, written = torch.zeros_like(wanted), 0
        for rank in group.mesh:
            (own,) = (each for each in shards.ranks[rank] if each.idx == idx)
            packed = shards_of(model, own, rank).view(torch.uint8)
            for _, src, dst, num_bytes in gather_writes(model, group, rank):
                gathered[dst : dst + num_bytes] = packed[src : src + num_bytes]
                written += num_bytes
        assert written == len(wanted)
        assert torch.equal(gathered, wanted)


@pytest.mark.parametrize(("change", "fault"), [("twice", "are written twice"), ("never", "are written by nobody")])
def test_a_schedule_with_a_fault_is_refused(change, fault):
    schedule = make_schedule(make_model(1, 32, 4), 4, 2)
    group = schedule.ranks[1][0]
    writes = group.writes[:1] + group.writes if change == "twice" else group.writes[1:]
    changed = (dataclasses.replace(group, writes=writes), *schedule.ranks[1][1:])
    with pytest.raises(ValueError, match=fault):
        check(dataclasses.replace(schedule, ranks={**schedule.ranks, 1: changed}))


def test_a_parameter_whose_blocks_would_be_cut_is_refused_by_name():
    with pytest.raises(ValueError, match=r"parameter layer0.q is 24 x 24; wanted a multiple of 16 rows"):
        make_schedule(make_model(1, 24, 8), 4, 2)


# ---- the pipeline ----


def make_work(count: int) -> list[RankGroup]:
    return [RankGroup(idx, MeshGroup(f"g{idx}", (0,), ()), 0, 0, (), ()) for idx in range(count)]


def test_no_more_groups_are_under_way_than_there_are_slots():
    held, most, order = set[int](), 0, list[int]()

    def begin(work: Work) -> None:
        nonlocal most
        assert id(work.slot) not in held
        held.add(id(work.slot))
        most = max(most, len(held))

    def end(work: Work) -> None:
        time.sleep(0.002)
        order.append(work.rank_group.idx)
        held.remove(id(work.slot))

    pipeline = Pipeline([Stage("first", begin), Stage("last", end)], [SimpleNamespace() for _ in range(3)])
    for _ in range(2):
        pipeline.send(make_work(20))
    pipeline.stop()
    assert order == [*range(20)] * 2
    assert most == 3


def test_the_first_failure_of_a_stage_ends_the_pipeline():
    def fail(work: Work) -> None:
        if work.rank_group.idx == 5:
            raise ValueError("group 5 is not there")

    pipeline = Pipeline([Stage("first", lambda work: None), Stage("last", fail)], [SimpleNamespace()] * 2)
    for _ in range(2):
        with pytest.raises(TransferError, match="^group 5 is not there$"):
            pipeline.send(make_work(20))


# ---- ranks that run ----


def test_a_model_that_cannot_be_split_is_refused_in_one_line():
    command = [sys.executable, ROOT / "examples" / "weights" / "main.py", "--hidden", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("weights: parameter layer0.q is 100 x 100; wanted a multiple of 256 rows")
    assert done.stderr.count("\n") == 1


def test_versions_follow_each_other_and_the_stages_are_on_record(tmp_path, capsys):
    assert main.run(SMALL, versions=2, output=tmp_path) == 0
    assert capsys.readouterr().out.count("every byte is right") == 2
    timeline = load(tmp_path)
    assert timeline.problems == ()
    assert len(list(tmp_path.glob("rank_*.tkdump"))) == 6
    assert [rank.rank for rank in timeline.ranks] == list(range(6))
    rows = timeline.rows_of("host")
    ranks = timeline.track_ranks()[timeline.spans.track[rows]].tolist()
    labels = [timeline.host_names[label] for label in timeline.spans.begin_payload[rows].tolist()]
    end = dict(zip(zip(labels, ranks, strict=True), timeline.spans.end[rows].tolist(), strict=True))
    groups = SMALL.model.groups
    stages = ("copy", "prepare", "write", "barrier")
    assert end.keys() == {(f"{stage} {each.name}", rank) for stage in stages for each in groups for rank in each.mesh}
    for each in groups:  # nobody passes a barrier before all of the mesh have written
        written, met = ([end[f"{stage} {each.name}", rank] for rank in each.mesh] for stage in ("write", "barrier"))
        assert max(written) < min(met)
    schedule = SMALL.schedule
    num_writes = sum(len(group.writes) for groups in schedule.ranks.values() for group in groups)
    assert len(timeline.rows_of("write")) == num_writes


@pytest.mark.parametrize(("provider", "way", "slots"), [("shm", "", 1), ("tcp", "broadcast", 1), ("shm", "parts", 2)])
def test_each_version_replaces_all_of_the_one_before(provider, way, slots):
    options = dataclasses.replace(SMALL, provider=provider, through_rank_0=way, slots=slots)
    with Ranks(options) as ranks:
        for version in (1, 2, 3):
            ranks.train(version)
            ranks.send(version)
            assert ranks.check(version) == 0
        assert ranks.check(2) > 0


@pytest.mark.skipif(missing() != "", reason=missing())
def test_training_and_inference_may_be_two_hosts():
    with Hosts(2) as hosts:
        places = [Place(hosts.net(host), hosts.enter(host)) for host in (0, 0, 0, 0, 1, 1)]
        with Ranks(SMALL, places) as ranks:
            for version in (1, 2):
                ranks.train(version)
                ranks.send(version)
            assert ranks.check(2) == 0


@pytest.mark.parametrize(("victim", "name"), [(2, "training rank 2"), (5, "inference rank 1")])
def test_of_a_killed_rank_one_line_tells_and_the_others_end(victim, name):
    with Ranks(SMALL) as ranks:
        ranks.train(1)
        ranks.send(1)
        pid = ranks.processes[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # no version can end without it: one is under way when it dies
        ranks.post("send", 2, range(4))
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RanksLost) as lost:
            ranks.collect("send", range(4))
        assert str(lost.value) == f"{name} was killed (SIGKILL), during 'send'; the other ranks have ended"
        codes = [process.exitcode for process in ranks.processes]
        assert codes == [0] * victim + [-signal.SIGKILL] + [0] * (5 - victim)

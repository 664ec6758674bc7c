"""An engine with several groups of domains: one thread each, and what they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, Done

from tracekern.errors import BadInput
from tracekern.fabric import DoneCounter, DoneFlag, Net, TransferEngine, TransferError
from tracekern.record.session import capture
from tracekern.timeline.load import load

NETS = [[LOOPBACK, Net("tcp", "127.0.0.2")], [Net("tcp", "127.0.0.3"), Net("tcp", "127.0.0.4")]]
NUM_BYTES = 1 << 16


def engine() -> TransferEngine:
    builder = TransferEngine.builder().connect_limit(LIMIT_S)
    for cpu, nets in zip(sorted(os.sched_getaffinity(0)) * 2, NETS, strict=False):
        builder.add_domains(nets, pin_worker_cpu=cpu)
    return builder.build()


@pytest.fixture
def two() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    made = engine(), engine()
    yield made
    for one in made:
        one.stop()


def test_each_group_writes_to_its_own_peers_and_all_count_together(two):
    source, target = two
    assert (source.num_groups, source.nets_per_gpu, source.num_domains) == (2, 2, 2)
    assert len({group.main_address for group in source.groups}) == 2
    counter, done = target.make_imm_counter(1), DoneCounter()
    sent, received = torch.randint(1, 256, (2, NUM_BYTES), dtype=torch.uint8), torch.zeros(2, NUM_BYTES).byte()
    for i in range(2):
        src, _ = source.groups[i].register_tensor(sent[i])
        _, dst = target.groups[i].register_tensor(received[i])
        source.groups[i].submit_write(src, dst, NUM_BYTES, imm=1, on_done=done)
    counter.wait(4, LIMIT_S)  # two shards from each group
    done.wait(2, LIMIT_S)
    assert torch.equal(received, sent)
    assert target.groups[1].remove_imm_count(1) == (0, 0)


def test_memory_is_of_the_group_that_registered_it(two):
    source, target = two
    memory = torch.zeros(64, dtype=torch.uint8)
    _, dst = target.register_tensor(memory)
    first, _ = source.groups[0].register_tensor(memory.clone() + 1)
    with pytest.raises(BadInput, match="is not registered here, or not any more"):
        source.groups[1].submit_write(first, dst, 64, on_done=Done())
    second, _ = source.groups[1].register_tensor(memory.clone() + 2)  # any group reaches any group
    source.groups[1].submit_write(second, dst, 64, on_done=(flag := DoneFlag()))
    flag.wait(LIMIT_S)
    assert memory.eq(2).all()


def test_the_engine_stops_all_its_groups_and_calls_back_for_all(two):
    source, target = two
    done = Done()
    for group, peer in zip(source.groups, target.groups, strict=True):
        src, _ = group.register_tensor(torch.zeros(NUM_BYTES, dtype=torch.uint8))
        _, dst = peer.register_tensor(torch.zeros(NUM_BYTES, dtype=torch.uint8))
        for _ in range(50):
            group.submit_write(src, dst, NUM_BYTES, on_done=done)
    source.stop()
    assert len(done.wait(100)) == 100
    for group in source.groups:
        with pytest.raises(BadInput, match="the engine was stopped"):
            _ = group.main_address


def test_a_group_that_is_dropped_alone_leaves_the_others(two):
    source, target = two
    source.groups[1].stop()
    src, _ = source.register_tensor(torch.ones(64, dtype=torch.uint8))
    _, dst = target.register_tensor(memory := torch.zeros(64, dtype=torch.uint8))
    source.submit_write(src, dst, 64, on_done=(flag := DoneFlag()))
    flag.wait(LIMIT_S)
    assert memory.all()


def test_all_groups_are_recorded(two, tmp_path: Path):
    source, target = two
    counter = target.make_imm_counter(3)
    with capture(tmp_path, device="cpu") as session, source.traced(session), target.traced(session):
        for group, peer in zip(source.groups, target.groups, strict=True):
            src, _ = group.register_tensor(torch.ones(64))
            _, dst = peer.register_tensor(torch.zeros(64))
            group.submit_write(src, dst, 256, imm=3, on_done=(flag := DoneFlag()))
            counter.wait(2, LIMIT_S)
            flag.wait(LIMIT_S)
    timeline = load(tmp_path)
    names = [timeline.events[event].name for event in timeline.spans.event]
    assert (names.count("transfer"), names.count("write_imm"), names.count("wait_imm")) == (2, 4, 2)
    assert timeline.problems == ()


def test_groups_need_as_many_domains():
    with pytest.raises(BadInput, match=r"groups of \[1, 2\] domains; wanted at least one group, and as many"):
        TransferEngine.builder().add_domains(NETS[0]).add_domains([LOOPBACK]).build()
    with pytest.raises(BadInput, match=r"groups of \[\] domains; wanted at least one group"):
        TransferEngine.builder().build()
    with pytest.raises(TransferError, match="provider efa"):
        TransferEngine.builder().add_domains([LOOPBACK]).add_domains([Net("efa", "")]).build()

"""Writes through chosen domains, and one transfer for several peers: every byte, and every immediate they raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, NETS, Done, Pair, engine

from tracekern.errors import BadInput
from tracekern.fabric import (
    DomainGroupRouting,
    DoneFlag,
    GroupTransferRouting,
    ImmCounter,
    Net,
    PageIndices,
    ScatterSlice,
    TransferEngine,
    TransferError,
    count_immediates,
)

NUM_PEERS, NUM_BYTES = 3, 1 << 16
GROUP_ROUTINGS = {
    "shard_peers": GroupTransferRouting.shard_peers(),
    "shard_bytes": GroupTransferRouting.shard_bytes(),
    "single": GroupTransferRouting.single(1),
}


class Fan:
    """An engine, and several that it writes to as a group."""

    def __init__(self, nets: list[Net]) -> None:
        self.source, self.targets = engine(nets), [engine(nets) for _ in range(NUM_PEERS)]
        self.sent = torch.randint(1, 256, (NUM_BYTES,), dtype=torch.uint8)
        self.received = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in self.targets]
        self.src, self.own = self.source.register_tensor(self.sent)
        registered = [made.register_tensor(memory) for made, memory in zip(self.targets, self.received, strict=True)]
        self.handles, self.memory = [handle for handle, _ in registered], [memory for _, memory in registered]
        self.group = self.source.add_peer_group(self.memory)

    def stop(self) -> None:
        for made in (self.source, *self.targets):
            made.stop()


@pytest.fixture(scope="module")
def fan() -> Iterator[Fan]:
    made = Fan(NETS["two_domains"])
    yield made
    made.stop()


@pytest.fixture(scope="module")
def two_domains() -> Iterator[Pair]:
    made = Pair(NETS["two_domains"], NUM_BYTES)
    yield made
    made.stop()


def assert_counted(target: TransferEngine, counter: ImmCounter, count: int) -> None:
    """So many have come, and no more."""
    counter.wait(count, LIMIT_S)
    assert target.remove_imm_count(counter.imm) == (0, 0)


# ---- one peer ----

WRITES = {
    "all domains": (DomainGroupRouting.round_robin(), 2),
    "one domain in turn": (DomainGroupRouting.round_robin(1), 1),
    "the first": (DomainGroupRouting.pinned(0), 1),
    "the second": (DomainGroupRouting.pinned(1), 1),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("num_bytes", [0, 1, 65, NUM_BYTES])
def test_a_write_raises_one_immediate_a_shard_whatever_its_bytes(two_domains, name, num_bytes):
    made, (routing, count) = two_domains, WRITES[name]
    assert count_immediates(routing, num_domains=2) == count
    made.received.zero_()
    counter, flag = made.target.make_imm_counter(1), DoneFlag()
    made.source.submit_write(made.src, made.dst, num_bytes, imm=1, routing=routing, on_done=flag)
    flag.wait(LIMIT_S)
    assert_counted(made.target, counter, count)
    assert torch.equal(made.received[:num_bytes], made.sent[:num_bytes])
    assert not made.received[num_bytes:].any()


@pytest.mark.parametrize("name", WRITES)
def test_pages_raise_one_immediate_each_through_any_domains(two_domains, name):
    made, routing, page = two_domains, WRITES[name][0], 1024
    order = torch.randperm(NUM_BYTES // page).tolist()
    made.received.zero_()
    counter, flag = made.target.make_imm_counter(2), DoneFlag()
    src_pages, dst_pages = PageIndices(range(len(order)), page), PageIndices(order, page)
    made.source.submit_paged_writes(
        made.src, src_pages, made.dst, dst_pages, page, imm=2, routing=routing, on_done=flag
    )
    flag.wait(LIMIT_S)
    assert_counted(made.target, counter, count_immediates(dst_pages))
    assert torch.equal(made.received.view(-1, page)[order], made.sent.view(-1, page))


# ---- groups ----


@pytest.mark.parametrize("name", GROUP_ROUTINGS)
def test_a_scatter_gives_each_peer_its_slice_and_no_more(fan, name):
    routing = GROUP_ROUTINGS[name]
    if name == "single" and fan.source.num_domains == 1:
        routing = GroupTransferRouting.single()
    for memory in fan.received:
        memory.zero_()
    slices = [ScatterSlice(1000, 0, 5), ScatterSlice(0), ScatterSlice(NUM_BYTES - 1000, 1000, 1000)]
    counters = [target.make_imm_counter(3) for target in fan.targets]
    done = Done()
    fan.source.submit_scatter(fan.group, fan.src, slices, imm=3, routing=routing, on_done=done)
    assert done.wait() == [None]
    for target, memory, counter, piece in zip(fan.targets, fan.received, counters, slices, strict=True):
        assert_counted(target, counter, count_immediates(routing, fan.source.num_domains))
        end = piece.dst_offset + piece.num_bytes
        wanted = torch.zeros_like(memory)
        wanted[piece.dst_offset : end] = fan.sent[piece.src_offset : piece.src_offset + piece.num_bytes]
        assert torch.equal(memory, wanted)


def test_a_thousand_scatters_arrive_whole(fan):
    slices = [ScatterSlice(64, 64 * peer, 64 * peer) for peer in range(NUM_PEERS)]
    counters = [target.make_imm_counter(4) for target in fan.targets]
    for memory in fan.received:
        memory.zero_()
    flags = [DoneFlag() for _ in range(1000)]
    for flag in flags:
        fan.source.submit_scatter(fan.group, fan.src, slices, imm=4, on_done=flag)
    for flag in flags:
        flag.wait(LIMIT_S)
    for peer, (target, memory, counter) in enumerate(zip(fan.targets, fan.received, counters, strict=True)):
        assert_counted(target, counter, 1000)
        assert torch.equal(memory[64 * peer : 64 * peer + 64], fan.sent[64 * peer : 64 * peer + 64])


@pytest.mark.parametrize("name", ["shard_peers", "shard_bytes"])
def test_engines_meet_at_barriers(fan, name):
    everyone = [fan.source, *fan.targets]
    memory = [fan.own, *fan.memory]
    groups = [made.add_peer_group(memory[:i] + memory[i + 1 :]) for i, made in enumerate(everyone)]
    counters = [made.make_imm_counter(5) for made in everyone]
    routing, done = GROUP_ROUTINGS[name], Done()
    for _ in range(10):
        for made, group in zip(everyone, groups, strict=True):
            made.submit_barrier(group, 5, routing=routing, on_done=done)
        for counter in counters:
            counter.wait(NUM_PEERS * count_immediates(routing, fan.source.num_domains), LIMIT_S)
    assert done.wait(10 * len(everyone)) == [None] * 10 * len(everyone)
    assert [made.remove_imm_count(5) for made in everyone] == [(0, 0)] * len(everyone)


def test_nothing_is_written_before_all_peers_have_answered():
    """One answers at once, one never."""
    there, gone = Pair(NETS["tcp"]), Pair(NETS["tcp"])
    gone.stop()
    made = TransferEngine([LOOPBACK], connect_limit_s=0.5)
    src, _ = made.register_tensor(there.sent)
    group = made.add_peer_group([there.dst, gone.dst])
    flag = DoneFlag()
    made.submit_scatter(group, src, [ScatterSlice(100), ScatterSlice(100)], imm=6, on_done=flag)
    with pytest.raises(TransferError):
        flag.wait(LIMIT_S)
    assert not there.received.any()
    alone = DoneFlag()
    made.submit_scatter(made.add_peer_group([there.dst]), src, [ScatterSlice(100)], imm=6, on_done=alone)
    alone.wait(LIMIT_S)
    assert torch.equal(there.received[:100], there.sent[:100])
    assert there.target.remove_imm_count(6) == (1, 0)
    made.stop()
    there.stop()


def test_memory_that_a_peer_takes_back_ends_its_group_alone():
    made = Fan(NETS["tcp"])
    slices, rest = [ScatterSlice(100)] * 3, made.source.add_peer_group(made.memory[1:])
    made.source.submit_scatter(made.group, made.src, slices, on_done=(first := DoneFlag()))
    first.wait(LIMIT_S)
    made.targets[0].unregister_memory(made.handles[0])
    for memory in made.received:
        memory.zero_()
    made.source.submit_scatter(made.group, made.src, slices, on_done=(refused := DoneFlag()))
    with pytest.raises(TransferError, match="the memory was unregistered"):
        refused.wait(LIMIT_S)
    assert not any(memory.any() for memory in made.received)
    made.source.submit_scatter(rest, made.src, slices[1:], on_done=(second := DoneFlag()))
    second.wait(LIMIT_S)
    assert [int(memory.count_nonzero()) for memory in made.received] == [0, 100, 100]
    made.stop()


def test_a_peer_that_stops_ends_the_transfers_of_its_group():
    made = Fan(NETS["tcp"])
    slices = [ScatterSlice(100)] * 3
    made.source.submit_scatter(made.group, made.src, slices, on_done=(first := DoneFlag()))
    first.wait(LIMIT_S)
    made.targets[2].stop()
    ended = DoneFlag()
    made.source.submit_scatter(made.group, made.src, slices, on_done=ended)
    with pytest.raises(TransferError):
        ended.wait(LIMIT_S)
    made.source.submit_scatter(
        made.source.add_peer_group(made.memory[:2]), made.src, slices[:2], on_done=(second := DoneFlag())
    )
    second.wait(LIMIT_S)
    made.stop()


def scatter(fan: Fan, *slices: ScatterSlice, **options: Any) -> Any:
    return lambda done: fan.source.submit_scatter(fan.group, fan.src, slices, on_done=done, **options)


def test_bad_groups_and_routes_are_refused_before_anything_is_posted(fan):
    one, last = Pair(NETS["tcp"]), NUM_BYTES - 1
    if fan.source.num_domains == 1:
        other = Pair(NETS["two_domains"])
        said = "the descriptor's engine has 2 domains, this one 1"
    else:
        other, said = one, "the descriptor's engine has 1 domains, this one 2"
    top, fits = fan.source.num_domains - 1, ScatterSlice(1)
    domain = f"domain 2; wanted 0 to {top}"
    refused = [
        (scatter(fan, fits, fits), "2 slices for a group of 3 peers; wanted one for each"),
        (scatter(fan, fits, fits, ScatterSlice(2, last)), "slice 2, source: 2 bytes at 65535 of a region of 65536"),
        (scatter(fan, fits, ScatterSlice(2, 0, last), fits), "slice 1, destination: 2 bytes at 65535"),
        (scatter(fan, fits, fits, ScatterSlice(-1)), "wanted whole numbers from 0 to 2^64 - 1, got "),
        (scatter(fan, fits, fits, fits, imm=1 << 32), "imm is 4294967296; wanted 0 to 4294967295"),
        (scatter(fan, fits, fits, fits, routing=GroupTransferRouting.single(2)), domain),
        (lambda done: fan.source.submit_barrier(fan.group, 1, routing=GroupTransferRouting.single(2), on_done=done),
         domain),
        (lambda done: one.source.submit_barrier(fan.group, 1, on_done=done), "the group of peers is another engine's"),
        (lambda done: fan.source.add_peer_group([]), "a group of 0 peers; wanted at least 1"),
        (lambda done: fan.source.add_peer_group([*fan.memory, other.dst]), said),
        (lambda done: fan.source.submit_write(
            fan.src, fan.memory[0], 1, routing=DomainGroupRouting.pinned(2), on_done=done), domain),
        (lambda done: fan.source.submit_write(
            fan.src, fan.memory[0], 1, num_shards=1, routing=DomainGroupRouting.pinned(0), on_done=done),
         "num_shards is 1, and routing is DomainGroupRouting(num_shards=1, domain=0); wanted one of them"),
        (lambda done: count_immediates(3), "request is 3; wanted PageIndices"),
    ]  # fmt: skip
    done = Done()
    for act, wanted in refused:
        with pytest.raises(BadInput) as error:
            act(done)
        assert wanted in str(error.value)
        assert "\n" not in str(error.value)
    assert done.errors == []
    one.stop()
    if other is not one:
        other.stop()

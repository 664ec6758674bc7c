"""Memory that its owner takes back from peers that are silent, or have ended in the middle of a write."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fabric_pairs import ALL_NETS, NETS, wait_until
from fabric_processes import PeerProcess, Source, both_providers, source_and_peer

from tracekern.errors import BadInput
from tracekern.fabric import MemoryRegionHandle, TransferError

MIB = 1 << 20
SILENCE_S = 1.0


def hold(owner: Source, handle: MemoryRegionHandle) -> str:
    """Asks for memory that is still in use. Returns the error's text."""
    with pytest.raises(TransferError) as held:
        owner.engine.unregister_memory(handle, timeout_s=0.1)
    assert held.value.outcome == "stalled"
    return str(held.value)


def assert_nothing_comes(memory: torch.Tensor, for_s: float = 0.5) -> None:
    memory.fill_(7)
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        assert memory.eq(7).all()
        time.sleep(0.02)


class GivenUp:
    """Memory that a peer was told of, who was stopped until its owner gave it up."""

    def __init__(self, owner: Source, peer: PeerProcess, num_writes: int = 0) -> None:
        self.owner, self.peer = owner, peer
        self.memory = torch.zeros(MIB, dtype=torch.uint8)
        self.handle, dst = owner.engine.register_tensor(self.memory)
        assert peer.write(dst) == "None"
        if num_writes:
            peer.ask(f"submit {dst.to_bytes().hex()} {num_writes}")
        peer.signal(signal.SIGSTOP)

    def wait_for_burial(self) -> None:
        wait_until(lambda: self.owner.told)
        assert "is dead: nothing was heard from it for 1000 ms" in self.owner.told[0]
        assert "may still write there: it has not confirmed" in hold(self.owner, self.handle)

    def must_be_freed(self) -> None:
        wait_until(lambda: self.owner.frees(self.handle))
        with pytest.raises(BadInput, match="is not registered here, or not any more"):
            self.owner.engine.unregister_memory(self.handle)
        assert_nothing_comes(self.memory)


@both_providers
@pytest.mark.parametrize("asks", ["before", "after"])
def test_memory_is_free_once_a_peer_that_was_given_up_confirms(net, asks):
    """Whether it was asked before it was given up, or after."""
    with source_and_peer(net, limit_s=SILENCE_S, num_bytes=MIB) as (owner, peer):
        given_up = GivenUp(owner, peer)
        if asks == "before":
            hold(owner, given_up.handle)
        given_up.wait_for_burial()
        peer.signal(signal.SIGCONT)
        given_up.must_be_freed()


@both_providers
def test_a_peer_that_has_given_up_the_owner_in_turn_confirms_as_well(net):
    with source_and_peer(net, limit_s=SILENCE_S, peer_limit_s=SILENCE_S, num_bytes=MIB) as (owner, peer):
        given_up = GivenUp(owner, peer)
        given_up.wait_for_burial()
        peer.signal(signal.SIGCONT)
        _, dst = owner.engine.register_tensor(torch.zeros(MIB, dtype=torch.uint8))
        wait_until(lambda: "is dead: it has given this engine up" in peer.write(dst))
        given_up.must_be_freed()


@pytest.mark.parametrize("provider", ALL_NETS)
def test_writes_of_a_peer_that_was_given_up_are_waited_for(provider):
    """Of two domains they come through one, and the confirmation through the other."""
    limits = {"limit_s": SILENCE_S, "peer_limit_s": SILENCE_S}
    with source_and_peer(*ALL_NETS[provider], **limits, num_bytes=MIB) as (owner, peer):
        given_up = GivenUp(owner, peer, num_writes=200)
        given_up.wait_for_burial()
        peer.signal(signal.SIGCONT)
        given_up.must_be_freed()


@both_providers
@pytest.mark.parametrize("end", ["stop", "death"])
def test_memory_is_free_once_a_peer_that_was_given_up_has_ended(net, end):
    with source_and_peer(net, limit_s=SILENCE_S, num_bytes=MIB) as (owner, peer):
        given_up = GivenUp(owner, peer)
        given_up.wait_for_burial()
        if end == "death":
            peer.signal(signal.SIGKILL)
        else:
            peer.signal(signal.SIGCONT)
            peer.ask("stop")
        given_up.must_be_freed()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("provider", ALL_NETS)
def test_nothing_comes_after_a_killed_writers_memory_was_given_back(provider, times):
    """The owner is stopped meanwhile, and has much of what was written still to take."""
    for _ in range(times):
        owner, writer = (PeerProcess(*ALL_NETS[provider], num_bytes=64 * MIB) for _ in range(2))
        assert writer.write(owner.descriptor) == "None"
        owner.ask("fill 7")
        owner.signal(signal.SIGSTOP)
        writer.ask(f"submit {owner.descriptor.to_bytes().hex()} 4")
        time.sleep(0.2)  # as much is sent as there is room for
        writer.end()
        owner.request("unregister")
        owner.signal(signal.SIGCONT)
        assert owner.read() == "done"
        owner.ask("fill 7")
        for _ in range(3):
            time.sleep(0.1)
            assert owner.ask("sum") == str(7 * 64 * MIB)
        owner.end()


class HalfWritten:
    """Memory in the middle of a write through the second of two domains, which receives nothing more for now."""

    def __init__(self, shim: Any) -> None:
        self.shim = shim
        nets = NETS["two_domains"]
        self.owner, self.writer = Source(*nets), PeerProcess(*nets, num_bytes=64 * MIB)
        self.memory = torch.full((64 * MIB,), 7, dtype=torch.uint8)
        self.handle, dst = self.owner.engine.register_tensor(self.memory)
        assert self.writer.write(dst) == "None"
        self.memory.fill_(7)
        self.shim.set("shim_num_reads", 0)
        self.writer.ask(f"submit {dst.to_bytes().hex()} 1")
        wait_until(self.has_begun)
        assert self.memory[-1] == 7

    def has_begun(self) -> bool:
        """Has a little received of what is there."""
        self.shim.set("shim_num_reads", 1)
        return self.memory[0] != 7


@pytest.fixture
def half_written(shim: Any) -> Iterator[HalfWritten]:
    made = HalfWritten(shim)
    yield made
    made.owner.engine.stop()
    made.writer.end()


def test_a_write_that_had_begun_is_waited_for_when_its_writer_has_ended(half_written):
    """What the second socket holds would come later: the domain has looked the memory up before it was closed."""
    made = half_written
    made.writer.end()
    hold(made.owner, made.handle)
    wait_until(lambda: made.owner.told)
    assert "is dead: it has ended" in made.owner.told[0]
    said = hold(made.owner, made.handle)
    assert "has ended, but what it had sent may still arrive" in said
    made.shim.set("shim_num_reads", -1)
    wait_until(lambda: made.owner.frees(made.handle))
    assert_nothing_comes(made.memory)

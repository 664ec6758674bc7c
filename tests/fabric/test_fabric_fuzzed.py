"""Wrong descriptors and addresses, handed to an engine with a live peer: each ends with one line, and harms nothing."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fabric_damage import PackedDescriptor, damaged, damaged_address, wrong_descriptors
from fabric_pairs import NETS, Done, engine
from fabric_processes import both_providers, source_and_peer

from tracekern.errors import BadInput
from tracekern.fabric import DomainAddress, MemoryRegionDescriptor, Net, TransferEngine, TransferError

REGION, GUARD = 1 << 12, 1 << 16
UNDER_WAY = 100
"""As many at a time; a new engine takes the next: one on shm has room for 256 addresses in its life."""
COUNTS = [pytest.param(300, id="hundreds"), pytest.param(10_000, id="ten_thousand", marks=pytest.mark.soak)]
IMM = 9


class Live:
    """A peer with memory between two guards, and engines that write there."""

    def __init__(self, nets: list[Net]) -> None:
        self.nets = nets
        self.target = engine(nets)
        self.all = torch.zeros(GUARD + REGION + GUARD, dtype=torch.uint8)
        self.region = self.all[GUARD : GUARD + REGION]
        _, self.dst = self.target.register_tensor(self.region)
        _, self.another = self.target.register_tensor(torch.zeros(64, dtype=torch.uint8))
        self.source = self.make_source()

    def make_source(self) -> TransferEngine:
        source = TransferEngine.builder().add_domains(self.nets).connect_limit(0.5).build()
        source.set_peer_callback(lambda line: None)
        self.sent = torch.ones(REGION, dtype=torch.uint8)
        self.src, _ = source.register_tensor(self.sent)
        return source

    def renew_source(self) -> None:
        self.source.stop()
        self.source = self.make_source()

    def must_transfer(self) -> None:
        """Whatever was tried before; and nothing else has been written or counted."""
        assert not self.all.any()
        assert self.target.remove_imm_count(IMM) == (0, 0)
        done = Done()
        for _ in range(20):  # a busy machine may be late
            self.source.submit_write(self.src, self.dst, REGION, on_done=done)
            if done.wait()[-1] is None:
                break
        assert torch.equal(self.region, self.sent)
        self.all.zero_()

    def write(self, dst: MemoryRegionDescriptor, chance: random.Random, done: Done) -> str:
        """Returns what is said at once, "" where it is taken. Writes at the end of what the descriptor claims, too."""
        num_bytes = min(8, dst.num_bytes)
        offset = chance.choice((0, dst.num_bytes - num_bytes, min(REGION, dst.num_bytes) - num_bytes))
        try:
            self.source.submit_write(self.src, dst, num_bytes, dst_offset=offset, imm=IMM, on_done=done)
        except BadInput as error:
            return str(error)
        return ""

    def stop(self) -> None:
        self.source.stop()
        self.target.stop()


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live(NETS["tcp"])
    yield made
    made.stop()


def assert_clear(line: str) -> None:
    assert line
    assert "\n" not in line
    assert len(line) < 400


def unpacked(packed: bytes, how: int) -> MemoryRegionDescriptor | str:
    """From bytes, or from a pickle that holds them. Returns what is said where that is refused."""
    try:
        return pickle.loads(pickle.dumps(Pickled(packed))) if how else MemoryRegionDescriptor(packed)
    except BadInput as error:
        return str(error)


class Pickled:
    """Is read back as a descriptor of any bytes."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __reduce__(self) -> Any:
        return MemoryRegionDescriptor, (self.packed,)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", COUNTS)
def test_wrong_descriptors_end_with_one_line_and_write_nothing(live, count):
    """Half of the engines have met the peer before; for the others it may be the first thing they are told."""
    chance, num_taken = random.Random(4), 0
    wrong = wrong_descriptors(live.dst.to_bytes(), live.another.to_bytes(), count, seed=3)
    live.must_transfer()
    num_before = num_files()
    for first in range(0, count, UNDER_WAY):
        done, num_submitted = Done(), 0
        for number, packed in enumerate(wrong[first : first + UNDER_WAY]):
            dst = unpacked(packed, number % 2)
            if isinstance(dst, str):
                assert dst.startswith("memory region descriptor: damaged, ")
                continue
            assert dst.to_bytes() == packed
            said = live.write(dst, chance, done)
            num_submitted += not said
            if said:
                assert_clear(said)
        for error in done.wait(num_submitted):
            assert isinstance(error, TransferError)
            assert_clear(str(error))
        num_taken += num_submitted
        live.must_transfer()
        live.renew_source()
        if first // UNDER_WAY % 2:
            live.must_transfer()
    assert num_taken > count / 2
    assert num_files() <= num_before + 10


@pytest.mark.parametrize("count", COUNTS)
def test_messages_to_wrong_addresses_end_with_one_line(live, count):
    chance = random.Random(5)
    whole, another = bytes(live.target.main_address), bytes(live.source.main_address)
    messages: list[bytes] = []
    live.target.submit_bouncing_recvs(64, 64, lambda message: messages.append(bytes(message)))
    for _ in range(0, count, UNDER_WAY):
        done, num_submitted = Done(), 0
        for number in range(UNDER_WAY):
            address = damaged_address(whole, chance, another)
            if address in (whole, another):
                continue
            text = address.hex() if number % 4 else damaged(address.hex().encode(), chance).decode("latin-1")
            try:
                to = DomainAddress.from_text(text) if number % 2 else DomainAddress(address)
            except BadInput as error:
                assert_clear(str(error))
                continue
            live.source.submit_send(to, b"nobody", done)
            num_submitted += 1
        for error in done.wait(num_submitted):
            assert isinstance(error, TransferError)
            assert_clear(str(error))
        live.must_transfer()
        live.renew_source()
    assert messages == []


def with_base(dst: MemoryRegionDescriptor, base: int) -> MemoryRegionDescriptor:
    changed = PackedDescriptor(dst.to_bytes())
    changed.keys[-1] = base
    return MemoryRegionDescriptor(changed.pack())


@both_providers
def test_a_late_answer_does_not_let_a_wrong_descriptor_of_the_same_region_pass(net):
    """The right one was asked about first, and its time was over before the peer answered."""
    with source_and_peer(net, connect_limit_s=1.0) as (source, peer):
        done = Done()
        assert source.write_once(peer.descriptor) is None
        right = MemoryRegionDescriptor(bytes.fromhex(peer.ask("register")))
        wrong = with_base(right, PackedDescriptor(right.to_bytes()).keys[-1] + 8)
        peer.ask("fill 0")
        peer.signal(signal.SIGSTOP)
        source.engine.submit_write(source.src, right, 8, on_done=done)
        assert "has not answered within the time limit" in str(done.wait()[-1])
        source.engine.submit_write(source.src, wrong, 8, on_done=done)
        time.sleep(0.1)  # it is asked about
        peer.signal(signal.SIGCONT)
        assert "the descriptor is not the one that this engine gave out" in str(done.wait()[-1])
        assert peer.ask("sum") == "0"
        assert source.write_once(right) is None


def test_a_descriptor_of_engine_0_which_stands_for_any_is_refused(live):
    changed = PackedDescriptor(live.dst.to_bytes())
    changed.numbers[0] = 0
    with pytest.raises(BadInput, match="memory region descriptor: damaged, engine 0"):
        MemoryRegionDescriptor(changed.pack())


@pytest.mark.parametrize("first", ["write", "hello"])
def test_a_wrong_address_does_not_stand_in_the_way_of_the_right_one(live, first):
    """The wrong descriptor names an engine that is met afterwards at its own address. Either engine may begin."""
    wrong, chance, done = PackedDescriptor(live.dst.to_bytes()), random.Random(6), Done()
    address = wrong.addresses[0]
    digit = 3  # of the port
    wrong.addresses[0] = address[:digit] + bytes([address[digit] ^ 1]) + address[digit + 1 :]
    assert live.write(MemoryRegionDescriptor(wrong.pack()), chance, done) == ""
    assert done.wait() != [None]
    if first == "hello":
        received = torch.zeros(64, dtype=torch.uint8)
        _, back = live.source.register_tensor(received)
        handle, _ = live.target.register_tensor(torch.ones(64, dtype=torch.uint8))
        live.target.submit_write(handle, back, 64, on_done=done)
        assert done.wait()[-1] is None
        assert received.all()
    else:
        live.must_transfer()

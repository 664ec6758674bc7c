"""Names that travel between engines: addresses and descriptors, whole or damaged."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
import torch
from fabric_damage import damaged
from fabric_pairs import ALL_NETS, LIMIT_S, LOOPBACK, NETS, Done, Pair, engine

from tracekern.errors import BadInput
from tracekern.fabric import DomainAddress, DoneCounter, DoneFlag, MemoryRegionDescriptor, ScatterSlice, TransferError

NUM_FUZZED = 10_000


def refusals(parse: Callable[[bytes], bytes], whole: bytes) -> list[str]:
    """What is said to those of the damaged names that are refused; the others come back as they were."""
    chance, said = random.Random(7), []
    for _ in range(NUM_FUZZED):
        name = damaged(whole, chance)
        try:
            assert parse(name) == name
        except BadInput as error:
            said.append(str(error))
    assert NUM_FUZZED / 4 < len(said) < NUM_FUZZED
    assert not any("\n" in line for line in said)
    return said


def test_ten_thousand_fuzzed_descriptors_are_whole_or_refused_in_one_line():
    made = Pair(NETS["two_domains"], 1000)
    said = refusals(lambda packed: MemoryRegionDescriptor(packed).to_bytes(), made.dst.to_bytes())
    assert all(line.startswith("memory region descriptor: damaged, ") for line in said)
    made.stop()


def test_ten_thousand_fuzzed_addresses_are_whole_or_refused_in_one_line():
    made = engine(NETS["tcp"])
    whole = str(made.main_address).encode()
    said = refusals(lambda text: str(DomainAddress.from_text(text.decode("latin-1"))).encode(), whole)
    assert all(line.startswith(("domain address ", "a domain address has ")) for line in said)
    made.stop()


def test_no_byte_is_written_by_a_descriptor_that_was_changed():
    """Its owner is asked before the first write: it knows what it gave out."""
    made, chance, done = Pair(NETS["tcp"], 1000), random.Random(10), DoneCounter()
    whole = made.dst.to_bytes()
    numbers = [*range(24), *range(len(whole) - 16, len(whole))]  # engine, region, size; key and base behind an address
    changed = [bytearray(whole) for _ in range(300)]
    for packed in changed:
        packed[chance.choice(numbers)] ^= 1 << chance.randrange(8)
    num_refused = 0
    for packed in changed:
        try:
            made.source.submit_write(made.src, MemoryRegionDescriptor(bytes(packed)), 8, imm=1, on_done=done)
        except BadInput:
            num_refused += 1
    with pytest.raises(TransferError, match="transfers failed"):
        done.wait(len(changed) - num_refused, LIMIT_S)
    assert (done.done, done.errors) == (0, len(changed) - num_refused)
    assert not made.received.any()
    assert made.target.remove_imm_count(1) == (0, 0)
    made.stop()


NO_SHM_NAMES = ["", "1:2:3", "1-1:2:", ":1-1:2:3", "1-1:2:3:4", "../../x", "a-b:c:d", "1-1:2:-3", f"1-{10**200}:2:3"]


@pytest.mark.parametrize("name", NO_SHM_NAMES)
def test_names_that_shm_gives_no_endpoint_are_refused(name):
    """It takes any file in /dev/shm for one, and crashes."""
    made, flag = engine(ALL_NETS["shm"]), DoneFlag()
    made.submit_send(DomainAddress(b"fi_shm://" + name.encode() + b"\0" + bytes(8)), b"hello", flag)
    with pytest.raises(TransferError, match="send: shm: not an address of this network"):
        flag.wait(LIMIT_S)
    made.stop()


@pytest.mark.parametrize("net", ["tcp", "shm"])
def test_addresses_that_no_engine_has_are_errors_and_the_engine_goes_on(net):
    """None of a network's form: others are tried, and not reached."""
    made, chance, flags = engine(ALL_NETS[net]), random.Random(9), []
    for _ in range(200):
        flags.append(DoneFlag())
        made.submit_send(DomainAddress(b"\xfe" + chance.randbytes(chance.randrange(1, 200))), b"hello", flags[-1])
    for flag in flags:
        with pytest.raises(TransferError, match=f"send: {net}: not an address of this network"):
            flag.wait(LIMIT_S)
    made.register_tensor(torch.zeros(8))
    made.stop()


def test_addresses_are_equal_by_their_bytes_and_serve_as_keys():
    first, second = engine(NETS["tcp"]), engine(NETS["tcp"])
    address = first.main_address
    assert address != second.main_address
    assert address != bytes(address)
    assert {address: 1, second.main_address: 2}[DomainAddress(bytes(address))] == 1
    assert pickle.loads(pickle.dumps(address)) == address
    assert repr(address) == f"DomainAddress({address})"
    first.stop()
    second.stop()


def test_a_pickled_descriptor_can_be_written_to():
    made = Pair(NETS["two_domains"])
    copy = pickle.loads(pickle.dumps(made.dst))
    assert len({copy, made.dst}) == 1
    flag = DoneFlag()
    made.source.submit_write(made.src, copy, len(made.sent), on_done=flag)
    flag.wait(LIMIT_S)
    assert torch.equal(made.received, made.sent)
    made.stop()


def test_two_engines_of_a_process_do_not_meet_over_shm():
    """libfabric would look up its own memory as the other has mapped it, and end the process."""
    one, other, done = engine(ALL_NETS["shm"]), engine(ALL_NETS["shm"]), Done()
    src, own = one.register_tensor(torch.zeros(8))
    _, dst = other.register_tensor(torch.zeros(8))
    for memory in (dst, own):
        one.submit_write(src, memory, 8, on_done=done)
    one.submit_send(other.main_address, b"hello", done)
    assert all("shm: both engines are in this process; use tcp" in str(error) for error in done.wait(3))
    one.stop()
    other.stop()


@pytest.mark.parametrize("number", [-1, 1 << 64, 0.5, None])
def test_numbers_that_are_none_are_refused_in_one_line(number):
    made, done = Pair(NETS["tcp"], 64), Done()
    for act in (
        lambda: made.source.submit_write(made.src, made.dst, number, on_done=done),
        lambda: made.source.submit_write(made.src, made.dst, 1, dst_offset=number, on_done=done),
        lambda: made.source.register_memory(number, 8),
    ):
        with pytest.raises(BadInput, match=r"wanted whole numbers from 0 to 2\^64 - 1, got ") as refused:
            act()
        assert "\n" not in str(refused.value)
    assert done.errors == []
    made.stop()


def test_a_region_is_unregistered_once():
    made = Pair([LOOPBACK], 64)
    made.source.unregister_memory(made.src)
    with pytest.raises(BadInput, match=r"memory region \d+ is not registered here, or not any more"):
        made.source.unregister_memory(made.src)
    with pytest.raises(BadInput, match=r"memory region \d+ is not registered here, or not any more"):
        made.source.submit_write(made.src, made.dst, 1, on_done=Done())
    made.stop()


def test_handles_of_another_engine_are_refused():
    one, other = Pair([LOOPBACK], 64), Pair([LOOPBACK], 64)
    for act in (
        lambda: one.source.submit_write(other.src, one.dst, 1, on_done=Done()),
        lambda: one.source.unregister_memory(other.src),
        lambda: one.source.submit_scatter(
            one.source.add_peer_group([one.dst]), other.src, [ScatterSlice(1)], on_done=Done()
        ),
    ):
        with pytest.raises(BadInput, match="is not registered here, or not any more"):
            act()
    one.stop()
    other.stop()

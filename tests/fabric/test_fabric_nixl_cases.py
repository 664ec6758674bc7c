"""The cases that NIXL's own tests try, of ours: writes only, notifications are immediates and messages.

| NIXL, test/gtest | here, or where it stands already |
| --- | --- |
| BasicXfer | test_fabric.py: test_two_hundred_writes_to_another_process_and_back |
| LoadRemoteThenFail, XferThenFail | test_a_write_to_a_process_that_was_killed_is_an_error |
| XferPostThenFail, XferFailRestore | test_fabric_failure.py: test_a_killed_peer_ends_its_transfers_and_a_new_... |
| RandomSizes, ConcurrentTransfers | test_pages_of_any_size_arrive_from_any_number_of_threads |
| SelfNotification | test_an_engine_writes_and_sends_to_itself |
| EmptyNotificationPayload | test_notifications_without_payload_arrive |
| LoadRemoteWithErrors | test_descriptors_that_cannot_be_used_are_refused_and_whole_ones_work |
"""

from __future__ import annotations

import random
import threading

import pytest
import torch
from fabric_pairs import ALL_NETS, LIMIT_S, NETS, Done, Pair, wait_until
from fabric_processes import PAGE, PROVIDERS, PeerProcess, Source, both_providers, source_and_peer

from tracekern.errors import BadInput
from tracekern.fabric import DoneCounter, DoneFlag, MemoryRegionDescriptor, PageIndices, TransferError


@both_providers
@pytest.mark.parametrize("case", ["LoadRemoteThenFail", "XferThenFail"])
def test_a_write_to_a_process_that_was_killed_is_an_error(net, case):
    """Whether the engines had met or the descriptor alone was passed on. Others are still written to."""
    with source_and_peer(net, connect_limit_s=3.0) as (source, peer):
        other = PeerProcess(net)
        if case == "XferThenFail":
            assert source.write_once(peer.descriptor) is None
        peer.end()
        error = source.write_once(peer.descriptor)
        assert error is not None
        assert error.outcome in ("failed", "stalled")
        assert "engine " in str(error)
        assert source.write_once(other.descriptor) is None
        assert other.ask("sum") == str(PAGE)
        other.end()


SIZES = {
    "one byte": (1, 1),
    "odd": (4097, 8),
    "many": (1000, 300),
    "large": (1_000_003, 5),
}
"""Bytes of a page, pages."""


@pytest.mark.parametrize("num_threads", [pytest.param(1, id="RandomSizes"), pytest.param(4, id="ConcurrentTransfers")])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("provider", NETS)
def test_pages_of_any_size_arrive_from_any_number_of_threads(provider, size, num_threads):
    """Each thread writes its own pages three times, the last time to other places."""
    page, count = SIZES[size]
    made = Pair(NETS[provider], num_bytes=page * count * num_threads)
    places = [random.Random(number).sample(range(count), count) for number in range(num_threads)]
    done, counter = DoneCounter(), made.target.make_imm_counter(3)

    def write(number: int) -> None:
        pages = PageIndices(range(count), page, number * count * page)
        for order in (range(count), range(count), places[number]):
            flag = DoneFlag()
            dst = PageIndices(order, page, number * count * page)
            made.source.submit_paged_writes(made.src, pages, made.dst, dst, page, imm=3, on_done=flag)
            made.source.submit_imm(made.dst, 4, on_done=done)
            flag.wait(LIMIT_S)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.wait(3 * num_threads, LIMIT_S)
    counter.wait(3 * num_threads * count, LIMIT_S)
    made.target.make_imm_counter(4).wait(3 * num_threads, LIMIT_S)
    assert made.target.remove_imm_count(3) == made.target.remove_imm_count(4) == (0, 0)
    sent, received = (memory.view(num_threads, count, page) for memory in (made.sent, made.received))
    for number, order in enumerate(places):
        assert torch.equal(received[number][order], sent[number])
    made.stop()


def test_an_engine_writes_and_sends_to_itself():
    own = Source(PROVIDERS["tcp"])
    received, messages = torch.zeros(PAGE, dtype=torch.uint8), list[bytes]()
    _, dst = own.engine.register_tensor(received)
    own.engine.submit_bouncing_recvs(100, 4, lambda message: messages.append(bytes(message)))
    counter, done = own.engine.make_imm_counter(5), Done()
    for _ in range(10):
        own.engine.submit_write(own.src, dst, PAGE, imm=5, on_done=done)
    assert done.wait(10) == [None] * 10
    counter.wait(10, LIMIT_S)
    assert torch.equal(received, own.memory)
    own.engine.submit_send(own.engine.main_address, b"to myself", done)
    assert done.wait()[-1] is None
    wait_until(lambda: messages)
    assert messages == [b"to myself"]
    own.engine.stop()


def test_notifications_without_payload_arrive():
    made, messages, done = Pair(NETS["tcp"], 64), list[bytes](), Done()
    made.target.submit_bouncing_recvs(1, 64, lambda message: messages.append(bytes(message)))
    counter = made.target.make_imm_counter(0)
    for _ in range(10):
        made.source.submit_send(made.target.main_address, b"", done)
        made.source.submit_write(made.src, made.dst, 0, imm=0, on_done=done)
    assert done.wait(20) == [None] * 20
    counter.wait(10, LIMIT_S)
    wait_until(lambda: len(messages) == 10)
    assert messages == [b""] * 10
    assert not made.received.any()
    made.stop()


def test_descriptors_that_cannot_be_used_are_refused_and_whole_ones_work():
    """Of another network, of nothing, and of an engine of this process that was stopped."""
    made, other, gone = Pair(NETS["tcp"], 64), Pair(ALL_NETS["shm"], 64), Pair(NETS["tcp"], 64)
    gone.stop()
    for text in (b"invalid", b"", bytes(100)):
        with pytest.raises(BadInput, match="memory region descriptor: damaged, "):
            MemoryRegionDescriptor(text)
    flag = DoneFlag()
    made.source.submit_write(made.src, other.dst, 64, on_done=flag)
    with pytest.raises(TransferError, match="tcp: not an address of this network"):
        flag.wait(LIMIT_S)
    flag = DoneFlag()
    made.source.submit_write(made.src, gone.dst, 64, on_done=flag)
    with pytest.raises(TransferError):
        flag.wait(LIMIT_S)
    flag = DoneFlag()
    made.source.submit_write(made.src, made.dst, 64, on_done=flag)
    flag.wait(LIMIT_S)
    assert torch.equal(made.received, made.sent)
    assert not other.received.any()
    assert not gone.received.any()
    made.stop()
    other.stop()

"""Transfers between engines: every byte, every immediate, and what is refused before anything is posted."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from fabric_pairs import ALL_NETS, LIMIT_S, LOOPBACK, NETS, Done, Pair, engine, wait_until

from tests.paths import TESTS
from tracekern.errors import BadInput
from tracekern.fabric import (
    DomainAddress,
    DomainGroupRouting,
    MemoryRegionDescriptor,
    MemoryRegionHandle,
    Net,
    PageIndices,
    TransferEngine,
    TransferError,
    count_immediates,
)


def test_a_write_arrives_before_its_immediates(pair):
    counter, done = pair.target.make_imm_counter(7), Done()
    pair.source.submit_write(pair.src, pair.dst, len(pair.sent), imm=7, on_done=done)
    counter.wait(count_immediates(DomainGroupRouting.round_robin(), pair.source.num_domains), LIMIT_S)
    assert torch.equal(pair.received, pair.sent)
    assert done.wait() == [None]


def test_pages_arrive_where_they_belong(pair):
    page, pages = 4096, 64
    order = torch.randperm(pages).tolist()
    counter, done = pair.target.make_imm_counter(9), Done()
    pair.source.submit_paged_writes(
        pair.src,
        PageIndices(range(pages), page),
        pair.dst,
        PageIndices(order, page, offset=page),
        page,
        imm=9,
        on_done=done,
    )
    counter.wait(count_immediates(PageIndices(order, page)), LIMIT_S)
    assert done.wait() == [None]
    for source, place in enumerate(order):
        start = page + place * page
        assert torch.equal(pair.received[start : start + page], pair.sent[source * page : (source + 1) * page])
    assert not pair.received[:page].any()


def test_a_shard_at_the_end_of_a_region_stays_within_it():
    made = Pair(NETS["two_domains"], num_bytes=1000)
    done, counter = Done(), made.target.make_imm_counter(1)
    made.source.submit_write(made.src, made.dst, 65, src_offset=935, dst_offset=935, imm=1, on_done=done)
    counter.wait(2, LIMIT_S)
    assert done.wait() == [None]
    assert torch.equal(made.received[935:], made.sent[935:])
    assert not made.received[:935].any()
    made.stop()


def test_a_short_write_raises_as_many_immediates_as_a_long_one():
    made = Pair(NETS["two_domains"])
    done, counter = Done(), made.target.make_imm_counter(3)
    made.source.submit_write(made.src, made.dst, 10, imm=3, on_done=done)
    counter.wait(count_immediates(DomainGroupRouting.round_robin(2)), LIMIT_S)
    assert done.wait() == [None]
    assert torch.equal(made.received[:10], made.sent[:10])
    made.stop()


def test_an_expectation_is_reached_once_and_the_rest_goes_to_the_callback(tcp):
    reached, others, done = [], [], Done()
    tcp.target.set_imm_count_expected(5, 10, lambda: reached.append(len(others)))
    tcp.target.set_imm_callback(others.append)
    empty = PageIndices([0] * 17, 0)
    tcp.source.submit_paged_writes(tcp.src, empty, tcp.dst, empty, 0, imm=5, on_done=done)
    done.wait()
    wait_until(lambda: len(others) >= 7)
    assert (len(reached), others) == (1, [5] * 7)


def test_immediates_that_come_early_are_kept(tcp):
    done = Done()
    for _ in range(3):
        tcp.source.submit_imm(tcp.dst, 11, done)
    done.wait(3)
    counter = tcp.target.make_imm_counter(11)
    counter.wait(2, LIMIT_S)
    counter.wait(1, LIMIT_S)
    with pytest.raises(TransferError, match=r"immediate 11: 0 of 1 have come within 0\.01 s"):
        counter.wait(1, 0.01)
    tcp.source.submit_imm(tcp.dst, 11, done)
    done.wait()
    wait_until(lambda: counter.count >= 1)
    assert tcp.target.remove_imm_count(11) == (1, 0)


@pytest.mark.parametrize("address", [b"nobody", b"x" * 200])
def test_a_message_to_no_address_is_an_error_and_the_engine_goes_on(tcp, address):
    done = Done()
    tcp.source.submit_send(DomainAddress(address), b"hello", done)
    (error,) = done.wait()
    assert str(error) == "send: tcp: not an address of this network"
    tcp.source.submit_write(tcp.src, tcp.dst, 8, on_done=done)
    assert done.wait() == [error, None]


def test_names_travel_as_bytes_and_text(tcp):
    address = tcp.source.main_address
    assert DomainAddress.from_text(str(address)) == DomainAddress(bytes(address)) == address
    assert len({address, DomainAddress(bytes(address))}) == 1
    copy = pickle.loads(pickle.dumps(tcp.dst))
    assert copy == tcp.dst
    assert (copy.num_bytes, copy.num_domains) == (len(tcp.received), 1)
    for damaged in (tcp.dst.to_bytes()[:-1], tcp.dst.to_bytes() + b"x", b""):
        with pytest.raises(BadInput, match="memory region descriptor: damaged"):
            MemoryRegionDescriptor(damaged)
    for text in ("", "xy", "012", "00" * 265):
        with pytest.raises(BadInput, match="domain address"):
            DomainAddress.from_text(text)


def test_engines_with_another_number_of_domains_do_not_meet():
    one, two = Pair(NETS["tcp"]), Pair(NETS["two_domains"])
    with pytest.raises(BadInput, match="the descriptor's engine has 2 domains, this one 1"):
        one.source.submit_write(one.src, two.dst, 1, on_done=Done())
    one.stop()
    two.stop()


def test_a_peer_that_never_answers_is_given_up_on():
    gone = Pair(NETS["tcp"])
    made = TransferEngine(NETS["tcp"], connect_limit_s=0.5)
    src, _ = made.register_tensor(gone.sent)
    gone.stop()
    done = Done()
    made.submit_write(src, gone.dst, 64, on_done=done)
    (error,) = done.wait()
    assert error is not None
    made.stop()


REFUSED = {
    "beyond the source": (lambda p, d: p.source.submit_write(p.src, p.dst, 2, src_offset=len(p.sent) - 1, on_done=d),
                          "source: 2 bytes at 1048575 of a region of 1048576"),
    "beyond the destination": (lambda p, d: p.source.submit_write(p.src, p.dst, 1, dst_offset=1 << 63, on_done=d),
                               "destination: 1 bytes at 9223372036854775808"),
    "33 bits": (lambda p, d: p.source.submit_imm(p.dst, 1 << 32, d), "imm is 4294967296; wanted 0 to 4294967295"),
    "unequal pages": (lambda p, d: p.source.submit_paged_writes(
        p.src, PageIndices([1, 2], 8), p.dst, PageIndices([1], 8), 8, on_done=d),
        "2 source pages and 1 destination pages"),
    "a page beyond": (lambda p, d: p.source.submit_paged_writes(
        p.src, PageIndices([1 << 40], 1 << 40), p.dst, PageIndices([0], 8), 8, on_done=d), "lies beyond 2^64 bytes"),
    "too many shards": (lambda p, d: p.source.submit_write(p.src, p.dst, 1, num_shards=2, on_done=d),
                        "num_shards is 2; wanted at most one for each of 1 domains"),
    "a foreign handle": (lambda p, d: p.source.submit_write(MemoryRegionHandle(99, 8), p.dst, 1, on_done=d),
                         "memory region 99 is not registered here"),
    "a text as payload": (lambda p, d: p.source.submit_send(p.target.main_address, "hello", d),
                        "the payload is 'hello'; wanted bytes"),
    "counted twice": (lambda p, d: [p.target.make_imm_counter(1) for _ in range(2)], "immediate 1 is counted already"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(tcp, name):
    act, said = REFUSED[name]
    done = Done()
    with pytest.raises(BadInput) as refused:
        act(tcp, done)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert done.errors == []


def test_after_stop_everything_is_refused(tcp):
    tcp.source.stop()
    tcp.source.stop()
    with pytest.raises(BadInput, match="the engine was stopped"):
        tcp.source.submit_write(tcp.src, tcp.dst, 1, on_done=Done())
    with pytest.raises(BadInput, match="is not registered here, or not any more"):
        tcp.target.unregister_memory(MemoryRegionHandle(7, 1))


def test_an_engine_that_is_dropped_calls_back_for_all_it_was_given():
    made, done = Pair(NETS["tcp"]), Done()
    for _ in range(50):
        made.source.submit_write(made.src, made.dst, len(made.sent), on_done=done)
    del made.source
    assert len(done.wait(50)) == 50
    made.target.stop()


@pytest.mark.parametrize("number", [0, 5])
def test_an_engine_has_one_to_four_domains(number):
    with pytest.raises(BadInput, match=f"{number} domains; wanted 1 to 4"):
        engine([LOOPBACK] * number)


def test_networks_that_are_not_here_are_named():
    with pytest.raises(TransferError, match=r"provider efa"):
        engine([Net("efa", "")])
    assert LOOPBACK in [Net(net.provider, net.source) for net in TransferEngine.detect_topology(["tcp"])]


# ---- another process ----


def answer(provider: str, pipe: Any) -> None:
    """Registers memory, tells where, and writes back what comes."""
    target = engine(ALL_NETS[provider])
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    handle, descriptor = target.register_tensor(memory)
    counter, done = target.make_imm_counter(1), Done()
    pipe.send(descriptor)
    back = pipe.recv()
    for call in range(200):
        counter.wait(target.num_domains, LIMIT_S)
        assert memory.eq(call % 251).all()
        target.submit_write(handle, back, len(memory), imm=2, on_done=done)
    assert done.wait(200) == [None] * 200
    target.stop()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("provider", ALL_NETS)
def test_two_hundred_writes_to_another_process_and_back(provider):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(provider, there))
    process.start()
    source = engine(ALL_NETS[provider])
    memory, back = torch.zeros(2, 1 << 16, dtype=torch.uint8)
    src, _ = source.register_tensor(memory)
    counter, done = source.make_imm_counter(2), Done()
    here.send(source.register_tensor(back)[1])
    assert here.poll(LIMIT_S)
    dst = here.recv()
    for call in range(200):
        memory.fill_(call % 251)
        source.submit_write(src, dst, len(memory), imm=1, on_done=done)
        counter.wait(source.num_domains, LIMIT_S)
        assert torch.equal(back, memory)
    assert done.wait(200) == [None] * 200
    process.join(LIMIT_S)
    assert process.exitcode == 0
    source.stop()


FORGOTTEN = """
import sys
from fabric_pairs import ALL_NETS, NETS, Pair

pair = Pair(NETS[sys.argv[1]])
for _ in range(20):
    pair.source.submit_write(pair.src, pair.dst, 1 << 20, imm=1, on_done=lambda error: None)
word = pair.target.alloc_scalar_watcher(lambda old, new: True)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("net", NETS)
def test_a_process_may_end_without_stopping_its_engines(net):
    here = TESTS
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    ended = subprocess.run([sys.executable, "-c", FORGOTTEN, net], env=env, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")

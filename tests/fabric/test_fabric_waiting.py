"""What tells a user of an engine that something has happened: flags and counters of transfers, and watched words."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from fabric_pairs import LIMIT_S, NETS, Done, Pair, engine, wait_until
from fabric_processes import PAGE, PeerProcess

from tracekern.errors import BadInput
from tracekern.fabric import DomainAddress, DoneCounter, DoneFlag, PageIndices, TransferError


@pytest.fixture(scope="module")
def tcp() -> Iterator[Pair]:
    made = Pair(NETS["tcp"])
    yield made
    made.stop()


# ---- ends of transfers ----


def test_a_flag_is_set_when_the_bytes_are_there(tcp):
    flag = DoneFlag()
    assert (flag.is_done, flag.error) == (False, None)
    tcp.source.submit_write(tcp.src, tcp.dst, len(tcp.sent), on_done=flag)
    flag.wait(LIMIT_S)
    assert (flag.is_done, flag.error) == (True, None)
    assert torch.equal(tcp.received, tcp.sent)
    with pytest.raises(BadInput, match="this DoneFlag has a transfer; make one for each"):
        tcp.source.submit_write(tcp.src, tcp.dst, 1, on_done=flag)


def test_a_flag_tells_what_went_wrong(tcp):
    flag = DoneFlag()
    with pytest.raises(TransferError, match=r"the transfer has not ended within 0\.01 s"):
        flag.wait(0.01)
    with pytest.raises(BadInput, match="source: 9 bytes"):  # refused, so that it is free for another
        tcp.source.submit_write(tcp.src, tcp.dst, 9, src_offset=len(tcp.sent), on_done=flag)
    tcp.source.submit_send(DomainAddress(b"nobody"), b"hello", flag)
    with pytest.raises(TransferError, match="send: tcp: not an address of this network"):
        flag.wait(LIMIT_S)
    assert flag.is_done
    assert str(flag.error) == "send: tcp: not an address of this network"


def test_a_counter_counts_what_arrived_and_what_failed(tcp):
    counter, nothing = DoneCounter(), PageIndices([], 8)
    for _ in range(20):
        tcp.source.submit_write(tcp.src, tcp.dst, 64, imm=1, on_done=counter)
    tcp.source.submit_paged_writes(tcp.src, nothing, tcp.dst, nothing, 8, on_done=counter)
    counter.wait(21, LIMIT_S)
    assert (counter.done, counter.errors) == (21, 0)
    with pytest.raises(TransferError, match=r"21 of 22 transfers have ended within 0\.01 s"):
        counter.wait(22, 0.01)
    tcp.source.submit_send(DomainAddress(b"nobody"), b"hello", counter)
    with pytest.raises(TransferError, match="1 of 22 transfers failed; the first: send: tcp: not an address"):
        counter.wait(22, LIMIT_S)
    assert (counter.done, counter.errors) == (21, 1)


def test_what_cannot_be_told_is_refused(tcp):
    with pytest.raises(BadInput, match="on_done is 7; wanted a function, a DoneFlag or a DoneCounter"):
        tcp.source.submit_imm(tcp.dst, 1, 7)


def test_stop_in_a_callback_does_not_wait_for_it():
    """The callbacks that remain are called once it has returned."""
    made, stopped, last = Pair(NETS["tcp"]), Done(), Done()

    def stop(_error: object) -> None:
        made.source.submit_imm(made.dst, 1, last)
        made.source.stop()
        stopped(None)

    made.source.submit_imm(made.dst, 1, stop)
    stopped.wait()
    last.wait()
    made.stop()


# ---- waits for immediates that do not come ----


@pytest.mark.parametrize("limit_s", [math.inf, 1e10, 1e300])
def test_a_wait_without_a_limit_lasts_until_all_has_come(tcp, limit_s):
    counter, flag = tcp.target.make_imm_counter(3), DoneFlag()
    late = threading.Timer(0.3, tcp.source.submit_imm, (tcp.dst, 3, flag))
    late.start()
    counter.wait(1, limit_s)
    flag.wait(limit_s)
    tcp.target.remove_imm_count(3)
    late.join()


def test_stopping_an_engine_ends_its_waits():
    made = engine(NETS["tcp"])
    counter = made.make_imm_counter(1)
    stopper = threading.Timer(0.2, made.stop)
    stopper.start()
    for _ in range(2):  # the second one begins after it
        with pytest.raises(TransferError, match="immediate 1: the engine was stopped"):
            counter.wait(1, LIMIT_S)
    stopper.join()


def test_a_broken_engine_ends_its_waits(shim):
    made = engine(NETS["tcp"])
    counter = made.make_imm_counter(1)
    breaker = threading.Timer(0.2, shim.set, ("shim_is_broken", 1))
    breaker.start()
    with pytest.raises(TransferError, match="immediate 1: the engine is broken"):
        counter.wait(1, LIMIT_S)
    shim.reset()
    made.stop()


def test_a_wait_names_who_has_not_come(tcp):
    counter, done = tcp.target.make_imm_counter(4), Done()
    other = Pair(NETS["tcp"], 64)
    tcp.source.submit_imm(tcp.dst, 4, done)
    other.source.submit_imm(tcp.dst, 5, done)  # is met
    assert done.wait(2) == [None, None]
    who = r"engine [0-9a-f]{16} at fi_sockaddr_in://127\.0\.0\.1:\d+ raised it"
    said = rf"^immediate 4: 1 of 2 have come within 0\.1 s; {who} 0 times; {who} once$"
    with pytest.raises(TransferError, match=said) as late:
        counter.wait(2, 0.1)
    assert late.value.outcome == "stalled"
    counter.wait(1, 0.1)
    assert tcp.target.remove_imm_count(4) == (0, 0)
    assert tcp.target.remove_imm_count(5) == (1, 0)
    other.stop()


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "known"])
def test_the_death_of_a_sender_ends_a_wait_and_is_told_once(is_named):
    """One that was named, or that has raised the immediate before; another one that is alive does not help."""
    target, flag = Pair(NETS["tcp"], PAGE), DoneFlag()
    target.source.submit_imm(target.dst, 9, flag)  # the other one is met
    flag.wait(LIMIT_S)
    peer = PeerProcess(*NETS["tcp"])
    senders = [DomainAddress.from_text(peer.ask("address"))] if is_named else []
    assert peer.write(target.dst) == "None"
    counter = target.target.make_imm_counter(1, senders)
    counter.wait(1, LIMIT_S)
    if not is_named:
        assert peer.write(target.dst) == "None"
        counter.wait(1, LIMIT_S)
    killer = threading.Timer(0.2, peer.signal, (signal.SIGKILL,))
    killer.start()
    with pytest.raises(TransferError, match="immediate 1: engine .* is dead: it has ended"):
        counter.wait(1, LIMIT_S)
    with pytest.raises(TransferError, match="0 of 1 have come .* which has ended, raised it"):
        counter.wait(1, 0.05)
    late = target.target.make_imm_counter(2, [DomainAddress.from_text(str(sender)) for sender in senders])
    if is_named:
        with pytest.raises(TransferError, match="immediate 2: engine .* has ended"):
            late.wait(1, LIMIT_S)
    peer.end()
    target.stop()


# ---- watched words ----


def test_a_watcher_sees_a_word_grow_until_it_has_enough(tcp):
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def grew(old: int, new: int) -> bool:
        seen.append((old, new))
        if new == 100:
            ended.set()
        return new < 100

    watcher = tcp.source.alloc_scalar_watcher(grew)
    assert watcher.address == watcher.tensor.data_ptr()
    for _ in range(100):
        watcher.tensor += 1
    assert ended.wait(LIMIT_S)
    watcher.tensor += 1
    olds, news = zip(*seen, strict=True)
    assert olds == (0, *news[:-1])  # increments coalesce, none is lost
    assert list(news) == sorted(set(news))
    assert news[-1] == 100
    watcher.free()


def test_each_of_several_watchers_sees_its_own_word(tcp):
    seen: dict[int, int] = {}
    watchers = [
        tcp.source.alloc_scalar_watcher(lambda _old, new, index=index: bool(seen.update({index: new})) or True)
        for index in range(5)
    ]
    for index, watcher in enumerate(watchers):
        watcher.tensor.fill_(index - 2)
    wait_until(lambda: len(seen) == 4)
    assert seen == {0: 2**64 - 2, 1: 2**64 - 1, 3: 1, 4: 2}  # one stayed at 0
    watchers[3].free()
    watchers[3].free()
    watchers[3].tensor.fill_(9)
    watchers[4].tensor.fill_(9)
    wait_until(lambda: seen[4] == 9)
    assert seen[3] == 1
    for watcher in watchers:
        watcher.free()


def test_a_watcher_can_be_freed_in_its_own_callback_and_writes_started_there(tcp):
    done = Done()

    def start(_old: int, _new: int) -> bool:
        tcp.source.submit_write(tcp.src, tcp.dst, 8, on_done=done)
        watcher.free()
        return True

    watcher = tcp.source.alloc_scalar_watcher(start)
    watcher.tensor += 1
    assert done.wait() == [None]
    watcher.tensor += 1
    assert done.errors == [None]


def test_free_waits_for_the_call_under_way(tcp):
    inside, calls = threading.Event(), []

    def slow(_old: int, _new: int) -> bool:
        inside.set()
        time.sleep(0.1)
        calls.append(1)
        return True

    watcher = tcp.source.alloc_scalar_watcher(slow)
    watcher.tensor += 1
    assert inside.wait(LIMIT_S)
    watcher.free()
    assert calls == [1]


def test_stop_frees_the_watchers():
    made = engine(NETS["tcp"])
    watcher = made.alloc_scalar_watcher(lambda old, new: True)
    made.stop()
    watcher.free()
    watcher.tensor += 1
    with pytest.raises(BadInput, match="the engine was stopped"):
        made.alloc_scalar_watcher(lambda old, new: True)

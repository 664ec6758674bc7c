"""examples/kv_cache: what arrives, what a cancel promises, and what is said when a prefiller dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fabric_hosts import missing, run_on_hosts
from fabric_pairs import wait_until
from hypothesis import given
from hypothesis import strategies as st
from toolchains import ROOT

sys.path.insert(0, str(ROOT))
from examples.kv_cache.decoder import Decoder, PageState, PrefillFailed
from examples.kv_cache.main import LAYOUT, MAX_PAGES, NETS, Given, be_prefiller, make_engine
from examples.kv_cache.prefiller import Prefiller
from examples.kv_cache.protocol import Cancel, Cancelled, Heartbeat, MalformedMessage, Request, decode, encode
from tracekern import BadInput
from tracekern.fabric import DomainAddress, DoneFlag

LONG_S = 30.0
numbers = st.integers(0, 2**32 - 1)
REQUEST = Request(7, 3, 11, LAYOUT, b"there", b"memory", (5, 1, 9))


class Run:
    """A decoder here, and prefillers in processes of their own."""

    def __init__(self, provider: str) -> None:
        self.provider, self.processes, self._pipes = provider, list[Any](), list[Any]()
        self.decoder = Decoder(make_engine(NETS[provider]), LAYOUT)

    def start(self, layer_s: float = 0.0) -> Any:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        name = f"prefiller {len(self.processes) + 1}"
        process = context.Process(target=be_prefiller, args=(there, Given(self.provider, layer_s=layer_s), 1))
        process.start()
        self.processes.append(process)
        address = DomainAddress.from_text(here.recv())
        self._pipes.append(here)  # a prefiller ends with its pipe
        return self.decoder.add_prefiller(name, address)

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self.decoder.stop()

    def wrong_bytes(self, link: Any, seed: int, pages: int = MAX_PAGES, deadline_s: float = LONG_S) -> int:
        with self.decoder.fetch(link, seed, pages, deadline_s) as cache:
            return cache.wrong_bytes(seed)

    def wait_for_free(self, count: int) -> None:
        wait_until(lambda: self.decoder.pool.count(PageState.FREE) == count)
        assert self.decoder.pool.count(PageState.FREE) == count


@pytest.fixture(params=NETS)
def run(request: Any) -> Iterator[Run]:
    made = Run(request.param)
    yield made
    made.stop()


def test_many_requests_at_once_arrive_whole(run: Run):
    link = run.start()
    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(lambda seed: run.wrong_bytes(link, seed, 1 + seed % MAX_PAGES), range(24))) == 0
    run.wait_for_free(LAYOUT.pool_pages)
    assert run.decoder.uncounted == 0


def test_pages_of_a_late_prefiller_are_lent_again_only_after_it_has_confirmed(run: Run):
    late, other = run.start(layer_s=0.05), run.start()
    assert run.wrong_bytes(late, 1) == run.wrong_bytes(other, 1) == 0
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(run.wrong_bytes, late, 2, MAX_PAGES, 0.5)
        wait_until(lambda: run.decoder.pool.count(PageState.LENT))
        os.kill(run.processes[0].pid, signal.SIGSTOP)
        with pytest.raises(PrefillFailed, match="prefiller 1: the deadline of 0.5 s is over; .* of 97 writes had come"):
            failed.result(LONG_S)
    assert run.decoder.pool.count(PageState.CANCELLING) == MAX_PAGES
    with pytest.raises(BadInput, match="64 pages wanted; 48 are free, 0 are lent, 16 are being cancelled"):
        run.decoder.pool.lend(LAYOUT.pool_pages, 0.1)
    os.kill(run.processes[0].pid, signal.SIGCONT)  # it goes on with its layers, and hears of the cancel meanwhile
    run.wait_for_free(LAYOUT.pool_pages)
    with ThreadPoolExecutor(4) as pool:  # all pages, those of the cancelled request as well
        assert sum(pool.map(lambda seed: run.wrong_bytes(other, seed), range(3, 7))) == 0


def test_a_prefiller_that_is_killed_is_named_and_its_pages_come_back(run: Run):
    killed = run.start(layer_s=0.1)
    assert run.wrong_bytes(killed, 1) == 0
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(run.wrong_bytes, killed, 2, MAX_PAGES, 4.0)
        wait_until(lambda: run.decoder.pool.count(PageState.LENT))
        os.kill(run.processes[0].pid, signal.SIGKILL)
        with pytest.raises(PrefillFailed, match="prefiller 1: .*; .* of 97 writes had come"):
            failed.result(LONG_S)
    assert run.decoder.pool.count(PageState.CANCELLING) == MAX_PAGES
    with pytest.raises(PrefillFailed, match="prefiller 1: "):
        run.wrong_bytes(killed, 3)
    run.wait_for_free(LAYOUT.pool_pages)
    another = run.start()
    with ThreadPoolExecutor(4) as pool:  # all pages
        assert sum(pool.map(lambda seed: run.wrong_bytes(another, seed), range(4, 8))) == 0


def test_requests_for_another_model_are_refused_in_a_line():
    own = Prefiller(make_engine(NETS["tcp"]), LAYOUT, MAX_PAGES)
    sender = make_engine(NETS["tcp"])
    for payload in (b"", b"nonsense", encode(REQUEST)[:-1], encode(REQUEST)):  # the last has no descriptor
        sender.submit_send(own.engine.main_address, payload, done := DoneFlag())
        done.wait(LONG_S)
    wait_until(lambda: own.refused == 4)
    assert own.refused == 4
    sender.stop()
    own.stop()


# ---- messages ----


@given(st.integers(0, 2**64 - 1), st.binary(max_size=64))
def test_messages_come_back_as_they_were(request: int, address: bytes):
    for message in (Cancel(request, address), Cancelled(request), Heartbeat(), REQUEST):
        assert decode(encode(message)) == message


@given(st.binary(max_size=200) | st.tuples(st.integers(0, 90), numbers).map(lambda at: changed(*at)))
def test_anything_else_is_refused_in_one_line(packed: bytes):
    said = ""
    try:
        decode(packed)
    except MalformedMessage as error:
        said = str(error)
    assert "\n" not in said


def changed(at: int, value: int) -> bytes:
    packed = bytearray(encode(REQUEST))
    packed[at % len(packed)] = value % 256
    return bytes(packed)


# ---- two hosts ----


def be_a_prefiller(other: Any, nets: Any) -> None:
    own = Prefiller(make_engine(nets[0]), LAYOUT, MAX_PAGES)
    other.send(str(own.engine.main_address))
    other.poll(LONG_S)
    own.stop()


def be_the_decoder(other: Any, nets: Any) -> int:
    decoder = Decoder(make_engine(nets[0]), LAYOUT)
    link = decoder.add_prefiller("prefiller", DomainAddress.from_text(other.recv()))
    wrong = 0
    for seed in range(4):
        with decoder.fetch(link, seed, MAX_PAGES, LONG_S) as cache:
            wrong += cache.wrong_bytes(seed)
    other.send("done")
    decoder.stop()
    return wrong


@pytest.mark.skipif(missing() != "", reason=missing())
def test_a_cache_travels_between_two_hosts():
    assert run_on_hosts(be_a_prefiller, be_the_decoder) == (None, 0)

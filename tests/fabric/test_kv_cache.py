"""examples/kv_cache: what arrives, what a cancel promises, and what is said when a prefiller dies."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch
from fabric_hosts import missing, run_on_hosts
from fabric_pairs import wait_until
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import ROOT

sys.path.insert(0, str(ROOT))
import tracekern
from examples.kv_cache.decoder import BEAT_S, Decoder, PageState, PrefillFailed
from examples.kv_cache.main import LAYOUT, MAX_PAGES, NETS, Given, be_prefiller, make_engine
from examples.kv_cache.prefiller import Prefiller
from examples.kv_cache.protocol import Cancel, Cancelled, Layout, MalformedMessage, Request, content, decode, encode
from tracekern import BadInput
from tracekern.fabric import DomainAddress, DoneFlag, Transfer, TransferError

LONG_S, PAGES = 30.0, 4
SILENT = "nothing was heard from it for 2000 ms"
GONE = "(it has ended|Operation canceled)"  # the second: its socket was gone before its process
numbers = st.integers(0, 2**32 - 1)
REQUEST = Request(7, 3, 11, LAYOUT, b"there", b"memory", (5, 1, 9))


class Run:
    """A decoder here, and prefillers in processes of their own: one to be killed, one to be stopped, and another."""

    def __init__(self, provider: str) -> None:
        context, started = multiprocessing.get_context("forkserver"), []
        context.set_forkserver_preload(["torch", "tracekern.fabric", "tracekern.record.session"])
        self.processes, self._pipes = list[Any](), list[Any]()
        for layer_s in (0.4, 0.4, 0.0):
            here, there = context.Pipe()
            process = context.Process(target=be_prefiller, args=(there, Given(provider, layer_s=layer_s), 1))
            process.start()
            self.processes.append(process)
            self._pipes.append(here)  # a prefiller ends with its pipe
        self.decoder = Decoder(make_engine(NETS[provider]), LAYOUT)
        for number, pipe in enumerate(self._pipes, 1):
            assert pipe.poll(LONG_S)
            address, pulse = pipe.recv()
            started.append(self.decoder.add_prefiller(f"prefiller {number}", DomainAddress.from_text(address), pulse))
        self.killed, self.silent, self.other = started

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self.decoder.stop()

    def wrong_bytes(self, link: Any, seed: int, pages: int = MAX_PAGES, deadline_s: float = LONG_S) -> int:
        with self.decoder.fetch(link, seed, pages, deadline_s) as cache:
            return cache.wrong_bytes(seed)


@pytest.fixture(params=NETS, scope="module")
def run(request: Any) -> Iterator[Run]:
    made = Run(request.param)
    yield made
    made.stop()


def test_many_requests_at_once_arrive_whole(run: Run):
    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(lambda seed: run.wrong_bytes(run.other, seed, 1 + seed % MAX_PAGES), range(24))) == 0
    assert run.decoder.pool.count(PageState.FREE) == LAYOUT.pool_pages
    assert run.decoder.uncounted == 0


@pytest.mark.soak
def test_thousands_of_requests_arrive_whole(run: Run):
    with ThreadPoolExecutor(6) as pool:
        for first in range(0, 3000, 100):
            seeds = range(first, first + 100)
            assert sum(pool.map(lambda seed: run.wrong_bytes(run.other, seed, 1 + seed % MAX_PAGES), seeds)) == 0
    assert run.decoder.pool.count(PageState.FREE) == LAYOUT.pool_pages
    assert run.decoder.uncounted == 0


def begin(run: Run, link: Any, pool: ThreadPoolExecutor) -> Future[int]:
    """Returns a reading of which one layer has come, or some more."""
    reading = pool.submit(run.wrong_bytes, link, 2)
    wait_until(lambda: any(lent.counter.count >= MAX_PAGES for lent in list(link.lent.values())))
    return reading


def pass_deadline(link: Any) -> None:
    for lent in list(link.lent.values()):
        lent.until = 0.0


def test_prefillers_that_are_killed_or_silent_are_named_early_and_their_pages_wait(run: Run):
    count = run.decoder.pool.count
    with ThreadPoolExecutor(4) as pool:
        killed, silent = (begin(run, link, pool) for link in (run.killed, run.silent))
        os.kill(run.processes[0].pid, signal.SIGKILL)
        os.kill(run.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(
            PrefillFailed, match=f"prefiller 1: heartbeat: .*{GONE}.*; [1-9][0-9] of 97 writes had come"
        ):
            killed.result(LONG_S)
        with pytest.raises(PrefillFailed, match=f"prefiller 2: heartbeat: .*{SILENT}.*; [1-9][0-9] of 97 writes had"):
            silent.result(LONG_S)
        with pytest.raises(PrefillFailed, match=f"prefiller 1: heartbeat: .*{GONE}"):
            run.wrong_bytes(run.killed, 3)
        wait_until(lambda: run.killed.is_revoked)
        assert run.killed.is_revoked
        time.sleep(3 * BEAT_S)  # no write can land, but the deadline is not over
        with pytest.raises(BadInput, match="64 pages wanted; 32 are free, 0 are lent, 32 are being cancelled"):
            run.decoder.pool.lend(LAYOUT.pool_pages, 0.1)
        pass_deadline(run.killed)
        pass_deadline(run.silent)
        wait_until(lambda: count(PageState.FREE) == 3 * MAX_PAGES)
        assert count(PageState.FREE) == 3 * MAX_PAGES
        time.sleep(3 * BEAT_S)
        assert count(PageState.CANCELLING) == MAX_PAGES  # of the silent one, which may go on
        reading = [pool.submit(run.wrong_bytes, run.other, seed) for seed in range(3, 15)]
        os.kill(run.processes[1].pid, signal.SIGCONT)
        assert sum(each.result(LONG_S) for each in reading) == 0


def test_requests_for_another_model_are_refused_in_a_line():
    own = Prefiller(make_engine(NETS["tcp"]), LAYOUT, MAX_PAGES)
    sender = make_engine(NETS["tcp"])
    _, descriptor = sender.register_tensor(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))
    nobody = encode(dataclasses.replace(REQUEST, memory=descriptor.to_bytes(), reply_to=b""))
    no_memory = encode(REQUEST)
    for payload in (b"", b"nonsense", no_memory[:-1], no_memory, nobody):
        sender.submit_send(own.engine.main_address, payload, done := DoneFlag())
        done.wait(LONG_S)
    wait_until(lambda: own.refused == 5)
    assert own.refused == 5
    sender.stop()
    own.stop()


# ---- within one process, where layers can be held back ----


class Gate:
    """Holds a model's layers back: it computes `layer` only when the gate is open."""

    def __init__(self, prefiller: Prefiller, layer: int) -> None:
        self.is_reached, self._open = threading.Event(), threading.Event()
        compute = prefiller.model._compute

        def compute_later(each: int) -> None:
            if each == layer:
                self.is_reached.set()
                assert self._open.wait(LONG_S)
            compute(each)

        prefiller.model._compute = compute_later  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()


class Here:
    """A decoder and two prefillers in this process. A request takes all pages."""

    def __init__(self) -> None:
        self.layout = Layout(layers=3, page_bytes=1 << 10, pool_pages=PAGES, tail_bytes=1 << 10)
        self.decoder = Decoder(make_engine(NETS["tcp"]), self.layout)
        self.prefillers = [Prefiller(make_engine(NETS["tcp"]), self.layout, PAGES) for _ in range(2)]
        self.links = [
            self.decoder.add_prefiller(f"prefiller {number}", each.engine.main_address, each.pulse)
            for number, each in enumerate(self.prefillers, 1)
        ]

    def read(self, link: int, seed: int, deadline_s: float = LONG_S, before: Callable[[], None] | None = None) -> int:
        """Returns how many bytes are wrong when the decoder reads them."""
        with self.decoder.fetch(self.links[link], seed, PAGES, deadline_s) as cache:
            if before is not None:
                before()
            return cache.wrong_bytes(seed)

    def finish(self, link: int) -> None:
        """Waits until a prefiller has no job."""
        wait_until(lambda: not self.prefillers[link]._jobs)

    def stop(self) -> None:
        for each in self.prefillers:
            each.stop()
        self.decoder.stop()


@pytest.fixture
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.stop()


# ---- faults that are planted, and must be seen ----


def read_with_the_last_layer_held_back(here: Here) -> int:
    """A decoder that waits for all writes cannot read before the gate is open."""
    assert here.read(0, 1) == 0
    gate = Gate(here.prefillers[0], here.layout.layers - 1)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(here.read, 0, 2)
        assert gate.is_reached.wait(LONG_S)
        wait([reading], 0.5)
        gate.open()
        return reading.result(LONG_S)


def read_what_a_late_prefiller_was_to_write(here: Here) -> int:
    """Pages go from a prefiller that is late to another one, and are read when the late one has ended."""
    assert here.read(0, 1) == here.read(1, 2) == 0
    gate = Gate(here.prefillers[0], 1)
    with pytest.raises(PrefillFailed, match=f"prefiller 1: the deadline of 0.3 s is over; {PAGES} of .* had come"):
        here.read(0, 3, 0.3)

    def let_the_late_one_end() -> None:
        gate.open()
        here.finish(0)

    try:
        return here.read(1, 4, 0.7, let_the_late_one_end)
    except BadInput:  # no page is free
        let_the_late_one_end()
    return here.read(1, 5)


def count_fewer(here: Here, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(here.decoder, "num_writes", lambda num_pages: 2 * num_pages)


def count_nothing(here: Here, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(here.decoder, "num_writes", lambda num_pages: 0)


def count_up_early(here: Here, patch: pytest.MonkeyPatch) -> None:
    model = here.prefillers[0].model
    compute, count_up = model._compute, model._count_up
    patch.setattr(model, "_count_up", lambda: None)

    def compute_late(layer: int) -> None:
        count_up()
        time.sleep(0.05)
        compute(layer)

    patch.setattr(model, "_compute", compute_late)


def free_at_the_deadline(here: Here, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(here.decoder, "_cancel", here.decoder._give_back)


def confirm_at_once(here: Here, patch: pytest.MonkeyPatch) -> None:
    late = here.prefillers[0]
    patch.setattr(late, "_cancel", lambda message: late._confirm(message.request, message.reply_to))


def hear_no_cancel(here: Here, patch: pytest.MonkeyPatch) -> None:
    """A cancel that is under way all the time; no fault."""
    late = here.prefillers[0]
    cancel = late._cancel
    patch.setattr(late, "_cancel", lambda message: None if message.request in late._jobs else cancel(message))


@pytest.mark.parametrize("fault", [None, count_fewer, count_nothing])
def test_a_decoder_that_reads_before_its_last_write_is_seen(here: Here, fault: Any, monkeypatch: pytest.MonkeyPatch):
    if fault is None:
        assert read_with_the_last_layer_held_back(here) == 0
        return
    plant, read = fault, here.read
    assert read(0, 1) == 0
    gate = Gate(here.prefillers[0], here.layout.layers - 1)
    plant(here, monkeypatch)
    assert read(0, 2) >= here.layout.page_bytes // 8
    gate.open()


def test_a_word_that_is_counted_up_before_its_layer_is_seen(here: Here, monkeypatch: pytest.MonkeyPatch):
    count_up_early(here, monkeypatch)
    assert here.read(0, 1) > 0


@pytest.mark.parametrize("fault", [None, hear_no_cancel, free_at_the_deadline, confirm_at_once])
def test_pages_that_are_lent_before_a_late_prefiller_has_ended_are_seen(
    here: Here, fault: Any, monkeypatch: pytest.MonkeyPatch
):
    if fault is not None:
        fault(here, monkeypatch)
    wrong = read_what_a_late_prefiller_was_to_write(here)
    assert (wrong > 0) == (fault in (free_at_the_deadline, confirm_at_once))


# ---- requests that end early ----


def test_a_request_that_cannot_be_submitted_is_given_up_and_the_next_one_served(
    here: Here, monkeypatch: pytest.MonkeyPatch
):
    engine = here.prefillers[0].engine

    def refuse(*given: Any, **how: Any) -> None:
        raise BadInput("planted")

    for submit in ("submit_paged_writes", "submit_write"):  # the second: pages of all layers are under way
        with monkeypatch.context() as planted:
            planted.setattr(engine, submit, refuse)
            with pytest.raises(PrefillFailed, match="prefiller 1: it has given the request up; .* writes had come"):
                here.read(0, 1)
        wait_until(lambda: here.decoder.pool.count(PageState.FREE) == PAGES)
        assert here.read(0, 2) == 0


def test_pages_of_a_lost_prefiller_stay_until_the_engine_says_that_none_can_write(
    here: Here, monkeypatch: pytest.MonkeyPatch
):
    gate, tried, engine = Gate(here.prefillers[0], 0), list[float](), here.decoder.engine

    def refuse(handle: Any, timeout_s: float) -> None:
        tried.append(time.monotonic())
        raise TransferError("planted", "stalled")

    with monkeypatch.context() as planted:
        planted.setattr(engine, "unregister_memory", refuse)
        until = time.monotonic() + 0.2
        with pytest.raises(PrefillFailed):
            here.read(0, 1, 0.2)
        here.links[0].lost = "planted"
        wait_until(lambda: len(tried) > 2 and tried[-1] > until)
        assert here.decoder.pool.count(PageState.CANCELLING) == PAGES
    gate.open()
    wait_until(lambda: here.decoder.pool.count(PageState.FREE) == PAGES)
    assert here.read(1, 2) == 0


def test_a_cache_that_a_stalled_write_may_still_read_is_not_computed_to(here: Here, monkeypatch: pytest.MonkeyPatch):
    prefiller, layout = here.prefillers[0], here.layout
    old = prefiller._cache

    def stall(*given: Any, on_done: Any, **how: Any) -> Transfer:
        on_done(TransferError("planted", "stalled"))
        return Transfer(0)

    with monkeypatch.context() as planted:
        planted.setattr(prefiller.engine, "submit_paged_writes", stall)
        with pytest.raises(PrefillFailed, match="prefiller 1: the deadline of 0.5 s is over; 0 of 13 writes had come"):
            here.read(0, 1, 0.5)
    assert here.decoder.pool.count(PageState.CANCELLING) == PAGES
    wait_until(lambda: prefiller._cache is not old)
    monkeypatch.setattr(here.decoder.pool, "lend", lambda count, timeout_s: tuple(range(count)))  # none is free
    assert here.read(0, 2) == 0
    for page in range(PAGES):
        at = page * layout.page_bytes
        assert torch.equal(old[at : at + layout.page_bytes], content(1, 0, page, layout.page_bytes))


# ---- messages ----


@given(st.integers(0, 2**64 - 1), st.binary(max_size=64))
def test_messages_come_back_as_they_were(request: int, address: bytes):
    for message in (Cancel(request, address), Cancelled(request), REQUEST):
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
    other.send((str(own.engine.main_address), own.pulse))
    other.poll(LONG_S)
    own.stop()


def be_the_decoder(other: Any, nets: Any) -> int:
    decoder = Decoder(make_engine(nets[0]), LAYOUT)
    address, pulse = other.recv()
    link = decoder.add_prefiller("prefiller", DomainAddress.from_text(address), pulse)
    wrong = 0
    for seed in range(4):
        with decoder.fetch(link, seed, MAX_PAGES, LONG_S) as cache:
            wrong += cache.wrong_bytes(seed)
    other.send("done")
    decoder.stop()
    return wrong


@pytest.mark.skipif(missing() != "", reason=missing())
@pytest.mark.rotates
def test_a_cache_travels_between_two_hosts():
    assert run_on_hosts(be_a_prefiller, be_the_decoder) == (None, 0)


# ---- the page ----


def test_the_page_says_what_the_kept_trace_shows():
    timeline = tracekern.load(ROOT / "traces" / "kv_cache")
    spans = timeline.spans
    layers, transfers, waits = (timeline.rows_of(name) for name in ("host", "transfer", "wait_imm"))
    starts, ends = spans.start[transfers, None], spans.end[transfers, None]
    beside = (np.minimum(ends, spans.end[layers]) - np.maximum(starts, spans.start[layers])).clip(0).sum()
    took = (ends - starts).sum()
    after = [(end - spans.end[layers][spans.end[layers] <= end].max()) / 1e6 for end in spans.end[waits]]
    page = " ".join((ROOT / "docs" / "fabric.md").read_text().split())
    assert f"of {took / 1e6:.0f} ms of transfers {beside / 1e6:.0f} ms, {beside / took:.0%}".replace("%", " %") in page
    assert f"ended {min(after):.1f} to {max(after):.1f} ms after the last layer" in page
    assert f"`prefiller 2: heartbeat: ... {SILENT} ...; 32 of 97 writes had come`" in page

"""Transfers between two hosts, each with a network and a /dev/shm of its own."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest
from fabric_hosts import NAMES, bytes_sent, missing, run_on_hosts, set_link

from tracekern.fabric import DoneFlag, Net, PageIndices, TransferEngine, TransferError

PAGE_BYTES, PAGES = 4096, 1000
LIMIT_S = 30.0

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())


def pages_of(call: int) -> np.ndarray:
    return np.random.default_rng(call).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)


def write(other: Connection, nets: list[Net]) -> tuple[str, list[str]]:
    """Writes pages in reverse order, twice, and waits for an answer in between."""
    engine = TransferEngine.builder().add_domains(nets).build()
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    src, mine = engine.register_memory(memory.ctypes.data, memory.nbytes, memory)
    other.send(mine)
    dst, answered = other.recv(), engine.make_imm_counter(2)
    errors: list[object] = []
    for call in range(2):
        memory[:] = pages_of(call)
        back = PageIndices(range(PAGES - 1, -1, -1), PAGE_BYTES)
        there = PageIndices(range(PAGES), PAGE_BYTES)
        engine.submit_paged_writes(src, there, dst, back, PAGE_BYTES, imm=1, on_done=errors.append)
        answered.wait(1, LIMIT_S)
    engine.stop()
    assert errors == [None, None]
    assert min(bytes_sent(link) for link in range(len(nets))) > PAGES * PAGE_BYTES * 2 // len(nets)
    return socket.gethostname(), os.listdir("/dev/shm")


def receive(other: Connection, nets: list[Net]) -> tuple[str, list[str]]:
    engine = TransferEngine.builder().add_domains(nets).build()
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    _, mine = engine.register_memory(memory.ctypes.data, memory.nbytes, memory)
    other.send(mine)
    dst, arrived = other.recv(), engine.make_imm_counter(1)
    for call in range(2):
        arrived.wait(PAGES, LIMIT_S)
        assert np.array_equal(memory[::-1], pages_of(call))
        engine.submit_imm(dst, 2, lambda error: None)
    other.poll(LIMIT_S)  # until the other host has ended: what was submitted has arrived
    engine.stop()
    return socket.gethostname(), os.listdir("/dev/shm")


def test_pages_travel_between_two_hosts_over_two_links():
    assert run_on_hosts(write, receive, num_links=2) == ((NAMES[0], []), (NAMES[1], []))


def write_until_the_link_is_down(other: Connection, nets: list[Net]) -> tuple[str, str, list[str]]:
    """Returns what the transfer ended with that was under way, the next one, and what was told of the peer."""
    engine = TransferEngine.builder().add_domains(nets).transfer_limit(1.0).build()
    told: list[str] = []
    engine.set_peer_callback(told.append)
    memory = np.ones((PAGES, PAGE_BYTES), np.uint8)
    src, _ = engine.register_memory(memory.ctypes.data, memory.nbytes, memory)
    dst, first = other.recv(), DoneFlag()
    engine.submit_write(src, dst, memory.nbytes, on_done=first)
    first.wait(LIMIT_S)
    set_link(0, "down")
    during, after = DoneFlag(), DoneFlag()
    pages = PageIndices(range(PAGES), PAGE_BYTES)
    engine.submit_paged_writes(src, pages, dst, pages, PAGE_BYTES, on_done=during)
    with pytest.raises(TransferError) as stalled:
        during.wait(LIMIT_S)
    while not told:
        time.sleep(0.01)
    engine.submit_write(src, dst, memory.nbytes, on_done=after)
    with pytest.raises(TransferError) as refused:
        after.wait(LIMIT_S)
    engine.stop()

    set_link(0, "up")
    another, done = TransferEngine.builder().add_domains(nets).build(), DoneFlag()
    src, _ = another.register_memory(memory.ctypes.data, memory.nbytes, memory)
    another.submit_write(src, dst, memory.nbytes, on_done=done)
    done.wait(LIMIT_S)
    another.stop()
    return stalled.value.outcome, str(refused.value), told


def be_written_to(other: Connection, nets: list[Net]) -> None:
    engine = TransferEngine.builder().add_domains(nets).build()
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    _, mine = engine.register_memory(memory.ctypes.data, memory.nbytes, memory)
    other.send(mine)
    other.poll(LIMIT_S)  # until the other host has ended
    engine.stop()


def test_a_link_that_is_down_makes_the_peer_dead_and_a_new_engine_goes_on():
    (outcome, refused, told), _ = run_on_hosts(write_until_the_link_is_down, be_written_to)
    assert outcome == "stalled"
    assert "is dead: nothing was heard from it for 1000 ms" in refused
    assert refused == told[0]

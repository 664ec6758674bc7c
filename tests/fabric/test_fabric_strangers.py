"""A stranger who can reach an engine cannot write to it, raise an immediate or send. Children hold no connection."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
from fabric_damage import PackedDescriptor
from fabric_pairs import LIMIT_S, LOOPBACK, Done, Pair, wait_until
from fabric_processes import PeerProcess, Source
from toolchains import GXX, ROOT, compile_cached

from tracekern.fabric import DomainAddress, DoneFlag, TransferEngine, TransferError
from tracekern.fabric.library import require_library

SECRET_BYTES = 8


def test_a_stranger_neither_writes_nor_raises_nor_silences():
    made, messages = Pair([LOOPBACK], 4096), list[bytes]()
    made.target.submit_bouncing_recvs(64, 8, lambda message: messages.append(bytes(message)))
    counter, done = made.target.make_imm_counter(7), Done()
    raised = list[int]()
    made.target.set_imm_callback(raised.append)
    stranger = compile_cached((*GXX, "-O1"), ROOT / "tests" / "cpp" / "fabric_stranger.cpp", "")
    address = bytes(made.target.main_address)[:-SECRET_BYTES].hex()
    command = [str(stranger), require_library() or "libfabric.so.1", address, "5"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert int(ended.stdout) >= 600  # the messages: a receiver takes them before it knows of whom
    assert not made.received.any()
    assert (counter.count, raised, messages) == (0, [], [])

    made.source.submit_write(made.src, made.dst, 4096, imm=7, on_done=done)
    made.source.submit_send(made.target.main_address, b"hello", done)
    assert done.wait(2) == [None, None]
    counter.wait(1, LIMIT_S)
    assert torch.equal(made.received, made.sent)
    made.stop()


def test_an_address_without_its_secret_reaches_nobody():
    made, flag = Pair([LOOPBACK], 64), DoneFlag()
    made.target.submit_bouncing_recvs(64, 8, lambda message: pytest.fail("a message of a stranger"))
    address = bytearray(bytes(made.target.main_address))
    address[-1] ^= 1
    source = TransferEngine([LOOPBACK], connect_limit_s=0.3)
    source.submit_send(DomainAddress(bytes(address)), b"hello", flag)
    with pytest.raises(TransferError, match="the peer has not answered within the time limit"):
        flag.wait(LIMIT_S)
    source.stop()
    made.stop()


def test_keys_are_drawn():
    made = [Pair([LOOPBACK], 64) for _ in range(2)]
    keys = {PackedDescriptor(pair.dst.to_bytes()).keys[0] for pair in made}
    assert len(keys) == 2
    assert min(keys) > 1 << 32
    for pair in made:
        pair.stop()


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_a_killed_process_is_noticed_though_a_child_of_it_lives(way):
    """The child would hold its connections open, and the engine be dead at the limit of silence only."""
    source, peer = Source(LOOPBACK), PeerProcess(LOOPBACK)
    assert source.write_once(peer.descriptor) is None
    time.sleep(1.5)  # looked after once a second
    child = int(peer.ask(f"child {way}"))
    peer.signal(signal.SIGKILL)
    assert source.write_once(peer.descriptor) is not None
    wait_until(lambda: source.told)
    assert "is dead: it has ended" in source.told[0]
    os.kill(child, signal.SIGKILL)
    peer.end()
    source.engine.stop()

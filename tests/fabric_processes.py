"""Peers that are processes of their own, which tests stop and kill, and engines here that write to them.

Also a libfabric that fails when a test says so, see cpp/fabric_shim.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rehearsal
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, Done

from tracekern.fabric import MemoryRegionDescriptor, MemoryRegionHandle, Net, PageIndices, TransferEngine, TransferError

PROVIDERS = {"tcp": LOOPBACK, "shm": Net("shm", "")}
PAGE = 1 << 14
PAGES = 1000

both_providers = pytest.mark.parametrize("net", PROVIDERS.values(), ids=list(PROVIDERS))


class PeerProcess:
    """tests/fabric_peer.py, running."""

    def __init__(self, *nets: Net, num_bytes: int = PAGE, limit_s: float = LIMIT_S) -> None:
        sources = ",".join(net.source for net in nets)
        command = [sys.executable, str(Path(__file__).parent / "fabric_peer.py"), nets[0].provider, sources]
        self.process = subprocess.Popen(
            [*command, str(num_bytes), str(limit_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.descriptor = self.read_descriptor()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def read_descriptor(self) -> MemoryRegionDescriptor:
        return MemoryRegionDescriptor(bytes.fromhex(self.read()))

    def request(self, request: str) -> None:
        """What read() returns the answer to."""
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()

    def ask(self, request: str) -> str:
        self.request(request)
        return self.read()

    def write(self, dst: MemoryRegionDescriptor) -> str:
        """All of its memory. Returns what the transfer ended with."""
        return self.ask(f"write {dst.to_bytes().hex()}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Source:
    """An engine, memory to write from, and what it was told of peers."""

    def __init__(self, *nets: Net, limit_s: float = LIMIT_S, connect_limit_s: float = LIMIT_S) -> None:
        builder = TransferEngine.builder().add_domains(nets)
        self.engine = builder.transfer_limit(limit_s).connect_limit(connect_limit_s).build()
        self.told: list[str] = []
        self.engine.set_peer_callback(self.told.append)
        self.memory = torch.ones(PAGE, dtype=torch.uint8)
        self.src, _ = self.engine.register_tensor(self.memory)

    def write_pages(self, dst: MemoryRegionDescriptor, done: Any, count: int = PAGES, **options: Any) -> Any:
        pages = PageIndices([0] * count, PAGE)
        return self.engine.submit_paged_writes(self.src, pages, dst, pages, PAGE, on_done=done, **options)

    def write_once(self, dst: MemoryRegionDescriptor) -> TransferError | None:
        done = Done()
        self.engine.submit_write(self.src, dst, PAGE, on_done=done)
        return done.wait()[0]

    def frees(self, handle: MemoryRegionHandle) -> bool:
        """Whether memory is given back at once."""
        with contextlib.suppress(TransferError):
            self.engine.unregister_memory(handle, timeout_s=0.1)
            return True
        return False


@contextlib.contextmanager
def source_and_peer(
    *nets: Net, num_bytes: int = PAGE, peer_limit_s: float = LIMIT_S, **limits: float
) -> Iterator[tuple[Source, PeerProcess]]:
    """limits: of the source."""
    source, peer = Source(*nets, **limits), PeerProcess(*nets, num_bytes=num_bytes, limit_s=peer_limit_s)
    try:
        yield source, peer
    finally:
        source.engine.stop()
        peer.end()


SHIM_NUMBERS = {
    "shim_is_broken": 0,
    "shim_num_lost": 0,
    "shim_num_reads": -1,
    "shim_num_queues": 0,
    "shim_num_full": 0,
    "shim_regs_until_full": -1,
}
"""The shim's variables, with the values under which nothing fails."""


class Shim:
    """What the engines made meanwhile call instead of libfabric."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._library, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    def reset(self) -> None:
        for name, value in SHIM_NUMBERS.items():
            self.set(name, value)


@pytest.fixture(name="shim")
def shim_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shim]:
    kept_builds = pytest.importorskip("kept_builds")
    source = Path(__file__).parent / "cpp" / "fabric_shim.cpp"
    built = kept_builds.build(rehearsal.COMMAND, [source], ".so")
    assert built.returncode == 0, built.stderr
    from tracekern.fabric import engine as module

    if "SHIM_LIBRARY" not in os.environ:  # in a rehearsal it is: then without the rules that are rehearsed
        monkeypatch.setenv("SHIM_LIBRARY", module.require_library() or "libfabric.so.1")
    monkeypatch.setattr(module, "require_library", lambda: str(built.result))
    made = Shim(built.result)
    yield made
    made.reset()

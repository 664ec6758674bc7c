"""What the tests of transfers share: engines on networks of this host, pairs of them, and how transfers end.

Skips the module that imports it where no libfabric is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from tracekern.errors import NotBuilt

try:
    from tracekern.fabric import library

    library.require_library()
except NotBuilt as error:
    pytest.skip(str(error), allow_module_level=True)

from tracekern.fabric import Net, TransferEngine, TransferError

LOOPBACK = Net("tcp", "127.0.0.1")
NETS = {"tcp": [LOOPBACK], "two_domains": [LOOPBACK, Net("tcp", "127.0.0.2")]}
ALL_NETS = {**NETS, "shm": [Net("shm", "")]}
"""Over shm two engines of one process do not meet."""
LIMIT_S = 30.0


class Done:
    """Collects what one transfer or more end with."""

    def __init__(self) -> None:
        self.errors: list[TransferError | None] = []
        self._ended = threading.Semaphore(0)

    def __call__(self, error: TransferError | None) -> None:
        self.errors.append(error)
        self._ended.release()

    def wait(self, count: int = 1) -> list[TransferError | None]:
        for _ in range(count):
            assert self._ended.acquire(timeout=LIMIT_S), f"{len(self.errors)} of {count} have ended"
        return self.errors


def wait_until(is_so: Callable[[], object]) -> None:
    """Waits until it is so; a test then asserts what it wants to know."""
    until = time.monotonic() + LIMIT_S
    while not is_so() and time.monotonic() < until:
        time.sleep(0.001)


def engine(nets: list[Net]) -> TransferEngine:
    return TransferEngine.builder().add_domains(nets).connect_limit(LIMIT_S).build()


class Pair:
    """Two engines, and memory of the second that the first writes to."""

    def __init__(self, nets: list[Net], num_bytes: int = 1 << 20) -> None:
        self.source, self.target = engine(nets), engine(nets)
        self.sent = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        self.received = torch.zeros(num_bytes, dtype=torch.uint8)
        self.src, _ = self.source.register_tensor(self.sent)
        _, self.dst = self.target.register_tensor(self.received)

    def stop(self) -> None:
        self.source.stop()
        self.target.stop()

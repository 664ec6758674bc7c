"""Engines that are opened and closed again and again leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
import operator
import os
from pathlib import Path

import pytest
import torch
from fabric_pairs import LIMIT_S, LOOPBACK, NETS, Done, Pair, engine, wait_until
from fabric_processes import PAGE

ENGINES = [pytest.param(10, id="ten"), pytest.param(200, id="two_hundred", marks=pytest.mark.soak)]
MAX_GROWTH_KIB = 128 << 10
"""The allocator keeps 10 to 70 MiB of what engines on tcp had, now more, now less, however many there were."""


def resources() -> tuple[int, int, int]:
    """Threads, files and segments of this process."""
    segments = list(Path("/dev/shm").glob(f"{os.getpid()}-*"))
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(segments)


def resident_kib() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # gives back what the allocator keeps of what was freed
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


class Growth:
    """What this process takes more than when this was made."""

    def __init__(self) -> None:
        self.resources, self.resident_kib = resources(), resident_kib()

    def has_none(self) -> bool:
        return all(map(operator.le, resources(), self.resources))  # what earlier tests had may go meanwhile

    def must_be_none(self) -> None:
        wait_until(self.has_none)
        assert self.has_none(), (resources(), self.resources)
        assert resident_kib() - self.resident_kib < MAX_GROWTH_KIB


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_engines", ENGINES)
@pytest.mark.parametrize("provider", NETS)
def test_engines_that_are_opened_and_closed_leave_nothing(provider, num_engines):
    """Some have transferred something, some have not met, and some are dropped in the middle of it."""

    def open_and_close(number: int) -> None:
        made, done = Pair(NETS[provider], num_bytes=PAGE), Done()
        for _ in range((0, 1, 50)[number % 3]):
            made.source.submit_write(made.src, made.dst, PAGE, imm=1, on_done=done)
        if number % 3 == 1:
            assert done.wait() == [None]
            assert torch.equal(made.received, made.sent)
        made.stop()

    for number in range(6):  # what libraries keep for good
        open_and_close(number)
    growth = Growth()
    for number in range(num_engines // 2):
        open_and_close(number)
    growth.must_be_none()


@pytest.mark.parametrize("num_engines", ENGINES)
def test_members_that_come_and_go_leave_nothing_at_the_engine_that_stays(num_engines):
    staying = engine(NETS["tcp"])
    received = torch.zeros(PAGE, dtype=torch.uint8)
    handle, dst = staying.register_tensor(received)

    def come_and_go(number: int) -> None:
        member, done = engine([LOOPBACK]), Done()
        src, mine = member.register_tensor(torch.full((PAGE,), number % 256, dtype=torch.uint8))
        member.submit_write(src, dst, PAGE, imm=number, on_done=done)
        staying.submit_imm(mine, 1, on_done=done)
        assert done.wait(2) == [None, None]
        assert received.eq(number % 256).all()
        staying.make_imm_counter(number).wait(1, LIMIT_S)
        assert staying.remove_imm_count(number) == (0, 0)
        member.stop()

    for number in range(3):
        come_and_go(number)
    growth = Growth()
    for number in range(num_engines):
        come_and_go(number)
    growth.must_be_none()
    staying.unregister_memory(handle)
    growth.must_be_none()
    staying.stop()

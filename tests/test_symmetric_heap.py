"""The memory that ranks of the CPU backend share."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool
from tracekern.comm import descriptors
from tracekern.comm.communicator import Communicator
from tracekern.comm.group import Group
from tracekern.errors import BadInput, CommTimeout
from tracekern.launcher.launch import launch_ranks

LISTS_NAMES = """
import os, sys
from tracekern.comm.communicator import Communicator
from tracekern.comm.group import Group

def note(event, arguments):
    if event == "open" and arguments[2] & os.O_CREAT and str(arguments[0]).startswith("/dev/shm"):
        print(arguments[0])

sys.addaudithook(note)
Communicator(Group(0, 1), 1 << 20, 1.0).barrier()
print("through")
"""


def test_no_name_is_ever_made_that_a_killed_rank_could_leave_behind():
    """Ctrl-C while a rank waited for the others left all their heaps in /dev/shm, until somebody found them there."""
    done = subprocess.run([sys.executable, "-c", LISTS_NAMES], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("through\n", "")


def test_descriptors_are_given_back():
    comm = Communicator(Group(0, 1), 1 << 20, 1.0)
    before = len(os.listdir("/proc/self/fd"))
    comm = Communicator(Group(0, 1), 1 << 20, 1.0)
    with pytest.raises(BadInput, match="symmetric heap of rank 0: .* No space left on device; make /dev/shm larger"):
        Communicator(Group(0, 1), 1 << 50, 1.0)
    comm.barrier()
    assert len(os.listdir("/proc/self/fd")) == before


ASKS_FOR_MORE = """
import torch.distributed as dist
from tracekern.errors import BadInput
from tracekern.comm.communicator import Communicator
from tracekern.comm.group import Group

dist.init_process_group("gloo")
group = Group.discover()
try:
    Communicator(group, (1 << 20) + 4096 * group.rank, 1.0)
except BadInput as error:
    print("told:", error)
comm = Communicator(group, 1 << 20, 20.0)
comm.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_ask_for_different_sizes_are_told_and_can_ask_again():
    lines: list[str] = []
    program = [sys.executable, "-c", ASKS_FOR_MORE]
    exits = launch_ranks(3, program, on_line=lambda rank, line: lines.append(line), timeout_s=100)
    assert [end.returncode for end in exits] == [0, 0, 0], lines
    told = "told: symmetric heap: rank 0 asks for 1048576 bytes, rank 1 for 1052672; every rank must use the same shape"
    assert [line for line in lines if line.startswith("told")] == [told] * 3


@pytest.fixture
def pair() -> Iterator[RankPool]:
    """Two ranks, and for the next test two others: these change how long they wait."""
    pool = RankPool(2)
    yield pool
    pool.close()


def exchange_with_a_rank_that_dies(group: Group, listens: bool) -> str:
    """What rank 0 is told of a rank 1 that died as soon as it had said where it listens, or a little later."""
    address = f"\0tracekern-{os.getppid()}"  # the ranks have one parent
    before = len(os.listdir("/proc/self/fd"))
    if group.rank == 1:
        group.all_gather(address)
        return ""
    descriptors.CONNECT_TIMEOUT_S = 0.1
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address)
        if listens:
            silent.listen()
        try:
            descriptors.exchange_descriptors(group, lambda: os.open("/dev/null", os.O_RDONLY))
        except CommTimeout as error:
            assert len(os.listdir("/proc/self/fd")) == before + 1
            return str(error)
    return "nothing"


@pytest.mark.parametrize(("listens", "why"), [(False, "Connection refused"), (True, "timed out")])
def test_a_rank_that_dies_while_memory_is_handed_over_is_told(pair: RankPool, listens: bool, why: str):
    told, _ = pair.call(exchange_with_a_rank_that_dies, listens)
    assert re.fullmatch(rf"rank 0: ranks 1 did not hand over their memory \(.*{why}\); see which one died", told)


def exchange_with_a_rank_that_hands_over_nothing(group: Group, stays: bool) -> str:
    """What rank 0 is told of a rank 1 that died, or was stopped, when it had just connected."""
    if group.rank == 0:
        descriptors.CONNECT_TIMEOUT_S = 0.5
        try:
            descriptors.exchange_descriptors(group, lambda: os.open("/dev/null", os.O_RDONLY))
        except CommTimeout as error:
            return str(error)
        finally:
            group.barrier()
    address = f"\0tracekern-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as link:
        listener.bind(address)
        listener.listen()
        link.connect(group.all_gather(address)[0])
        if not stays:
            link.close()
        group.barrier()
    return ""


@pytest.mark.parametrize(("stays", "why"), [(False, "the connection ended"), (True, "timed out")])
def test_a_rank_that_connects_and_hands_over_nothing_is_told(pair: RankPool, stays: bool, why: str):
    told, _ = pair.call(exchange_with_a_rank_that_hands_over_nothing, stays)
    assert told == f"rank 0: ranks 1 did not hand over their memory ({why}); see which one died"


def miss_a_barrier(group: Group) -> str:
    comm = Communicator(group, 1 << 20, 0.3)
    try:
        if group.rank == 0:
            comm.barrier()
    except CommTimeout as error:
        return str(error)
    finally:
        group.barrier()
    return ""


def test_who_misses_a_barrier_of_ranks_is_named_and_the_barrier(pair: RankPool):
    told, _ = pair.call(miss_a_barrier)
    assert re.search(r"^rank 0 rank_barrier block 0 warp 0 gave up on rank 1 after ", told), told


@pytest.mark.parametrize("backend", ["gpu", "CPU", ""])
def test_a_backend_that_there_is_not_is_no_cpu(backend: str):
    with pytest.raises(BadInput, match=f"backend is '{backend}'; wanted 'cpu' or 'cuda'"):
        Communicator(Group(0, 1), 1 << 20, 1.0, backend)

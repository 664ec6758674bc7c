"""The memory that ranks of the CPU backend share."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool
from tests.warm_ranks import run_ranks
from tracekern.comm import descriptors
from tracekern.comm.communicator import Communicator
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout, PeerLost

LISTS_NAMES = """
import os, sys
from tracekern.comm.communicator import Communicator
from tracekern.comm.ranks.group import Group

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
from tracekern.comm.ranks.group import Group

dist.init_process_group("gloo")
group = Group.discover()
try:
    Communicator(group, (1 << 20) + 4096 * group.rank, 1.0)
except BadInput as error:
    print("told:", error)
comm = Communicator(group, 1 << 20, 60.0)
comm.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_ask_for_different_sizes_are_told_and_can_ask_again():
    codes, lines = run_ranks(3, ASKS_FOR_MORE)
    assert codes == [0, 0, 0], lines
    told = "told: symmetric heap: rank 0 asks for 1048576 bytes, rank 1 for 1052672; every rank must use the same shape"
    assert [line for _, line in lines if line.startswith("told")] == [told] * 3


@pytest.fixture
def pair() -> Iterator[RankPool]:
    """Two ranks, and for the next test two others: these change how long they wait."""
    pool = RankPool(2)
    yield pool
    pool.close()


def exchange_with_a_rank_that_dies(group: Group) -> str:
    """What rank 0 is told of a rank 1 that died as soon as it had said where it listens."""
    before = len(os.listdir("/proc/self/fd"))
    if group.rank == 1:
        group.all_gather(["\0tracekern-nobody-listens-here", b""], descriptors._WHAT)
        return ""
    return exchange(group, 0.1) + f", {len(os.listdir('/proc/self/fd')) - before} more files"


def exchange(group: Group, limit_s: float) -> str:
    """What this rank is told of memory that it does not get, or the sizes of what it got."""
    descriptors.CONNECT_TIMEOUT_S = limit_s
    try:
        received = descriptors.exchange_descriptors(group, file_of_16_bytes, 16)
    except PeerLost as error:
        return str(error)
    sizes = {rank: os.fstat(descriptor).st_size for rank, descriptor in received.items()}
    for descriptor in received.values():
        os.close(descriptor)
    return str(sizes)


def file_of_16_bytes() -> int:
    descriptor = os.memfd_create("part")
    os.write(descriptor, bytes(16))
    return descriptor


def test_a_rank_that_dies_while_memory_is_handed_over_is_told(pair: RankPool):
    told, _ = pair.call(exchange_with_a_rank_that_dies)
    assert re.fullmatch(r"rank 0: ranks 1 did not hand over their memory \(.*Connection refused\), 0 more files", told)


def exchange_beside_a_stranger(group: Group, what: str) -> str:
    """What rank 0 gets while rank 1 behaves like a stranger who has found its door first."""
    if group.rank == 0:
        told = exchange(group, 1.0 if what == "silence" else 60.0)
        group.barrier()
        return told
    ours = descriptors._Exchange([0], 16)
    (address, token), _ = group.all_gather(ours.door, descriptors._WHAT)
    links = [strange_link(address, what, token) for _ in range(40)]
    if what != "silence":
        assert descriptors._hand_over(1, address, token, file_of_16_bytes)
    for _ in range(20):
        ours.receive(0.1)
    group.barrier()
    for link in links:
        link.close()
    ours.close()
    return ""


def strange_link(address: str, what: str, token: bytes) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(address)
    message = {
        "a foreign token": bytes(16) + (1).to_bytes(4, "little"),
        "a rank too high": token + (7).to_bytes(4, "little"),
        "the rank itself": token + (0).to_bytes(4, "little"),
        "half a message": token,
        "no descriptor": token + (1).to_bytes(4, "little"),
    }.get(what)
    if message is not None:
        foreign = os.memfd_create("foreign")
        socket.send_fds(link, [message], [] if what == "no descriptor" else [foreign])
        os.close(foreign)
    if what == "leaves":
        link.close()
    return link


STRANGE = ["a foreign token", "a rank too high", "the rank itself", "half a message", "no descriptor", "leaves"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", [*STRANGE, "stays"])
def test_strangers_at_the_door_are_passed_over(pair: RankPool, what: str):
    assert pair.call(exchange_beside_a_stranger, what)[0] == "{1: 16}"


def test_a_rank_that_hands_over_nothing_is_told_when_the_time_is_up(pair: RankPool):
    told, _ = pair.call(exchange_beside_a_stranger, "silence")
    assert told == "rank 0: ranks 1 did not hand over their memory (timed out)"


def hand_over_too_little(group: Group) -> str:
    if group.rank == 0:
        return exchange(group, 60.0)
    with contextlib.suppress(PeerLost):
        descriptors.exchange_descriptors(group, lambda: os.memfd_create("empty"), None)
    return ""


def test_memory_of_another_size_is_refused(pair: RankPool):
    told, _ = pair.call(hand_over_too_little)
    assert told == "rank 0: ranks 1 did not hand over their memory (rank 1 handed over 0 bytes, wanted 16)"


def exchange_beside_another_user(group: Group) -> str:
    """What the ranks get while another user's process sends to each door, with its token, before its peer does."""
    ours = descriptors._Exchange([1 - group.rank], 16)
    doors = group.all_gather(ours.door)
    stranger = os.fork()
    if stranger == 0:
        os.setresuid(65534, 65534, 65534)
        for address, token in doors:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.connect(address)
                socket.send_fds(link, [token, (1 - group.rank).to_bytes(4, "little")], [file_of_16_bytes()])
        os._exit(0)
    assert os.waitpid(stranger, 0)[1] == 0
    group.barrier()  # both strangers have sent
    for _ in range(5):
        ours.receive(0.1)
    taken = dict(ours.received)
    ours.close()
    return str(taken)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_cannot_hand_over_memory_even_with_the_token(pair: RankPool):
    assert pair.call(exchange_beside_another_user) == ["{}", "{}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_memory_is_not_handed_over_to_another_user():
    address = f"\0tracekern-stranger-{os.getpid()}"
    reads, writes = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        os.setresuid(65534, 65534, 65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            os.write(writes, b".")
            signal.pause()
    os.read(reads, 1)
    try:
        with pytest.raises(ConnectionError, match="another user listens at its address"):
            descriptors._hand_over(0, address, bytes(16), file_of_16_bytes)
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


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

"""How launched ranks find each other: a store that listens on the loopback interface only.

The launcher opens the socket, so that no other program can take its port, and rank 0 serves the store on it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from tracekern.comm.ranks.launcher_environment import rank_and_size
from tracekern.errors import BadInput, PeerLost, packages_for

_STORE, _SOCKET = "TRACEKERN_STORE", "TRACEKERN_STORE_SOCKET"
_HOST = "127.0.0.1"
_FIRST_PORT = 10_000


@contextlib.contextmanager
def store_socket() -> Iterator[socket.socket]:
    """Opens the socket of a run's store, in the launcher."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen(socket.SOMAXCONN)
        yield listener


def environment(listener: socket.socket, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which all ranks find the store, and each other. given: their other variables."""
    return {
        _STORE: f"{_HOST}:{listener.getsockname()[1]}",
        "GLOO_SOCKET_IFNAME": given.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def give_socket(descriptor: int) -> dict[str, str]:
    """Returns the variable by which rank 0 finds the socket that it inherited."""
    return {_SOCKET: str(descriptor)}


def join_ranks(timeout_s: float = 60.0) -> None:
    """Connects this rank with the others of its run, by torch.distributed with gloo.

    Under tracekern's launcher it uses the launcher's store, under any other launcher that launcher's. Raises PeerLost
    if another rank does not come, or if somebody else has written into the store.
    """
    with packages_for("connecting ranks"):
        import torch.distributed as dist

    timeout, (rank, num_ranks) = timedelta(seconds=timeout_s), rank_and_size()
    store, address, began = None, os.environ.get(_STORE), time.monotonic()
    try:
        if address:
            host, port = address.split(":")
            descriptor = int(os.environ[_SOCKET]) if rank == 0 else None
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                int(port),
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        else:
            dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timeout)
    except Exception as error:  # noqa: BLE001 - who connects to the store can write what gloo fails to read
        why = str(error).strip().partition("\n")[0].partition(". ")[0][:200] or type(error).__name__
        if time.monotonic() - began >= timeout_s:
            why = f"the other ranks did not come within {timeout_s:.0f} s ({why})"
        raise PeerLost(f"rank {rank}: the process group could not be formed: {why}") from None


def free_port() -> int:
    """Returns a port for rank 0, which takes it seconds later: one that the system meanwhile gives to no program."""
    given = 32768
    with contextlib.suppress(OSError):  # a container may hide it
        given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in [*random.sample(range(_FIRST_PORT, max(given, _FIRST_PORT + 100)), 100), 0]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((_HOST, port))
            return int(probe.getsockname()[1])
    raise BadInput(f"no port of {_HOST} is free")

"""Passes file descriptors of memory between the ranks of a host. It has no name, so none is ever left behind."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from tracekern.comm.group import Group
from tracekern.errors import CommTimeout

CONNECT_TIMEOUT_S = 60.0


def exchange_descriptors(group: Group, export: Callable[[], int]) -> dict[int, int]:
    """Returns, by peer, the file descriptor that the peer exported for this rank. Collective.

    Uses sockets without a name on disk. Raises CommTimeout if a rank is gone or late.
    """
    address = f"\0tracekern-{secrets.token_hex(16)}"
    received: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(CONNECT_TIMEOUT_S)
        listener.bind(address)
        listener.listen(group.num_ranks)
        addresses = group.all_gather(address)
        try:
            for peer, theirs in enumerate(addresses):
                if peer != group.rank:
                    _hand_over(group.rank, theirs, export())
            for _ in range(group.num_ranks - 1):
                link, _ = listener.accept()
                with link:
                    link.settimeout(CONNECT_TIMEOUT_S)
                    message, descriptors, _, _ = socket.recv_fds(link, 4, 1)
                    if not descriptors:
                        raise ConnectionError("the connection ended")
                    received[int.from_bytes(message, "little")] = descriptors[0]
        except OSError as error:
            for descriptor in received.values():
                os.close(descriptor)
            missing = [peer for peer in range(group.num_ranks) if peer not in (group.rank, *received)]
            what = f"rank {group.rank}: ranks {', '.join(map(str, missing))} did not hand over their memory ({error})"
            raise CommTimeout(f"{what}; see which one died") from None
    return received


def _hand_over(rank: int, address: str, descriptor: int) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(address)
            socket.send_fds(link, [rank.to_bytes(4, "little")], [descriptor])
    finally:
        os.close(descriptor)

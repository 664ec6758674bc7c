"""How ranks of one host hand each other the file descriptors of memory: it has no name, so none is ever left behind."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from tracekern.record.group import Group

CONNECT_TIMEOUT_S = 60.0


def exchange_descriptors(group: Group, export: Callable[[], int]) -> dict[int, int]:
    """Peer -> file descriptor that it exported for this rank. Collective; over sockets that have no name on disk."""
    address = f"\0tracekern-{secrets.token_hex(16)}"
    received: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(CONNECT_TIMEOUT_S)
        listener.bind(address)
        listener.listen(group.num_ranks)
        addresses = group.all_gather(address)
        for peer, theirs in enumerate(addresses):
            if peer == group.rank:
                continue
            descriptor = export()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.connect(theirs)
                socket.send_fds(link, [group.rank.to_bytes(4, "little")], [descriptor])
            os.close(descriptor)
        for _ in range(group.num_ranks - 1):
            link, _ = listener.accept()
            with link:
                message, descriptors, _, _ = socket.recv_fds(link, 4, 1)
                received[int.from_bytes(message, "little")] = descriptors[0]
    return received

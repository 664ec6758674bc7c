"""Passes file descriptors of memory between the ranks of a host. It has no name, so none is ever left behind.

The sockets have no name on disk either, but every user of the machine can find and use them. Each rank therefore gives
the others a random token over the process group, and takes memory only from a process of its own user that knows the
token. It passes everybody else over.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from tracekern.comm.ranks.group import Group
from tracekern.errors import PeerLost
from tracekern.segment.peers import is_own

CONNECT_TIMEOUT_S = 60.0
_RETRY_S = 0.02
_WHAT = "the exchange of memory"
"""What ranks gather their doors for."""
_TOKEN_BYTES = 16
_RANK_BYTES = 4


def exchange_descriptors(
    group: Group, export: Callable[[], int], num_bytes: int | None = None, ranks: Sequence[int] | None = None
) -> dict[int, int]:
    """Returns, by peer, the file descriptor that the peer exported for this rank. Collective.

    num_bytes: size that each must have; None where descriptors have none. ranks: those that exchange theirs, this one
    among them; None: all.

    Raises PeerLost if a rank is gone, is late or hands over memory of another size.
    """
    others = [peer for peer in ranks or range(group.num_ranks) if peer != group.rank]
    with closing(_Exchange(others, num_bytes)) as exchange:
        doors = [(str(address), bytes(token)) for address, token in group.all_gather(exchange.door, _WHAT)]
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        try:
            unsent = {peer: doors[peer] for peer in others}
            while unsent or exchange.missing:
                for peer, (address, token) in list(unsent.items()):
                    if _hand_over(group.rank, address, token, export):
                        del unsent[peer]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                exchange.receive(min(left, _RETRY_S) if unsent else left)
        except OSError as error:
            for descriptor in exchange.received.values():
                os.close(descriptor)
            missing = ", ".join(str(group.world_ranks[peer]) for peer in exchange.missing or unsent)
            what = f"rank {group.world_rank}: ranks {missing} did not hand over their memory ({error})"
            raise PeerLost(what) from None
        return exchange.received


class _Exchange:
    """This rank's door: where the other ranks hand over their memory."""

    def __init__(self, others: Sequence[int], num_bytes: int | None) -> None:
        self.received: dict[int, int] = {}
        self._others = others
        self._num_bytes = num_bytes
        self._address, self._token = f"\0tracekern-{secrets.token_hex(16)}", secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._address)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        self._open = selectors.DefaultSelector()
        self._open.register(self._listener, selectors.EVENT_READ)

    @property
    def door(self) -> tuple[str, bytes]:
        """Address and token that a rank needs to hand over its memory."""
        return self._address, self._token

    @property
    def missing(self) -> list[int]:
        """The ranks whose memory is still to come."""
        return [peer for peer in self._others if peer not in self.received]

    def close(self) -> None:
        for key in list(self._open.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._open.close()

    def receive(self, timeout_s: float) -> None:
        """Serves who is at the door, or waits `timeout_s` for somebody to come. Raises ConnectionError for a rank that
        hands over memory of another size."""
        for key, _ in self._open.select(timeout_s):
            if key.fileobj is self._listener:
                with suppress(BlockingIOError, ConnectionError):  # it has left again
                    link, _ = self._listener.accept()
                    self._open.register(link, selectors.EVENT_READ) if is_own(link) else link.close()
            elif isinstance(key.fileobj, socket.socket):
                self._open.unregister(key.fileobj)
                with key.fileobj as link:
                    self._take(link)

    def _take(self, link: socket.socket) -> None:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            message, descriptors, _, _ = socket.recv_fds(link, _TOKEN_BYTES + _RANK_BYTES, 1, flags)
        except OSError:  # it has left again
            return
        token, peer = message[:_TOKEN_BYTES], int.from_bytes(message[_TOKEN_BYTES:], "little")
        if not secrets.compare_digest(token, self._token) or peer not in self.missing or not descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        num_bytes = os.fstat(descriptors[0]).st_size
        if self._num_bytes not in (None, num_bytes):
            os.close(descriptors[0])
            raise ConnectionError(f"rank {peer} handed over {num_bytes} bytes, wanted {self._num_bytes}")
        self.received[peer] = descriptors[0]


def _hand_over(rank: int, address: str, token: bytes, export: Callable[[], int]) -> bool:
    """Hands this rank's memory over to a peer. Returns False if too many are at its door; try again.

    Raises OSError if the peer is gone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setblocking(False)
        try:
            link.connect(address)
        except BlockingIOError:
            return False
        if not is_own(link):
            raise ConnectionError("another user listens at its address")
        descriptor = export()
        try:
            socket.send_fds(link, [token, rank.to_bytes(_RANK_BYTES, "little")], [descriptor])
        finally:
            os.close(descriptor)
    return True

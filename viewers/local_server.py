"""An HTTP server for this machine's browser, which slow connections of other users do not keep from its work."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

HOST = "127.0.0.1"

MAX_CONNECTIONS = 32
"""A browser opens at most six to one server, and a few ahead, which it leaves silent."""

HEAD_SECONDS = 10.0
"""How long the head of a request may take in all, however it comes."""

STALL_SECONDS = 60.0
"""How long a reader may take nothing. The Perfetto UI stops reading while it parses what it has."""

LEAVE_SECONDS = 3.0
"""How long a reader may keep the connection once all was sent, before it counts as one that has read it."""

TURN_SECONDS = 0.2
"""How long a connection may be silent, at least, before another one can take its place. A browser sends its request in
the moment in which it connects."""


@dataclass
class _Connection:
    socket: socket.socket
    since: float
    """When it was accepted, or last took something of an answer. What it sends does not count: it may trickle."""
    is_trusted: bool = False


class LocalServer(ThreadingHTTPServer):
    """Has a thread for each connection, because a browser opens some ahead and leaves them silent.

    At most MAX_CONNECTIONS at once. Further ones wait until another ends; after TURN_SECONDS the one that has been
    silent for longest is ended for them, unless its handler trusts it.
    """

    daemon_threads = True
    request_queue_size = 512  # a connection that finds no place in it is tried again after a second

    def __init__(self, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self._connections: dict[Any, _Connection] = {}
        self._changed = threading.Condition()
        super().__init__((HOST, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a connection, or refuses it."""
        if self._admit(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection. Every one that was accepted comes by here."""
        with self._changed:
            self._connections.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what went wrong with a trusted connection, unless the other side left. Others may try to fill the
        user's terminal: the parent answers some odd requests with an exception."""
        state = self._connections.get(request)
        if state and state.is_trusted and not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def connection_of(self, request: Any) -> _Connection:
        """The state of a connection that was admitted."""
        with self._changed:
            return self._connections[request]

    def _admit(self, request: Any) -> bool:
        give_up = time.monotonic() + 5 * TURN_SECONDS
        with self._changed:
            while len(self._connections) >= MAX_CONNECTIONS:
                if time.monotonic() >= give_up:  # all are trusted
                    return False
                self._end_the_silent()
                self._changed.wait(TURN_SECONDS / 4)
            self._connections[request] = _Connection(request, time.monotonic())
        return True

    def _end_the_silent(self) -> None:
        """Ends the connection that has been silent for longest; its own thread then closes it. Needs the lock."""
        strangers = [connection for connection in self._connections.values() if not connection.is_trusted]
        silent = min(strangers, key=lambda connection: connection.since, default=None)
        if silent and time.monotonic() - silent.since >= TURN_SECONDS:
            with contextlib.suppress(OSError):  # the other side has ended it
                silent.socket.shutdown(socket.SHUT_RDWR)


class LocalHandler(BaseHTTPRequestHandler):
    """Answers a request if it has this machine's name and comes, and its answer goes, within the time limits."""

    server: LocalServer

    def setup(self) -> None:
        """Replaces the parent's files, whose time limits begin anew with every byte, or end before the last one."""
        self.connection = self.request
        self._state = self.server.connection_of(self.request)
        self.rfile = io.BufferedReader(_Head(self.connection, time.monotonic() + HEAD_SECONDS))
        self.wfile = _Answer(self._state)

    def parse_request(self) -> bool:
        """Refuses every request, of whatever method, of a page that reached us by a name of its own (DNS rebinding)."""
        if not super().parse_request():
            return False
        port = self.server.server_port
        if self.headers.get("Host") in {f"{HOST}:{port}", f"localhost:{port}"}:
            return True
        self.send_error(HTTPStatus.NOT_FOUND)
        return False

    def trust(self) -> None:
        """Keeps the connection from being ended for another one: it comes from this user, as its request shows."""
        self._state.is_trusted = True

    def is_taken(self) -> bool:
        """Ends the answer, and returns whether the other side has taken all of it. Sent bytes may still lie in buffers:
        who leaves them there ends the connection by a reset, who has read them by an end, or keeps it."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LEAVE_SECONDS)
            while self.connection.recv(1 << 16):  # more than a request: not for us
                pass
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    def log_message(self, *args: object) -> None:
        """The user sees the picture, not the requests."""


class _Head(io.RawIOBase):
    """What a connection sends, up to a point in time."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


class _Answer(io.BufferedIOBase):
    """What a connection is sent. Its time limit begins anew whenever some of it is taken."""

    def __init__(self, state: _Connection) -> None:
        self._state = state

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        self._state.socket.settimeout(STALL_SECONDS)
        while rest:
            rest = rest[self._state.socket.send(rest) :]
            self._state.since = time.monotonic()
        return size

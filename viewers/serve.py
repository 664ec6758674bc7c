"""Local HTTP servers that hand one trace to the Perfetto UI.

They listen on 127.0.0.1, which every user of this machine reaches, so the trace has a random part in its address. So
has the short address that leads to it, of which there are two: one is printed, for the user's terminal alone. The other
becomes an argument of the browser's process, where other users can read it as long as the browser runs; it therefore
leads to the trace once. What remains is a race: a user who watches for new processes can ask before the browser does.
The browser then says that the address was used already.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

from tracekern.errors import BadInput
from tracekern.viewers import perfetto_ui
from tracekern.viewers.local_server import HOST, LEAVE_SECONDS, LocalHandler, LocalServer

_SHORT = "/open/"
_TOKEN_BYTES = 16
AGAIN_SECONDS = 2.0
"""How long a trace that was read can be read again. A browser takes a small one whole even for a page that has given
the load up, and the page may come back."""

# The UI asks the network for a list of Google's own users and port 9001 for a running trace processor. Neither has a
# place in an offline view: the browser itself refuses every address but the page's own.
_OFFLINE_POLICY = (
    "default-src 'self' blob: data:; connect-src 'self' blob: data:; img-src 'self' blob: data:; "
    "style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; worker-src 'self' blob:"
)


@dataclass(frozen=True)
class Addresses:
    """Two short URLs of the same view, which itself has an address pages long, with the UI's commands in it."""

    printed: str
    """Leads there as often as it is asked for."""
    once: str
    """Leads there once, so that others may see it afterwards: in the arguments of a browser's process, they do."""
    outlier: str
    """Leads to the view of the trace's outlier, as often as it is asked for."""


def serve_once(path: Path, on_ready: Callable[[Addresses], None]) -> None:
    """Serves `path` on 127.0.0.1:9001 to ui.perfetto.dev until one who knows its address has read it, whole, and nobody
    again for AGAIN_SECONDS.

    on_ready: called, when the port listens, with the URLs to open.
    Raises BadInput when the port is taken.
    """
    try:
        server = _OneFileServer(path)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise BadInput(
            f"open: port {perfetto_ui.ONLINE_PORT} of 127.0.0.1 is taken, and ui.perfetto.dev reads from no other; "
            "end the program that listens there (a trace_processor? another `open`?) or use --offline"
        ) from None
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            on_ready(server.addresses())
            server.wait_until_read()
        finally:
            server.shutdown()


def serve_offline(path: Path, on_ready: Callable[[Addresses], None]) -> None:
    """Serves the bundled Perfetto UI and `path` from one free port of 127.0.0.1, until interrupted.

    on_ready: called with the URLs to open, when the port listens. The UI itself, which is public, needs no token.
    Raises BadInput when the UI is not installed.
    """
    handler = functools.partial(_OfflineHandler, directory=str(perfetto_ui.bundled_ui()))
    with _TraceServer(path, 0, handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            on_ready(server.addresses())
            threading.Event().wait()
        finally:
            server.shutdown()


class _TraceServer(LocalServer):
    """Knows the secret parts of the addresses."""

    def __init__(self, path: Path, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self.path = path
        self.token, self._printed, self._once, self._outlier = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(4))
        self._unused = threading.Lock()  # held once the address that leads there once has done so
        super().__init__(port, handler)

    def addresses(self) -> Addresses:
        """The short URLs."""
        start = f"http://{HOST}:{self.server_port}{_SHORT}"
        return Addresses(start + self._printed, start + self._once, start + self._outlier)

    def answer_short(self, path: str) -> HTTPStatus | None:
        """How to answer a request for a short URL's path; None for any other path."""
        if not path.startswith(_SHORT):
            return None
        if _same(path, _SHORT + self._printed) or self.is_of_outlier(path):
            return HTTPStatus.FOUND
        if not _same(path, _SHORT + self._once):
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.FOUND if self._unused.acquire(blocking=False) else HTTPStatus.GONE

    def is_of_outlier(self, path: str) -> bool:
        return _same(path, _SHORT + self._outlier)


def _same(path: str, wanted: str) -> bool:
    """Takes as long for a path that is nearly right as for any other: nobody finds a token character by character."""
    return secrets.compare_digest(path.encode(), wanted.encode())


class _TraceHandler(LocalHandler):
    server: _TraceServer

    def _view(self) -> str:
        """The long URL. Making it reads much of the trace, so that is done only for one who knows a short URL."""
        raise NotImplementedError

    def _answer_short(self) -> bool:
        """Answers a request for a short URL, whether it is a right one or not; False if it is for another path."""
        status = self.server.answer_short(self._asked())
        if status == HTTPStatus.FOUND:
            self.trust()
            self.send_response(status)
            self.send_header("Location", self._view())
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif status == HTTPStatus.GONE:
            self.send_error(status, "Used already", "Open the address that tracekern printed: this one works once.")
        elif status is not None:
            self.send_error(status)
        return status is not None

    def _asked(self) -> str:
        return self.path.partition("?")[0]

    def _is_the_trace(self, folder: str) -> bool:
        name = quote(perfetto_ui.served_name(self.server.path))
        if not _same(self._asked(), f"{folder}{self.server.token}/{name}"):
            return False
        self.trust()
        return True

    def _send_trace(self) -> None:
        with self.server.path.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)


class _OneFileServer(_TraceServer):
    def __init__(self, path: Path) -> None:
        self.claim = threading.Lock()
        """Held during a read: there is one at a time."""
        self.was_read = threading.Event()
        super().__init__(path, perfetto_ui.ONLINE_PORT, _OneFileHandler)

    def wait_until_read(self) -> None:
        """Waits for a whole read, and for each that comes soon after one."""
        self.was_read.wait()
        while self.was_read.is_set():
            self.was_read.clear()
            self.was_read.wait(AGAIN_SECONDS)
            with self.claim:
                pass


class _OneFileHandler(_TraceHandler):
    server: _OneFileServer

    def _view(self) -> str:
        of_outlier = self.server.is_of_outlier(self._asked())
        return perfetto_ui.online_url(self.server.path, self.server.token, of_outlier)

    def do_GET(self) -> None:
        server = self.server
        if self._answer_short():
            return
        # A page that comes back at once finds the last read not yet ended: it has all bytes before the server knows.
        if not self._is_the_trace("/") or not server.claim.acquire(timeout=LEAVE_SECONDS + 1):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            self._send_trace()
            if self.is_taken():
                server.was_read.set()
        finally:
            server.claim.release()

    def do_OPTIONS(self) -> None:
        """A browser may ask first whether a public page may read from this machine."""
        if not self._is_the_trace("/"):
            return self.send_error(HTTPStatus.NOT_FOUND)
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Methods", "GET")
        self.send_header("Access-Control-Allow-Private-Network", "true")
        return self.end_headers()

    def _not_found(self) -> None:
        self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _not_found

    def end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", perfetto_ui.ONLINE_UI)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


class _OfflineHandler(_TraceHandler, SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012 - the parent's attribute; the system's own table may lack these
        **SimpleHTTPRequestHandler.extensions_map,
        ".wasm": "application/wasm",
        ".js": "text/javascript",
    }

    def _view(self) -> str:
        of_outlier = self.server.is_of_outlier(self._asked())
        return perfetto_ui.offline_url(self.server.server_port, self.server.path, self.server.token, of_outlier)

    def do_GET(self) -> None:
        if self._answer_short():
            return
        if not self._asked().startswith(perfetto_ui.TRACE_FOLDER):
            super().do_GET()
        elif self._is_the_trace(perfetto_ui.TRACE_FOLDER):
            self._send_trace()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _OFFLINE_POLICY)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

"""Local HTTP servers that hand one trace to the Perfetto UI. They listen on 127.0.0.1 and answer only this machine."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tracekern.errors import BadInput
from tracekern.viewers import perfetto_ui

_HOST = "127.0.0.1"
_SHORT = "/open"

# The UI asks the network for a list of Google's own users and port 9001 for a running trace processor. Neither has a
# place in an offline view: the browser itself refuses every address but the page's own.
_OFFLINE_POLICY = (
    "default-src 'self' blob: data:; connect-src 'self' blob: data:; img-src 'self' blob: data:; "
    "style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; worker-src 'self' blob:"
)


def serve_once(path: Path, on_ready: Callable[[str], None]) -> None:
    """Serves `path` on 127.0.0.1:9001 to ui.perfetto.dev until it was read once, whole.

    on_ready: called, when the port listens, with the URL to open: a short one that leads to the UI's, which has its
    commands in it and is pages long.
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
            on_ready(f"http://{_HOST}:{perfetto_ui.ONLINE_PORT}{_SHORT}")
            server.done.wait()
        finally:
            server.shutdown()


def serve_offline(path: Path, on_ready: Callable[[str], None]) -> None:
    """Serves the bundled Perfetto UI and `path` from one free port of 127.0.0.1, until interrupted.

    on_ready: called with the URL to open, when the port listens.
    Raises BadInput when the UI is not installed.
    """
    handler = functools.partial(_OfflineHandler, trace=path, directory=str(perfetto_ui.bundled_ui()))
    with ThreadingHTTPServer((_HOST, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            on_ready(f"http://{_HOST}:{server.server_port}{_SHORT}")
            threading.Event().wait()
        finally:
            server.shutdown()


def _lead_to(handler: BaseHTTPRequestHandler, url: str) -> None:
    handler.send_response(HTTPStatus.FOUND)
    handler.send_header("Location", url)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _send_file(handler: BaseHTTPRequestHandler, path: Path) -> None:
    with path.open("rb") as file:
        handler.send_response(HTTPStatus.OK)
        handler.send_header("Content-Type", "application/octet-stream")
        handler.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
        handler.end_headers()
        shutil.copyfileobj(file, handler.wfile)


def _is_for_us(handler: BaseHTTPRequestHandler, port: int) -> bool:
    """False for a page that reached this port through a name of its own (DNS rebinding)."""
    return handler.headers.get("Host") in {f"{_HOST}:{port}", f"localhost:{port}"}


class _OneFileServer(ThreadingHTTPServer):
    """Threads, because a browser opens connections ahead and leaves them silent."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claim = threading.Lock()
        self.delivered = False
        self.done = threading.Event()
        super().__init__((_HOST, perfetto_ui.ONLINE_PORT), _OneFileHandler)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        if self.delivered:
            self.done.set()


class _OneFileHandler(BaseHTTPRequestHandler):
    server: _OneFileServer

    def do_GET(self) -> None:
        if self.path == _SHORT and _is_for_us(self, self.server.server_port):
            return _lead_to(self, perfetto_ui.online_url(self.server.path))
        if not self._is_the_file() or not self.server.claim.acquire(blocking=False):
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            _send_file(self, self.server.path)
        except ConnectionError:  # the reader left early: the next one may try
            self.server.claim.release()
        else:
            self.server.delivered = True
        return None

    def do_OPTIONS(self) -> None:
        """A browser may ask first whether a public page may read from this machine."""
        if not self._is_the_file():
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

    def log_message(self, *args: object) -> None:
        """The user sees the picture, not the requests."""

    def _is_the_file(self) -> bool:
        wanted = "/" + quote(perfetto_ui.served_name(self.server.path))
        return _is_for_us(self, self.server.server_port) and urlsplit(self.path).path == wanted


class _OfflineHandler(SimpleHTTPRequestHandler):
    server: ThreadingHTTPServer

    extensions_map = {  # noqa: RUF012 - the parent's attribute; the system's own table may lack these
        **SimpleHTTPRequestHandler.extensions_map,
        ".wasm": "application/wasm",
        ".js": "text/javascript",
    }

    def __init__(self, *args: Any, trace: Path, **kwargs: Any) -> None:
        self._trace = trace
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not _is_for_us(self, self.server.server_port):
            return self.send_error(HTTPStatus.NOT_FOUND)
        if path == _SHORT:
            return _lead_to(self, perfetto_ui.offline_url(self.server.server_port, self._trace))
        if not path.startswith(perfetto_ui.TRACE_FOLDER):
            return super().do_GET()
        if path != perfetto_ui.TRACE_FOLDER + quote(perfetto_ui.served_name(self._trace)):
            return self.send_error(HTTPStatus.NOT_FOUND)
        return _send_file(self, self._trace)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _OFFLINE_POLICY)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """The user sees the picture, not the requests."""

"""`tracekern open` where other users of the machine reach its port, too: what they get, and what they can hold up."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from opening import ask, location_of, opened, path_of_trace
from waiting import LONG_S

from tracekern.launcher.rendezvous import free_port
from tracekern.viewers import local_server, perfetto_ui, serve

LARGE = 50_000_000
"""Bytes: far more than sockets hold."""


@dataclass
class Served:
    addresses: serve.Addresses
    port: int
    thread: threading.Thread
    """Ends when the trace was read."""

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, bytes, dict]:
        return ask(method, path, self.port, headers)

    def connect(self, sent: str = "") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=LONG_S)
        connection.sendall(sent.encode())
        return connection

    def begin_to_read(self) -> socket.socket:
        """A connection that has the first bytes of the answer with the trace, and takes no more."""
        path = path_of_trace(self.addresses.printed)
        connection = self.connect(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{self.port}\r\n\r\n")
        assert b"200 OK" in connection.recv(100)
        return connection

    def is_read_by(self, path: str) -> None:
        status, _, _ = self.ask(path)
        assert status == 200
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "some.json"
    path.write_text('{"traceEvents": []}')
    return path


@pytest.fixture
def serving(trace, monkeypatch):
    """Serves the trace once, in this process, on a port that no other test has."""

    @contextlib.contextmanager
    def start(again_s: float = 0.05) -> Iterator[Served]:
        port = free_port()
        monkeypatch.setattr(perfetto_ui, "ONLINE_PORT", port)
        monkeypatch.setattr(serve, "AGAIN_SECONDS", again_s)
        ready, addresses = threading.Event(), []
        thread = threading.Thread(
            target=serve.serve_once, args=(trace, lambda given: (addresses.append(given), ready.set())), daemon=True
        )
        thread.start()
        assert ready.wait(LONG_S)
        served = Served(addresses[0], port, thread)
        yield served
        if thread.is_alive():
            served.is_read_by(path_of_trace(served.addresses.printed))

    return start


def test_who_does_not_know_the_token_gets_nothing_and_ends_nothing(trace, serving, monkeypatch):
    with serving() as served:
        path = path_of_trace(served.addresses.printed)
        token = path.split("/")[1]
        monkeypatch.setattr(perfetto_ui, "online_url", None)  # making the view takes time, so it is not for strangers
        short = urlsplit(served.addresses.printed).path
        for guess in (
            f"/{trace.name}",
            f"/{'x' * len(token)}/{trace.name}",
            f"/{token[:-1]}/{trace.name}",
            f"/{token}/",
            f"/{token}",
            "/open",
            "/open/",
            f"/open/{token}",
            short[:-1],
        ):
            status, body, headers = served.ask(guess)
            assert (status, headers.get("Location")) == (404, None), guess
            assert token.encode() not in body
        time.sleep(0.1)
        assert served.thread.is_alive()
        status, body, _ = served.ask(path)
        assert (status, body) == (200, trace.read_bytes())
        served.thread.join(LONG_S)
        assert not served.thread.is_alive()


def test_each_view_has_tokens_of_its_own(serving):
    seen = set()
    for _ in range(3):
        with serving() as served:
            seen |= {served.addresses.printed, served.addresses.once, path_of_trace(served.addresses.printed)}
    assert len(seen) == 9


def test_the_address_for_the_browser_leads_there_once(serving):
    with serving() as served:
        printed, once = served.addresses.printed, served.addresses.once
        view = location_of(once)
        status, body, headers = served.ask(urlsplit(once).path)
        assert (status, headers.get("Location")) == (410, None)
        assert b"Open the address that tracekern printed" in body
        assert location_of(printed) == location_of(printed) == view


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_no_method_answers_a_page_with_a_name_of_its_own(serving, method):
    with serving() as served:
        for path in (path_of_trace(served.addresses.printed), urlsplit(served.addresses.printed).path):
            assert served.ask(path, method, {"Host": f"evil.example:{served.port}"})[0] == 404
        assert served.thread.is_alive()


def test_offline_the_host_and_the_token_count_too(trace):
    with opened("--offline", trace) as (process, url):
        port = urlsplit(url).port
        path = path_of_trace(url)
        for method in ("GET", "HEAD"):
            assert ask(method, "/", port)[0] == 200
            assert ask(method, "/", port, {"Host": f"evil.example:{port}"})[0] == 404
            assert ask(method, f"/trace/{trace.name}", port)[0] == 404
            assert ask(method, "/open", port)[0] == 404
        assert ask("GET", path, port)[1] == trace.read_bytes()
        assert ask("GET", path, port)[1] == trace.read_bytes(), "a page may be loaded again"
        # The handler of files fails at a path with a zero byte. The user's terminal is not the place to say so.
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as odd:
            odd.sendall(f"GET /%00 HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            odd.recv(1000)
        assert process.poll() is None
        process.kill()
        assert "Traceback" not in process.stderr.read()


def test_many_slow_connections_hold_few_threads_and_not_the_reader(serving, monkeypatch):
    monkeypatch.setattr(local_server, "TURN_SECONDS", 0.005)
    monkeypatch.setattr(local_server, "HEAD_SECONDS", 10 * LONG_S)
    with serving() as served, contextlib.ExitStack() as slow:
        path = path_of_trace(served.addresses.printed)
        before = threading.active_count()
        for _ in range(300):
            slow.enter_context(served.connect("GET / HTTP/1.0\r\n"))
        served.is_read_by(path)  # it does not wait for the slow ones to be ended, which takes longer than any test
        # All came before the reader. A thread that has given its place to the next one may not have ended yet.
        assert threading.active_count() < before + 2 * local_server.MAX_CONNECTIONS


def test_a_reader_who_knows_the_token_is_not_ended_for_others(trace, serving, monkeypatch):
    os.truncate(trace, LARGE)
    monkeypatch.setattr(local_server, "TURN_SECONDS", 0.01)
    with serving() as served, served.begin_to_read() as reader, contextlib.ExitStack() as slow:
        for _ in range(64):
            slow.enter_context(served.connect())
        time.sleep(0.1)  # it parses, as the Perfetto UI does
        size = 0
        while received := reader.recv(1 << 20):
            size += len(received)
        assert size > LARGE - 100
        served.thread.join(LONG_S)
        assert not served.thread.is_alive()


def test_a_load_that_is_aborted_leaves_even_a_small_trace_to_the_next(trace, serving):
    """All of it fits into the buffers of the sockets: it was sent, and nobody has read it."""
    with serving() as served:
        for _ in range(3):
            served.begin_to_read().close()
            time.sleep(0.1)
            assert served.thread.is_alive()
        served.is_read_by(path_of_trace(served.addresses.printed))


def test_a_trace_that_was_read_can_be_read_again_at_once(trace, serving, monkeypatch):
    """Chromium takes half a megabyte for a page that has aborted the load, and then ends the connection as if it had
    shown it."""
    with serving(again_s=2.0) as served:
        path = path_of_trace(served.addresses.printed)
        with monkeypatch.context() as patch:
            patch.setattr(serve, "AGAIN_SECONDS", 1e6)
            assert served.ask(path)[:2] == (200, trace.read_bytes())
        assert served.ask(path)[:2] == (200, trace.read_bytes())
        served.thread.join(LONG_S)
        assert not served.thread.is_alive()


def test_a_request_that_trickles_is_ended(serving, monkeypatch):
    monkeypatch.setattr(local_server, "HEAD_SECONDS", 0.3)
    with serving() as served, served.connect("GET / HTTP/1.0\r\n") as trickling:
        trickling.settimeout(0.02)
        start, is_open = time.monotonic(), True
        while is_open and time.monotonic() - start < LONG_S:
            try:
                trickling.sendall(b"x")
                is_open = trickling.recv(1) != b""
            except TimeoutError:
                pass
            except ConnectionError:
                is_open = False
        assert not is_open
        assert time.monotonic() - start > 0.2


def test_a_reader_who_takes_nothing_leaves_the_trace_to_the_next(trace, serving, monkeypatch):
    os.truncate(trace, LARGE)
    monkeypatch.setattr(local_server, "STALL_SECONDS", 1)
    monkeypatch.setattr(serve, "LEAVE_SECONDS", 30)
    with serving() as served, served.begin_to_read():
        served.is_read_by(path_of_trace(served.addresses.printed))


def test_there_is_one_reader_at_a_time(trace, serving, monkeypatch):
    os.truncate(trace, LARGE)
    monkeypatch.setattr(serve, "LEAVE_SECONDS", -0.9)
    with serving() as served, served.begin_to_read():
        assert served.ask(path_of_trace(served.addresses.printed))[0] == 404

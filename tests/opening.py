"""`tracekern open` as a process, and the requests of a browser."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

import numpy as np

from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.facts.iterations import find_iterations
from tracekern.timeline.model import Timeline
from tracekern.viewers import perfetto_ui

PORT = perfetto_ui.ONLINE_PORT


def longest_waits(timeline: Timeline) -> list[tuple[int, int]]:
    """The longest wait that a signal ended, as (wait, signal), indices of spans: of the iteration of median length, and
    of all."""
    waits, iterations = analyze_waits(timeline), find_iterations(timeline)
    order = np.argsort(iterations.duration_ns, kind="stable")
    median = iterations.number[order[(len(order) - 1) // 2]]
    is_typical = np.append(iterations.of_launch, -1)[timeline.spans.launch[waits.row]] == median
    wait_ns = waits.wait_ns * (waits.signal >= 0)
    return [(int(waits.row[at]), int(waits.signal[at])) for at in ((wait_ns * is_typical).argmax(), wait_ns.argmax())]


@contextlib.contextmanager
def opened(*arguments: object, through: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and the URL it printed. through: a program that starts it."""
    command = [*through, sys.executable, "-m", "tracekern", "open", "--no-browser", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url, process.stderr.read()
            assert len(url) < 60
            yield process, url
        finally:
            process.kill()


def ask(method: str, path: str, port: int = PORT, headers: dict[str, str] | None = None) -> tuple[int, bytes, dict]:
    """Status, body and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    answer = response.status, response.read(), dict(response.getheaders())
    connection.close()
    return answer


def location_of(url: str) -> str:
    """Where a short URL leads to: the Perfetto UI."""
    parts = urlsplit(url)
    status, _, headers = ask("GET", parts.path, parts.port)
    assert status == 302
    return headers["Location"]


def trace_of(location: str) -> str:
    """The URL of the trace in one of the Perfetto UI."""
    return parse_qs(urlsplit(location).fragment.split("?", 1)[1])["url"][0]


def path_of_trace(url: str) -> str:
    """The path of the trace to which a short URL leads."""
    return urlsplit(trace_of(location_of(url))).path

"""Waits for what comes when it comes: on a busy machine any process may stand still for seconds at any line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LONG_S = 120.0
"""No test that is right waits so long."""


def wait_until(condition: Callable[[], object], limit_s: float = LONG_S) -> None:
    """Returns once the condition holds; fails when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
        time.sleep(0.005)


def in_a_while(act: Callable[[], object], duration_s: float = 0.5) -> None:
    """Acts in a thread. It sleeps in short steps: a process that stands still does not find the whole time gone."""

    def run() -> None:
        for _ in range(int(duration_s / 0.01)):
            time.sleep(0.01)
        act()

    threading.Thread(target=run, daemon=True).start()

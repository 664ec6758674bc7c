"""Fixtures that several test files use."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import browser as chromium
import pytest

# Whoever started the tests in the background had Ctrl-C ignored, which every process that they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def command_line() -> CommandLine:
    """Runs `tracekern ARGUMENTS...` as a user does: in a process of its own."""

    def run(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tracekern", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    """One headless Chromium for all tests of a worker; skips where there is none."""
    with chromium.launch() as launched:
        yield launched

"""Fixtures that several test files use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def command_line() -> CommandLine:
    """Runs `tracekern ARGUMENTS...` as a user does: in a process of its own."""

    def run(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tracekern", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    return run

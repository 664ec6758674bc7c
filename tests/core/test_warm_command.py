"""Commands of the tests: each gets its own answer, whatever became of those before it."""

from __future__ import annotations

import subprocess
import time

import pytest
from warm_command import WarmCommands


def test_both_answers_that_come_at_once_are_taken(monkeypatch):
    commands = WarmCommands(())
    answer = commands._answer

    def late(name: str, timeout: float) -> int:
        time.sleep(1.0 if name == "pid" else 0.0)  # the command has ended meanwhile
        return answer(name, timeout)

    monkeypatch.setattr(commands, "_answer", late)
    for _ in range(2):
        assert commands.run("--version", timeout=20).returncode == 0
        assert commands.run("no-such-command", timeout=20).returncode == 2


def test_after_one_that_takes_too_long_the_next_one_is_answered(tmp_path):
    commands = WarmCommands(())
    with pytest.raises(subprocess.TimeoutExpired):
        commands.run("info", tmp_path, timeout=0.0)
    assert commands.run("no-such-command").returncode == 2
    assert commands.run("--version").returncode == 0

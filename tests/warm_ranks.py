"""Ranks of the launcher for a text of Python: forks of one process a worker that has imported torch.

It is the launcher's own spawner. What each rank would be as a command that imports torch by itself, a few tests of the
launcher show.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed  # noqa: F401 - for the forks

import tracekern.record.session  # noqa: F401 - for the forks
from tracekern import _C  # noqa: F401 - for the forks
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.spawner import Spawner

PROGRAM = "RANK_PROGRAM"


@functools.cache
def warm_spawner() -> Spawner:
    """That of this worker; it ends with it."""
    return Spawner("tests.warm_ranks:main", os.environ)


def run_ranks(num_ranks: int, text: str, timeout_s: float = 120) -> tuple[list[int], list[tuple[int, str]]]:
    """Runs the program as so many ranks. Returns their exit codes, and (rank, line) of all that they printed."""
    lines: list[tuple[int, str]] = []

    def keep(rank: int, line: str) -> None:
        lines.append((rank, line))

    exits = launch_ranks(num_ranks, warm_spawner(), env={PROGRAM: text}, on_line=keep, timeout_s=timeout_s)
    return [end.returncode for end in exits], lines


def main() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(os.environ.pop(PROGRAM), "<ranks>", "exec"), names)

"""Ranks for a text of Python, or of an MoE run: forks of one process a worker that has imported torch.

It is the launcher's own spawner. What ranks are as commands that import torch by themselves, the tests of the launcher
and of `run moe` show.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed  # noqa: F401 - for the forks

import tracekern.record.session  # noqa: F401 - for the forks
from tracekern import _core  # noqa: F401 - for the forks
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.spawner import Spawner
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.reports import RunReport
from tracekern.moe.workload.run import WORKER, run

PROGRAM = "RANK_PROGRAM"


@functools.cache
def warm_spawner(target: str = "tests.warm_ranks:main") -> Spawner:
    """Returns the spawner of this worker, which ends with it."""
    return Spawner(target, os.environ)


def run_ranks(
    num_ranks: int, text: str, timeout_s: float = 120, env: Mapping[str, str] | None = None
) -> tuple[list[int], list[tuple[int, str]]]:
    """Runs the program as so many ranks. Returns their exit codes, and (rank, line) of all that they printed."""
    lines: list[tuple[int, str]] = []

    def keep(rank: int, line: str) -> None:
        lines.append((rank, line))

    more = {**(env or {}), PROGRAM: text}
    exits = launch_ranks(num_ranks, warm_spawner(), env=more, on_line=keep, timeout_s=timeout_s)
    return [end.returncode for end in exits], lines


def run_moe(options: MoeRun, directory: Path | str, *more: Any, **named: Any) -> RunReport:
    """Runs tracekern.moe.workload.run.run() with ranks from the warm spawner."""
    return run(options, directory, *more, spawner=warm_spawner(WORKER), **named)


def main() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(os.environ.pop(PROGRAM), "<ranks>", "exec"), names)

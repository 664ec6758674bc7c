"""Programs that run random cases on ranks: their command line, their ranks, and how tests call them.

python tests/PROGRAM.py BACKEND RANKS COUNT [--resident] [--seed 1] [--first 0]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from paths import ROOT

from tracekern.comm.ranks.group import Group
from tracekern.launcher.launch import launch_ranks

OPTIONS = "TRACEKERN_RANDOM_CASES"
"""Environment variable: what the ranks are told."""

RunCase = Callable[[int, Group, argparse.Namespace], bool]
"""Runs case `index` of options.seed; returns whether it is right on all ranks. Collective."""


def run_rank(run_case: RunCase) -> int:
    """One rank; started by main()."""
    options = argparse.Namespace(**json.loads(os.environ[OPTIONS]))
    if not options.resident:
        dist.init_process_group("gloo")
        if options.backend == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    group, started = Group.discover(), time.monotonic()
    num_right = sum(run_case(index, group, options) for index in range(options.first, options.first + options.count))
    if group.rank == 0:
        took_s = time.monotonic() - started
        sys.stdout.write(f"{num_right} of {options.count} cases are right on {options.ranks} ranks; {took_s:.0f} s\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if num_right == options.count else 1


def main(program: str, about: str | None) -> int:
    """Runs the ranks of tests/PROGRAM.py, whose run_rank() each of them calls. Returns the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["cuda", "cpu"])
    parser.add_argument("ranks", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()

    def on_line(_: int, line: str) -> None:
        sys.stdout.write(f"{line}\n")  # at once: a thread a rank comes here
        sys.stdout.flush()

    exits = launch_ranks(
        options.ranks,
        f"{program}:run_rank",
        env={
            OPTIONS: json.dumps(vars(options)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        },
        on_line=on_line,
        timeout_s=400 + 3 * options.count,
        resident=options.resident,
    )
    return 1 if any(end.returncode for end in exits) else 0


def assert_right(program: str, backend: str, ranks: int, count: int, *options: object) -> None:
    """Runs the cases of tests/PROGRAM.py: all have to be right."""
    said = f"{count} of {count} cases are right on {ranks} ranks; "
    if backend == "cpu" and not options:  # its ranks, forked from a process that has imported torch
        about = {"backend": backend, "ranks": ranks, "count": count, "resident": False, "seed": 1, "first": 0}
        from tests.warm_ranks import run_ranks  # not on the path of a program in tests

        text = f"import sys; from {program} import run_rank; sys.exit(run_rank())"
        codes, lines = run_ranks(ranks, text, 400 + 3 * count, {OPTIONS: json.dumps(about)})
        assert codes == [0] * ranks, lines
        assert [line for _, line in lines if line.startswith(said)], lines
        return
    command = [sys.executable, Path(__file__).with_name(f"{program}.py"), backend, str(ranks), str(count)]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith(said), done.stdout[-4000:]

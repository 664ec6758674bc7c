"""Ranks for benchmarks: a function that each runs, with the options of main(), and the rows that it prints.

One rank a GPU, or all of them resident on one where `options.resident`; on the CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

OPTIONS = "TRACEKERN_BENCHMARK_OPTIONS"
"""Environment variable: the options of main() for the ranks."""

Row = dict[str, Any]


def placement(options: argparse.Namespace) -> str:
    return "resident on one GPU" if options.resident else "a GPU each"


def run_ranks(function: str, options: argparse.Namespace) -> list[list[Row]]:
    """The rows of every rank, in the order printed. function: "module:function" of a file in benchmarks.

    Raises RuntimeError with the ranks' last lines where one failed.
    """
    from tracekern.launcher.launch import launch_ranks

    lines: list[str] = []
    exits = launch_ranks(
        options.ranks,
        function,
        env={
            OPTIONS: json.dumps(vars(options)),
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        on_line=lambda _, line: lines.append(line),
        timeout_s=400,
        resident=options.resident,
    )
    if any(end.returncode for end in exits):
        raise RuntimeError("\n".join(lines[-40:]))
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [[row for row in rows if row["rank"] == rank] for rank in range(options.ranks)]


@contextlib.contextmanager
def this_rank() -> Iterator[tuple[argparse.Namespace, Any]]:
    """The options of main() and the Group of a rank, on its GPU if there is one."""
    import torch
    import torch.distributed as dist

    from tracekern.comm.ranks.group import Group

    options = argparse.Namespace(**json.loads(os.environ[OPTIONS]))
    if options.ranks > 1 and not options.resident:
        dist.init_process_group("gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(0 if options.resident else int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    group = Group.discover()
    yield options, group
    group.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def print_row(rank: int, row: Row) -> None:
    """In one write: resident ranks are threads."""
    sys.stdout.write(json.dumps({"rank": rank, **row}) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def directory_of_all(group: Any) -> Iterator[str]:
    """A directory that all ranks share, which rank 0 makes and removes."""
    with tempfile.TemporaryDirectory() as own:
        yield group.all_gather(own)[0]
        group.barrier()

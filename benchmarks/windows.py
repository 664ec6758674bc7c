"""What does a report of a large capture take, in memory and in windows: CPU time and memory, dumps to last line?

    python benchmarks/windows.py
    python benchmarks/windows.py --in-memory 1 --in-windows 3 --rounds 1      # a quick look

Captures are written by large_captures.py, and each report runs in processes of its own, sizes in turns: the whole of
`tracekern report --json` is measured, reading, naming and printing included. In memory it has one core, in windows two.
Judged is the fastest round, for other work on the machine counts as well. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Table, judged, measured_in_child, print_verdicts, resident_bytes, write_results
from large_captures import Size, write_capture

Measured = dict[str, Any]

MAX_SECONDS, MAX_BYTES = 25.0, 2e9
"""What a report of 10 M spans in memory may take."""
MAX_BYTES_OF_A_PROCESS, MAX_US_A_SPAN, MAX_GROWTH = 1e9, 10.0, 1.2
"""What a report in windows may take; growth is that of us a span from the smallest capture to the largest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-memory", type=float, nargs="*", default=[1, 3, 10], help="M spans of 16 ranks")
    parser.add_argument("--in-windows", type=float, nargs="*", default=[3, 6, 12, 24], help="M spans of 64 ranks")
    parser.add_argument("--memory", default="1100MB", help="of a report in windows")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return
    load_before = os.getloadavg()[0]
    in_memory = measure_sizes([Size.of(16, size * 1e6) for size in options.in_memory], options.rounds)
    in_windows = measure_sizes([Size.of(64, size * 1e6) for size in options.in_windows], options.rounds, options.memory)
    verdicts = [*judge_in_memory(in_memory), *judge_in_windows(in_windows)]
    print_table("in memory, one core", in_memory)
    print_table(f"in windows, two cores, --memory {options.memory}", in_windows)
    print_verdicts(verdicts)
    found = {"in_memory": in_memory, "in_windows": in_windows, "memory": options.memory, "verdicts": verdicts}
    write_results("windows", {"load_before": load_before, **found})
    sys.exit(0 if all(verdict["met"] for verdict in verdicts) else 1)


def measure_sizes(sizes: list[Size], num_rounds: int, memory: str = "") -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        captures = [write_capture(Path(folder) / str(size.spans), size) for size in sizes]
        how = [memory] if memory else []
        rounds = [[measured_in_child(str(capture), *how) for capture in captures] for _ in range(num_rounds)]
    return [
        {"ranks": size.ranks, "spans": size.spans, "rounds": list(of_size)}
        for size, of_size in zip(sizes, zip(*rounds, strict=True), strict=True)
    ]


def measure(capture: str, memory: str = "") -> Measured:
    """A report of this process, and of those that it starts."""
    if not memory:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
    from tracekern.cli.app import app

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        options = ["--memory", memory] if memory else []
        app(["report", capture, "--json", *options], standalone_mode=False)
    times, of_children = os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": times.user + times.system + times.children_user + times.children_system,
        "system_s": times.system + times.children_system,
        "peak_bytes": max(resident_bytes("VmHWM"), of_children.ru_maxrss * 1024),
        "named": len(json.loads(printed.getvalue())["answer"]["causes"]),
    }


def fastest(row: Measured) -> float:
    return float(min(one["cpu_s"] for one in row["rounds"]))


def peak(row: Measured, of: Callable[[Any], int] = min) -> int:
    """Bytes of the largest process."""
    return of(one["peak_bytes"] for one in row["rounds"])


def us_a_span(row: Measured) -> float:
    return fastest(row) / row["spans"] * 1e6


def judge_in_memory(rows: list[Measured]) -> list[Measured]:
    what = f"{rows[-1]['spans'] / 1e6:.0f} M spans in memory" if rows else ""
    bounds = [
        (f"{what}, CPU s", fastest, MAX_SECONDS),
        (f"{what}, GB at peak", lambda row: peak(row) / 1e9, MAX_BYTES / 1e9),
    ]
    return judged([(name, of(rows[-1]), bound) for name, of, bound in bounds]) if rows else []


def judge_in_windows(rows: list[Measured]) -> list[Measured]:
    if not rows:
        return []
    return judged(
        [
            (
                "in windows, GB of a process at peak",
                max(peak(row, max) for row in rows) / 1e9,
                MAX_BYTES_OF_A_PROCESS / 1e9,
            ),
            ("in windows, CPU us a span", max(map(us_a_span, rows)), MAX_US_A_SPAN),
            (
                "in windows, us a span of the largest to the smallest",
                us_a_span(rows[-1]) / us_a_span(rows[0]),
                MAX_GROWTH,
            ),
        ]
    )


def print_table(title: str, rows: list[Measured]) -> None:
    columns = ["ranks", "M spans", "CPU s", "slowest", "us a span", "wall s", "MB of a process"]
    table = Table(f"a report {title}", columns)
    for row in rows:
        slowest, wall = max(one["cpu_s"] for one in row["rounds"]), min(one["wall_s"] for one in row["rounds"])
        numbers = f"{fastest(row):.1f}", f"{slowest:.1f}", f"{us_a_span(row):.2f}", f"{wall:.1f}"
        table.add(str(row["ranks"]), f"{row['spans'] / 1e6:.2f}", *numbers, f"{peak(row, max) / 1e6:.0f}")
    table.print()


if __name__ == "__main__":
    main()

"""What does a report of a large capture take: CPU time and memory, from the dumps to the last line?

    python benchmarks/windows.py
    python benchmarks/windows.py --sizes 1 --rounds 1      # a quick look

Captures are written by large_captures.py, and each report runs in a process of its own on one core, sizes in turns: the
whole of `tracekern report --json` is measured, reading, naming and printing included. Judged is the fastest round, for
other work on the machine counts as well. So far all of it is in memory. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Table, judged, measured_in_child, print_verdicts, resident_bytes, write_results
from large_captures import Size, write_capture

Measured = dict[str, Any]

MAX_SECONDS, MAX_BYTES = 25.0, 2e9
"""What a report of 10 M spans in memory may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 3, 10], help="in M spans")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", metavar="CAPTURE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return
    sizes = [Size.of(options.ranks, size * 1e6) for size in options.sizes]
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        captures = [write_capture(Path(folder) / str(size.spans), size) for size in sizes]
        rounds = [[measured_in_child(str(capture)) for capture in captures] for _ in range(options.rounds)]
    rows = [
        {"ranks": size.ranks, "spans": size.spans, "rounds": list(of_size)}
        for size, of_size in zip(sizes, zip(*rounds, strict=True), strict=True)
    ]
    verdicts = judge(rows[-1])
    print_tables(rows, verdicts)
    write_results("windows", {"load_before": load_before, "in_memory": rows, "verdicts": verdicts})
    sys.exit(0 if all(verdict["met"] for verdict in verdicts) else 1)


def measure(capture: str) -> Measured:
    """A report of this process, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
    from tracekern.cli.app import app

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(["report", capture, "--json"], standalone_mode=False)
    times = os.times()
    return {
        "wall_s": time.perf_counter() - began,
        "user_s": times.user,
        "system_s": times.system,
        "peak_bytes": resident_bytes("VmHWM"),
        "named": len(json.loads(printed.getvalue())["answer"]["causes"]),
    }


def cpu_seconds(measured: Measured) -> float:
    return float(measured["user_s"] + measured["system_s"])


def judge(row: Measured) -> list[Measured]:
    what = f"{row['spans'] / 1e6:.0f} M spans in memory"
    rows = [
        (f"{what}, CPU s", min(map(cpu_seconds, row["rounds"])), MAX_SECONDS),
        (f"{what}, GB at peak", min(one["peak_bytes"] for one in row["rounds"]) / 1e9, MAX_BYTES / 1e9),
    ]
    return judged(rows)


def print_tables(rows: list[Measured], verdicts: list[Measured]) -> None:
    table = Table("a report in memory, one core", ["ranks", "M spans", "CPU s", "slowest", "us a span", "peak, MB"])
    for row in rows:
        fastest, slowest = (of(map(cpu_seconds, row["rounds"])) for of in (min, max))
        peak = min(one["peak_bytes"] for one in row["rounds"])
        numbers = f"{fastest:.1f}", f"{slowest:.1f}", f"{fastest / row['spans'] * 1e6:.2f}", f"{peak / 1e6:.0f}"
        table.add(str(row["ranks"]), f"{row['spans'] / 1e6:.2f}", *numbers)
    table.print()
    print_verdicts(verdicts)


if __name__ == "__main__":
    main()

"""What capture.launch() costs the host of each rank, in microseconds, by the number of ranks: the kernel starts so much
later. A rank that pays more than the others is late at every launch, and the trace would blame it.

    python benchmarks/launch.py [--ranks 1 2 4 8] [--threads 1 4 8] [--launches 4000]

The first table: a flight recorder of the CPU backend whose regions are used again, every rank a process; no kernel
runs. On a GPU the marks that it makes on the stream come on top. The yardstick is an eager operation of torch on one
number, on the CPU. It takes turns with the launches, in rows of four, and a time is the mean of a row. "no capture" is
`tracekern.launch()` before one is open, which a library pays that nobody traces.

The second table: a capture that keeps its first records, in CPU time of a thread, with so many threads of one process
that launch at a time; 1 in 85 launches makes room, which the mean has. A range is `with tracekern.range(...)`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results

IN_A_ROW = 4
WARM_UP = 1200
"""More than the regions that there is room for."""

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--launches", type=int, default=4000)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)  # a rank's own start
    options = parser.parse_args()
    if options.rank_in is not None:
        measure(options.rank_in, options.launches)
        return 0
    rows = [run_ranks(num_ranks) for num_ranks in options.ranks]
    columns = [
        "ranks",
        "rank 0 us",
        "p10..p90",
        "others us",
        "rank 0 - others",
        "torch us",
        "rank 0 / torch",
        "no capture us",
    ]
    table = Table(f"{options.launches} launches a rank on {os.cpu_count()} processors", columns)
    for row in rows:
        others = row["others_us"]
        table.add(
            str(row["ranks"]),
            f"{row['rank_0_us']:.1f}",
            f"{row['rank_0_p10_us']:.1f}..{row['rank_0_p90_us']:.1f}",
            "" if others is None else f"{others:.1f}",
            "" if others is None else f"{row['rank_0_us'] - others:+.1f}",
            f"{row['torch_us']:.2f}",
            f"{row['rank_0_us'] / row['torch_us']:.1f}x",
            f"{row['no_capture_us']:.2f}",
        )
    table.print()
    of_threads = [measure_threads(number, options.launches) for number in options.threads]
    second = Table("CPU time of a thread", ["threads", "launch us", "mean us", "range us", "mean us"])
    for row in of_threads:
        medians = (f"{row[f'{what}_{which}_us']:.2f}" for what in ("launch", "range") for which in ("median", "mean"))
        second.add(str(row["threads"]), *medians)
    second.print()
    about = {"launches": options.launches, "processors": os.cpu_count()}
    write_results("launch", {**about, "rows": rows, "threads": of_threads})
    return 0


def measure_threads(num_threads: int, num_launches: int) -> Row:
    """Launches and ranges of so many threads at a time, in rows of several."""
    import tracekern
    from tracekern.compiled import compiled

    events = compiled("p2p").event_table()
    times: dict[str, list[float]] = {"launch": [], "range": []}

    def work(stream: int) -> None:
        for _ in range(num_launches // IN_A_ROW):
            began = time.thread_time_ns()
            for _ in range(IN_A_ROW):
                tracekern.launch("demo", grid=1, warps=8, stream=stream, events=events, epoch=1)
            then = time.thread_time_ns()
            for _ in range(IN_A_ROW):
                with tracekern.range("demo"):
                    pass
            times["range"].append((time.thread_time_ns() - then) / IN_A_ROW / 1e3)
            times["launch"].append((then - began) / IN_A_ROW / 1e3)
            time.sleep(2e-5)

    with tempfile.TemporaryDirectory() as directory:
        room = {"max_bytes": 1 << 30, "host_spans": num_threads * num_launches}
        with tracekern.capture(directory, records_per_track=16, **room):
            threads = [threading.Thread(target=work, args=(stream,)) for stream in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    of = {"median": statistics.median, "mean": statistics.fmean}
    found = {f"{what}_{name}_us": work_out(row) for what, row in times.items() for name, work_out in of.items()}
    return {"threads": num_threads, **found}


def run_ranks(num_ranks: int) -> Row:
    """Of all ranks. Raises RuntimeError with their lines where one failed."""
    from tracekern.launcher.launch import launch_ranks

    lines: list[list[str]] = [[] for _ in range(num_ranks)]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--rank-in", directory]
        exits = launch_ranks(num_ranks, command, on_line=lambda rank, line: lines[rank].append(line), timeout_s=120)
    if any(end.returncode for end in exits):
        raise RuntimeError("\n".join(line for of_rank in lines for line in of_rank[-12:]))
    return summarise([json.loads(line) for of_rank in lines for line in of_rank if line.startswith("{")])


def summarise(ranks: list[Row]) -> Row:
    """others_us: the median of the other ranks' medians, None without any."""
    first = sorted(ranks[0]["launch_us"])
    others = [statistics.median(rank["launch_us"]) for rank in ranks[1:]]
    return {
        "ranks": len(ranks),
        "rank_0_us": statistics.median(first),
        "rank_0_p10_us": first[len(first) // 10],
        "rank_0_p90_us": first[-1 - len(first) // 10],
        "others_us": statistics.median(others) if others else None,
        "torch_us": statistics.median([statistics.median(rank["torch_us"]) for rank in ranks]),
        "no_capture_us": statistics.median([statistics.median(rank["no_capture_us"]) for rank in ranks]),
    }


def measure(directory: Path, num_launches: int) -> None:
    """One rank: prints its times of a launch, in rows of several, and of the yardstick."""
    import torch

    import tracekern
    from tracekern import capture
    from tracekern.compiled import compiled

    number, events = torch.zeros(1), compiled("p2p").event_table()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"launch_us": [], "torch_us": [], "no_capture_us": []}
    for _ in range((num_launches + WARM_UP) // IN_A_ROW):
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            tracekern.launch("demo", grid=1, warps=8, events=events, epoch=1)
        times["no_capture_us"].append((time.perf_counter() - began) / IN_A_ROW * 1e6)
    with capture(directory, keep="last", records_per_track=16, max_bytes=1 << 20) as session:
        for _ in range((num_launches + WARM_UP) // IN_A_ROW):
            began = time.perf_counter()
            for _ in range(IN_A_ROW):
                session.launch("demo", grid=1, warps=8, events=events, epoch=1)
            then = time.perf_counter()
            for _ in range(IN_A_ROW):
                torch.add(number, 1, out=number)
            times["launch_us"].append((then - began) / IN_A_ROW * 1e6)
            times["torch_us"].append((time.perf_counter() - then) / IN_A_ROW * 1e6)
    print(json.dumps({key: found[WARM_UP // IN_A_ROW :] for key, found in times.items()}), flush=True)


if __name__ == "__main__":
    sys.exit(main())

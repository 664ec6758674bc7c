"""What a launch costs its host, in microseconds, by the number of its tracks, and how it comes to its region.

    python benchmarks/launch_tracks.py [--tracks 4 480 2048] [--launches 2000]

No kernel runs. Each time is of one launch. "untraced": `tracekern.launch()` without a capture. "counted": the region
was reserved by `counting()`. "own": the launch reserves it itself, in an arena whose pages are there, as on a GPU.
"library": the same through `tracekern.launch()`. "flight": a flight recorder without room for more, which uses a region
again. "cpu": as "own", but pages are reserved with the region, as the CPU backend does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results

import tracekern
from tracekern import capture
from tracekern.comm.devices.device import HostDevice, HostMemory
from tracekern.compiled import compiled
from tracekern.segment.writer import SegmentWriter

WARPS = 4
RECORDS = 8
"""Room of each track."""
WARM_UP = 100
MAX_BYTES = 1 << 30
REUSED = 64
"""Regions of a flight recorder."""


class ReadyMemory(HostMemory):
    """Pages are there and mapped, as those that a GPU writes to."""

    def attach(self, segment: SegmentWriter) -> None:
        address, num_bytes = segment.back_arena()
        segment._bytes[address - segment.address :][:num_bytes:4096] = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tracks", type=int, nargs="+", default=[4, 480, 2048])
    parser.add_argument("--launches", type=int, default=2000)
    options = parser.parse_args()
    rows = [row for tracks in options.tracks for row in measure(tracks, options.launches)]
    columns = ["tracks", "launch", "median us", "p90", "p99", "median - untraced"]
    table = Table(f"{options.launches} launches", columns)
    for row in rows:
        beyond = f"{row['median_us'] - row['untraced_us']:.2f}"
        table.add(*(f"{row[key]:.2f}" if key.endswith("us") else str(row[key]) for key in list(row)[:5]), beyond)
    table.print()
    write_results("launch_tracks", {"launches": options.launches, "rows": rows})
    return 0


def measure(tracks: int, num_launches: int) -> list[dict[str, Any]]:
    shape = {"grid": tracks // WARPS, "warps": WARPS, "events": compiled("p2p").event_table(), "epoch": 1}
    region_bytes = tracks * (64 + RECORDS * 16) + 64
    num_launches = min(num_launches, MAX_BYTES // region_bytes - WARM_UP - 1)
    times = {"untraced": times_of(lambda: tracekern.launch("k", **shape), num_launches)}
    ready = HostDevice()
    ready.memory = ReadyMemory()
    with tempfile.TemporaryDirectory() as directory:
        common: dict[str, Any] = {"records_per_track": RECORDS, "max_bytes": MAX_BYTES}
        with capture(directory, device=ready, **common) as session:
            with session.counting(repeats=num_launches + WARM_UP):
                session.launch("k", **shape)
            times["counted"] = times_of(lambda: session.launch("k", **shape), num_launches)
        with capture(directory, device=ready, **common) as session:
            times["own"] = times_of(lambda: session.launch("k", **shape), num_launches)
        with capture(directory, device=ready, **common):
            times["library"] = times_of(lambda: tracekern.launch("k", **shape), num_launches)
        with capture(directory, device=ready, keep="last", **common | {"max_bytes": REUSED * region_bytes}) as session:
            times["flight"] = times_of(lambda: session.launch("k", **shape), num_launches)
        with capture(directory, **common) as session:
            times["cpu"] = times_of(lambda: session.launch("k", **shape), num_launches)
    untraced_us = statistics.median(times["untraced"])
    return [
        {
            "tracks": tracks,
            "launch": launch,
            "median_us": statistics.median(of_launch),
            "p90_us": of_launch[len(of_launch) * 9 // 10],
            "p99_us": of_launch[len(of_launch) * 99 // 100],
            "untraced_us": untraced_us,
        }
        for launch, of_launch in times.items()
    ]


def times_of(launch: Callable[[], Any], num_launches: int) -> list[float]:
    """Returns the microseconds of each launch, sorted."""
    times = []
    for _ in range(WARM_UP + num_launches):
        began = time.perf_counter_ns()
        launch()
        times.append((time.perf_counter_ns() - began) / 1000)
    return sorted(times[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())

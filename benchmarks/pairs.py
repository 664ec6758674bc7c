"""Pairs of an untraced and a traced call on GPUs, what benchmarks of an exchange measure: device time of its kernels.

Calls are queued behind a sleeping GPU and a barrier of all ranks on the device. CUDA events stand before and behind
each kernel; of each call the slowest rank counts. "on/off" is the ratio of the medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from harness import Table
from ranks import Row, directory_of_all

WARM_UP = 3
SLEEP_CYCLES = 2_000_000
"""About 1 ms: longer than the host takes to queue a call. Resident ranks, whose calls one process queues, sleep so long
for each of them."""


class Stopwatch:
    """Events around kernels of one call."""

    def __init__(self, comm: Any, sleep_cycles: int) -> None:
        import torch

        self._marks: list[Any] = []
        comm.barrier()
        torch.cuda._sleep(sleep_cycles)
        comm.native.barrier(stream=torch.cuda.current_stream().cuda_stream)

    def mark(self) -> None:
        import torch

        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def between_us(self, first: int) -> float:
        """From that mark to the next, once all that was queued is over."""
        return float(self._marks[first].elapsed_time(self._marks[first + 1])) * 1e3


def measure_pairs(
    group: Any, device: Any, timed_us: Callable[[Any], list[float]], kernels: tuple[str, ...], num_pairs: int
) -> list[Row]:
    """A row for each kernel. timed_us(capture or None): device time of each, of one call."""
    from tracekern.record.session import capture

    how = {"device": device, "clocks": False, "sink": "device", "max_bytes": 1 << 29}
    with directory_of_all(group) as directory, capture(directory, **how) as session:
        with session.counting():
            timed_us(session)
        pairs = [(timed_us(None), timed_us(session)) for _ in range(WARM_UP + num_pairs)][WARM_UP:]
        unrecorded = int(session.segment.header["launches_refused"])
    return [
        {
            "kernel": kernel,
            "off_us": [off[idx] for off, _ in pairs],
            "on_us": [on[idx] for _, on in pairs],
            "unrecorded": unrecorded,
        }
        for idx, kernel in enumerate(kernels)
    ]


def summarise(ranks: tuple[Row, ...]) -> Row:
    """One row of all ranks: medians and spread of the slowest rank of each call."""
    row = {name: value for name, value in ranks[0].items() if name not in ("rank", "off_us", "on_us", "unrecorded")}
    for key in ("off_us", "on_us"):
        times = sorted(max(of_call) for of_call in zip(*(row[key] for row in ranks), strict=True))
        tenth = len(times) // 10
        row |= {key: statistics.median(times), f"{key}_p10": times[tenth], f"{key}_p90": times[-1 - tenth]}
    row["on_over_off"] = row["on_us"] / row["off_us"]
    row["unrecorded"] = sum(one["unrecorded"] for one in ranks)
    return row


def print_pairs(title: str, columns: tuple[str, ...], rows: list[Row]) -> None:
    """columns: of the rows, in front of the times."""
    table = Table(title, [*columns, "off us", "p10..p90", "on us", "p10..p90", "on/off"])
    for row in rows:
        cells = [str(row[column]) for column in columns]
        for key in ("off_us", "on_us"):
            cells += [f"{row[key]:.1f}", f"{row[f'{key}_p10']:.1f}..{row[f'{key}_p90']:.1f}"]
        table.add(*cells, f"{row['on_over_off']:.3f}")
    table.print()


def exit_code(program: str, rows: list[Row]) -> int:
    """1, with a line, where a traced launch ran unrecorded."""
    unrecorded = sum(row["unrecorded"] for row in rows)
    if unrecorded:
        print(f"{program}: {unrecorded} traced launches found no room and ran unrecorded: not a measurement")
    return 1 if unrecorded else 0

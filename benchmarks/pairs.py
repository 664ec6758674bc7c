"""Pairs of an untraced and a traced call on GPUs, what benchmarks of an exchange measure: device time of its kernels.

Calls are queued behind a sleeping GPU and a barrier of all ranks on the device. CUDA events stand before and behind
each kernel; of each call the slowest rank counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from harness import Table
from ranks import Row, directory_of_all

WARM_UP = 3
PAIRS_OF_A_CAPTURE = 100
COMMON = {"clocks": False, "max_bytes": 1 << 31}
TRIMMED = 0.1
"""Share of the times at either end that no mean is taken of."""
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
    group: Any, how: Row, timed_us: Callable[[Any], list[float]], kernels: tuple[str, ...], num_pairs: int
) -> list[Row]:
    """A row for each kernel. how: options of the captures, with the device. timed_us(capture or None): device time of
    each kernel of a call."""
    from tracekern.record.session import capture

    pairs: list[tuple[list[float], list[float]]] = []
    unrecorded = 0
    while len(pairs) < num_pairs:
        with directory_of_all(group) as directory, capture(directory, **how, **COMMON) as session:
            with session.counting():
                timed_us(session)
            more = min(PAIRS_OF_A_CAPTURE, num_pairs - len(pairs))
            pairs += [(timed_us(None), timed_us(session)) for _ in range(WARM_UP + more)][WARM_UP:]
            unrecorded += int(session.segment.header["launches_refused"])
    return [
        {
            "kernel": kernel,
            "off_us": [off[idx] for off, _ in pairs],
            "on_us": [on[idx] for _, on in pairs],
            "unrecorded": unrecorded,
        }
        for idx, kernel in enumerate(kernels)
    ]


def trimmed_mean(times: Sequence[float]) -> tuple[float, float]:
    """The mean without both ends, and its standard error, by Yuen (1974): that of the times whose ends are set to the
    nearest that count."""
    ordered = sorted(times)
    cut = int(TRIMMED * len(ordered))
    inner = ordered[cut : len(ordered) - cut]
    winsorised = [inner[0]] * cut + inner + [inner[-1]] * cut
    share = len(inner) / len(ordered)
    return statistics.fmean(inner), statistics.stdev(winsorised) / share / math.sqrt(len(ordered))


def summarise(ranks: tuple[Row, ...]) -> Row:
    """One row of all ranks: means of the slowest rank of each call, and of what the second of a pair takes more, with
    intervals of 95 %."""
    row = {name: value for name, value in ranks[0].items() if name not in ("rank", "off_us", "on_us", "unrecorded")}
    off, on = (
        [max(of_call) for of_call in zip(*(one[key] for one in ranks), strict=True)] for key in ("off_us", "on_us")
    )
    (row["off_us"], _), (row["on_us"], _) = trimmed_mean(off), trimmed_mean(on)
    added_us, error_us = trimmed_mean([after - before for before, after in zip(off, on, strict=True)])
    row |= {"pairs": len(off), "added_us": added_us, "added_within_us": 1.96 * error_us}
    row |= {"on_over_off": 1 + added_us / row["off_us"], "within": 1.96 * error_us / row["off_us"]}
    row["unrecorded"] = sum(one["unrecorded"] for one in ranks)
    return row


def print_pairs(title: str, columns: tuple[str, ...], rows: list[Row]) -> None:
    """columns: of the rows, in front of the times."""
    table = Table(title, [*columns, "off us", "on us", "added ns", "on/off", "goal"])
    for row in rows:
        goal = row.get("goal")
        verdict = "" if goal is None else "met" if row["on_over_off"] <= goal else f"missed {goal:.2f}"
        table.add(
            *(str(row.get(column, "")) for column in columns),
            f"{row['off_us']:.2f}",
            f"{row['on_us']:.2f}",
            f"{1e3 * row['added_us']:.0f} +- {1e3 * row['added_within_us']:.0f}",
            f"{row['on_over_off']:.3f} +- {row['within']:.3f}",
            verdict,
        )
    table.print()


def exit_code(program: str, rows: list[Row]) -> int:
    """1, with a line, where a traced launch ran unrecorded."""
    unrecorded = sum(row["unrecorded"] for row in rows)
    if unrecorded:
        print(f"{program}: {unrecorded} traced launches found no room and ran unrecorded: not a measurement")
    return 1 if unrecorded else 0

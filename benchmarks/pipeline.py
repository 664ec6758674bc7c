"""The MoE variants side by side on the CPU backend, tracing off and on: host time of a call, median and spread.

    python benchmarks/pipeline.py [--ranks 8] [--tokens 64] [--hidden 2048] [--rounds 5] ...

Runs are interleaved (every variant, off and on, in each round), so that a noisy machine hits all alike. One sample is
the slowest rank's time of one call; calls follow each other without a barrier. Times are medians over all rounds,
on/off the median of the rounds' own ratios. CPU figures compare variants and show what tracing costs here, never a
GPU's time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
from collections import defaultdict

from harness import Table, write_results

from tracekern.moe.families import VARIANTS
from tracekern.moe.options import MoeRun, UnsuitableShape
from tracekern.moe.run import run

DEFAULTS = {"ranks": 8, "tokens": 64, "hidden": 2048, "experts": 64, "topk": 6, "iterations": 20, "rounds": 5}

Samples = dict[tuple[str, bool], list[list[float]]]
"""(variant, traced) -> [round][call] ms of the slowest rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--routing", default="zipf")
    arguments = parser.parse_args()
    shape = {key: value for key, value in vars(arguments).items() if key != "rounds"}
    rows = summarise(measure(shape, arguments.rounds))
    print_table(shape, rows)
    write_results("pipeline", {"shape": shape, "rounds": arguments.rounds, "rows": rows})


def measure(shape: dict[str, int | str], rounds: int) -> Samples:
    """Of the variants that take the shape. The first call of each run warms up and does not count."""
    samples: Samples = defaultdict(list)
    for round_idx in range(rounds):
        for variant, traced in itertools.product(VARIANTS, (False, True)):
            with contextlib.suppress(UnsuitableShape), tempfile.TemporaryDirectory() as directory:
                report = run(MoeRun(**shape, variant=variant, trace=traced, seed=round_idx + 1), directory)
                report.raise_for_error()
                calls = zip(*(rank.iteration_ms for rank in report.ranks), strict=True)
                samples[variant, traced].append([max(times) for times in calls][1:])
    return samples


def summarise(samples: Samples) -> list[dict[str, float | str]]:
    """One row a variant: medians, ratios of medians, and the range of the ratio over the rounds."""
    every = {key: sorted(time for times in rounds for time in times) for key, rounds in samples.items()}
    rows: list[dict[str, float | str]] = []
    for variant in dict.fromkeys(variant for variant, _ in samples):
        row: dict[str, float | str] = {"variant": variant}
        for name, times in (("off", every[variant, False]), ("on", every[variant, True])):
            row[f"{name}_ms"] = statistics.median(times)
            row[f"{name}_p10_ms"] = times[len(times) // 10]
            row[f"{name}_p90_ms"] = times[len(times) * 9 // 10]
        ratios = [
            statistics.median(on) / statistics.median(off)
            for off, on in zip(samples[variant, False], samples[variant, True], strict=True)
        ]
        row["on_over_off"] = statistics.median(ratios)
        row["on_over_off_low"], row["on_over_off_high"] = min(ratios), max(ratios)
        row["off_over_sorted"] = row["off_ms"] / statistics.median(every["sorted", False])
        rows.append(row)
    return rows


def print_table(shape: dict[str, int | str], rows: list[dict[str, float | str]]) -> None:
    title = ", ".join(f"{key} {value}" for key, value in shape.items())
    columns = ["variant", "off ms", "p10..p90", "on ms", "p10..p90", "on/off", "over rounds", "off/sorted"]
    table = Table(f"{title}; ms of a call on the slowest rank", columns)
    for row in rows:
        table.add(
            str(row["variant"]),
            f"{row['off_ms']:.2f}",
            f"{row['off_p10_ms']:.2f}..{row['off_p90_ms']:.2f}",
            f"{row['on_ms']:.2f}",
            f"{row['on_p10_ms']:.2f}..{row['on_p90_ms']:.2f}",
            f"{row['on_over_off']:.2f}",
            f"{row['on_over_off_low']:.2f}..{row['on_over_off_high']:.2f}",
            f"{row['off_over_sorted']:.2f}",
        )
    table.print()


if __name__ == "__main__":
    main()

"""The transfer engine against libfabric alone, on this host: what the engine costs.

    python benchmarks/fabric.py [--pairs 7] [--providers tcp shm]

Two processes, each pinned to a core of its own, write through 64 MiB of memory. fabric_raw.cpp posts and polls in one
thread; fabric_engine.cpp does the same through csrc/fabric, and once more while it records. All ask for
FI_DELIVERY_COMPLETE, keep as many writes under way, and have one thread that polls. They take turns: a ratio is of runs
that follow each other, and what stands in the table is the median of these ratios, with the smallest and the largest;
beside it the best runs. Absolute figures are of a machine that others may use; the copies inside one process, at the
end, say how quiet it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import ROOT, Table, write_results

KiB, MiB = 1 << 10, 1 << 20
SOURCES = {"tcp": "127.0.0.1", "shm": ""}
LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """A row: `goal` is how much of raw the engine shall reach; of a time, how much more it may take."""

    name: str
    shape: str
    bytes: int
    count: int
    window: int
    goal: float
    unit: str = "gb_per_s"


CASES = (
    Case("single 16 MiB", "single", 16 * MiB, 64, 8, 0.95),
    Case("single 32 MiB", "single", 32 * MiB, 32, 4, 0.95),
    Case("paged 64 KiB", "paged", 64 * KiB, 16 * KiB, 192, 0.90),
    Case("paged 4 KiB", "paged", 4 * KiB, 64 * KiB, 192, 0.75),
    Case("8 B half round trip", "ping", 8, 10_000, 16, 1.3, "p50_us"),
)
COPY = Case("memcpy 16 MiB", "copy", 16 * MiB, 64, 0, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--providers", nargs="+", default=list(SOURCES))
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES], help="names of rows")
    options = parser.parse_args()
    from tracekern.errors import NotBuilt
    from tracekern.fabric.library import native, require_library

    try:
        library = require_library()
    except NotBuilt as error:
        print(f"fabric: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            "raw": compile_program(Path(folder), "raw"),
            "engine": compile_program(Path(folder), "engine"),
            "traced": compile_program(Path(folder), "engine", "-DTRACED"),
        }
        rows, copies = [], []
        for provider in options.providers:
            for case in (case for case in CASES if case.name in options.cases):
                rows.append(measure(programs, library, provider, case, options.pairs))
                copies.append(run(programs["raw"], library, provider, COPY))
    print_table(rows, copies)
    about = {"libfabric": native().library_version(library), "pairs": options.pairs}
    write_results("fabric", {**about, "rows": rows, "memcpy_gb_per_s": copies})
    return 0


def compile_program(folder: Path, name: str, *options: str) -> list[str]:
    """Returns the command that runs benchmarks/fabric_<name>.cpp."""
    program = str(folder / "".join((name, *options)))
    flags = ["-O3", "-DNDEBUG", "-std=c++20", f"-I{ROOT / 'csrc'}", "-pthread", *options]
    subprocess.run(["g++", *flags, str(ROOT / f"benchmarks/fabric_{name}.cpp"), "-ldl", "-o", program], check=True)
    return [program]


def run(program: list[str], library: str, provider: str, case: Case) -> float:
    arguments = [library, provider, SOURCES.get(provider, ""), case.shape, case.bytes, case.count, case.window]
    command = [*program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"fabric: {case.name} over {provider}: {done.stderr.strip()}; run it again")
    return float(json.loads(done.stdout)[case.unit])


def measure(programs: dict[str, list[str]], library: str, provider: str, case: Case, pairs: int) -> dict[str, Any]:
    """Runs raw, the engine, and the engine that records, by turns, in alternate order."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for pair in range(pairs):
        for name in sorted(programs, reverse=pair % 2 == 0):
            found[name].append(run(programs[name], library, provider, case))
    ratios = [engine / raw for engine, raw in zip(found["engine"], found["raw"], strict=True)]
    ratio = statistics.median(ratios)
    best = min if case.unit == "p50_us" else max
    traced = [traced / engine for traced, engine in zip(found["traced"], found["engine"], strict=True)]
    return {
        "provider": provider,
        "case": case.name,
        "unit": case.unit,
        **found,
        "ratios": ratios,
        "ratio": ratio,
        "best_ratio": best(found["engine"]) / best(found["raw"]),
        "traced_ratios": traced,
        "traced_ratio": statistics.median(traced),
        "goal": case.goal,
        "is_reached": ratio <= case.goal if case.unit == "p50_us" else ratio >= case.goal,
    }


def print_table(rows: list[dict[str, Any]], copies: list[float]) -> None:
    columns = ["provider", "case", "raw", "engine", "engine / raw", "least..most", "best / best", "goal", "", "traced"]
    table = Table(f"engine and raw libfabric, interleaved, on {os.cpu_count()} cores", columns)
    for row in rows:
        unit = "us" if row["unit"] == "p50_us" else "GB/s"
        table.add(
            row["provider"],
            row["case"],
            f"{statistics.median(row['raw']):.2f} {unit}",
            f"{statistics.median(row['engine']):.2f} {unit}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}",
            f"{row['best_ratio']:.2f}",
            f"{'<' if unit == 'us' else '>'}= {row['goal']:.2f}",
            "" if row["is_reached"] else "missed",
            f"{row['traced_ratio']:.2f} ({min(row['traced_ratios']):.2f}..{max(row['traced_ratios']):.2f})",
        )
    table.print()
    print(f"  memcpy 16 MiB between the rows: {min(copies):.2f} to {max(copies):.2f} GB/s")


if __name__ == "__main__":
    sys.exit(main())

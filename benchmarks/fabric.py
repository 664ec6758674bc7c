"""The transfer engine against libfabric alone, on this host: what the engine costs. With --nixl also against NIXL.

    python benchmarks/fabric.py [--pairs 7] [--providers tcp shm] [--rehearse efa] [--nixl FOLDER] [--base CHECKOUT]

Two processes, each pinned to a core of its own, write through 64 MiB of memory. fabric_raw.cpp posts a write for each
page and polls, in one thread; fabric_engine.cpp moves the same through csrc/fabric, which may write pages together, and
once more while it records. All ask for FI_DELIVERY_COMPLETE, keep as many writes under way, and have one thread that
polls. They take turns: a ratio is of runs that follow each other, and what stands in the table is the median of these
ratios, with the smallest and the largest; beside it the best runs. Absolute figures are of a machine that others may
use; the copies inside one process, at the end, say how quiet it was. --rehearse efa adds rows of the engine on a tcp
with EFA's rules (tests/cpp/efa_rules.cpp); --base a column of the engine of another checkout, in the same turns.
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
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import fabric_nixl
from harness import ROOT, Table, about_network, write_results

KiB, MiB = 1 << 10, 1 << 20
SOURCES = {"tcp": "127.0.0.1", "shm": ""}
LIMIT_S = 120
REHEARSED = ("efa",)


@dataclass(frozen=True)
class Network:
    """What the programs run on: a provider, or tcp in its place, with a library that gives it the provider's rules."""

    name: str
    provider: str
    library: str
    status: str = "run"
    real_library: str = ""


def find_networks(providers: list[str], rehearse: list[str]) -> list[Network]:
    """Raises NotBuilt where there is no libfabric."""
    from tracekern.fabric.library import require_library

    library = require_library()
    networks = [Network(name, name, library, real_library=library) for name in providers]
    for name in rehearse:
        import rehearsal

        variables = rehearsal.variables(name)
        os.environ["SHIM_LIBRARY"] = variables["SHIM_LIBRARY"]
        networks.append(Network(name, "tcp", variables["TRACEKERN_LIBFABRIC"], "rehearsed", library))
    return networks


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
    parser.add_argument("--rehearse", nargs="+", default=[], choices=REHEARSED, help="providers that are not here")
    parser.add_argument("--nixl", default="", help=f"where NIXL is: {fabric_nixl.HOW}")
    parser.add_argument("--base", type=Path, help="a checkout whose engine takes turns with this one")
    options = parser.parse_args()
    from tracekern.errors import NotBuilt
    from tracekern.fabric.library import native

    try:
        networks = find_networks(options.providers, options.rehearse)
    except NotBuilt as error:
        print(f"fabric: {error}", file=sys.stderr)
        return 2
    nixl = fabric_nixl.measure(options.nixl, options.pairs)
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            "raw": compile_program(Path(folder), "raw"),
            "engine": compile_program(Path(folder), "engine"),
            "traced": compile_program(Path(folder), "engine", "-DTRACED"),
        }
        if options.base:
            programs["base"] = compile_program(Path(folder), "engine", "-DBASE", root=options.base)
        rows, copies = [], []
        for network in networks:
            for case in (case for case in CASES if case.name in options.cases):
                rows.append(measure(programs, network, case, options.pairs))
                copies.append(run(programs["raw"], network, COPY))
    print_table(rows, copies)
    fabric_nixl.print_table(nixl)
    about = {"libfabric": native().library_version(networks[0].real_library), "pairs": options.pairs}
    write_results("fabric", {**about, "rows": rows, "nixl": nixl, "memcpy_gb_per_s": copies})
    return 0


def compile_program(folder: Path, name: str, *options: str, root: Path = ROOT) -> list[str]:
    """Returns the command that runs benchmarks/fabric_<name>.cpp of a checkout."""
    program = str(folder / "".join((name, *options)))
    flags = ["-O3", "-DNDEBUG", "-std=c++20", f"-I{root / 'csrc'}", "-pthread", *options]
    subprocess.run(["g++", *flags, str(root / f"benchmarks/fabric_{name}.cpp"), "-ldl", "-o", program], check=True)
    return [program]


def run(program: list[str], network: Network, case: Case) -> float:
    """Returns the program's figure. libfabric alone keeps no other provider's rules, and runs without them."""
    library = network.real_library if Path(program[0]).name == "raw" else network.library
    source = SOURCES.get(network.provider, "")
    arguments = [library, network.provider, source, case.shape, case.bytes, case.count, case.window]
    command = [*program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"fabric: {case.name} over {network.name}: {done.stderr.strip()}; run it again")
    return float(json.loads(done.stdout)[case.unit])


def measure(programs: dict[str, list[str]], network: Network, case: Case, pairs: int) -> dict[str, Any]:
    """Runs raw, the engine, and the engine that records, by turns, in alternate order."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for pair in range(pairs):
        for name in sorted(programs, reverse=pair % 2 == 0):
            found[name].append(run(programs[name], network, case))
    ratios = [engine / raw for engine, raw in zip(found["engine"], found["raw"], strict=True)]
    ratio = statistics.median(ratios)
    best = min if case.unit == "p50_us" else max
    traced = [traced / engine for traced, engine in zip(found["traced"], found["engine"], strict=True)]
    to_base = [engine / base for engine, base in zip(found["engine"], found.get("base", []), strict=False)]
    return {
        **about_network(network.name, network.status),
        "case": case.name,
        "unit": case.unit,
        **found,
        "ratios": ratios,
        "ratio": ratio,
        "best_ratio": best(found["engine"]) / best(found["raw"]),
        "traced_ratios": traced,
        "traced_ratio": statistics.median(traced),
        **({"base_ratios": to_base, "base_ratio": statistics.median(to_base)} if to_base else {}),
        "goal": case.goal,
        "is_reached": ratio <= case.goal if case.unit == "p50_us" else ratio >= case.goal,
    }


def print_table(rows: list[dict[str, Any]], copies: list[float]) -> None:
    columns = [
        "provider",
        "",
        "case",
        "raw",
        "engine",
        "engine / raw",
        "least..most",
        "best / best",
        "goal",
        "",
        "traced",
        *(["engine / base"] if "base_ratio" in rows[0] else []),
    ]
    table = Table(f"engine and raw libfabric, interleaved, on {os.cpu_count()} cores", columns)
    for row in rows:
        unit = "us" if row["unit"] == "p50_us" else "GB/s"
        table.add(
            row["provider"],
            row["status"],
            row["case"],
            f"{statistics.median(row['raw']):.2f} {unit}",
            f"{statistics.median(row['engine']):.2f} {unit}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}",
            f"{row['best_ratio']:.2f}",
            f"{'<' if unit == 'us' else '>'}= {row['goal']:.2f}",
            "" if row["is_reached"] else "missed",
            f"{row['traced_ratio']:.2f} ({min(row['traced_ratios']):.2f}..{max(row['traced_ratios']):.2f})",
            *([f"{row['base_ratio']:.2f}"] if "base_ratio" in row else []),
        )
    table.print()
    print(f"  memcpy 16 MiB between the rows: {min(copies):.2f} to {max(copies):.2f} GB/s")


if __name__ == "__main__":
    sys.exit(main())

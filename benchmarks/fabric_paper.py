"""The tables of the paper of the transfer engine (arXiv 2510.27656, section 7) with the engine's figures on this host.

    python benchmarks/fabric_paper.py [--providers tcp shm] [--rehearse efa] [--turns 5]

Single writes and writes of pages, 256 B to 32 MiB, by benchmarks/fabric_engine.cpp: two processes, a core each, as many
writes under way as fabric.py has. The paper's figures are of GPUs of different hosts, 400 Gbit/s each: two EFA NICs of
200 or a ConnectX-7. Its figures 10 to 12 time kernels on 8 to 64 GPUs; those rows say what would run them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fabric
from harness import Table, about_network, write_results

KiB, MiB = fabric.KiB, fabric.MiB
SIZES = [256, KiB, 4 * KiB, 8 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 32 * MiB]
MEMORY_BYTES, MAX_WRITES = 64 * MiB, 1 << 18
PAPER = {
    ("single", 256 * KiB): {"efa": 54.0, "cx7": 116.0},
    ("single", 32 * MiB): {"efa": 336.0, "cx7": 378.0},
    ("paged", 8 * KiB): {"efa": 138.0, "cx7": 320.0},
    ("paged", 64 * KiB): {"efa": 364.0, "cx7": 370.0},
}
"""Gbit/s, table 2."""
NOT_RUN = {
    "figure 10": "dispatch and combine of 64 ranks by parts: 64 GPUs on 8 hosts with EFA or ConnectX-7",
    "figure 11": "decode, 128 tokens, 8 to 64 ranks: the same hosts",
    "figure 12": "prefill, 4,096 tokens, 8 to 64 ranks: the same hosts",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--providers", nargs="+", default=list(fabric.SOURCES))
    parser.add_argument("--rehearse", nargs="+", default=[], choices=fabric.REHEARSED)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes of a write")
    options = parser.parse_args()
    from tracekern.errors import NotBuilt

    try:
        networks = fabric.find_networks(options.providers, options.rehearse)
    except NotBuilt as error:
        print(f"fabric_paper: {error}", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = fabric.compile_program(Path(folder), "engine")
        for network in networks:
            for shape in ("single", "paged"):
                rows += [measure(program, network, shape, size, options.turns) for size in options.sizes]
    rows += [{"case": name, "status": "not run", "needs": needs} for name, needs in NOT_RUN.items()]
    print_table(rows)
    write_results("fabric_paper", {"turns": options.turns, "rows": rows})
    return 0


def case_of(shape: str, size: int) -> fabric.Case:
    """Returns a case that writes all of the memory, once or several times."""
    in_one = MEMORY_BYTES // size
    rounds = max(1, min(MAX_WRITES // in_one, 16))
    window = 192 if size < MiB else max(4, 64 * MiB // size // 8)
    unit = next(unit for unit in (MiB, KiB, 1) if size >= unit)
    name = f"{size // unit} {'B' if unit == 1 else 'KiB' if unit == KiB else 'MiB'}"
    return fabric.Case(f"{shape} {name}", shape, size, in_one * rounds, window, 0.0)


def measure(program: list[str], network: fabric.Network, shape: str, size: int, turns: int) -> dict[str, Any]:
    case = case_of(shape, size)
    rates = [fabric.run(program, network, case) for _ in range(turns)]
    gbit_per_s = 8 * statistics.median(rates)
    return {
        **about_network(network.name, network.status),
        "case": case.name,
        "shape": shape,
        "bytes": size,
        "gb_per_s": rates,
        "gbit_per_s": gbit_per_s,
        "mops_per_s": gbit_per_s * 1e3 / 8 / size,
        "paper_gbit_per_s": PAPER.get((shape, size), {}),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ["provider", "", "case", "Gbit/s", "least..most", "Mop/s", "paper: EFA", "ConnectX-7"]
    table = Table(f"the engine on {os.cpu_count()} cores, and the paper's on 400 Gbit/s", columns)
    for row in rows:
        if row["status"] == "not run":
            table.add("", row["status"], row["case"], *("" for _ in columns[3:]))
            continue
        paper = row["paper_gbit_per_s"]
        table.add(
            row["provider"],
            row["status"],
            row["case"],
            f"{row['gbit_per_s']:.2f}",
            f"{8 * min(row['gb_per_s']):.2f}..{8 * max(row['gb_per_s']):.2f}",
            f"{row['mops_per_s']:.4f}",
            *(f"{paper[name]:.0f}" if paper else "" for name in ("efa", "cx7")),
        )
    table.print()
    for name, needs in NOT_RUN.items():
        print(f"  {name}: {needs}")


if __name__ == "__main__":
    sys.exit(main())

"""What a begin+end span costs on this GPU: our records beside nothing, FlashInfer, an atomic scheme, Proton.

    python benchmarks/recorder.py [--launches 40] [--regions 1000] [--no-proton]

ns/span: the median launch with a probe less the median one without, through the spans of a warp; all warps of all SMs
run at once. p10 and p90 are of the differences of launches that stood in the same round. What a launch and a track cost
once is in it, through as many spans.

"span" has the recorder of launches that are recorded whole, "span of any launch" that of all.

All rows are measured in the same loop, whose operands are in registers. Lower bounds do a part of a recorder's work and
hold in registers what does not change from span to span:

    clock reads        two reads, no store
    bare stores        two records of 16 bytes, nothing checked
    one bare store     one record of 16 bytes at the end, nothing checked
    one checked store  the same, room and event mask checked
    8-byte records     two records of 8 bytes with half the clock, room and event mask checked once for both
    in shared memory   one record of 16 bytes in a ring that nobody empties, event mask checked

Needs one GPU and nvcc. FLASHINFER_INCLUDE names the folder that holds flashinfer/profiler.cuh (in the wheel of
flashinfer-python: flashinfer/data/include); without it that row is missing. Proton runs where triton can be imported.
Exits with 1 when a probe's records are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import ROOT, Table, build, require_gpus, write_results

GOALS = {"span": {4: 0.48, 16: 0.50, 32: 0.48}}
"""By probe and warps per SM: the goal, of the cost of FlashInfer's macros."""

Row = dict[str, Any]


def flashinfer_include() -> tuple[Path | None, str]:
    """The folder to give to nvcc or, without one, why."""
    named = os.environ.get("FLASHINFER_INCLUDE")
    if named is None:
        return None, "FLASHINFER_INCLUDE is not set"
    # Whichever folder was meant: the one above flashinfer/, or flashinfer/ itself.
    for folder in (Path(named), Path(named).parent):
        if (folder / "flashinfer" / "profiler.cuh").is_file():
            return folder, ""
    return None, f"no flashinfer/profiler.cuh under {named}"


def measure(program: Path, launches: int, regions: int) -> tuple[list[Row], bool]:
    done = subprocess.run([str(program), str(launches), str(regions)], stdout=subprocess.PIPE, text=True, timeout=420)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return rows, done.returncode == 0


def measure_proton(launches: int, regions: int) -> tuple[list[Row], str]:
    """Rows and, without any, the reason. In a process of its own: its instrumentation stays on for good."""
    worker = ROOT / "benchmarks" / "recorder_proton.py"
    try:
        done = subprocess.run(
            [sys.executable, str(worker), str(launches), str(regions)], capture_output=True, text=True, timeout=150
        )
    except subprocess.TimeoutExpired:
        return [], "it took longer than 150 s"
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if rows and done.returncode == 0:
        return rows, ""
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return rows, last


def add_ratios(rows: list[Row], proton: list[Row]) -> None:
    """Each row's cost over FlashInfer's macros and over their scheme written cleanly, in the same configuration."""
    cost = {(row["probe"], row["warps_per_sm"], row["fmas"]): row["added_ns"] for row in rows}
    for row in rows + proton:
        for other in ("flashinfer", "clean"):
            base = cost.get((other, row["warps_per_sm"], row["fmas"]))
            row[f"over_{other}"] = round(row["added_ns"] / base, 3) if base and row["probe"] != "nothing" else None


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def print_tables(rows: list[Row]) -> None:
    columns = ["probe", "ns/span", "p10", "p90", "/flashinfer", "/clean", "B/span", "registers", "local B", "records"]
    for warps, fmas in sorted({(row["warps_per_sm"], row["fmas"]) for row in rows}, key=lambda key: (key[1], key[0])):
        chosen = [row for row in rows if (row["warps_per_sm"], row["fmas"]) == (warps, fmas)]
        table = Table(f"{warps} warps per SM, regions of {chosen[0]['region_ns']:.0f} ns ({fmas} FMAs)", columns)
        for row in chosen[1:]:
            table.add(
                row["probe"],
                f"{row['added_ns']:+.1f}",
                f"{row['p10_ns']:+.1f}",
                f"{row['p90_ns']:+.1f}",
                ratio(row["over_flashinfer"]),
                ratio(row["over_clean"]),
                f"{row['bytes_per_span']:g}",
                str(row["registers"]),
                str(row["local_bytes"]),
                row["records"],
            )
        table.print()


def print_verdicts(rows: list[Row]) -> None:
    """Which of our probes miss the goals."""
    if not any(row["over_flashinfer"] for row in rows):
        print("goals: not judged, they are ratios to FlashInfer's macros")
        return
    judged = [row for row in rows if row["probe"] in GOALS]
    missed = [
        f"{row['probe']} at {row['warps_per_sm']} warps, {row['fmas']} FMAs: "
        f"{ratio(row['over_flashinfer'])} of flashinfer (goal {GOALS[row['probe']][row['warps_per_sm']]:.2f}x)"
        for row in judged
        if (row["over_flashinfer"] or 0) > GOALS[row["probe"]][row["warps_per_sm"]]
    ]
    print("\n  ".join([f"goals: {len(missed)} of {len(judged)} missed", *missed]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=40, help="timed launches of each probe")
    parser.add_argument("--regions", type=int, default=1000, help="spans a warp and launch")
    parser.add_argument("--no-proton", action="store_true", help="leave Triton Proton out")
    options = parser.parse_args()
    require_gpus(1)
    include, no_flashinfer = flashinfer_include()
    with tempfile.TemporaryDirectory() as folder:
        rows, right = measure(build(Path(folder), "recorder", include), options.launches, options.regions)
    proton: list[Row] = []
    reason = "left out: --no-proton"
    if not options.no_proton:
        proton, reason = measure_proton(max(5, options.launches // 4), options.regions)
    add_ratios(rows, proton)
    print_tables(rows)
    print_verdicts(rows)
    for row in proton:
        print("proton:", ", ".join(f"{name} {value}" for name, value in row.items()))
    for name, why in (("proton", reason), ("flashinfer", no_flashinfer)):
        if why:
            print(f"{name}: not available ({why})")
    results = {
        "launches": options.launches,
        "regions": options.regions,
        "rows": rows,
        "proton": proton,
        "proton_missing": reason,
        "flashinfer_missing": no_flashinfer,
    }
    if rows:
        write_results("recorder", results, num_gpus=1)
    if not right or not rows:
        print("recorder: a probe failed or its records are wrong; see the column `records` and the lines above")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Device time of K2 and K4 of int4 experts on one GPU: all ways of staging, beside a read of the weights and torch.

    python benchmarks/int4_sparse.py [--quick] [--experts 48 128] [--loads 1 2 4 8 16 32 64 zipf] [--calls 20]

Hidden 7168, intermediate 2048. A load is a number of tokens for each expert, or `zipf`: uneven with a mean of 8, see
benchmarks/int4_load.py. CUDA events stand before and behind each call, on a queue behind a sleeping GPU; between calls
256 MB are written, so that L2 holds no weights. The read, each staging and torch._grouped_mm take turns; figures are
medians of the rounds. A product of two launches is timed as one.

"read" is the fastest of several kernels that do nothing but read the same bytes, "share" that over the product's time.
"grouped" is torch._grouped_mm with dense bf16 weights of the same sizes, rows and offsets: gate and up in one product,
without silu. "of even" is zipf over 8 tokens each. "on/off": untraced and traced in pairs of their own, the untraced
one first, as a ratio of the medians. "goal": what 128 experts shall reach with `wide`.

Exits with 1 where a staging's bits are not those of `direct`, where a kernel has a stack or spills that is to have
none (`ring` has: ptxas' limit of registers by the number of warps), or where a traced launch ran unrecorded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import int4_load
from harness import Table, require_gpus, write_results
from int4_load import HIDDEN, INTERMEDIATE, KERNELS, ZIPF, Case, Load, Product, Weights, stagings_here
from int4_read import WARM_UP, fastest_read, in_turns, spread, timed_us

LOADS = ("1", "2", "4", "8", "16", "32", "64", ZIPF)
QUICK_LOADS = ("8", "64", ZIPF)
EVEN = "8"
"""The load that zipf is compared with: as many rows."""
TRACED = ("wide", "ring", "direct")
MAY_SPILL = ("ring",)
"""What has values of a tile in memory, outside its loops, untraced too; test_compile.py knows of the traced."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """What 128 experts shall reach with `wide`: at least the bound of "share", at most that of other figures."""

    kernel: str
    load: str
    figure: str
    h100: float
    h200: float

    def bound(self, gpu: str) -> float | None:
        return self.h100 if "H100" in gpu else self.h200 if "H200" in gpu else None

    def is_met(self, figure: float, bound: float) -> bool:
        return figure >= bound if self.figure == "share" else figure <= bound

    def text(self, bound: float) -> str:
        return {
            "share": f">= {100 * bound:.0f} %",
            "off_us": f"<= {bound:.0f} us",
            "of_even": f"<= {bound:.1f} of even",
        }[self.figure]


GOAL_EXPERTS, GOAL_STAGING = 128, "wide"
GOALS = (
    Goal("k2", "1", "share", 0.95, 0.92),
    Goal("k4", "1", "share", 0.95, 0.90),
    Goal("k2", "8", "share", 0.92, 0.90),
    Goal("k4", "8", "share", 0.90, 0.88),
    Goal("k2", "16", "share", 0.85, 0.72),
    Goal("k4", "16", "share", 0.85, 0.72),
    Goal("k2", "64", "off_us", 750, 750),
    Goal("k4", "64", "off_us", 400, 400),
    Goal("k2", ZIPF, "of_even", 1.2, 1.3),
    Goal("k4", ZIPF, "of_even", 1.2, 1.3),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+")
    parser.add_argument("--loads", nargs="+", choices=LOADS, help="tokens of each expert, or zipf")
    parser.add_argument("--quick", action="store_true", help="8 and 64 tokens and zipf, of 128 experts")
    parser.add_argument("--calls", type=int, default=20, help="timed rounds, and timed pairs")
    parser.add_argument("--detail", type=int, default=0, help="traced: record the steps of every so many-th tile")
    parser.add_argument("--clock", choices=("realtime", "cycles"), default="realtime", help="traced: of the records")
    options = parser.parse_args()
    options.experts = options.experts or ([128] if options.quick else [48, 128])
    options.loads = options.loads or (QUICK_LOADS if options.quick else LOADS)
    require_gpus(1)
    rows: list[Row] = []
    reads: list[Row] = []
    for experts in options.experts:
        for kernel in KERNELS:
            measure_kernel(kernel, experts, options, rows, reads)
    compare_with_even(rows)
    missed = compare_with_goals(rows, gpu_name())
    used = resources()
    print_reads(reads)
    print_table(rows)
    for row in used:
        print(f"  {row['stage']} {row['staging']}: {row['registers']} registers, {row['local_bytes']} bytes of stack")
    if goals := sum("goal" in row for row in rows):
        print(f"  goals of {gpu_name()}: {missed} of {goals} missed")
    zipf = {str(experts): int4_load.zipf_counts(experts) for experts in options.experts}
    about = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "zipf": zipf, "resources": used, "reads": reads}
    name = "int4_sparse" + (f"_detail_{options.detail}" if options.detail else "")
    write_results(name, about | {"rows": rows}, 1)
    return 1 if complaints(rows, reads, used) else 0


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def complaints(rows: list[Row], reads: list[Row], used: list[Row]) -> int:
    """Says what makes this run none that counts. Returns how much there is."""
    found = [
        f"{row['kernel']} {row['staging']}, {row['experts']} experts, load {row['load']}: other bits than direct"
        for row in rows
        if not row["same_bits"]
    ]
    found += [f"prepare_weights() refuses {name}: other bits than direct" for row in reads for name in row["refused"]]
    found += [
        f"{row['stage']} {row['staging']} has a stack or spills"
        for row in used
        if row["local_bytes"] and row["staging"] not in MAY_SPILL
    ]
    if unrecorded := sum(row.get("unrecorded", 0) for row in rows):
        found.append(f"{unrecorded} traced launches found no room and ran unrecorded: not a measurement")
    for line in found:
        print(f"int4_sparse: {line}")
    return len(found)


def resources() -> list[Row]:
    """What each kernel takes of an SM."""
    from tracekern import _cuda
    from tracekern.moe.gemm.kernels import FACTS, product_stages

    rows = []
    for kernel in KERNELS:
        for staging in stagings_here():
            for stage in product_stages(kernel, staging, FACTS.few_tokens + 1):
                registers, local_bytes = _cuda.families["gemm"].resources(stage, staging)
                rows.append({"stage": stage, "staging": staging, "registers": registers, "local_bytes": local_bytes})
    return rows


def measure_kernel(kernel: str, experts: int, options: argparse.Namespace, rows: list[Row], reads: list[Row]) -> None:
    """Adds how long a read of the weights takes, and a row for each load and staging."""
    weights = Weights(kernel, experts, stagings_here())
    read, about_read = fastest_read(weights.words, options.calls)
    reads.append({"kernel": kernel, "experts": experts, **about_read, "refused": weights.refused})
    for name in options.loads:
        rows += measure(Case(weights, Load.of(name, experts)), read, options)


def measure(case: Case, read: Any, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each staging."""
    differing = case.differing()
    grouped, why_not = case.grouped_mm()
    starts = {"read": read} | {name: product.start for name, product in case.products.items()}
    if grouped is not None:
        starts["grouped"] = grouped
    times = in_turns(starts, options.calls)
    about = {"kernel": case.weights.kernel, "experts": case.weights.experts, "load": case.load.name}
    about |= {"num_rows": sum(case.load.counts), "most_rows": max(case.load.counts)}
    about |= spread("read_us", times["read"])
    about |= {"grouped_error": why_not} if grouped is None else spread("grouped_us", times["grouped"])
    for name, product in case.products.items():
        row = {**about, "staging": name, "stages": product.stages, "same_bits": name not in differing}
        row |= spread("off_us", times[name])
        row["share"] = row["read_us"] / row["off_us"]
        yield row | (traced(product, options) if name in TRACED else {})


def traced(product: Product, options: argparse.Namespace) -> Row:
    """Pairs of untraced and traced calls under one capture."""
    from tracekern.record.session import capture

    how: Row = {"device": int4_load.DEVICE, "clocks": False, "clock": options.clock, "sink": "device"}
    product.record_steps(options.detail)
    with tempfile.TemporaryDirectory() as directory, capture(directory, **how, max_bytes=1 << 30) as session:
        with session.counting():
            timed_us(lambda: product.start(session))
        pairs = []
        for _ in range(WARM_UP + options.calls):
            off_us = timed_us(product.start)
            pairs.append((off_us, timed_us(lambda: product.start(session))))
        unrecorded = int(session.segment.header["launches_refused"])
    product.record_steps(0)
    off, on = zip(*pairs[WARM_UP:], strict=True)
    row = {"unrecorded": unrecorded, **spread("paired_off_us", off), **spread("on_us", on)}
    return row | {"on_over_off": row["on_us"] / row["paired_off_us"]}


def compare_with_even(rows: list[Row]) -> None:
    """Gives rows of zipf their time over that of as many rows in even shares."""
    same = ("kernel", "experts", "staging")
    even = {tuple(row[name] for name in same): row["off_us"] for row in rows if row["load"] == EVEN}
    for row in rows:
        found = even.get(tuple(row[name] for name in same))
        if row["load"] == ZIPF and found is not None:
            row["of_even"] = row["off_us"] / found


def compare_with_goals(rows: list[Row], gpu: str) -> int:
    """Gives rows their goal, and whether it is met. Returns how many are missed."""
    missed = 0
    goals = {(goal.kernel, goal.load): goal for goal in GOALS}
    for row in rows:
        goal = goals.get((row["kernel"], row["load"]))
        if goal is None or (row["experts"], row["staging"]) != (GOAL_EXPERTS, GOAL_STAGING):
            continue
        bound = goal.bound(gpu)
        if bound is None or goal.figure not in row:
            continue
        is_met = goal.is_met(row[goal.figure], bound)
        row |= {"goal": goal.text(bound), "goal_met": is_met}
        missed += not is_met
    return missed


def print_reads(reads: list[Row]) -> None:
    for row in reads:
        others = ", ".join(f"{way} {us:.1f}" for way, us in row["ways_us"].items())
        weights = f"{row['kernel']} of {row['experts']} experts: {row['bytes'] / 1e6:.0f} MB"
        print(f"{weights}, read in {row['read_us']:.1f} us, {row['gb_per_s']:.0f} GB/s, by {row['way']} (us: {others})")


def print_table(rows: list[Row]) -> None:
    title = (
        f"int4 experts, hidden {HIDDEN}, intermediate {INTERMEDIATE}, device time with a cold L2; grouped: "
        "torch._grouped_mm of dense bf16 weights, for K2 gate and up in one product without silu"
    )
    columns = ["experts", "tokens", "kernel", "staging", "off us", "p10..p90", "read us", "share"]
    table = Table(title, [*columns, "grouped us", "of even", "on/off", "goal"])
    for row in sorted(rows, key=lambda row: (row["experts"], LOADS.index(row["load"]))):
        goal = f"{row['goal']} {'met' if row['goal_met'] else 'MISSED'}" if "goal" in row else ""
        table.add(
            str(row["experts"]),
            row["load"],
            row["kernel"],
            row["staging"],
            f"{row['off_us']:.1f}",
            f"{row['off_us_p10']:.1f}..{row['off_us_p90']:.1f}",
            f"{row['read_us']:.1f}",
            f"{100 * row['share']:.0f} %",
            f"{row['grouped_us']:.1f}" if "grouped_us" in row else "none",
            f"{row['of_even']:.2f}" if "of_even" in row else "",
            f"{row['on_over_off']:.3f}" if "on_over_off" in row else "",
            goal,
        )
    table.print()
    for why in sorted({row["grouped_error"] for row in rows if "grouped_error" in row}):
        print(f"  grouped none: {why}")


if __name__ == "__main__":
    sys.exit(main())

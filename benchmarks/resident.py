"""Whether a report names the rank that was late, of ranks resident on one GPU: captures in each of which another is.

    python benchmarks/resident.py [--ranks 8] [--captures 20] [--late-us 300] [--variants balanced pipelined]

In one process, one capture after the other: three calls, of which one rank's kernels begin `late-us` behind those of
the others. Counts the captures whose report says that this rank, and no other, costs most. Three calls can be described
and not judged, so it is the largest cost that counts, of 1 % of the run or more. The last captures have no late rank:
there all ranks are alike. Prints a table and writes JSON. Exits with 1 unless the late rank cost most each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, require_gpus, write_results

SHAPE = {"max_tokens": 32, "hidden": 2048, "num_experts": 64, "topk": 4, "dtype": "bf16"}
CALLS = 3
CONTROLS = 5
"""Captures without a late rank."""
OPTIONS = "TRACEKERN_RESIDENT_OPTIONS"
"""Environment variable: the plan of measure_variant() for its ranks, as JSON."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--captures", type=int, default=20)
    parser.add_argument("--late-us", type=int, default=300)
    parser.add_argument("--variants", nargs="+", default=["balanced", "pipelined"])
    options = parser.parse_args()
    require_gpus(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for variant in options.variants:
            rows += measure_variant(options, variant, Path(directory) / variant)
    print_table(options, rows)
    about = {"shape": SHAPE, "ranks": options.ranks, "late_us": options.late_us, "placement": "resident on one GPU"}
    write_results("resident", {**about, "rows": rows}, 1)
    return 1 if any(row["named"] != row["late"] for row in rows if row["late"] is not None) else 0


def measure_variant(options: argparse.Namespace, variant: str, directory: Path) -> list[dict[str, Any]]:
    from tracekern.launcher.launch import launch_ranks

    draw = random.Random(1)
    late = [draw.randrange(options.ranks) for _ in range(options.captures)] + [None] * CONTROLS
    plan = {"variant": variant, "late": late, "late_us": options.late_us, "directory": str(directory)}
    lines: list[str] = []
    exits = launch_ranks(
        options.ranks,
        f"{Path(__file__).stem}:record",
        env={
            OPTIONS: json.dumps(plan),
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
        on_line=lambda _, line: lines.append(line),
        timeout_s=300,
        resident=True,
    )
    if any(end.returncode for end in exits):
        raise RuntimeError("\n".join(lines[-40:]))
    return [{"variant": variant, "late": rank, **read(directory / str(idx))} for idx, rank in enumerate(late)]


def record() -> None:
    """One resident rank: makes all captures."""
    from tracekern.comm.ranks.group import Group
    from tracekern.moe.experts import draw_experts
    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape
    from tracekern.record.session import capture

    plan = json.loads(os.environ[OPTIONS])
    group = Group.discover()
    shape = MoeShape(num_ranks=group.num_ranks, **SHAPE)
    pipeline = P2PPipeline(group, shape, plan["variant"], backend="cuda")
    experts = draw_experts(shape).to("cuda")
    batches = [
        draw_batch(shape, seed=1, rank=group.rank, iteration=idx, routing="uniform", uneven=True).to("cuda")
        for idx in range(CALLS)
    ]
    for batch in batches:  # what the first calls load is no part of what is judged
        pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
    pipeline.synchronize()
    for idx, late in enumerate(plan["late"]):
        pipeline.late_us = plan["late_us"] if group.rank == late else 0
        with capture(Path(plan["directory"], str(idx)), device=pipeline.comm.device, max_bytes=1 << 26) as session:
            pipeline.comm.barrier(session)
            for batch in batches:
                pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)
                pipeline.synchronize()


def read(directory: Path) -> dict[str, Any]:
    """What the report of a capture says first."""
    import tracekern
    from tracekern.analysis.findings import analyze
    from tracekern.analysis.why.answer import MIN_SHARE
    from tracekern.viewers.report.causes import name_candidate

    timeline = tracekern.load(directory)
    answer = analyze(timeline).answer
    worth_it = [cost for cost in answer.costs if cost.saving.whole_ns >= MIN_SHARE * answer.makespan_ns]
    first = worth_it[0] if worth_it else None
    return {
        "named": first.candidate.rank if first else None,
        "cause": name_candidate(first.candidate) if first else "",
        "saved_ns": first.saving.whole_ns if first else 0.0,
        "share": round(first.saving.whole_ns / answer.makespan_ns, 3) if first else 0.0,
        "clock_hard_ns": max(rank.clock.hard_ns for rank in timeline.ranks),
        "contradictions": sum(problem.kind.startswith("flow") for problem in timeline.problems),
    }


def print_table(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    title = f"{options.ranks} ranks resident on one GPU, one of them {options.late_us} us late in each call"
    table = Table(title, ["variant", "late rank", "named", "first cause", "of the run"])
    for row in rows:
        late, named = ("none" if row[key] is None else str(row[key]) for key in ("late", "named"))
        table.add(row["variant"], late, named, row["cause"], f"{row['share']:.1%}")
    table.print()
    for variant in options.variants:
        late = [row for row in rows if row["variant"] == variant and row["late"] is not None]
        named = sum(row["named"] == row["late"] for row in late)
        free = [row for row in rows if row["variant"] == variant and row["late"] is None]
        print(f"{variant}: late rank named {named} of {len(late)}; without one, a rank named", end=" ")
        print(f"{sum(row['named'] is not None for row in free)} of {len(free)}")


if __name__ == "__main__":
    sys.exit(main())

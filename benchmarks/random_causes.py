"""Is what was injected charged to it, in simulated runs drawn at random? benchmarks/causes.py has chosen ones.

    python benchmarks/random_causes.py
    python benchmarks/random_causes.py --seed 2 --cases 300

Draws shape, ranks (2 to 32), iterations (1 to 50), noise (0 to 6 %), size of the work, and what is injected: slow work,
moving work, a slow link or a late host, of at least 5 us and 3 standard deviations of the work. Left out are draws in
which the others hardly wait for it. Scores and bounds are those of benchmarks/causes.py, of one run each. Writes
benchmarks/results/random_causes.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

from causes import is_in_bounds
from harness import Table, write_results
from simulator import Case, Drain, Injection, LateHost, Latency, MovingWork, Shape, SlowWork, score

MIN_NS = 5_000
MIN_SIGMAS = 3
MOST_RANKS = {Shape.EXCHANGE: 12}  # messages and warps grow with the square of the ranks


def draw_case(draw: random.Random) -> Case:
    """One case of the domain in which the analysis promises something."""
    shape = draw.choice(list(Shape))
    num_ranks = round(2 * 2 ** draw.uniform(0, 4))
    case = Case(
        shape,
        min(num_ranks, MOST_RANKS.get(shape, num_ranks)),
        iterations=round(50 ** draw.random()),
        noise=draw.choice([0.0, draw.uniform(0, 0.06)]),
        is_persistent=draw.random() < 0.3,
        work_ns=round(5_000 * 8 ** draw.random()),
    )
    least_ns = max(MIN_NS, MIN_SIGMAS * case.noise * case.work_ns)
    return dataclasses.replace(case, injections=(_draw_injection(draw, case, round(least_ns * 8 ** draw.random())),))


def _draw_injection(draw: random.Random, case: Case, ns: int) -> Injection:
    rank = draw.randrange(case.num_ranks)
    choices: list[Injection] = [SlowWork(ns, rank=rank)] * 2
    if not case.is_persistent:
        choices.append(LateHost(ns, rank=rank))
    if case.shape is Shape.BARRIER and case.iterations >= case.num_ranks:
        choices.append(MovingWork(ns, num_ranks=case.num_ranks))
    if case.shape is Shape.EXCHANGE and case.num_ranks > 2:
        peer = (rank + draw.randrange(1, case.num_ranks)) % case.num_ranks
        choices += [Latency(ns, source=rank, destination=peer), Drain(ns, source=rank, destination=peer)]
    return draw.choice(choices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    rows = [_judge(draw_case(draw), draw.randrange(1 << 30)) for _ in range(arguments.cases)]
    waited_for = [row for row in rows if row["is_waited_for"]]
    missed = [row for row in waited_for if not row["met"]]
    columns = ["shape", "ranks", "iterations", "noise", "injected", "E, us", "score", "D / E", "elsewhere"]
    table = Table(
        f"{len(missed)} of {len(waited_for)} cases out of bounds; {len(rows) - len(waited_for)} hardly wait", columns
    )
    for row in missed:
        about = (str(row[key]) for key in ("shape", "ranks", "iterations"))
        figures = (f"{row[key]:.2f}" for key in ("score", "ratio", "elsewhere"))
        table.add(*about, f"{row['noise']:.1%}", row["injected"], f"{row['caused_ns'] / 1000:.1f}", *figures)
    table.print()
    counts = {"cases": len(waited_for), "met": len(waited_for) - len(missed)}
    lowest = min((row["score"] for row in waited_for), default=1.0)
    write_results(
        "random_causes",
        {"seed": arguments.seed, "drawn": len(rows), **counts, "lowest_score": lowest, "missed": missed},
    )


def _judge(case: Case, seed: int) -> dict[str, Any]:
    injection = case.injections[0]
    with tempfile.TemporaryDirectory() as directory:
        scored = score(case, seed, Path(directory))
    is_waited_for = scored.caused_ns >= injection.ns * case.iterations
    row = {
        "shape": case.shape.value,
        "ranks": case.num_ranks,
        "iterations": case.iterations,
        "noise": case.noise,
        "is_persistent": case.is_persistent,
        "work_ns": case.work_ns,
        "injected": str(injection),
        "seed": seed,
        "caused_ns": scored.caused_ns,
        "is_waited_for": is_waited_for,
    }
    if not is_waited_for:
        return row
    met = is_in_bounds(scored.score, scored.ratio, scored.elsewhere)
    return {**row, "score": scored.score, "ratio": scored.ratio, "elsewhere": scored.elsewhere, "met": met}


if __name__ == "__main__":
    main()

"""Is a cause's cost what the run would save, and is the right cause named? Simulated runs, whose truth is known.

    python benchmarks/causes.py                      # all of it: some five minutes on two cores
    python benchmarks/causes.py --only ring --seeds 7 8 9
    python benchmarks/causes.py --chance 100         # fewer runs with noise alone

Costs: each case runs with and without what is injected, of the same seed. Truth: by how much its makespan is longer.
Cost: what the analysis says that the run would save without it. Both are summed over the seeds; "named" counts the runs
that name what was injected and nothing else. Where hosts run ahead, truth has to lie between the two costs that are
said; where one rank has less than all others, or nothing is injected, nobody may be named. Chance: how many runs with
noise alone, of all shapes, name anything.
Writes benchmarks/results/causes.json; exits with 1 where a figure is out of its bounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results
from simulator import (
    Case,
    Drain,
    Injection,
    LateHost,
    Latency,
    MoreWork,
    Noise,
    Shape,
    SlowPause,
    SlowWarp,
    SlowWork,
    simulate,
)

import tracekern
from tracekern.analysis.findings import analyze
from tracekern.analysis.why.answer import Answer
from tracekern.analysis.why.candidates import Candidate, CauseKind
from tracekern.errors import BadInput

RATIO = 0.95, 1.05
MAX_CHANCE = 0.01
MIN_HITS = 4
"""The fewest hits of a habit; fewer are an incident."""
DELAY_NS = 5_000
_JUMPS_NS = (300, 3_000, 20_000)


@dataclass(frozen=True)
class Row:
    name: str
    case: Case
    names_nobody: bool = False


def cost_cases() -> list[Row]:
    """Returns the cases that are judged. They were written beside the analysis, which was tuned on some of them."""
    slow, late = SlowWork(DELAY_NS, rank=1), LateHost(20 * DELAY_NS, rank=1)
    latency, drain = (kind(DELAY_NS, source=1, destination=3) for kind in (Latency, Drain))
    real = Case(Shape.PIPELINE, 4, 10, num_warps=128)
    once = SlowWork(40 * DELAY_NS, rank=1, iterations=(4,))
    all_but_one = tuple(SlowWork(2 * DELAY_NS, rank=rank) for rank in range(8) if rank != 4)
    rows = [
        *(
            Row(f"chain of {n}", Case(Shape.CHAIN, n, 10, (SlowWork(DELAY_NS + 200 * n, rank=0),)))
            for n in (2, 8, 16, 32)
        ),
        *(Row(f"stream of {n}", Case(Shape.STREAM, n, 20, (SlowWork(DELAY_NS, rank=0),))) for n in (2, 8, 32)),
        Row("ring", Case(Shape.RING, 8, 10, (slow,))),
        Row("ring, 20 us more", Case(Shape.RING, 8, 10, (SlowWork(4 * DELAY_NS, rank=1),))),
        Row("credits", Case(Shape.CREDITS, 8, 50, (slow,))),
        Row("barrier of 32", Case(Shape.BARRIER, 32, 10, (slow,))),
        Row("exchange", Case(Shape.EXCHANGE, 8, 10, (slow,))),
        Row("persistent stream", Case(Shape.STREAM, 8, 50, (slow,), is_persistent=True)),
        Row("persistent ring", Case(Shape.RING, 8, 50, (slow,), is_persistent=True)),
        Row("persistent credits", Case(Shape.CREDITS, 8, 50, (slow,), is_persistent=True)),
        Row("persistent exchange", Case(Shape.EXCHANGE, 4, 20, (slow,), is_persistent=True)),
        Row("once, persistent ring", Case(Shape.RING, 8, 50, (once,), is_persistent=True)),
        Row("once, exchange", Case(Shape.EXCHANGE, 4, 10, (once,))),
        Row("in 2 of 50", Case(Shape.BARRIER, 8, 50, (replace(once, iterations=(13, 37)),))),
        *_sets_and_patterns(),
        Row("late host, exchange", Case(Shape.EXCHANGE, 4, 10, (late,))),
        Row("late host, barrier", Case(Shape.BARRIER, 8, 10, (LateHost(DELAY_NS, rank=1),))),
        Row("slow flags", Case(Shape.EXCHANGE, 4, 20, (latency,))),
        Row("slow stores", Case(Shape.EXCHANGE, 4, 10, (drain,))),
        Row("slow stores, persistent", Case(Shape.EXCHANGE, 4, 20, (drain,), is_persistent=True)),
        Row("outside spans", Case(Shape.BARRIER, 4, 10, (SlowPause(DELAY_NS, rank=2),), pause_ns=3_000)),
        Row("real: slow rank", replace(real, injections=(SlowWork(1_000, rank=1),))),
        Row("real: slow warp", replace(real, injections=(SlowWarp(DELAY_NS, rank=1, warp=0),))),
        Row("real: slow warp, not the polling one", replace(real, injections=(SlowWarp(DELAY_NS, rank=1, warp=77),))),
        Row("real: more tokens", replace(real, injections=(MoreWork(rank=1),))),
        Row("real: late host that synchronises", replace(real, injections=(late,), launch_ns=10_000)),
        Row("real: late host, others ahead", replace(real, injections=(late,))),
        Row("real: uneven tokens, late host", replace(real, injections=(late,), is_uneven=True)),
        Row("real: slow stores", replace(real, injections=(drain,))),
        Row("real: once", replace(real, injections=(once,))),
        Row("real: uneven tokens, nothing slow", replace(real, is_uneven=True), names_nobody=True),
        Row("real: uneven tokens, one has more", replace(real, injections=(MoreWork(rank=1),), is_uneven=True)),
        Row("all slow but rank 4, barrier", Case(Shape.BARRIER, 8, 20, all_but_one), names_nobody=True),
        Row("all slow but rank 4, exchange", Case(Shape.EXCHANGE, 8, 20, all_but_one), names_nobody=True),
        *_ahead(real),
        Row("two late hosts", Case(Shape.EXCHANGE, 6, 10, (late, LateHost(14 * DELAY_NS, rank=2)))),
        Row("two slow ranks", Case(Shape.BARRIER, 8, 20, (slow, SlowWork(DELAY_NS, rank=5)))),
        Row(
            "slow rank hides a late host",
            Case(Shape.RING, 8, 20, (SlowWork(4 * DELAY_NS, rank=1), LateHost(2 * DELAY_NS, rank=5))),
        ),
        Row(
            "slow link hides a slow rank",
            Case(Shape.EXCHANGE, 4, 20, (Drain(2 * DELAY_NS, source=1, destination=3), SlowWork(DELAY_NS, rank=0))),
        ),
    ]
    return [replace(row, case=replace(row.case, noise=noise)) for noise in (0.0, 0.05) for row in rows]


def _sets_and_patterns() -> list[Row]:
    """Several ranks or links alike, and causes that come and go."""
    half = tuple(SlowWork(DELAY_NS, rank=rank) for rank in (0, 2, 5, 7))
    several = tuple(SlowWork(DELAY_NS, rank=rank) for rank in (1, 4, 6, 9, 12))
    out = tuple(Latency(4 * DELAY_NS, source=5, destination=peer) for peer in range(8) if peer != 5)
    late, every = tuple(range(12, 30)), tuple(range(1, 30, 4))
    return [
        Row("5 of 16 ranks", Case(Shape.BARRIER, 16, 12, several)),
        Row("all links out of a rank", Case(Shape.EXCHANGE, 8, 12, out)),
        Row("from iteration 12 on", Case(Shape.BARRIER, 8, 30, (SlowWork(DELAY_NS, rank=2, iterations=late),))),
        Row("every 4th iteration", Case(Shape.BARRIER, 8, 30, (SlowWork(3 * DELAY_NS, rank=2, iterations=every),))),
        Row("half of the ranks", Case(Shape.BARRIER, 8, 12, half), names_nobody=True),
    ]


def _ahead(real: Case) -> list[Row]:
    """Hosts that wait for nothing. The first and the last two launch more slowly than the device works."""
    ahead = {"hosts_run_ahead": True, "has_host_lane": True}
    slower, later = SlowWork(2 * DELAY_NS, rank=1), LateHost(4 * DELAY_NS, rank=1)
    late = LateHost(20 * DELAY_NS, rank=1)
    return [
        Row("hosts ahead, slow rank", Case(Shape.BARRIER, 4, 20, (slower,), launch_ns=28_000, **ahead)),
        Row("hosts ahead, late host", Case(Shape.BARRIER, 4, 20, (later,), launch_ns=28_000, **ahead)),
        Row("hosts ahead in time, slow rank", Case(Shape.EXCHANGE, 4, 20, (slower,), launch_ns=3_000, **ahead)),
        Row("hosts ahead in time, late host", Case(Shape.EXCHANGE, 4, 20, (later,), launch_ns=7_000, **ahead)),
        Row(
            "real: hosts ahead, slow rank",
            replace(real, injections=(SlowWork(3_000, rank=1),), launch_ns=12_000, **ahead),
        ),
        Row("real: hosts ahead, late host", replace(real, injections=(late,), launch_ns=12_000, **ahead)),
    ]


def candidates_of(injections: tuple[Injection, ...]) -> set[Candidate]:
    """Returns the candidates that are right to name."""
    right = set()
    links = [entry for entry in injections if isinstance(entry, (Latency, Drain))]
    if len({entry.source for entry in links}) == 1 < len(links):
        return {Candidate(CauseKind.LINKS_OUT, links[0].source)}
    for entry in injections:
        if isinstance(entry, (Latency, Drain)):
            right.add(Candidate(CauseKind.LINK, entry.source, entry.destination))
        else:
            kind = {LateHost: CauseKind.HOST, MoreWork: CauseKind.AMOUNT}.get(type(entry), CauseKind.PACE)
            right.add(Candidate(kind, entry.rank))
    return right


def answer_of(case: Case, seed: int) -> tuple[Answer, float]:
    """Returns the answer for a run, and its true makespan in ns."""
    with tempfile.TemporaryDirectory() as directory:
        truth = simulate(case, seed, Path(directory))
        return analyze(tracekern.load(truth.directory)).answer, truth.makespan_ns


def told_by(answer: Answer, case: Case) -> set[Candidate]:
    """Returns what is named, each rank by itself; of a case with few hits what its incidents are."""
    few = any(0 < len(entry.iterations) < MIN_HITS for entry in case.injections)
    found = [one.candidate for one in (answer.incidents if few and not answer.causes else answer.causes)]
    return {Candidate(one.kind, rank, one.peer) for one in found for rank in one.ranks}


def judge(row: Row, seeds: list[int]) -> dict[str, Any]:
    truth_ns = cost_ns = least_ns = 0.0
    num_right = num_wrong = 0
    right = set() if row.names_nobody else candidates_of(row.case.injections)
    for seed in seeds:
        answer, makespan_ns = answer_of(row.case, seed)
        with tempfile.TemporaryDirectory() as directory:
            truth_ns += makespan_ns - simulate(row.case.without_injections(), seed, Path(directory)).makespan_ns
        named = told_by(answer, row.case)
        num_right += named == right
        num_wrong += bool(named - right)
        if answer.causes:
            cost_ns += answer.causes[-1].together_ns
            least_ns += answer.causes[-1].together_at_least_ns or 0.0
        else:
            cost_ns += sum(incident.saving.whole_ns for incident in answer.incidents)
    case = row.case
    about = {"case": row.name, "ranks": case.num_ranks, "iterations": case.iterations, "noise": case.noise}
    figures = {"right": num_right, "wrong": num_wrong, "runs": len(seeds)}
    met = num_right == len(seeds)
    if right:
        ratio = cost_ns / truth_ns
        figures = {"truth_ns": truth_ns / len(seeds), "ratio": ratio, **figures}
        least = ratio
        if case.hosts_run_ahead:
            least = figures["least_ratio"] = least_ns / truth_ns
        met = met and ratio >= RATIO[0] and least <= RATIO[1]
    return {**about, **figures, "met": bool(met)}


def draw_noise(seed: int) -> Case:
    """A run with noise alone."""
    rng = np.random.default_rng([seed, 42])
    shape = list(Shape)[seed % len(Shape)]
    size = {"num_ranks": int(rng.choice([2, 4, 8])), "iterations": int(rng.choice([8, 10, 20, 50]))}
    if shape is Shape.PIPELINE:
        size = {"num_ranks": 4, "iterations": int(rng.choice([8, 10])), "num_warps": 16}
    kind = list(Noise)[int(rng.integers(len(Noise)))]
    launch_ns = int(rng.choice([0, 10_000]))
    persistent = bool(rng.random() < 0.2)
    noise = float(rng.choice([0.01, 0.03, 0.06, 0.15]))
    return Case(
        shape,
        noise=noise,
        noise_kind=kind,
        launch_ns=launch_ns,
        is_persistent=persistent,
        is_uneven=bool(rng.random() < 0.5),
        **size,
    )


def draw_jump(seed: int) -> Case:
    """A run with little noise, in the middle of which the clock of a rank jumps."""
    return replace(draw_noise(seed), noise=0.03, noise_kind=Noise.NORMAL, jump_ns=_JUMPS_NS[seed % len(_JUMPS_NS)])


def named_by_chance(case: Case, seed: int) -> str:
    """What a run names; "" for nothing, as of a run whose clock jumps so far that its capture is refused."""
    try:
        answer, _ = answer_of(case, seed)
    except BadInput:
        return ""
    return "; ".join(f"{cause.candidate} {cause.finding} saves {cause.saving.whole_ns:.0f}" for cause in answer.causes)


def _count_named(what: str, cases: list[Case], seeds: list[int], pool: ProcessPoolExecutor) -> dict[str, Any]:
    found = list(pool.map(named_by_chance, cases, seeds, chunksize=4))
    named = [
        {"case": str(case), "seed": seed, "named": text}
        for case, seed, text in zip(cases, seeds, found, strict=True)
        if text
    ]
    return {"what": what, "runs": len(cases), "named": len(named), "which": named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--chance", type=int, default=1000, help="runs with noise alone")
    parser.add_argument("--name", default="causes", help="of the file in benchmarks/results")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        rows = list(
            pool.map(
                judge,
                *zip(*((row, arguments.seeds) for row in cost_cases() if arguments.only in row.name), strict=True),
            )
        )
        seeds = list(range(arguments.chance))
        chance = [
            _count_named("noise alone", [draw_noise(seed) for seed in seeds], seeds, pool),
            _count_named(
                "a clock jumps", [draw_jump(seed) for seed in seeds[: len(seeds) // 5]], seeds[: len(seeds) // 5], pool
            ),
        ]
    table = Table(
        "cost of what was injected",
        [
            "case",
            "ranks",
            "iterations",
            "noise",
            "truth, us",
            "at least / truth",
            "cost / truth",
            "named",
            "wrong",
            "met",
        ],
    )
    for row in rows:
        about = row["case"], str(row["ranks"]), str(row["iterations"]), f"{row['noise']:.0%}"
        named = f"{row['right']} of {row['runs']}"
        table.add(
            *about,
            f"{row['truth_ns'] / 1000:.1f}" if "ratio" in row else "-",
            *(f"{row[key]:.3f}" if key in row else "-" for key in ("least_ratio", "ratio")),
            named,
            str(row["wrong"]),
            "yes" if row["met"] else "NO",
        )
    table.print()
    by_chance = Table("named by chance", ["what", "runs", "named"])
    for entry in chance:
        by_chance.add(entry["what"], str(entry["runs"]), str(entry["named"]))
    by_chance.print()
    write_results(arguments.name, {"seeds": arguments.seeds, "cases": rows, "chance": chance})
    good = all(row["met"] for row in rows) and all(entry["named"] <= MAX_CHANCE * entry["runs"] for entry in chance)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

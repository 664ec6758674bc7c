"""Do the bounds of clocks hold where clocks jump, change their rate or are sampled over uneven paths?

    python benchmarks/clock_jumps.py              # 3,200 captures: 10 minutes on an idle core
    python benchmarks/clock_jumps.py --runs 40    # 1,880

Simulated clocks of 4 ranks, real dumps, the real merge: each capture is merged by this version and by that of an
earlier commit, and every event is held against the truth. Prints a table, writes benchmarks/results/clock_jumps.json,
and exits with 1 when an error is outside the bound and neither reported nor named as an assumption, or a nominal run
raises an alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness import ROOT, Table, write_results

BEFORE = "d932aa9"
ALARMS = ("clock_step", "contradicting_flows", "fit_outside_flows", "backwards_flow")
SIGMAS = 3.0
BATCH = 50
COUNTED = ("refused", "alarm", "assumes", "holds", "likely_holds")
TICKS_NS = 64
"""A stamp of either clock may be a tick of 32 ns late."""


@dataclass(frozen=True)
class Verdict:
    """What one version made of one capture: the worst rank's figures, ns."""

    refused: bool
    alarm: bool
    assumes: bool
    """The bound of a rank outside of which its error is rests on a stated assumption."""
    hard_ns: float
    likely_ns: float
    """Of the rank with the largest error."""
    error_ns: float
    holds: bool
    likely_holds: bool


def judge_all(directory: Path) -> None:
    """Prints a Verdict, as JSON, for each capture in a directory, by whatever version of tracekern is imported."""
    for capture in sorted(directory.iterdir()):
        print(json.dumps(asdict(judge(capture))), flush=True)


def judge(capture: Path) -> Verdict:
    import tracekern
    from tracekern.errors import BadInput
    from tracekern.timeline.clocks.fit import apply_clock

    truth = np.load(capture / "truth.npz")
    try:
        timeline = tracekern.load(capture)
    except BadInput:
        return Verdict(True, True, False, 0.0, 0.0, 0.0, True, True)
    fits = {rank.rank: rank.clock for rank in timeline.ranks}
    reference = next(rank for rank, fit in fits.items() if fit.method == "reference")
    alarm = any(problem.kind in ALARMS for problem in timeline.problems)
    rows = []
    for rank, fit in fits.items():
        off = apply_clock(fit, truth["ticks"][rank]) - truth["bases_ns"][reference] - truth["reading_ns"][reference]
        likely = min(fit.hard_ns, SIGMAS * fit.sigma_ns + getattr(fit, "doubt_ns", 0.0))
        if rank != reference:
            rows.append((float(np.abs(off).max()), fit.hard_ns, likely, not getattr(fit, "is_checked", True)))
    error_ns, hard_ns, likely_ns, _ = max(rows)
    outside = [row for row in rows if row[0] > row[1]]
    return Verdict(
        refused=False,
        alarm=alarm,
        assumes=bool(outside) and all(assumes for *_, assumes in outside),
        hard_ns=hard_ns,
        likely_ns=likely_ns,
        error_ns=error_ns,
        holds=not outside,
        likely_holds=all(error <= likely + TICKS_NS for error, _, likely, _ in rows),
    )


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Any, int, int]]:
    """(name, case, number of rounds, number of runs); 0 rounds: 3 to 6 of them."""
    from clock_captures import Case

    for flows in (False, True):
        said = ", flows" if flows else ""
        yield f"nominal{said}", Case(flows=flows), 0, options.nominal
        yield f"wander 0.3 ppm{said}", Case(wander=3e-7, flows=flows), 0, options.runs
        for jump_us in (0.5, 1.0, 1.1, 1.5, 3.0, 20.0):
            yield f"jump {jump_us:g} us{said}", Case(jump_ns=jump_us * 1e3, flows=flows), 0, options.runs
        for rate in (1e-6, 8e-6):
            yield f"rate step {rate * 1e6:g} ppm{said}", Case(rate_step=rate, flows=flows), 0, options.runs
        yield f"way 3 us longer{said}", Case(slower_ns=3e3, flows=flows), 0, options.runs
        yield f"2 rounds, jump 3 us{said}", Case(jump_ns=3e3, flows=flows), 2, options.runs


def checkout(directory: Path) -> Path:
    """The package as it was at BEFORE."""
    archive = subprocess.run(
        ["git", "archive", BEFORE, "tracekern", "viewers"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "x"], cwd=directory, input=archive.stdout, check=True)
    return directory


def run_case(case: Any, num_rounds: int, seeds: range, versions: dict[str, Path]) -> dict[str, list[Verdict]]:
    from clock_captures import write_case

    found: dict[str, list[Verdict]] = {name: [] for name in versions}
    for begin in range(seeds.start, seeds.stop, BATCH):
        with tempfile.TemporaryDirectory() as directory:
            for seed in range(begin, min(begin + BATCH, seeds.stop)):
                capture = Path(directory) / f"{seed:06}"
                truth = write_case(capture, case, seed, num_rounds or 3 + seed % 4)
                columns = {name: column for name, column in vars(truth).items() if isinstance(column, dict)}
                np.savez(
                    capture / "truth.npz", **{name: np.array(list(column.values())) for name, column in columns.items()}
                )
            for name, path in versions.items():
                command = [sys.executable, __file__, "--judge", directory]
                env = {**os.environ, "PYTHONPATH": str(path)}
                judged = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
                found[name] += [Verdict(**json.loads(line)) for line in judged.stdout.splitlines()]
    return found


def sum_up(verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts of runs, and [median, 95 %, largest] of the figures of their worst ranks, ns."""
    merged = [verdict for verdict in verdicts if not verdict.refused]
    counts = {name: sum(getattr(verdict, name) for verdict in verdicts) for name in COUNTED}
    figures = {
        name: [round(float(np.percentile([getattr(verdict, name) for verdict in merged], at))) for at in (50, 95, 100)]
        for name in ("error_ns", "hard_ns", "likely_ns")
    }
    return {"runs": len(verdicts), **counts, **figures}


def print_table(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    columns = ["ns: median / largest", "runs", "error", f"bound at {BEFORE}", "bound now"]
    columns += [f"{what} {when}" for what in ("holds", "likely holds", "alarm") for when in ("then", "now")]
    table = Table("clocks that jump: error and bound of the worst rank, and numbers of runs", [*columns, "assumed"])
    for name, of_case in results.items():
        before, after = of_case["before"], of_case["after"]
        ends = [f"{figures[0]} / {figures[2]}" for figures in (after["error_ns"], before["hard_ns"], after["hard_ns"])]
        counts = [str(side[field]) for field in ("holds", "likely_holds", "alarm") for side in (before, after)]
        table.add(name, str(after["runs"]), *ends, *counts, str(after["assumes"]))
    table.print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="of every case")
    parser.add_argument("--nominal", type=int, default=500, help="runs of the nominal cases")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        judge_all(options.judge)
        return 0
    results, is_sound = {}, True
    with tempfile.TemporaryDirectory() as directory:
        versions = {"before": checkout(Path(directory)), "after": ROOT}
        for number, (name, case, num_rounds, runs) in enumerate(cases(options)):
            first = options.first_seed + 100_000 * number
            found = run_case(case, num_rounds, range(first, first + runs), versions)
            results[name] = {when: sum_up(verdicts) for when, verdicts in found.items()}
            print(name, flush=True)
            is_sound &= all(verdict.holds or verdict.assumes for verdict in found["after"])
            is_sound &= not (name.startswith("nominal") and any(verdict.alarm for verdict in found["after"]))
    print_table(results)
    about = {"before": BEFORE, "first_seed": options.first_seed}
    write_results("clock_jumps", {**about, "cases": results})
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())

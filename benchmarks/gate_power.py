"""What does the gate catch, and when is it wrong? Simulated launches through the real check, before and after a change.

    python benchmarks/gate_power.py --before d932aa9     that commit's gate beside this one, on the same launches

The numbers of a launch are drawn; everything from them on (compare, verdicts, exit code) is the gate's own code, that
of the other commit in a process of its own. Needs numpy and git.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, Table, write_results

from tracekern.gate.ab import turns
from tracekern.gate.check import check
from tracekern.gate.compare import Rules, Verdict
from tracekern.gate.run import Run

METRICS = {
    "dispatch.copy_token.p50": 40_000.0,
    "dispatch.wait_token.p50": 20_000.0,
    "dispatch.wait_token.p99": 90_000.0,
    "dispatch.wait_token.wait_share": 0.3,
    "dispatch.wait_token.wait_per_iteration": 5e6,
    "combine.reduce_token.p50": 60_000.0,
    "end_to_end.p50": 900_000.0,
}
GROWN = "dispatch.copy_token.p50"
NEW = "wait_per_iteration"
CHECKS, EQUAL_CHECKS = 300, 2000
FIELDS = ("regressed", "undecided", "drift", "passed", "caught", "printed")


@dataclass(frozen=True)
class Case:
    name: str
    spread: float = 0.03
    """Of the launches' logarithms."""
    tail: str = "normal"
    """normal; t2: Student's t with 2 degrees of freedom; slow: each launch with p = .1 takes 1.3 to 4 times as long."""
    growth: float = 1.0
    grown_launches: int = 100
    side: int = 8
    drift: float = 0.0
    """Growth of everything, or of one metric, from launch to launch."""
    drifts: str = "all"
    alternating: bool = False
    speeds_up: bool = False
    """The work takes 15 % less time, the waits as long as before."""
    checks: int = CHECKS


CASES = (
    *(Case(f"equal, spread {s:.0%}", s, checks=EQUAL_CHECKS) for s in (0.01, 0.03, 0.1)),
    Case("equal, heavy tails", tail="t2", checks=EQUAL_CHECKS),
    Case("equal, slow launches", tail="slow", checks=EQUAL_CHECKS),
    Case("equal, 5 a side", side=5, checks=EQUAL_CHECKS),
    Case("equal, 5 a side, heavy tails", side=5, tail="t2", checks=EQUAL_CHECKS),
    *(
        Case(f"+15 %, spread {s:.0%}{', slow launches' * (t == 'slow')}", s, t, 1.15)
        for s in (0.01, 0.02, 0.03)
        for t in ("normal", "slow")
    ),
    Case("+15 %, spread 3%, heavy tails", tail="t2", growth=1.15),
    *(Case(f"+15 %, spread {s:.0%}, 5 a side", s, growth=1.15, side=5) for s in (0.01, 0.02, 0.03)),
    Case("+15 %, spread 2%, 5 a side, slow launches", 0.02, "slow", 1.15, side=5),
    Case("+30 %, spread 3%, slow launches", tail="slow", growth=1.3),
    Case("+30 %, spread 10%", 0.1, growth=1.3),
    Case("+30 %, spread 10%, 5 a side", 0.1, growth=1.3, side=5),
    *(Case(f"+30 % in {n} of 8 launches", growth=1.3, grown_launches=n) for n in (2, 3, 4, 6)),
    *(Case(f"equal, all drift 1 % a launch, spread {s:.0%}", s, drift=0.01) for s in (0.01, 0.02, 0.03)),
    *(Case(f"equal, one drifts 1 % a launch, spread {s:.0%}", s, drift=0.01, drifts=GROWN) for s in (0.01, 0.02, 0.03)),
    Case("equal, all drift 1 %, alternating", drift=0.01, alternating=True),
    Case("+15 %, all drift 1 %, alternating", drift=0.01, alternating=True, growth=1.15),
    Case("+15 %, all drift -1 % a launch", drift=-0.01, growth=1.15),
    *(Case(f"work -15 %, waits equal, spread {s:.0%}", s, speeds_up=True) for s in (0.01, 0.03)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="whose gate to judge the same launches with")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--most", type=int, default=EQUAL_CHECKS, metavar="N", help="checks of a case at most")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [replace(case, checks=min(case.checks, arguments.most)) for case in CASES if arguments.only in case.name]
    if arguments.worker:
        for case in cases:
            print(json.dumps(judge(case)), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="tracekern-gate-") as folder:
        worker = start_before(arguments, folder) if arguments.before else None
        after = [judge(case) for case in cases]
        lines = worker.communicate()[0].splitlines() if worker else ["{}"] * len(cases)
    if worker and worker.returncode:
        raise SystemExit(f"gate_power: the gate of {arguments.before} ended with {worker.returncode}, see above")
    rows = [
        {"case": case.name, "checks": case.checks, "before": json.loads(line), "after": new}
        for case, line, new in zip(cases, lines, after, strict=True)
    ]
    show(rows)
    if not arguments.only and arguments.most == EQUAL_CHECKS:
        write_results("gate_power", {"before": arguments.before or "", "rows": rows})


def start_before(arguments: argparse.Namespace, folder: str) -> subprocess.Popen[str]:
    """A process that imports the gate of that commit, unpacked into `folder`, and prints a line for each case."""
    archive = subprocess.run(
        ["git", "archive", arguments.before, "tracekern"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    command = [sys.executable, __file__, "--worker", "--only", arguments.only, "--most", str(arguments.most)]
    environment = {**os.environ, "PYTHONPATH": folder}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def judge(case: Case) -> dict[str, Any]:
    """Fractions of the checks: each exit code, the grown metric found, and how often the check said it would be."""
    rng = np.random.default_rng(abs(hash_of(case.name)))
    alternating = {"alternating": True} if case.alternating and hasattr(Rules, "alternating") else {}
    counts: Counter[str] = Counter()
    printed = []
    for _ in range(case.checks):
        base, head = draw(rng, case)
        report = check(head, base, rules=Rules(**alternating))
        comparison = report.comparison
        assert comparison is not None
        drift = any(problem.startswith("drift: ") for problem in comparison.problems)
        regressed = {change.metric for change in comparison.of(Verdict.REGRESSED)}
        outcome = ("passed", "regressed", "undecided")[int(report.outcome)]
        counts["drift" if drift else outcome] += 1
        counts["caught"] += GROWN in regressed and not drift
        printed += [getattr(c, "power", float("nan")) for c in comparison.changes if c.metric == GROWN]
    shares = {name: round(counts[name] / case.checks, 4) for name in FIELDS}
    mean = float(np.mean(printed))
    return {**shares, "printed": None if np.isnan(mean) or case.growth != 1.15 else round(mean, 4)}


def hash_of(text: str) -> int:
    """The same in every process, unlike hash()."""
    return int.from_bytes(text.encode()[-8:], "little") + len(text)


def draw(rng: np.random.Generator, case: Case) -> tuple[list[Run], list[Run]]:
    """Both sides of a check, in the order in which `tracekern ab` launches or one after the other."""
    total = 2 * case.side
    order = ["base"] * case.side + ["head"] * case.side
    if case.alternating:
        order = [turn.side for turn in turns(case.side, Path())]
    names = [name for name in METRICS if hasattr(Verdict, "NOT_JUDGED") or not name.endswith(NEW)]
    noise = (
        rng.standard_t(2, (total, len(METRICS))) if case.tail == "t2" else rng.standard_normal((total, len(METRICS)))
    )
    factors = np.exp(case.spread * noise)
    slow = np.where(rng.random(total) < 0.1 * (case.tail == "slow"), rng.uniform(1.3, 4, total), 1.0)
    sides: dict[str, list[Run]] = {"base": [], "head": []}
    for number, side in enumerate(order):
        values = {}
        for name, factor in zip(METRICS, factors[number], strict=True):
            scale = 1.0 if name.endswith("wait_share") else slow[number]
            scale *= (1 + case.drift) ** number if case.drifts in ("all", name) else 1.0
            if side == "head" and name == GROWN and len(sides[side]) < case.grown_launches:
                scale *= case.growth
            values[name] = min(METRICS[name] * factor * scale * speed_up(case, side, name), 1e17)
        chosen = {name: values[name] for name in names}
        sides[side].append(make_run(number, chosen))
    for runs in sides.values():
        rng.shuffle(runs)  # type: ignore[arg-type]  # as directories are named: their order says nothing
    return sides["base"], sides["head"]


def speed_up(case: Case, side: str, name: str) -> float:
    """What 15 % less work makes of a metric where the waits stay as they are."""
    if not case.speeds_up or side == "base":
        return 1.0
    if name.endswith("wait_share"):
        return 1 / 0.863
    return 0.863 if name.startswith("end_to_end") else 1.0 if "wait" in name else 0.85


def make_run(number: int, metrics: dict[str, float]) -> Run:
    return Run(
        source=f"launch {number}",
        run_id=str(number),
        created=f"2026-01-01T00:{number:02}:00+00:00",
        command="",
        device="simulated",
        backend="cuda",
        nodes=("node",),
        shape={"ranks": 8, "iterations": 11},
        metrics=metrics,
        spans={name.rpartition(".")[0]: 5000 for name in metrics},
        resolution_ns=32.0,
        probe_cost_ns=56.0,
        clock_hard_ns=900.0,
        aligned=True,
    )


def show(rows: list[dict[str, Any]]) -> None:
    columns = [field for field in FIELDS if field != "undecided"]
    titles = [f"{when} {field}" for field in columns[:-1] for when in ("before:", "after:")]
    table = Table("percent of the checks", [*titles, "printed", "case"])
    for row in rows:
        cells = [percent(row[when].get(field)) for field in columns[:-1] for when in ("before", "after")]
        table.add(*cells, percent(row["after"]["printed"]), row["case"])
    table.print()


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    main()

"""Does the gate keep its promises on real launches? Alarms where nothing changed, growth and losses it must notice.

    python benchmarks/gate.py --record 24 [--backend cuda --ranks 4 ...]    launches the program 24 times
    python benchmarks/gate.py                                               draws from all that is in traces/launches

Recording needs numpy and torch alone; it keeps every launch's numbers in traces/launches/<device>.json as they come.
Every file is judged. One of fewer than 20 launches shows nothing, whatever its numbers: they are printed, and called
not shown. Exits with 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Table, write_results

from tracekern.analysis.statistics import END_TO_END
from tracekern.errors import TracekernError
from tracekern.formatting import metric_value
from tracekern.gate import baseline
from tracekern.gate.check import check
from tracekern.gate.compare import Rules, Verdict, compare, floors, logarithms
from tracekern.gate.report import Outcome, size
from tracekern.gate.run import Run, read_run

LAUNCHES = Path(__file__).resolve().parent.parent / "traces" / "launches"
NUMBERS = ("ranks", "tokens", "hidden", "experts", "topk", "iterations", "blocks", "warps")
SHAPES = {"cpu": (4, 16, 65536, 16, 4, 10, 4, 4), "cuda": (4, 64, 7168, 64, 4, 20, 16, 8)}
"""Phases of microseconds, launches of seconds."""
COMPARISONS, DETECTIONS = 1000, 100
MAX_ALARMS, MIN_CAUGHT = 10, 95
GROWTH = 1.15
MAX_SPREAD = 0.03
MIN_LAUNCHES = 20
SIDE = 8
_GIVE_UP_AFTER = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=int, metavar="LAUNCHES", help="launch the program this often")
    parser.add_argument("--out", type=Path, help="file or folder of the recorded numbers; traces/launches")
    parser.add_argument("--backend", default="cpu", choices=list(SHAPES))
    for number, name in enumerate(NUMBERS):
        default = " or ".join(f"{SHAPES[backend][number]} ({backend})" for backend in SHAPES)
        parser.add_argument(f"--{name}", type=int, help=default)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--variant", default="balanced")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments)
    else:
        sys.exit(evaluate(sorted(LAUNCHES.glob("*.json"))))


def record(arguments: argparse.Namespace) -> None:
    """Every launch is a program of its own: new processes, new communicator, new clocks."""
    from tracekern.moe.workload.options import MoeRun
    from tracekern.moe.workload.run import run

    shape = dict(zip(NUMBERS, SHAPES[arguments.backend], strict=True))
    given = {name: getattr(arguments, name) for name in (*NUMBERS, "seed", "variant", "backend")}
    shape.update((name, value) for name, value in given.items() if value is not None)
    command = shlex.join(["python", "benchmarks/gate.py", *sys.argv[1:]])
    runs: list[Run] = []
    failures = 0
    while len(runs) < arguments.record:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tracekern-gate-") as directory:
            try:
                run(MoeRun(**shape, command=command), directory).raise_for_error()
                runs.append(dataclasses.replace(read_run(Path(directory)), source=f"launch {len(runs)}"))
            except TracekernError as error:
                failures += 1
                print(f"a launch failed and does not count: {error}", flush=True)
                if failures == _GIVE_UP_AFTER:
                    raise
                continue
        path = arguments.out or LAUNCHES
        path = path if path.suffix == ".json" else path / f"{baseline.slug(runs[0].device)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        baseline.write(path, runs, baseline.commit_info())
        lost = f", LOST DATA: {runs[-1].losses[0]}" if runs[-1].losses else ""
        print(f"launch {len(runs)} of {arguments.record}: {time.monotonic() - started:.1f} s{lost}", flush=True)
    print(f"-> {path}")


def evaluate(paths: Sequence[Path]) -> int:
    """Returns the exit code."""
    results, verdicts = {}, []
    for path in paths:
        runs = baseline.read(path)
        if len(runs) < 2 * SIDE:
            print(f"{path.name}: {len(runs)} launches, wanted at least {2 * SIDE} to draw {SIDE} and {SIDE} from")
            continue
        results[path.stem] = evaluate_device(runs)
        verdicts += judge(results[path.stem])
    table = Table("\npromises", ["device", "what", "measured", "bound", "verdict"])
    for row in verdicts:
        table.add(row["device"], row["what"], str(row["measured"]), row["bound"], row["verdict"])
    table.print()
    about = {"runs_a_side": SIDE, "growth": GROWTH, "max_spread": MAX_SPREAD, "min_launches": MIN_LAUNCHES}
    write_results("gate", {**about, "verdicts": verdicts, "devices": results})
    return int(any(row["verdict"] == "BROKEN" for row in verdicts))


def judge(device: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each promise: kept, BROKEN, or why it is not shown."""
    promised = [row["caught"] for row in device["phases"] if row["promised"]]
    growth = f"+15 % caught of {DETECTIONS}, least of {len(promised)} phases: spread <= {MAX_SPREAD:.0%}, usual floor"
    rows = [
        (f"alarms in {COMPARISONS} A/A comparisons", device["alarms"], "<=", MAX_ALARMS),
        (growth, min(promised, default=None), ">=", MIN_CAUGHT),
        (f"of {COMPARISONS} checks with a lossy launch: exit code 2", device["lossy_refused"], ">=", COMPARISONS),
    ]
    verdicts = []
    for what, measured, sign, bound in rows:
        if measured is None:
            verdict = "not shown: no such phase"
        elif not (measured <= bound if sign == "<=" else measured >= bound):
            verdict = "BROKEN"
        elif device["launches"] < MIN_LAUNCHES:
            verdict = f"not shown: {device['launches']} launches, wanted {MIN_LAUNCHES}"
        else:
            verdict = "kept"
        about = {"device": device["device"], "what": what, "measured": measured}
        verdicts.append({**about, "bound": f"{sign} {bound}", "verdict": verdict})
    return verdicts


def evaluate_device(runs: list[Run]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    started = time.perf_counter()
    outcomes = [compare(*draw(rng, runs), Rules()) for _ in range(COMPARISONS)]
    seconds = (time.perf_counter() - started) / COMPARISONS
    alarms = sum(bool(outcome.of(Verdict.REGRESSED)) for outcome in outcomes)
    settled = sum(not outcome.of(Verdict.UNDECIDED) for outcome in outcomes)
    undecided = float(np.mean([len(outcome.of(Verdict.UNDECIDED)) for outcome in outcomes]))
    gated = [change.metric for change in outcomes[0].changes]
    in_time = compare(runs[:SIDE], runs[-SIDE:], Rules()).of(Verdict.REGRESSED)
    print(f"\n{runs[0].device}: {len(runs)} launches, {len(gated)} metrics gated, {1e3 * seconds:.0f} ms a comparison")
    print(f"  {alarms} alarms in {COMPARISONS} A/A comparisons of {SIDE} against {SIDE} launches drawn disjointly")
    print(f"  {settled} of them settled every metric; {undecided:.1f} metrics undecided on average")
    print(f"  the first {SIDE} against the last {SIDE}: {', '.join(c.metric for c in in_time) or 'nothing regressed'}")
    return {
        "device": runs[0].device,
        "launches": len(runs),
        "recorded": [runs[0].created, runs[-1].created],
        "command": runs[0].command,
        "shape": runs[0].shape,
        "metrics": len(gated),
        "alarms": alarms,
        "settled": settled,
        "undecided_metrics": round(undecided, 2),
        "first_against_last": [change.metric for change in in_time],
        "ms_a_comparison": round(1e3 * seconds, 1),
        "lossy_refused": sum(refuses_a_loss(rng, runs) for _ in range(COMPARISONS)),
        "phases": detect_all(runs, gated),
    }


def refuses_a_loss(rng: np.random.Generator, runs: list[Run]) -> bool:
    """Whether a check ends in exit code 2 when one launch, of either side, lost a record."""
    sides = draw(rng, runs)
    side, place = sides[int(rng.integers(2))], int(rng.integers(SIDE))
    side[place] = dataclasses.replace(side[place], losses=("1 record lost",))
    base, head = sides
    return check(head, base, undecided_fails=False).outcome is Outcome.CANNOT_SAY


def detect_all(runs: list[Run], gated: Sequence[str]) -> list[dict[str, Any]]:
    """For each phase's p50 the spread of the launches, and how often its growth is caught.

    Promised is 95 of 100 where the launches spread by at most MAX_SPREAD and the floor is the usual one. Two ticks or
    the cost of a probe make it higher where spans are short: of 15 %, a floor of 11 % leaves too little to be sure of.
    Those rows, and the ones where noise is larger, show what is caught all the same.
    """
    names = [name for name in gated if name.endswith(".p50") and not name.startswith(END_TO_END)]
    spreads = logarithms(runs, names).std(axis=0, ddof=1)
    least = floors(runs, runs, names, Rules())
    columns = ["median", "spread", "floor", "caught", "promise", "phase"]
    table = Table(f"  a phase grows by 15 %, {DETECTIONS} times", columns)
    rows = []
    for name, spread, floor in zip(names, spreads, least, strict=True):
        median = float(np.median([run.metrics[name] for run in runs]))
        caught = detect(runs, name) if floor < GROWTH - 1 else None
        limits = [f"floor {size(floor)}"] if floor > Rules().floor else []
        limits += [f"spread {size(spread)}"] if spread > MAX_SPREAD else []
        row = {"metric": name, "median": median, "spread": round(float(spread), 4), "floor": round(float(floor), 4)}
        rows.append({**row, "caught": caught, "promised": not limits})
        said = "below the floor" if caught is None else f"{caught}/{DETECTIONS}"
        promise = ", ".join(limits) or "promised"
        table.add(metric_value(name, median), size(spread), size(floor), said, promise, name)
    table.print()
    return rows


def detect(runs: list[Run], name: str) -> int:
    """How many of DETECTIONS comparisons find that the phase of `name` takes GROWTH times as long."""
    rng = np.random.default_rng(2)
    caught = 0
    for _ in range(DETECTIONS):
        base, head = draw(rng, runs)
        slow = [grown(run, name.rpartition(".")[0]) for run in head]
        caught += name in {change.metric for change in compare(base, slow, Rules()).of(Verdict.REGRESSED)}
    return caught


def grown(run: Run, phase: str) -> Run:
    metrics = {
        name: value * GROWTH if name in (f"{phase}.p50", f"{phase}.p99") else value
        for name, value in run.metrics.items()
    }
    return dataclasses.replace(run, metrics=metrics)


def draw(rng: np.random.Generator, runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """Two sides of launches, none on both."""
    chosen = rng.permutation(len(runs))[: 2 * SIDE]
    return [runs[i] for i in chosen[:SIDE]], [runs[i] for i in chosen[SIDE:]]


if __name__ == "__main__":
    main()

"""How much of what was injected is charged to it? Simulated ranks whose true times are known (tests/simulator).

    python benchmarks/causes.py
    python benchmarks/causes.py --seeds 7 8 9 --only ring    # other seeds, the cases with "ring" in their name

Each case runs with and without its injection, of the same seed. E: waiting with minus without, by true times. D: what
is charged to the injected rank or link with minus without. Score: min(D, E) / E. Elsewhere: what is charged to anything
else with minus without, where it rose, as a share of E. The mean over the seeds is shown and judged. Writes
benchmarks/results/causes.json, and exits with 1 where a score is below .95.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results
from simulator import Case, Drain, Injection, LateHost, Latency, MovingWork, Score, Shape, SlowWork, score

MIN_SCORE = 0.95
RATIO = 0.95, 1.10
MAX_ELSEWHERE = 0.05
DELAY_NS = 5_000


@dataclass(frozen=True)
class _Row:
    name: str
    case: Case


def _cases() -> list[_Row]:
    late = SlowWork(DELAY_NS, rank=1)
    asleep = LateHost(20 * DELAY_NS, rank=1)
    moving = MovingWork(DELAY_NS, num_ranks=8)
    slow_link, slow_drain = (
        kind(DELAY_NS, source=1, destination=3)  # type: ignore[operator]
        for kind in (Latency, Drain)
    )
    rows = []
    for noise in (0.0, 0.05):
        for num_ranks in (2, 8, 16, 32):
            rows.append(_row("chain", Shape.CHAIN, SlowWork(DELAY_NS, rank=0), num_ranks, noise))
            rows.append(_row("stream", Shape.STREAM, SlowWork(DELAY_NS, rank=0), num_ranks, noise))
        rows += [
            _row("chain, one iteration", Shape.CHAIN, SlowWork(DELAY_NS, rank=3), 8, noise, iterations=1),
            _row("persistent stream", Shape.STREAM, SlowWork(DELAY_NS, rank=4), 8, noise, 50, is_persistent=True),
            _row("ring", Shape.RING, late, 8, noise),
            _row("persistent ring", Shape.RING, late, 8, noise, 50, is_persistent=True),
            _row("ring, 20 us more", Shape.RING, SlowWork(4 * DELAY_NS, rank=1), 8, noise),
            _row("credits", Shape.CREDITS, late, 2, noise, 20, is_persistent=True),
            _row("credits", Shape.CREDITS, late, 8, noise, 50, is_persistent=True),
            _row("barrier", Shape.BARRIER, late, 8, noise, is_persistent=True),
            _row("barrier", Shape.BARRIER, late, 32, noise),
            _row("moving imbalance", Shape.BARRIER, moving, 8, noise, 50),
            _row("late host, barrier", Shape.BARRIER, LateHost(DELAY_NS, rank=1), 8, noise),
            _row("late host, exchange", Shape.EXCHANGE, LateHost(DELAY_NS, rank=1), 4, noise),
            _row("late host, 40 us a launch", Shape.EXCHANGE, asleep, 4, noise, work_ns=20_000, launch_ns=40_000),
            _row("exchange", Shape.EXCHANGE, late, 8, noise),
            _row("persistent exchange", Shape.EXCHANGE, late, 4, noise, is_persistent=True),
            _row("slow flags, exchange", Shape.EXCHANGE, slow_link, 4, noise),
            _row("slow stores, exchange", Shape.EXCHANGE, slow_drain, 4, noise),
            _row("slow stores, persistent", Shape.EXCHANGE, slow_drain, 4, noise, is_persistent=True),
        ]
    edge = SlowWork(DELAY_NS, rank=1)  # some 4 sigma: the noise alone would make the ranks wait as well
    rows += [
        _row("chain at 4 sigma", Shape.CHAIN, edge, 8, 0.06, work_ns=20_000),
        _row("stream at 4 sigma", Shape.STREAM, edge, 8, 0.06, work_ns=20_000),
        _row("barrier at 4 sigma", Shape.BARRIER, edge, 8, 0.06, work_ns=20_000),
    ]
    return rows


def _row(
    name: str,
    shape: Shape,
    injection: Injection,
    num_ranks: int,
    noise: float,
    iterations: int = 10,
    is_persistent: bool = False,
    work_ns: int = 5_000,
    launch_ns: int = 0,
) -> _Row:
    case = Case(shape, num_ranks, iterations, (injection,), noise, is_persistent, work_ns=work_ns, launch_ns=launch_ns)
    return _Row(name, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--name", default="causes", help="of the file in benchmarks/results")
    arguments = parser.parse_args()
    rows = [_judge(row, arguments.seeds) for row in _cases() if arguments.only in row.name]
    table = Table(
        f"charged of {DELAY_NS / 1000:.0f} us more, mean of seeds {arguments.seeds}",
        ["case", "ranks", "iterations", "noise", "E, us", "score", "D / E", "elsewhere", "met"],
    )
    for row in rows:
        figures = (f"{row['caused_ns'] / 1000:.0f}", *(f"{row[key]:.2f}" for key in ("score", "ratio", "elsewhere")))
        cells = row["case"], str(row["ranks"]), str(row["iterations"]), f"{row['noise']:.0%}"
        table.add(*cells, *figures, "yes" if row["met"] else "NO")
    table.print()
    write_results(arguments.name, {"seeds": arguments.seeds, "cases": rows})
    sys.exit(0 if all(row["score"] >= MIN_SCORE for row in rows) else 1)


def _judge(row: _Row, seeds: list[int]) -> dict[str, Any]:
    scores = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            scores.append(score(row.case, seed, Path(directory)))
    means = {key: _mean(scores, key) for key in ("caused_ns", "score", "ratio", "elsewhere")}
    case = row.case
    about = {"case": row.name, "ranks": case.num_ranks, "iterations": case.iterations, "noise": case.noise}
    return {**about, **means, "met": is_in_bounds(means["score"], means["ratio"], means["elsewhere"])}


def is_in_bounds(score: float, ratio: float, elsewhere: float) -> bool:
    """Returns whether a case is charged as the analysis promises."""
    return score >= MIN_SCORE and RATIO[0] <= ratio <= RATIO[1] and elsewhere <= MAX_ELSEWHERE


def _mean(scores: list[Score], key: str) -> float:
    return sum(getattr(entry, key) for entry in scores) / len(scores)


if __name__ == "__main__":
    main()

"""Is a cause's cost what the run would save, and is the right cause named? Simulated runs, whose truth is known.

    python benchmarks/causes.py                      # all of it: some fifteen minutes on two cores
    python benchmarks/causes.py --scale 1            # as many runs that are all alike as hold a bound of 1 %: hours
    python benchmarks/causes.py --parts cases --only ring --seeds 7 8 9
    python benchmarks/causes.py --again singles 17   # one run of those that were missed, and what is said of it
    python benchmarks/causes.py --again ahead/8 47   # likewise, of runs of 8 ranks that are alike

Cases: fixed ones, each with and without what is injected, of the same seed. Truth: by how much its makespan is longer.
Cost: what the analysis says that the run would save without it. Both are summed over the seeds; "named" counts the runs
that name what was injected and nothing else. Where hosts run ahead, truth has to lie between the two costs that are
said; where one rank has less than all others, or nothing is injected, nobody may be named.
Singles, sets: random runs with one cause, of one rank, link or warp, or of several and in some iterations. Where the
truth is below 1 % of the run, to name nobody is right. What is missed is listed below, with the reason.
Alike: random runs without any cause; how many name one. Incidents, which name nobody, are counted apart.
Writes benchmarks/results/causes.json; exits with 1 where a figure is out of its bounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # there are as many processes as cores
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from causes_cases import ALIKE, JUMPS, Row, as_link, candidates_of, cost_cases, draw_alike, draw_set, draw_single
from harness import Table, write_results
from simulator import Case, Truth, simulate

import tracekern
from tracekern.analysis.findings import analyze
from tracekern.analysis.why.answer import MIN_SHARE, Answer
from tracekern.analysis.why.candidates import Candidate, CauseKind
from tracekern.errors import BadInput

RATIO = 0.95, 1.05
MAX_NAMED, MAX_WANDERING = 0.01, 0.025
"""Shares of runs without a cause that may name one; the second where eight iterations of wandering speeds are all."""
MIN_HITS = 4
"""The fewest hits of a habit; fewer are an incident."""
NUM_ALIKE = {2: 2_000, 8: 2_000, 64: 200, 512: 40}
"""Runs of each kind by ranks, at scale 1."""
MOST_JUMPING = 8
"""Ranks of runs in which a clock jumps: what is tested is the doubt of clocks, not the number of ranks."""
RIGHT = {"singles": 0.99, "sets": 0.95}
WITHIN = 0.95
DRAW: dict[str, Callable[[int], tuple[str, Case]]] = {"singles": draw_single, "sets": draw_set}
COUNT = {"singles": 390, "sets": 245}


def answer_of(case: Case, seed: int) -> tuple[Answer, Truth]:
    with tempfile.TemporaryDirectory() as directory:
        truth = simulate(case, seed, Path(directory))
        return analyze(tracekern.load(truth.directory)).answer, truth


def told_by(answer: Answer, case: Case) -> set[Candidate]:
    """Returns what is named, each rank by itself; of a case with few hits what its incidents are."""
    few = any(0 < len(entry.iterations) < MIN_HITS for entry in case.injections)
    found = [one.candidate for one in (answer.incidents if few and not answer.causes else answer.causes)]
    rings = {Candidate(one.kind, -1, channel=one.channel) for one in found if one.kind is CauseKind.RING}
    found = [one for one in found if one.kind is not CauseKind.RING]
    each = {Candidate(one.kind, rank, one.peer) for one in found for rank in one.ranks} | rings
    return {as_link(one) for one in each} if case.num_ranks == 2 else each


def costs_of(answer: Answer) -> tuple[float, float]:
    """(at least, at most) what the run would save without all that is told, in ns."""
    if answer.causes:
        last = answer.causes[-1]
        return last.together_at_least_ns or 0.0, last.together_ns
    whole_ns = sum(incident.saving.whole_ns for incident in answer.incidents)
    return whole_ns, whole_ns


def judge(row: Row, seeds: list[int]) -> dict[str, Any]:
    """Judges a fixed case."""
    truth_ns = cost_ns = least_ns = 0.0
    num_right = num_wrong = 0
    right = set() if row.names_nobody else candidates_of(row.case)
    for seed in seeds:
        answer, truth = answer_of(row.case, seed)
        truth_ns += truth.cost_ns
        named = told_by(answer, row.case)
        num_right += named == right
        num_wrong += bool(named - right)
        least, most = costs_of(answer)
        least_ns, cost_ns = least_ns + least, cost_ns + most
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


def judge_one(part: str, number: int) -> dict[str, Any]:
    """Judges a random run with one cause."""
    kind, case = DRAW[part](number)
    answer, truth = answer_of(case, number)
    truth_ns, (least_ns, most_ns) = truth.cost_ns, costs_of(answer)
    right, named = candidates_of(case), told_by(answer, case)
    is_small = truth_ns < MIN_SHARE * truth.makespan_ns
    is_right = named == right or (is_small and not named)
    found: dict[str, Any] = {
        "kind": kind,
        "number": number,
        "about": f"{case.shape.value}, {case.num_ranks} ranks, {case.iterations} iterations, "
        f"{case.noise_kind.value} noise of {case.noise:.1%}",
        "truth_share": truth_ns / truth.makespan_ns,
        "is_small": is_small,
        "is_right": is_right,
        "is_wrong": bool(named - right),
        "why": "" if is_right else _reason(answer, named, right),
    }
    if named == right and not is_small:
        found["ratio"] = most_ns / truth_ns
        found["is_within"] = most_ns >= RATIO[0] * truth_ns
        found["is_within"] &= (least_ns if case.hosts_run_ahead else most_ns) <= RATIO[1] * truth_ns
        if len(answer.causes) == 1 and answer.causes[0].at_least_ns == most_ns:
            low_ns, high_ns = answer.causes[0].within_ns
            found["is_held"] = low_ns <= truth_ns <= high_ns
    return found


def _reason(answer: Answer, named: set[Candidate], right: set[Candidate]) -> str:
    """Says why a run is missed: what is named instead, or why nobody is and what the cause's cost is worked out as."""
    if answer.note:
        return answer.note
    parts = []
    if missing := sorted(map(_word, right - named)):
        parts.append(f"not named: {' '.join(missing)}")
    if other := sorted(map(_word, named - right)):
        parts.append(f"named: {' '.join(other)}")
    if answer.silence:
        parts.append(f"silence: {answer.silence.value}")
    parts += [f"half: {' '.join(map(str, half.candidate.ranks))}" for half in answer.halves]
    parts += [
        f"{_word(cost.candidate)} costs {cost.saving.whole_ns / answer.makespan_ns:.1%}"
        for cost in answer.costs
        if cost.candidate in right - named
    ][:2]
    return "; ".join(parts)


def _word(one: Candidate) -> str:
    return f"{one.kind.value}-{one.rank}" + (f">{one.peer}" if one.peer >= 0 else "")


def named_by_chance(kind: str, num_ranks: int, number: int) -> dict[str, Any]:
    """Returns what a run without a cause names; nothing where a clock jumps so far that its capture is refused."""
    try:
        answer, _ = answer_of(draw_alike(kind, num_ranks, number), number)
    except BadInput:
        return {"named": "", "has_incident": False}
    named = "; ".join(
        f"{_word(cause.candidate)} of {cause.excess_ns:.0f} ns saves {cause.saving.whole_ns / answer.makespan_ns:.1%}"
        for cause in answer.causes
    )
    return {"named": named, "has_incident": bool(answer.incidents)}


# ---- parts: what is run, printed and written ----


def run_cases(pool: ProcessPoolExecutor, only: str, seeds: list[int]) -> tuple[list[dict[str, Any]], bool]:
    chosen = [row for row in cost_cases() if only in row.name]
    rows = list(pool.map(judge, chosen, [seeds] * len(chosen)))
    columns = "case", "ranks", "iterations", "noise", "truth, us", "at least / truth", "cost / truth"
    table = Table("cost of what was injected", [*columns, "named", "wrong", "met"])
    for row in rows:
        table.add(
            *(row["case"], str(row["ranks"]), str(row["iterations"]), f"{row['noise']:.0%}"),
            f"{row['truth_ns'] / 1000:.1f}" if "ratio" in row else "-",
            *(f"{row[key]:.3f}" if key in row else "-" for key in ("least_ratio", "ratio")),
            *(f"{row['right']} of {row['runs']}", str(row["wrong"]), "yes" if row["met"] else "NO"),
        )
    table.print()
    return rows, all(row["met"] for row in rows)


def run_random(pool: ProcessPoolExecutor, part: str, only: str) -> tuple[list[dict[str, Any]], bool]:
    numbers = [number for number in range(COUNT[part]) if only in DRAW[part](number)[0]]
    found = list(pool.map(judge_one, [part] * len(numbers), numbers, chunksize=2))
    rows = [
        summarize(kind, [one for one in found if one["kind"] == kind]) for kind in sorted({o["kind"] for o in found})
    ]
    rows.append(summarize("all", found))
    table = Table(part, ["kind", "runs", "right", "wrong", "small", "cost within 5 %", "within its interval"])
    for row in rows:
        shares = f"{row['right'] / row['runs']:.1%}", str(row["wrong"]), str(row["small"])
        costs = f"{row['within']} of {row['costed']}", f"{row['held']} of {row['has_interval']}"
        table.add(row["kind"], str(row["runs"]), *shares, *costs)
    table.print()
    for one in found:
        about = f"{part} {one['number']}: {one['kind']}, {one['about']}"
        if not one["is_right"]:
            print(f"  missed {about}, {one['truth_share']:.1%} of the run: {one['why']}")
        elif not one.get("is_within", True):
            print(f"  cost of {about}: {one['ratio']:.3f} of the truth")
        elif not one.get("is_held", True):
            print(f"  outside of its interval: {about}, {one['ratio']:.3f} of the truth")
    last = rows[-1]
    is_good = last["right"] >= RIGHT[part] * last["runs"] and last["within"] >= WITHIN * last["costed"]
    is_good = is_good and last["held"] >= WITHIN * last["has_interval"]
    return [*rows, {"kind": "missed", "which": [one for one in found if not one["is_right"]]}], is_good


def summarize(kind: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": kind,
        "runs": len(found),
        "right": sum(one["is_right"] for one in found),
        "wrong": sum(one["is_wrong"] for one in found),
        "small": sum(one["is_small"] for one in found),
        "within": sum(one.get("is_within", False) for one in found),
        "costed": sum("is_within" in one for one in found),
        "held": sum(one.get("is_held", False) for one in found),
        "has_interval": sum("is_held" in one for one in found),
    }


def run_alike(pool: ProcessPoolExecutor, only: str, scale: float) -> tuple[list[dict[str, Any]], bool]:
    rows = []
    table = Table("alike", ["kind", "ranks", "runs", "named", "with an incident"])
    for kind in ALIKE:
        for num_ranks, most in NUM_ALIKE.items():
            count = round(scale * most)
            if only not in kind or not count or (kind == JUMPS and num_ranks > MOST_JUMPING):
                continue
            found = list(pool.map(named_by_chance, [kind] * count, [num_ranks] * count, range(count)))
            which = [{"number": number, "named": one["named"]} for number, one in enumerate(found) if one["named"]]
            row = {"kind": kind, "ranks": num_ranks, "runs": count, "named": len(which)}
            rows.append({**row, "incidents": sum(one["has_incident"] for one in found), "which": which})
            table.add(*(str(rows[-1][key]) for key in ("kind", "ranks", "runs", "named", "incidents")))
    table.print()
    for row in rows:
        for one in row["which"]:
            print(f"  named in {row['kind']}/{row['ranks']} {one['number']}: {one['named']}")
    limits = {kind: MAX_WANDERING if "8 iterations" in kind else MAX_NAMED for kind in ALIKE}
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ALIKE}
    good = (
        sum(row["named"] for row in of_kind) <= limits[kind] * sum(row["runs"] for row in of_kind)
        for kind, of_kind in by_kind.items()
    )
    return rows, all(good)


def again(part: str, number: int) -> None:
    """Prints a random run, and what is said of it."""
    if part in DRAW:
        part, case = DRAW[part](number)
    else:
        kind, num_ranks = part.split("/")
        case = draw_alike(kind, int(num_ranks), number)
    print(f"{part}: {case}")
    answer, truth = answer_of(case, number)
    print(f"truth: {truth.cost_ns:.0f} of {truth.makespan_ns:.0f} ns; said: {answer.silence}")
    for what in ("causes", "halves", "incidents", "costs"):
        for one in getattr(answer, what):
            others = "".join(f",{rank}" for rank in one.candidate.others)
            saves = f"saves {one.saving.whole_ns:.0f} ns; exceeds its peers by {one.excess_ns:.0f} ns"
            print(f"{what}: {_word(one.candidate)}{others} {saves}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["cases", "singles", "sets", "alike"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the fixed cases")
    parser.add_argument("--only", default="", help="cases, or kinds, with this in their name")
    parser.add_argument("--scale", type=float, default=0.05, help="share of the runs that are all alike")
    parser.add_argument(
        "--again", nargs=2, metavar=("PART", "NUMBER"), help="a run of singles, of sets, or of KIND/RANKS"
    )
    parser.add_argument("--name", default="causes", help="of the file in benchmarks/results")
    arguments = parser.parse_args()
    if arguments.again:
        again(arguments.again[0], int(arguments.again[1]))
        return
    results, good = dict[str, Any](), True
    with ProcessPoolExecutor(2) as pool:
        for part in arguments.parts:
            run: Callable[[], tuple[list[dict[str, Any]], bool]] = {
                "cases": lambda: run_cases(pool, arguments.only, arguments.seeds),
                "singles": lambda: run_random(pool, "singles", arguments.only),
                "sets": lambda: run_random(pool, "sets", arguments.only),
                "alike": lambda: run_alike(pool, arguments.only, arguments.scale),
            }[part]
            results[part], is_good = run()
            good = good and is_good
    write_results(arguments.name, {"seeds": arguments.seeds, **results})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

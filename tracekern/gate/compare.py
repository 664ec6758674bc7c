"""Are the runs of head slower than those of base? A verdict for each metric, and for all of them together.

A metric regressed when two things hold: its adjusted p-value is at most the family error (some metric grew at all, and
the p-value is adjusted for all others), and the interval of its own change lies above the floor (it grew by more than
the growth that matters, the clock's step and the cost of a probe). It is the same if the interval ends below the floor.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import Any

import numpy as np

from tracekern.formatting import is_share
from tracekern.gate.permutation import CONFIDENCE, Floats, adjusted_p, shift_interval
from tracekern.gate.run import Run, difference

FAMILY_ERROR = 0.005
"""Probability that, of two equal sides, any metric is reported as regressed."""
MIN_SPANS_OF_P99 = 100
"""With fewer spans a p99 is hardly more than the longest span; it is shown but not gated."""
SHARE_FLOOR = 0.01
"""A change of a wait share by less than a hundredth of the time does not matter, whatever its ratio."""
_SHARE_GRAIN = 1e-3
_MAX_RUNS_SHOWN = 1000


class Verdict(enum.Enum):
    SAME = "same"
    BETTER = "better"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Rules:
    floor: float = 0.05
    """The smallest growth that matters; a metric's own floor is larger where ticks or probes are coarser."""
    min_runs: int = 5
    metrics: tuple[str, ...] = ("*",)
    """Patterns of the metrics to gate, as in `dispatch_*.p50`."""
    across_hosts: bool = False


@dataclass(frozen=True)
class Change:
    """How one metric moved; changes are relative, 0.15 for 15 % more."""

    metric: str
    base: float
    """Medians over the runs: ns, or a share in 0..1."""
    head: float
    low: float
    estimate: float
    high: float
    floor: float
    p: float
    verdict: Verdict
    base_spread: float
    """Standard deviation of the runs' logarithms, which is about the relative standard deviation."""
    head_spread: float
    runs_to_decide: int
    """Approximate runs of a side that would decide it; 0 if it is decided, or no number would be enough."""


@dataclass(frozen=True)
class Comparison:
    num_base: int
    num_head: int
    changes: tuple[Change, ...]
    problems: tuple[str, ...]
    """Why no verdict is possible; then `changes` is empty."""
    notes: tuple[str, ...]
    """Metrics left out of the family, and why."""

    def of(self, verdict: Verdict) -> list[Change]:
        return [change for change in self.changes if change.verdict is verdict]

    def as_dict(self) -> dict[str, Any]:
        rows = [{**vars(change), "verdict": change.verdict.value} for change in self.changes]
        return {**vars(self), "changes": rows}


def compare(base: Sequence[Run], head: Sequence[Run], rules: Rules) -> Comparison:
    """Compares two sides. base, head: at least rules.min_runs runs each, all of one shape.

    Otherwise the result only says why they cannot be compared.
    """
    problems = [*own_problems("base", base, rules), *own_problems("head", head, rules)]
    if base and head:
        problems += sides_differ(base[0], head[0], rules, or_else=", or save a new baseline")
        problems += _on_both_sides(base, head)
    names, notes = _family(base, head, rules) if not problems else ([], [])
    problems += [note for note in notes if note.startswith("gone: ")]
    idle = [pattern for pattern in rules.metrics if not any(fnmatchcase(name, pattern) for name in names)]
    if not problems and idle:
        problems.append(f"no metric to compare in all runs matches {', '.join(idle)}; correct it, or leave it out")
    changes = _changes(base, head, names, rules) if not problems else []
    return Comparison(len(base), len(head), tuple(changes), tuple(problems), tuple(notes))


def floors(base: Sequence[Run], head: Sequence[Run], names: Sequence[str], rules: Rules) -> Floats:
    """Returns the smallest relative growth of each metric that matters, [m], given the metric's size in `base`.

    It exceeds what the recorder itself may have added on either side.
    """
    runs = (*base, *head)
    ticks = max(run.resolution_ns for run in runs)
    # The median, because one launch may have measured it on a busy machine.
    probe = max(float(np.median([run.probe_cost_ns for run in side])) for side in (base, head))
    bound = max(run.clock_hard_ns for run in runs)
    result = []
    for name in names:
        value = float(np.median([run.metrics[name] for run in base]))
        of_ranks = bound if name.startswith("end_to_end.") else 0
        least = SHARE_FLOOR if is_share(name) else max(2 * ticks, probe, of_ranks)
        result.append(max(rules.floor, least / max(value, _grain_of(name, base))))
    return np.array(result)


def has_sign_of_growth(base: Sequence[Run], head: Sequence[Run], name: str, rules: Rules) -> bool:
    """Returns whether the metric's median grew by more than its floor, which is no proof with any number of runs."""
    if is_longest_span(name, (*base, *head)):
        return False
    before, after = (float(np.median(logarithms(side, [name]))) for side in (base, head))
    return after - before > math.log1p(floors(base, head, [name], rules)[0])


def logarithms(runs: Sequence[Run], names: Sequence[str]) -> Floats:
    """Returns the logarithms of the metrics, [runs, m]; a value below its grain counts as the grain."""
    return np.array([[math.log(max(run.metrics[name], _grain_of(name, runs))) for name in names] for run in runs])


def _grain_of(name: str, runs: Sequence[Run]) -> float:
    return _SHARE_GRAIN if is_share(name) else max(max(run.resolution_ns for run in runs) / 2, 0.5)


def minimal_detectable_changes(runs: Sequence[Run], rules: Rules) -> dict[str, float]:
    """Returns, by metric, the relative growth that as many runs again would show in about 95 of 100 checks.

    Uses Student's t for both conditions of a regression: an approximation for planning, not for a verdict.
    """
    names, _ = _family(runs, runs, rules)
    degrees, error = 2 * len(runs) - 2, math.sqrt(2 / len(runs))
    family = _student(1 - FAMILY_ERROR / max(len(names), 1), degrees)
    alone = _student((1 + CONFIDENCE) / 2, degrees)
    power = _student(0.95, degrees)
    result = {}
    # Few launches may underestimate the spread; without the limit such a growth would be missed more often.
    spreads = logarithms(runs, names).std(axis=0, ddof=1) * _spread_limit(len(runs) - 1)
    for name, spread, floor in zip(names, spreads, floors(runs, runs, names, rules), strict=True):
        needed = max(math.log1p(floor) + alone * spread * error, family * spread * error) + power * spread * error
        result[name] = math.expm1(needed)
    return result


def losses_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """Returns why the numbers of these runs prove nothing, whatever they are compared with."""
    lost = [f"{run.source} proves nothing: {run.losses[0]}" for run in runs if run.losses]
    empty = [f"{run.source} has no span in a measured launch" for run in runs if not run.spans]
    return (*lost, *empty)


def own_problems(side: str, runs: Sequence[Run], rules: Rules) -> list[str]:
    """Returns what is wrong with one side by itself."""
    problems = [*losses_of(runs)]
    if len(runs) < rules.min_runs:
        problems.append(
            f"{side}: {len(runs)} run{'s' if len(runs) != 1 else ''}, wanted at least {rules.min_runs}: launch the "
            "program more often (iterations of one launch are no runs)"
        )
    for run in runs[1:]:
        problems += [f"{side}: {text}" for text in sides_differ(runs[0], run, rules)]
    identities = [run.run_id for run in runs]
    if len(set(identities)) < len(identities):
        problems.append(f"{side}: one launch of the program is in it twice; each counts once")
    return list(dict.fromkeys(problems))


def sides_differ(first: Run, second: Run, rules: Rules, or_else: str = "") -> list[str]:
    """Returns why two runs cannot be compared, one line for each reason; empty if they can.

    or_else: another remedy for different shapes, as in ", or save a new baseline".
    """
    problems = []
    if (first.device, first.backend) != (second.device, second.backend):
        problems.append(
            f"other device: {second.source} ran on {second.device} ({second.backend}), {first.source} on "
            f"{first.device} ({first.backend})"
        )
    if text := difference(first, second):
        problems.append(f"other shape: {text}; compare runs of one shape{or_else}")
    if first.aligned != second.aligned:
        problems.append(f"{(first if second.aligned else second).source} is unaligned, other runs are not")
    if first.nodes != second.nodes and not rules.across_hosts:
        problems.append(
            f"other session: {second.source} ran on {', '.join(second.nodes)}, {first.source} on "
            f"{', '.join(first.nodes)}; record both sides in one job with tracekern ab, or allow it with --across-hosts"
        )
    return problems


def _on_both_sides(base: Sequence[Run], head: Sequence[Run]) -> list[str]:
    shared = {run.run_id for run in base} & {run.run_id for run in head} - {""}
    if not shared:
        return []
    number = f"{len(shared)} launch{'es' if len(shared) > 1 else ''} of the program"
    return [f"{number} on both sides; a launch compared with itself says nothing: launch the program again for head"]


def _family(base: Sequence[Run], head: Sequence[Run], rules: Rules) -> tuple[list[str], list[str]]:
    """Returns the names of the metrics to gate, and notes on those that are not gated."""
    in_base, lost = in_all(base), gone_metrics(base, head)
    known = list(dict.fromkeys(name for run in (*base, *head) for name in run.metrics))
    wanted = [name for name in known if any(fnmatchcase(name, pattern) for pattern in rules.metrics)]
    names, notes, new, few = [], [], [], []
    for name in wanted:
        if name in lost:
            notes.append(gone(name))
        elif name not in in_base:
            new.append(name)
        elif is_longest_span(name, (*base, *head)):
            few.append(name)
        else:
            names.append(name)
    if new:
        notes.append(f"not gated, not in every run of base: {', '.join(new)}")
    if few:
        notes.append(f"not gated, fewer than {MIN_SPANS_OF_P99} spans in a run: {', '.join(few)}")
    return names, notes


def in_all(runs: Sequence[Run]) -> set[str]:
    """Returns the metrics that every run has."""
    return set.intersection(*(set(run.metrics) for run in runs))


def gone_metrics(base: Sequence[Run], head: Sequence[Run]) -> list[str]:
    return sorted(in_all(base) - in_all(head))


def gone(name: str) -> str:
    return f"gone: {name} is in every run of base, not of head; renamed? then save a new baseline"


def is_longest_span(name: str, runs: Sequence[Run]) -> bool:
    """Returns whether a metric is a p99 of so few spans in some run that it is hardly more than the longest."""
    fewest = min(run.spans.get(name.rpartition(".")[0], 0) for run in runs)
    return name.endswith(".p99") and fewest < MIN_SPANS_OF_P99


def _changes(base: Sequence[Run], head: Sequence[Run], names: Sequence[str], rules: Rules) -> list[Change]:
    base_logs, head_logs = logarithms(base, names), logarithms(head, names)
    medians = [float(np.median([run.metrics[name] for run in base])) for name in names]
    grain = np.array(
        [_grain_of(name, base) / max(m, _grain_of(name, base)) for name, m in zip(names, medians, strict=True)]
    )
    p = adjusted_p(base_logs, head_logs, grain)
    low, estimate, high = shift_interval(base_logs, head_logs)
    limits = floors(base, head, names, rules)
    changes = []
    for i, name in enumerate(names):
        interval = (float(low[i]), float(estimate[i]), float(high[i]))
        verdict = _verdict(interval, math.log1p(limits[i]), float(p[i]))
        changes.append(
            Change(
                metric=name,
                base=medians[i],
                head=float(np.median([run.metrics[name] for run in head])),
                low=math.expm1(interval[0]),
                estimate=math.expm1(interval[1]),
                high=math.expm1(interval[2]),
                floor=float(limits[i]),
                p=float(p[i]),
                verdict=verdict,
                base_spread=float(base_logs[:, i].std(ddof=1)),
                head_spread=float(head_logs[:, i].std(ddof=1)),
                runs_to_decide=_runs_to_decide(interval, math.log1p(limits[i]), min(len(base), len(head)))
                if verdict is Verdict.UNDECIDED
                else 0,
            )
        )
    return changes


def _verdict(interval: tuple[float, float, float], floor: float, p: float) -> Verdict:
    low, _, high = interval
    if high < -floor:
        return Verdict.BETTER
    if high < floor:
        return Verdict.SAME
    return Verdict.REGRESSED if low > floor and p <= FAMILY_ERROR else Verdict.UNDECIDED


def _runs_to_decide(interval: tuple[float, float, float], floor: float, num_runs: int) -> int:
    """Estimates the runs that decide a metric: the interval, which shrinks with the square root of the number of runs,
    has to be narrower than its distance to the floor.
    """
    low, estimate, high = interval
    distance = abs(floor - estimate)
    half = max(high - estimate, estimate - low)
    needed = math.ceil(num_runs * (half / distance) ** 2) if distance else _MAX_RUNS_SHOWN + 1
    return max(needed, num_runs + 1) if needed <= _MAX_RUNS_SHOWN else 0


def _spread_limit(degrees: int) -> float:
    """Returns an upper limit, which holds 8 times of 10, on the ratio of the true standard deviation to the measured.

    Uses the chi-squared distribution (Wilson and Hilferty: good to 1 % from 4 degrees of freedom on).
    """
    part = 2 / (9 * degrees)
    return float((1 - part + NormalDist().inv_cdf(0.2) * math.sqrt(part)) ** -1.5)


def _student(probability: float, degrees: int) -> float:
    """Quantile of Student's t (Abramowitz and Stegun, 26.7.5: good to 1 % from 8 degrees of freedom on)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / degrees**power for power, term in enumerate(terms, 1)))

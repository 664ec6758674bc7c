"""Are the runs of head slower than those of base? A verdict for each metric, and for all of them together.

A metric regressed when two things hold: its adjusted p-value is at most the family error (some metric grew at all, and
the p-value is adjusted for all others), and the interval of its own change lies above the floor (it grew by more than
the growth that matters, the clock's step and the cost of a probe). It is the same if the interval ends below the floor.

A share of waiting grows also where only the work became faster. It is judged where the waiting itself regressed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.analysis.statistics import WAIT_PER_ITERATION
from tracekern.formatting import growth, is_share
from tracekern.gate import power
from tracekern.gate.permutation import Floats, adjusted_p, shift_interval
from tracekern.gate.run import Run, difference
from tracekern.gate.trend import Places, Trend, find_trend

FAMILY_ERROR = 0.008
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
    NOT_JUDGED = "not judged"
    """A share of waiting that did not fall, where the waiting itself did not regress."""


@dataclass(frozen=True)
class Rules:
    floor: float = 0.05
    """The smallest growth that matters; a metric's own floor is larger where ticks or probes are coarser."""
    min_runs: int = 5
    metrics: tuple[str, ...] = ("*",)
    """Patterns of the metrics to gate, as in `dispatch_*.p50`."""
    across_hosts: bool = False
    alternating: bool = False
    """Whether base and head were launched alternately: a drift then adds the same to both."""


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
    power: float
    """Probability that a growth of power.GROWTH regresses, with as many runs that spread like these."""
    detectable: float
    """Growth that 95 of 100 such checks would find."""


@dataclass(frozen=True)
class Comparison:
    num_base: int
    num_head: int
    changes: tuple[Change, ...]
    problems: tuple[str, ...]
    """Why no verdict is possible; `changes` is empty then, unless it is a drift."""
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
    changes: list[Change] = []
    if not problems:
        changes, drifts = _changes(base, head, names, rules)
        problems += drifts
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
        least = SHARE_FLOOR if is_share(name) else max(2 * ticks, probe, of_ranks) * _spans_in(name, base)
        result.append(max(rules.floor, least / max(value, _grain_of(name, base))))
    return np.array(result)


def _spans_in(name: str, runs: Sequence[Run]) -> float:
    """Returns how many spans a value of the metric is the sum of."""
    phase, _, statistic = name.rpartition(".")
    if statistic != WAIT_PER_ITERATION:
        return 1
    return max(run.spans.get(phase, 0) / run.num_measured for run in runs)


def has_sign_of_growth(base: Sequence[Run], head: Sequence[Run], name: str, rules: Rules) -> bool:
    """Returns whether the metric's median grew by more than its floor, which is no proof with any number of runs."""
    if is_longest_span(name, (*base, *head)):
        return False
    names = needed_for(name)
    medians = [np.median(logarithms(side, names), axis=0) for side in (base, head)]
    return bool((medians[1] - medians[0] > np.log1p(floors(base, head, names, rules))).all())


def needed_for(name: str) -> list[str]:
    """Returns the metrics that judging one takes: itself, and for a wait share the waiting that it is a share of."""
    return [name, f"{name.rpartition('.')[0]}.{WAIT_PER_ITERATION}"] if is_share(name) else [name]


def logarithms(runs: Sequence[Run], names: Sequence[str]) -> Floats:
    """Returns the logarithms of the metrics, [runs, m]; a value below its grain counts as the grain."""
    return np.array([[math.log(max(run.metrics[name], _grain_of(name, runs))) for name in names] for run in runs])


def _grain_of(name: str, runs: Sequence[Run]) -> float:
    return _SHARE_GRAIN if is_share(name) else max(max(run.resolution_ns for run in runs) / 2, 0.5)


@dataclass(frozen=True)
class Detectable:
    change: float
    """Relative growth that as many runs again would show in about 95 of 100 checks."""
    power: float
    """Probability that they would show a growth of power.GROWTH."""


def minimal_detectable_changes(runs: Sequence[Run], rules: Rules) -> dict[str, Detectable]:
    """Returns, by metric, what a comparison of these runs with as many new ones can see.

    Takes a spread that the true one is below with 80 % probability: few launches may underestimate it.
    """
    names, _ = _family(runs, runs, rules)
    able = power.power_of(len(runs), len(runs), len(names), FAMILY_ERROR)
    logs, floor = logarithms(runs, names), np.log1p(floors(runs, runs, names, rules))
    spread = able.spread(logs, holds=0.8)
    changes = np.expm1(able.smallest(spread, floor))
    caught = able.caught(math.log1p(power.GROWTH), able.spread(logs), floor)
    return {name: Detectable(float(c), float(p)) for name, c, p in zip(names, changes, caught, strict=True)}


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
    matched = [name for name in known if any(fnmatchcase(name, pattern) for pattern in rules.metrics)]
    wanted = dict.fromkeys(needed for name in matched for needed in needed_for(name))
    names, notes, new, few, alone = [], [], [], [], []
    for name in wanted:
        if name in lost:
            notes.append(gone(name))
        elif name not in in_base:
            new.append(name)
        elif not in_base.issuperset(needed_for(name)):
            alone.append(name)
        elif is_longest_span(name, (*base, *head)):
            few.append(name)
        else:
            names.append(name)
    if new:
        notes.append(f"not gated, not in every run of base: {', '.join(new)}")
    if alone:
        notes.append(f"not gated, base lacks {WAIT_PER_ITERATION} (save a new baseline): {', '.join(alone)}")
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


def _changes(
    base: Sequence[Run], head: Sequence[Run], names: Sequence[str], rules: Rules
) -> tuple[list[Change], list[str]]:
    """Returns the changes, and why they prove nothing where a metric drifts."""
    base_logs, head_logs = logarithms(base, names), logarithms(head, names)
    medians = [[float(np.median([run.metrics[name] for run in side])) for name in names] for side in (base, head)]
    grains = np.array([_grain_of(name, base) for name in names])
    p = adjusted_p(base_logs, head_logs, grains / np.maximum(medians[0], grains))
    low, estimate, high = shift_interval(base_logs, head_logs)
    limits = floors(base, head, names, rules)
    floor = np.log1p(limits)
    able = power.power_of(len(base), len(head), len(names), FAMILY_ERROR)
    spread = able.spread(base_logs, head_logs)
    caught = able.caught(math.log1p(power.GROWTH), spread, floor)
    detectable = np.expm1(able.smallest(spread, floor))

    own = [(float(low[i]), float(estimate[i]), float(high[i])) for i in range(len(names))]
    verdicts = [_verdict(own[i], float(floor[i]), float(p[i])) for i in range(len(names))]
    trend = find_trend(base_logs, head_logs, _places(base, head))
    regressed = np.array([verdict is Verdict.REGRESSED for verdict in verdicts], bool)
    drifts = trend.explains(estimate, floor, regressed) & (not rules.alternating)
    verdicts = [Verdict.UNDECIDED if drift else verdict for verdict, drift in zip(verdicts, drifts, strict=True)]
    verdicts = _hold_shares(names, verdicts)
    changes = [
        Change(
            metric=name,
            base=medians[0][i],
            head=medians[1][i],
            low=math.expm1(low[i]),
            estimate=math.expm1(estimate[i]),
            high=math.expm1(high[i]),
            floor=float(limits[i]),
            p=float(p[i]),
            verdict=verdicts[i],
            base_spread=float(base_logs[:, i].std(ddof=1)),
            head_spread=float(head_logs[:, i].std(ddof=1)),
            runs_to_decide=_runs_to_decide(own[i], float(floor[i]), min(len(base), len(head)))
            if verdicts[i] is Verdict.UNDECIDED and not drifts[i]
            else 0,
            power=float(caught[i]),
            detectable=float(detectable[i]),
        )
        for i, name in enumerate(names)
    ]
    return changes, _say_drift(names, trend, drifts)


def _places(base: Sequence[Run], head: Sequence[Run]) -> tuple[Places, Places]:
    """Returns the places of the runs in the order of all launches; within a second, the order that they were given."""
    order = np.argsort(np.array([run.created for run in (*base, *head)]), kind="stable")
    places = np.argsort(order)
    return places[: len(base)], places[len(base) :]


def _hold_shares(names: Sequence[str], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Returns the verdicts, with no doubt and no regression of a share whose waiting did not regress."""
    of_name = dict(zip(names, verdicts, strict=True))
    harmless = (Verdict.SAME, Verdict.BETTER)
    return [
        verdict
        if not is_share(name) or verdict in harmless or of_name[needed_for(name)[-1]] is Verdict.REGRESSED
        else Verdict.NOT_JUDGED
        for name, verdict in zip(names, verdicts, strict=True)
    ]


def _say_drift(names: Sequence[str], trend: Trend, drifts: npt.NDArray[np.bool_]) -> list[str]:
    if not drifts.any():
        return []
    worst = int(np.argmax(np.where(drifts, np.abs(trend.drift), -1)))
    slope, drift = (growth(math.expm1(values[worst])) for values in (trend.slope, trend.drift))
    more = f", and {drifts.sum() - 1} more" if drifts.sum() > 1 else ""
    return [
        f"drift: within the sides {names[worst]}{more} changes by {slope} a launch, which alone makes {drift} from "
        "base to head; launch both alternately with tracekern ab"
    ]


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

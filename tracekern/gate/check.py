"""The whole check as a function: runs in, report out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from tracekern.gate.budget import Budget, check_budgets
from tracekern.gate.compare import Rules, Verdict, compare, losses_of
from tracekern.gate.report import Outcome, Report, order
from tracekern.gate.run import Run, difference


def check(
    head: Sequence[Run],
    base: Sequence[Run] | None,
    budgets: Iterable[Budget] = (),
    rules: Rules | None = None,
    *,
    head_name: str = "",
    base_name: str = "",
    undecided_fails: bool = True,
) -> Report:
    """Compares the runs of `head` with those of `base`, if given, and with budgets.

    Raises BadInput for a budget whose name no metric has.
    """
    budgets = tuple(budgets)
    problems = losses_of(head) or (_other_shapes(head) if budgets or base is None else ())
    report = Report(
        head=head_name,
        base=base_name,
        comparison=None if base is None else compare(base, head, rules or Rules()),
        budgets=() if problems else tuple(check_budgets(budgets, head)),
        problems=problems,
        undecided_fails=undecided_fails,
    )
    return dataclasses.replace(report, look_at=_look_at(report, base or (), head))


def _look_at(report: Report, *sides: Sequence[Run]) -> tuple[str, ...]:
    """Returns for each side the capture that is typical of what regressed most; none for a side without captures."""
    failed = [result.metric for result in report.budgets if not result.ok]
    if report.comparison:
        failed += [change.metric for change in order(report.comparison.of(Verdict.REGRESSED))]
    if report.outcome is not Outcome.REGRESSED:
        return ()
    captured = [[run for run in runs if failed[0] in run.metrics and Path(run.source).is_dir()] for runs in sides]
    by_value = [sorted(runs, key=lambda run: run.metrics[failed[0]]) for runs in captured if runs]
    return tuple(runs[len(runs) // 2].source for runs in by_value)


def _other_shapes(runs: Sequence[Run]) -> tuple[str, ...]:
    """Returns the differences of shape: launches of different work have no common median to compare with a budget."""
    texts = [difference(runs[0], run) for run in runs[1:]]
    return tuple(f"other shape: {text}; check runs of one shape" for text in texts if text)

"""The whole check as a function: runs in, report out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracekern.gate.budget import Budget, check_budgets
from tracekern.gate.compare import Rules, compare, losses_of
from tracekern.gate.report import Report
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
    return Report(
        head=head_name,
        base=base_name,
        comparison=None if base is None else compare(base, head, rules or Rules()),
        budgets=() if problems else tuple(check_budgets(budgets, head)),
        problems=problems,
        undecided_fails=undecided_fails,
    )


def _other_shapes(runs: Sequence[Run]) -> tuple[str, ...]:
    """Returns the differences of shape: launches of different work have no common median to compare with a budget."""
    texts = [difference(runs[0], run) for run in runs[1:]]
    return tuple(f"other shape: {text}; check runs of one shape" for text in texts if text)

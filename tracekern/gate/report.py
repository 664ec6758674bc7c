"""The result of a check, as one value with an exit code, and as JSON, Markdown and JUnit XML."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekern.errors import packages_for
from tracekern.files import write_whole
from tracekern.formatting import growth, metric_value, printable
from tracekern.gate.budget import BudgetResult
from tracekern.gate.compare import Change, Comparison, Verdict
from tracekern.gate.power import GROWTH

POWER = f"finds {growth(GROWTH)}"


class Outcome(enum.IntEnum):
    """The exit code of a check."""

    GOOD = 0
    REGRESSED = 1
    CANNOT_SAY = 2


@dataclass(frozen=True)
class Report:
    head: str
    """Where the checked runs came from, in a few words."""
    base: str
    comparison: Comparison | None
    budgets: tuple[BudgetResult, ...]
    problems: tuple[str, ...]
    """Why no verdict is possible, besides the comparison's problems."""
    undecided_fails: bool = True
    look_at: tuple[str, ...] = ()
    """Captures that show what regressed: one of base, if it has captures, and one of head."""
    cause: str = ""
    """What costs the last of these more than the first, and how much; "" where its report names nothing such."""

    @property
    def all_problems(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.problems, *(self.comparison.problems if self.comparison else ()))))

    @property
    def outcome(self) -> Outcome:
        """Returns the outcome. Doubtful data come first, because they prove nothing, good or bad."""
        if self.all_problems:
            return Outcome.CANNOT_SAY
        comparison = self.comparison
        if any(not result.ok for result in self.budgets) or (comparison and comparison.of(Verdict.REGRESSED)):
            return Outcome.REGRESSED
        if self.undecided_fails and comparison and comparison.of(Verdict.UNDECIDED):
            return Outcome.CANNOT_SAY
        return Outcome.GOOD

    @property
    def headline(self) -> str:
        """Returns the result in one sentence."""
        if self.all_problems:
            return f"cannot say: {self.all_problems[0]}"
        over = [result for result in self.budgets if not result.ok]
        parts = [f"{result.metric} is over its budget" for result in over]
        if self.comparison:
            parts += [f"{c.metric} regressed by {growth(c.estimate)}" for c in self.comparison.of(Verdict.REGRESSED)]
            undecided = len(self.comparison.of(Verdict.UNDECIDED))
            if not parts:
                parts.append("nothing regressed")
            if undecided:
                parts.append(f"{undecided} of {len(self.comparison.changes)} metrics undecided")
        if self.budgets and not over:
            parts.append("within budget")
        return "; ".join(parts) or "nothing to compare with"

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.name.lower(),
            "exit_code": int(self.outcome),
            "headline": self.headline,
            "base": self.base,
            "head": self.head,
            "problems": list(self.all_problems),
            "budgets": [
                {"metric": b.metric, "limit": b.budget.limit, "value": b.value, "ok": b.ok} for b in self.budgets
            ],
            "comparison": self.comparison.as_dict() if self.comparison else None,
            "look_at": list(self.look_at),
            "cause": self.cause or None,
        }


def order(changes: Sequence[Change]) -> list[Change]:
    """Sorts the changes by importance: regressed, undecided, improved, not judged, same."""
    ranks = (Verdict.REGRESSED, Verdict.UNDECIDED, Verdict.BETTER, Verdict.NOT_JUDGED, Verdict.SAME)
    return sorted(changes, key=lambda change: (ranks.index(change.verdict), -change.estimate))


def markdown(report: Report) -> str:
    """Returns the report as Markdown for a comment on a pull request."""
    signs = {Outcome.GOOD: "✅", Outcome.REGRESSED: "❌", Outcome.CANNOT_SAY: "❔"}
    lines = [f"### {signs[report.outcome]} tracekern: {_cell(report.headline)}", ""]
    if report.cause:
        lines += [f"**Cause in head:** {_cell(report.cause)}", ""]
    if report.budgets:
        lines += ["| budget | limit | value | |", "| --- | ---: | ---: | --- |"]
        for result in report.budgets:
            limit, value = (metric_value(result.metric, number) for number in (result.budget.limit, result.value))
            lines.append(f"| `{_cell(result.metric)}` | {limit} | {value} | {'ok' if result.ok else '**over**'} |")
        lines.append("")
    if report.comparison and report.comparison.changes:
        lines += _markdown_changes(report.comparison)
    lines += [f"- {_cell(problem)}" for problem in report.all_problems]
    if report.comparison and report.comparison.notes:
        lines += ["", *(f"- {_cell(note)}" for note in report.comparison.notes)]
    lines += ["", f"base: {_cell(report.base or 'none')} · head: {_cell(report.head)}"]
    return "\n".join(lines) + "\n"


def _markdown_changes(comparison: Comparison) -> list[str]:
    shown = [change for change in order(comparison.changes) if change.verdict is not Verdict.SAME]
    lines = [
        f"{comparison.num_head} runs against {comparison.num_base}; "
        f"{len(comparison.of(Verdict.SAME))} metrics the same; {what_is_found(comparison)}.",
        "",
    ]
    if shown:
        lines += [
            f"| metric | base | head | change | 90 % interval | floor | {POWER} | |",
            "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- |",
        ]
    for change in shown:
        base, head = metric_value(change.metric, change.base), metric_value(change.metric, change.head)
        word = f"**{change.verdict.value}**" if change.verdict is Verdict.REGRESSED else change.verdict.value
        lines.append(
            f"| `{_cell(change.metric)}` | {base} | {head} | {growth(change.estimate)} | {growth(change.low)} to "
            f"{growth(change.high)} | {size(change.floor)} | {100 * change.power:.0f} % | {word} |"
        )
    return [*lines, ""]


def junit(report: Report, path: Path) -> None:
    """Writes JUnit XML with a test case for each budget and each metric. Raises BadInput if junitparser is missing."""
    with packages_for("--junit"):
        from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    suite = TestSuite("tracekern")
    for problem in report.all_problems:
        case = TestCase("check", classname="tracekern")
        case.result = [Error(printable(problem), "cannot_say")]
        suite.add_testcase(case)
    for result in report.budgets:
        case = TestCase(printable(result.metric), classname="tracekern.budget")
        if not result.ok:
            value, limit = (metric_value(result.metric, number) for number in (result.value, result.budget.limit))
            case.result = [Failure(f"{value}, budget {limit}", "over_budget")]
        suite.add_testcase(case)
    for change in report.comparison.changes if report.comparison else ():
        case = TestCase(printable(change.metric), classname="tracekern.compare")
        interval = f"{growth(change.low)} to {growth(change.high)}"
        text = f"{growth(change.estimate)} ({interval}), floor {size(change.floor)}"
        if change.verdict is Verdict.REGRESSED:
            case.result = [Failure(text, "regressed")]
        elif change.verdict is Verdict.UNDECIDED:
            case.result = [Error(text, "undecided")] if report.undecided_fails else [Skipped(f"undecided: {text}")]
        elif change.verdict is Verdict.NOT_JUDGED:
            case.result = [Skipped(f"not judged, the waiting did not regress: {text}")]
        suite.add_testcase(case)
    document = JUnitXml("tracekern")
    document.add_testsuite(suite)
    write_whole(path, document.tostring())  # type: ignore[no-untyped-call]


def what_is_found(comparison: Comparison) -> str:
    """Returns in words how good a comparison of so many runs is at finding a growth."""
    least = min(comparison.changes, key=lambda change: change.power)
    num_sure = sum(change.power >= 0.95 for change in comparison.changes)
    return (
        f"95 of 100 such checks find {growth(GROWTH)} in {num_sure} of {len(comparison.changes)} metrics, "
        f"{100 * least.power:.0f} of 100 in {least.metric}"
    )


def size(value: float) -> str:
    """Returns 0.05 as "5.0 %", without a sign, for a spread or a floor."""
    return growth(value).removeprefix("+")


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")

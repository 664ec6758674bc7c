"""Shared by `check` and `ab`: options, and the output of a report."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tracekern.cli import options
from tracekern.cli.output import console, note, print_json, progress, suggest, table
from tracekern.errors import BadInput
from tracekern.formatting import duration, growth, metric_value

if TYPE_CHECKING:
    from tracekern.analysis.why.answer import Answer
    from tracekern.gate.compare import Change, Rules
    from tracekern.gate.report import Report


class OnUndecided(str, enum.Enum):
    fail = "fail"
    allow = "pass"


Floor = Annotated[str, typer.Option(metavar="PERCENT", help="The smallest growth that matters.")]
MinRuns = Annotated[int, typer.Option(help="Fewest runs of a side for a verdict; at least 5.")]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="PATTERN", help="Gate only these, as in 'dispatch_*.p50'. Repeatable."),
]
Undecided = Annotated[
    OnUndecided, typer.Option("--on-undecided", help="fail: a metric that cannot be decided ends in exit code 2.")
]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", parser=options.output_path, help="Write JUnit XML.")]
Markdown = Annotated[
    Path | None, typer.Option(metavar="FILE", parser=options.output_path, help="Write Markdown for a pull request.")
]
Budgets = Annotated[
    list[str] | None,
    typer.Option("--max", metavar="NAME=LIMIT", help="A budget, as in wait_token.p99=20us. Repeatable."),
]


@dataclass(frozen=True)
class Outputs:
    as_json: bool
    junit: Path | None
    markdown: Path | None


def make_rules(
    floor: str, min_runs: int, metrics: list[str] | None, *, across_hosts: bool = False, alternating: bool = False
) -> Rules:
    from tracekern.gate.compare import Rules

    text = floor.strip().removesuffix("%").strip()
    try:
        value = float(text) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise BadInput(f"--floor: got {floor!r}, wanted a percentage, as in 5%")
    if min_runs < Rules.min_runs:
        raise BadInput(f"--min-runs: got {min_runs}, wanted at least {Rules.min_runs}: with fewer no test can tell")
    patterns = tuple(metrics or ("*",))
    return Rules(value, min_runs, patterns, across_hosts, alternating)


def add_cause(report: Report, memory: int | None = None) -> Report:
    """Adds the cause of what regressed, where the report of the capture that shows it names one.

    memory: as of Cost.of().
    """
    from tracekern.gate.cause import grown_cause
    from tracekern.viewers.report.verdict import tell_cause

    if not report.look_at:
        return report
    try:
        *base, head = [_answer_of(Path(source), memory) for source in report.look_at]
    except BadInput:  # what the gate can read may not be on one axis
        return report
    if (found := grown_cause(head, base[0] if base else None)) is None:
        return report
    cause, before_ns = found
    in_base = f" In base it costs {duration(before_ns)}." if before_ns > 0 else ""
    return dataclasses.replace(report, cause=f"{tell_cause(head, cause)}{in_base}")


def _answer_of(capture: Path, memory: int | None) -> Answer:
    from tracekern.analysis.findings import analyze
    from tracekern.analysis.in_windows import CannotBeCut, Cost, findings_in_windows
    from tracekern.timeline.load import load

    cost = Cost.of([capture], memory)
    if not cost.fits:
        try:
            note(f"{capture}: the cause, in windows: {cost.in_windows()}")
            with (
                progress("reading ranks") as tell,
                findings_in_windows([capture], cost, tell, note, lambda _: None, None, {}) as found,
            ):
                return found.answer
        except CannotBeCut as error:
            note(f"{capture}: the cause, in memory: {cost.require(cost.num_spans, str(error))}")
    return analyze(load(capture)).answer


def finish(report: Report, outputs: Outputs, without_captures: str = "") -> None:
    """Writes and prints the report, and exits with its code.

    without_captures: what to do where something regressed and no capture is left that shows it.
    """
    from tracekern.files import write_whole
    from tracekern.gate.report import junit, markdown

    if outputs.junit:
        junit(report, outputs.junit)
    if outputs.markdown:
        write_whole(outputs.markdown, markdown(report))
    if outputs.as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
        if report.cause:
            console().print(f"cause in head: {report.cause}", soft_wrap=True)
        if step := _next_step(report, without_captures):
            console().print(f"next: {step}", soft_wrap=True)
    raise typer.Exit(int(report.outcome))


def _next_step(report: Report, without_captures: str) -> str:
    """Returns the command that shows what regressed, or how many launches would decide; "" where neither is asked."""
    from tracekern.gate.compare import Verdict
    from tracekern.gate.report import Outcome

    if report.outcome is Outcome.REGRESSED:
        captures = [Path(source) for source in report.look_at]
        if not captures:
            return without_captures
        shown = suggest("diff", *captures) if len(captures) == 2 else suggest("open", captures[-1])
        return f"{shown}   and why: {suggest('report', captures[-1])}" if report.cause else shown
    undecided = report.comparison.of(Verdict.UNDECIDED) if report.comparison and not report.all_problems else ()
    needed = max((change.runs_to_decide for change in undecided), default=0)
    return f"about {needed} launches a side would decide" if needed and report.outcome is Outcome.CANNOT_SAY else ""


def print_report(report: Report) -> None:
    from tracekern.gate.report import what_is_found

    out = console()
    if report.budgets:
        out.print(_budget_table(report))
    if report.comparison and report.comparison.changes:
        out.print(_change_table(report))
        note(what_is_found(report.comparison))
    for problem in report.all_problems[1:]:  # the headline says the first
        note(f"cannot say: {problem}")
    for text in report.comparison.notes if report.comparison else ():
        note(text)
    out.print(report.headline, soft_wrap=True)


def _budget_table(report: Report) -> object:
    grid = table(["value", "budget"], ["", "metric"])
    for result in report.budgets:
        value, limit = metric_value(result.metric, result.value), metric_value(result.metric, result.budget.limit)
        grid.add_row(value, limit, "ok" if result.ok else Text("over", "bold red"), result.metric)
    return grid


def _change_table(report: Report) -> object:
    from tracekern.gate.report import POWER, order, size

    assert report.comparison is not None
    grid = table(["base", "head", "change", "90 % interval", "floor", "p", POWER, "runs to tell"], ["", "metric"])
    for change in order(report.comparison.changes):
        grid.add_row(
            metric_value(change.metric, change.base),
            metric_value(change.metric, change.head),
            growth(change.estimate),
            f"{growth(change.low)} .. {growth(change.high)}",
            size(change.floor),
            f"{change.p:.2g}",
            f"{100 * change.power:.0f} %",
            f"about {change.runs_to_decide}" if change.runs_to_decide else "",
            _verdict(change),
            change.metric,
        )
    return grid


def _verdict(change: Change) -> Text:
    colors = {"regressed": "bold red", "undecided": "yellow", "better": "green"}
    return Text(change.verdict.value, colors.get(change.verdict.value, ""))

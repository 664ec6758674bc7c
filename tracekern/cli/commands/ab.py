"""`tracekern ab`: launches two commands alternately and compares them: the fair comparison on a noisy machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekern.cli import gate_output, options
from tracekern.cli.output import progress
from tracekern.errors import BadInput

if TYPE_CHECKING:
    from tracekern.gate.ab import Sides, Turn
    from tracekern.gate.compare import Rules


def ab(
    base: Annotated[str, typer.Option(metavar="CMD", help="Shell command of the old program; captures into {out}.")],
    head: Annotated[str, typer.Option(metavar="CMD", help="The same of the new one; {out} is also in TRACEKERN_OUT.")],
    runs: Annotated[int, typer.Option(help="Launches of each side; at least 5.")] = 8,
    output: Annotated[Path | None, options.output_option("DIR", "Keep the captures here; empty or new.")] = None,
    warm_ups: Annotated[int, typer.Option(help="Uncounted launches of each side, before the others.")] = 1,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Time limit of one launch.")] = None,
    budgets: gate_output.Budgets = None,
    metrics: gate_output.Metrics = None,
    floor: gate_output.Floor = "5%",
    on_undecided: gate_output.Undecided = gate_output.OnUndecided.fail,
    unaligned: options.Unaligned = False,
    junit: gate_output.Junit = None,
    markdown: gate_output.Markdown = None,
    as_json: options.Json = False,
) -> None:
    """Launch base and head alternately (base, head, head, base, ...) and say whether head is slower.

    Exit code 0: same or better, 1: regressed, 2: cannot say.
    """
    from tracekern.files import scratch_directory
    from tracekern.gate.ab import turns
    from tracekern.gate.budget import parse_budget
    from tracekern.gate.check import check
    from tracekern.gate.report import Report

    rules = gate_output.make_rules(floor, 5, metrics, alternating=True)
    limits = list(map(parse_budget, budgets or ()))
    options.check_files(junit, markdown)
    if runs < rules.min_runs or warm_ups < 0:
        raise BadInput(f"--runs {runs}, --warm-ups {warm_ups}: wanted at least {rules.min_runs} runs and 0 warm-ups")
    if timeout is not None and not timeout > 0:
        raise BadInput(f"--timeout: got {timeout:g}, wanted seconds above 0")
    if output is not None and output.exists() and any(output.iterdir()):
        raise BadInput(f"{output}: is not empty; wanted a new directory for the captures of both sides")
    with scratch_directory() as scratch:
        todo = turns(runs, (output or scratch).absolute(), warm_ups)
        sides = _launch(todo, {"base": base, "head": head}, rules, timeout, unaligned)
        if sides.problems:
            report = Report(head=head, base=base, comparison=None, budgets=(), problems=sides.problems)
        else:
            report = check(
                sides.head,
                sides.base,
                limits,
                rules,
                head_name=head,
                base_name=base,
                undecided_fails=on_undecided is gate_output.OnUndecided.fail,
            )
        report = gate_output.add_cause(report)
    if output is None:
        report = dataclasses.replace(report, look_at=())  # these captures are gone
    keep_them = "keep the captures with -o DIR; then tracekern diff DIR/base_00 DIR/head_00 shows two of them"
    gate_output.finish(report, gate_output.Outputs(as_json, junit, markdown), keep_them)


def _launch(todo: list[Turn], commands: dict[str, str], rules: Rules, timeout: float | None, unaligned: bool) -> Sides:
    from tracekern.gate.ab import run_turns

    with progress("launching", len(todo)) as tell:
        return run_turns(
            todo,
            commands,
            rules,
            unaligned=unaligned,
            timeout_s=timeout,
            on_progress=lambda number, turn: tell(number, len(todo), f"launching {turn.directory.name}"),
        )

"""`tracekern check`: compares launches of a program with a baseline and with budgets; its exit code is for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekern.cli import gate_output, options
from tracekern.cli.output import note, progress
from tracekern.errors import BadInput
from tracekern.formatting import growth

if TYPE_CHECKING:
    from tracekern.gate.budget import Budget
    from tracekern.gate.compare import Rules
    from tracekern.gate.report import Report
    from tracekern.gate.run import Run


_Append = Annotated[
    Path | None, typer.Option(metavar="FILE.jsonl", parser=options.output_path, help="Add the runs to a history.")
]
_Trend = Annotated[
    Path | None, typer.Option(metavar="FILE.html", parser=options.output_path, help="Draw that history, offline.")
]


def check(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Captures of one launch each, or directories that hold several."),
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="BASELINE", help="latest, a number as in 0003, a file, or a directory of captures."),
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the runs as a baseline, unless they regressed.")] = False,
    budgets: gate_output.Budgets = None,
    config: Annotated[
        Path | None, typer.Option(help="More budgets: tool.tracekern.budgets of this file; without, of pyproject.toml.")
    ] = None,
    metrics: gate_output.Metrics = None,
    floor: gate_output.Floor = "5%",
    min_runs: gate_output.MinRuns = 5,
    on_undecided: gate_output.Undecided = gate_output.OnUndecided.fail,
    across_hosts: Annotated[bool, typer.Option("--across-hosts", help="Compare runs of different machines.")] = False,
    unaligned: options.Unaligned = False,
    memory: options.Memory = None,
    storage: Annotated[Path, typer.Option(help="Where baselines are kept.")] = Path(".tracekern"),
    append: _Append = None,
    trend: _Trend = None,
    junit: gate_output.Junit = None,
    markdown: gate_output.Markdown = None,
    as_json: options.Json = False,
) -> None:
    """Say whether launches of a program got slower. Exit code 0: same or better, 1: regressed, 2: cannot say.

    The unit is one launch of the program: give at least 5 captures, better 8. A capture that lost records proves
    nothing, which gives exit code 2.
    """
    from tracekern.gate.check import check as check_runs

    if trend and not append:
        raise BadInput("--trend draws the history that --append names; give both")
    rules = gate_output.make_rules(floor, min_runs, metrics, across_hosts=across_hosts)
    limits = _limits(config, budgets or [])
    options.check_files(append, trend, junit, markdown)
    if not (against or save or limits or append):
        raise BadInput("nothing to check: give --against BASELINE, --max NAME=LIMIT, --save or --append")
    head = _read_new(runs, unaligned, append, limit := options.parse_memory(memory))
    base, base_name = _base(against, head, save, storage, unaligned, limit)
    report = check_runs(
        head,
        base,
        limits,
        rules,
        head_name=_name(runs),
        base_name=base_name,
        undecided_fails=on_undecided is gate_output.OnUndecided.fail,
    )
    if save:
        _save(head, rules, storage, _why_not_saved(report))
    if append and not report.all_problems:
        _append(append, trend, head, report.outcome.name.lower(), rules)
    gate_output.finish(gate_output.add_cause(report, limit), gate_output.Outputs(as_json, junit, markdown))


def _limits(config: Path | None, texts: list[str]) -> list[Budget]:
    """Returns the budgets of the file and of the command line, which takes precedence."""
    from tracekern.gate.budget import parse_budget, read_budgets

    if config is not None and not config.is_file():
        raise BadInput(f"--config {config}: no such file; its budgets would not be held")
    budgets = [*read_budgets(config or Path("pyproject.toml")), *map(parse_budget, texts)]
    return list({budget.name: budget for budget in budgets}.values())


def _read(paths: list[Path], unaligned: bool, memory: int | None) -> list[Run]:
    from tracekern.gate.baseline import read_any

    with progress("reading captures") as tell:
        return read_any(paths, unaligned, tell, memory, note)


def _read_new(paths: list[Path], unaligned: bool, append: Path | None, memory: int | None) -> list[Run]:
    """Reads the runs. Raises BadInput if they are to be appended to a history that has one of them."""
    from tracekern.gate.history import require_new

    runs = _read(paths, unaligned, memory)
    if append:
        require_new(append, runs)
    return runs


def _base(
    against: str | None, head: list[Run], save: bool, storage: Path, unaligned: bool, memory: int | None
) -> tuple[list[Run] | None, str]:
    """Returns the runs to compare with and their name; no runs if the first baseline is about to be saved."""
    from tracekern.gate.baseline import NoBaseline, find

    if against is None:
        return None, ""
    try:
        path = find(against, head[0], storage)
    except NoBaseline:
        if not save or against != "latest":
            raise
        note(f"no baseline in {storage} yet: these runs become the first")
        return None, ""
    return _read([path], unaligned, memory), str(path)


def _why_not_saved(report: Report) -> str:
    from tracekern.gate.report import Outcome

    if report.outcome is Outcome.REGRESSED:
        return "they regressed"
    return "these runs allow no verdict" if report.all_problems else ""


def _save(runs: list[Run], rules: Rules, storage: Path, refusal: str) -> None:
    from tracekern.gate.baseline import save
    from tracekern.gate.compare import minimal_detectable_changes, own_problems
    from tracekern.gate.power import GROWTH

    problems = own_problems("these runs", runs, rules)
    if refusal:
        note(f"not saved: {refusal}")
        return
    if problems:
        raise BadInput(f"not saved: {problems[0]}")
    path = save(runs, storage)
    note(f"saved {len(runs)} runs as {path}")
    changes = sorted(minimal_detectable_changes(runs, rules).items(), key=lambda entry: entry[1].change)
    told = f"what has to grow by how much for 95 of 100 checks of {len(runs)} runs to find it"
    note(f"{told}; and how many find a growth of {100 * GROWTH:.0f} %:")
    for name, found in changes:
        note(f"  {growth(found.change):>9}  {100 * found.power:3.0f} of 100  {name}")


def _append(path: Path, trend: Path | None, runs: list[Run], outcome: str, rules: Rules) -> None:
    from tracekern.files import write_whole
    from tracekern.gate import history

    entries = history.append(path, runs, outcome)
    crept = history.drift(entries, rules)
    for found in crept or ():
        since = f"{found.since.created[:10]} {found.since.commit[:7]}".rstrip()
        note(f"drift: {found.change.metric} {growth(found.change.estimate)} since {since}")
    if trend:
        from tracekern.viewers.trend import trend_page

        drifts = None if crept is None else {found.change.metric: found.change.estimate for found in crept}
        write_whole(trend, trend_page(runs[0].device, history.series(entries), drifts))


def _name(paths: list[Path]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"

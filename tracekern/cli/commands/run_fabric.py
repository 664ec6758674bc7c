"""`tracekern run fabric`: ranks of this host write pages to each other through transfer engines, recorded."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.flags import takes_flags_of
from tracekern.cli.output import Command, console, print_json, progress, show_it, table
from tracekern.errors import BadInput
from tracekern.fabric.exchange import Exchange, ExchangeReport, raise_for_error, run_exchange
from tracekern.formatting import count, duration

if TYPE_CHECKING:
    from tracekern.analysis.questions.transfers import TransferWaits
    from tracekern.timeline.model import Timeline


app = typer.Typer(add_completion=False)


@app.command(cls=Command, epilog="Example: tracekern run fabric --ranks 2 -o my-capture")
@takes_flags_of(Exchange)
def fabric(
    output: options.Directory = None,
    *,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Record, or only run.")] = True,
    as_json: options.Json = False,
    **flags: Any,
) -> None:
    """Transfers over libfabric. Ends with 0 only if every byte arrived."""
    if trace and output is None:
        raise BadInput("run fabric: no place for the capture; give one with -o DIR, or run with --no-trace")
    plan = Exchange(**flags, command=shlex.join(["tracekern", *sys.argv[1:]]))
    with progress(f"{plan.provider} on {plan.ranks} ranks", plan.iterations) as tell:
        reports, directory = run_exchange(plan, output if trace else None, tell)
    raise_for_error(reports)
    timeline = _write_trace(directory) if directory else None
    if as_json:
        print_json({"ranks": [dataclasses.asdict(report) for report in reports], "capture": str(directory or "")})
    else:
        _print(plan, reports, timeline, directory)


def _write_trace(directory: Path) -> Timeline:
    from tracekern.dump.format import TRACE_NAME
    from tracekern.export.write import save_in_capture
    from tracekern.timeline.load import load

    timeline = load(directory)
    save_in_capture(timeline, directory / TRACE_NAME)
    return timeline


def _print(plan: Exchange, reports: list[ExchangeReport], timeline: Timeline | None, directory: Path | None) -> None:
    from tracekern.dump.format import TRACE_NAME
    from tracekern.timeline.model import told_once

    out = console()
    out.print(
        f"{plan.provider}: {count(plan.iterations, 'iteration')} on {count(plan.ranks, 'rank')} with "
        f"{count(plan.domains, 'domain')} each; every rank writes {count(plan.pages, 'page')} of {plan.page_kib} KiB "
        "to every other rank",
        soft_wrap=True,
    )
    out.print(_table(plan, reports, timeline))
    out.print("every byte that arrived is what was written")
    if timeline is not None and directory is not None:
        for line in [*_why(timeline), *(problem.text for problem in told_once(timeline.problems))]:
            out.print(line, soft_wrap=True)
        out.print(f"trace: {directory / TRACE_NAME}   {show_it(directory)}", soft_wrap=True)


def _why(timeline: Timeline) -> list[str]:
    from tracekern.analysis.questions.transfers import divide_transfer_waits
    from tracekern.viewers.report.questions.transfers import describe_transfers

    waits = divide_transfer_waits(timeline)
    return [f"waiting: {describe_transfers(waits)}"] if waits is not None and len(waits) else []


def _table(plan: Exchange, reports: list[ExchangeReport], timeline: Timeline | None) -> Any:
    from tracekern.analysis.questions.transfers import TransferCause, divide_transfer_waits

    waits: TransferWaits | None = divide_transfer_waits(timeline) if timeline is not None else None
    parts = [cause.value for cause in TransferCause] if waits is not None else []
    grid = table(["rank", "ms/iteration", "MiB/s in", "waited", *parts], [])
    num_bytes = (plan.ranks - 1) * plan.bytes_to_each
    for report in reports:
        median_ms = statistics.median(report.iteration_ms)
        row = [str(report.rank), f"{median_ms:,.2f}", f"{num_bytes / 2**20 / median_ms * 1e3:,.0f}"]
        if waits is not None:
            own = waits.rank == report.rank
            row += [duration(int(waits.wait_ns[own].sum()))]
            row += [duration(int(waits.of(cause)[own].sum())) for cause in TransferCause]
        else:
            row.append("-")
        grid.add_row(*row)
    return grid

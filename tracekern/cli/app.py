"""The list of commands."""

from __future__ import annotations

import typer

import tracekern
from tracekern.cli import ab, check, diff, export, info, merge, open_trace, overhead, report, run, salvage, snapshot
from tracekern.cli.output import Command

app = typer.Typer(
    name="tracekern",
    help="What happens inside GPU kernels, on every rank, on one timeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(run.app, name="run")
app.command(cls=Command)(merge.merge)
app.command(cls=Command)(export.export)
app.command(cls=Command)(info.info)
app.command(cls=Command)(report.report)
app.command(cls=Command)(check.check)
app.command(cls=Command)(ab.ab)
app.command(cls=Command)(diff.diff)
app.command(cls=Command)(overhead.overhead)
app.command(cls=Command)(salvage.salvage)
app.command(cls=Command)(snapshot.snapshot)
app.command("open", cls=Command)(open_trace.open_trace)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tracekern {tracekern.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass

"""The list of commands."""

from __future__ import annotations

import typer

import tracekern
from tracekern.cli import ab, check, diff, export, info, merge, open_trace, overhead, report, run, salvage, snapshot

app = typer.Typer(
    name="tracekern",
    help="What happens inside GPU kernels, on every rank, on one timeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(run.app, name="run")
app.command()(merge.merge)
app.command()(export.export)
app.command()(info.info)
app.command()(report.report)
app.command()(check.check)
app.command()(ab.ab)
app.command()(diff.diff)
app.command()(overhead.overhead)
app.command()(salvage.salvage)
app.command()(snapshot.snapshot)
app.command("open")(open_trace.open_trace)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tracekern {tracekern.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass

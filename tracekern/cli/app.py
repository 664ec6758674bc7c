"""The list of commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.core

from tracekern import __version__
from tracekern.cli.commands import (
    ab,
    check,
    convert,
    diff,
    info,
    open_trace,
    overhead,
    record,
    report,
    run,
    salvage,
    snapshot,
)
from tracekern.cli.output import Command


class _RunFirst(typer.core.TyperGroup):
    def list_commands(self, context: Any) -> list[str]:
        return sorted(super().list_commands(context), key=lambda name: name != "run")


_MAKE_AND_CHECK = "tracekern run moe --ranks 2 -o my-capture && tracekern check my-capture --max wait_token.p99=1s"

app = typer.Typer(
    name="tracekern",
    cls=_RunFirst,
    help="What happens inside GPU kernels, on every rank, on one timeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# In the order in which they are used, each with an example.
_COMMANDS: dict[str, list[tuple[str, Callable[..., None], str]]] = {
    "Record": [
        ("snapshot", snapshot.snapshot, "tracekern snapshot -o now/"),
        ("salvage", salvage.salvage, "tracekern salvage RUN"),
        ("overhead", overhead.overhead, "tracekern overhead"),
    ],
    "Look": [
        ("info", info.info, "tracekern info my-capture"),
        ("report", report.report, "tracekern report my-capture -o report.html"),
        ("merge", convert.merge, "tracekern merge node-0/ node-1/ -o trace.pftrace.gz"),
        ("export", convert.export, "tracekern export my-capture -o spans.parquet"),
        ("open", open_trace.open_trace, "tracekern open my-capture"),
        ("diff", diff.diff, "tracekern diff before/ after/ -o diff.html"),
    ],
    "Hold": [
        ("check", check.check, _MAKE_AND_CHECK),
        ("ab", ab.ab, "tracekern ab --base './old.sh {out}' --head './new.sh {out}'"),
    ],
}

app.add_typer(run.app, name="run", rich_help_panel="Record")
# Options behind the program's name are the program's.
_of_program = {"allow_interspersed_args": False}
_example = "Example: tracekern record -o my-capture -- torchrun --nproc-per-node 2 my_program.py"
app.command("record", cls=Command, rich_help_panel="Record", epilog=_example, context_settings=_of_program)(
    record.record
)
for _panel, _commands in _COMMANDS.items():
    for _name, _function, _example in _commands:
        app.command(_name, cls=Command, rich_help_panel=_panel, epilog=f"Example: {_example}")(_function)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tracekern {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass

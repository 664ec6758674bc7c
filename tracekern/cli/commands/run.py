"""`tracekern run`: runs a workload on several ranks, records its kernels, and leaves a capture and a trace."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main

from tracekern.errors import BadInput

_WORKLOADS = {
    "fabric": "Transfers over libfabric. Ends with 0 only if every byte arrived.",
    "moe": "MoE dispatch, experts and combine. Ends with 0 only if results equal the reference, bit by bit.",
}


class _Workloads(typer.core.TyperGroup):
    """Imports a workload when it is called: its flags are the fields of its options, which need what it runs."""

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        """Raises BadInput for an unknown workload, which is mostly the user's own program."""
        name, *rest = words
        if name not in _WORKLOADS:
            raise BadInput(
                f"run {name}: no such workload, wanted moe or fabric; a program of your own opens "
                "tracekern.capture(...) itself and is started as usual, by python or torchrun, or calls "
                "tracekern.launch() and is started by tracekern record"
            )
        return name, typer.main.get_command(import_module(f"tracekern.cli.commands.run_{name}").app), rest


app = typer.Typer(
    help="Run a workload and trace it.",
    epilog="Example: tracekern run moe -o my-capture",
    no_args_is_help=True,
    cls=_Workloads,
)
for _name, _help in _WORKLOADS.items():
    app.command(_name, help=_help)(lambda: None)

"""How commands speak: results to stdout, everything else to stderr, bars only where somebody watches."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import typer.core
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from tracekern.formatting import printable

_WIDTH = 1000
"""Wider than any line of ours: where a terminal is narrower, it breaks lines itself, and no cell loses its end."""
_PANELS_WIDTH = 80
SUFFIXES, BROWSER_SUFFIXES = "{suffixes}", "{browser suffixes}"
"""Stand in help texts for suffixes that save() takes, all and a browser's: only who asks for help waits for them."""


class _Console(Console):
    """Names of kernels and files stay as they are, `gemm[fp8]` is no markup, `::fire::` no picture, but for what would
    steer the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(_printable, objects), **options)


def _printable(cell: Any) -> Any:
    return printable(cell) if isinstance(cell, str) else cell


def console() -> Console:
    """For results."""
    return _Console(width=_WIDTH)


def note(text: str) -> None:
    """Says to the person, not to the program that reads stdout, what is going on."""
    _Console(stderr=True, soft_wrap=True).print(text)


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """What the block warns of, one line each behind it, without the place in our code where it arose."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    for warning in warned:
        note(f"warning: {warning.message}")


class Command(typer.core.TyperCommand):
    """Its help has panels only where they have room: columns that are too narrow lose the ends of options' names."""

    def format_help(self, *arguments: Any) -> None:
        for parameter in self.params:
            if text := getattr(parameter, "help", None):
                parameter.help = _with_suffixes(text)
        if Console().width < _PANELS_WIDTH:
            self.rich_markup_mode = None
        super().format_help(*arguments)


def _with_suffixes(text: str) -> str:
    """A help text with the suffixes themselves: ".pftrace, .json (also .gz), .parquet"."""
    for place, only_browser in ((SUFFIXES, False), (BROWSER_SUFFIXES, True)):
        if place in text:
            from tracekern.export.write import formats

            shown = [entry for entry in formats() if entry.for_browser or not only_browser]
            suffixes = [suffix for entry in shown for suffix in entry.suffixes]
            zipped = [suffix for suffix in suffixes if f"{suffix}.gz" in suffixes]
            plain = [suffix for suffix in suffixes if suffix.removesuffix(".gz") not in zipped]
            text = text.replace(place, ", ".join([f"{', '.join(zipped)} (also .gz)", *plain]))
    return text


def program() -> str:
    """How the person called tracekern, for a line to copy: its path, where the shell would not find the name."""
    called = sys.argv[0]
    if Path(called).name != "tracekern":
        return f"{Path(sys.executable).name} -m tracekern"
    found = shutil.which("tracekern")
    return "tracekern" if found and os.path.samefile(found, called) else os.path.relpath(called)


def show_it(what: Path) -> str:
    """The command that opens a capture or a trace, to be copied."""
    return f"show it: {program()} {shlex.join(['open', str(what)])}"


def print_json(value: dict[str, Any]) -> None:
    """The one JSON object of `--json`."""
    sys.stdout.write(json.dumps(value) + "\n")


class _Table(Table):
    """Without spaces behind the last cell: where a terminal is as narrow, they would be a line of nothing."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_printable, cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(super().__rich_console__(console, options)):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def table(right: list[str], left: list[str]) -> Table:
    """An empty table: first the columns that align right, numbers, then those that align left."""
    grid = _Table(box=None, pad_edge=False, header_style="bold")
    for name in right:
        grid.add_column(name, justify="right")
    for name in left:
        grid.add_column(name)
    return grid


def working(text: str) -> AbstractContextManager[object]:
    """Something moves on stderr while a step of unknown length runs; silent where stderr is not a terminal."""
    errors = Console(stderr=True)
    return errors.status(text) if errors.is_terminal else nullcontext()


def progress() -> Progress:
    """A bar on stderr that vanishes when done; silent where stderr is not a terminal."""
    errors = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )

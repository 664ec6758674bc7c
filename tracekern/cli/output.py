"""Output of commands: results go to stdout, all else to stderr; progress bars are drawn on terminals only."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import typer.core
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from tracekern.formatting import argument, printable

_WIDTH = 1000
"""Wider than any line printed here: a narrower terminal wraps lines itself, so no cell is cut off."""
_PANELS_WIDTH = 80
_BARS: list[Console] = []
"""Where a bar is shown: lines are printed above it."""
SUFFIXES, BROWSER_SUFFIXES = "{suffixes}", "{browser suffixes}"
"""Placeholders in help texts for the suffixes that save() takes: all, and a browser's. Looking them up takes time, so
only --help does it."""


class _Console(Console):
    """A console that prints names of kernels and files literally: no markup in `gemm[fp8]`, no emoji in `::fire::`.

    Only characters that control the terminal are replaced.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(_printable, objects), **options)


def _printable(cell: Any) -> Any:
    return printable(cell) if isinstance(cell, str) else cell


def console() -> Console:
    """Returns the console for results."""
    return _Console(width=_WIDTH)


def note(text: str) -> None:
    """Prints a line for the user to stderr, which a program that reads stdout does not see."""
    (_BARS[-1] if _BARS else _Console(stderr=True)).print(text, soft_wrap=True)


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Prints warnings of the block after it, one line each, without their place in the source."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    for warning in warned:
        note(f"warning: {warning.message}")


class Command(typer.core.TyperCommand):
    """A command whose help has panels only if they have room: narrow columns would cut off names of options."""

    def format_help(self, *arguments: Any) -> None:
        for parameter in self.params:
            if isinstance(parameter, typer.core.TyperArgument | typer.core.TyperOption) and parameter.help:
                parameter.help = _with_suffixes(parameter.help)
        if Console().width < _PANELS_WIDTH:
            self.rich_markup_mode = None
        super().format_help(*arguments)


def _with_suffixes(text: str) -> str:
    """Returns a help text with its placeholders replaced by suffixes: ".pftrace, .json (also .gz), .parquet"."""
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
    """Returns how tracekern was called, for a command to copy; a path if the shell would not find the name."""
    called, script = sys.argv[0], Path(sys.executable).with_name("tracekern")
    if Path(called).name != "tracekern":
        if not script.exists():
            return f"{Path(sys.executable).name} -m tracekern"
        called = str(script)  # safer than `python -m tracekern`, which imports from the working directory
    found = shutil.which("tracekern")
    if found and os.path.exists(called) and os.path.samefile(found, called):
        return "tracekern"
    path = os.path.relpath(called)
    return shlex.quote(argument(Path(path)) if os.sep in path else f"./{path}")


def suggest(*arguments: str | Path) -> str:
    """Returns a command of tracekern for the user to copy. Paths are to be given as such: they may begin with "-"."""
    return f"{program()} {quoted(*arguments)}"


def quoted(*arguments: str | Path) -> str:
    """Returns arguments of a shell's command, for the user to copy."""
    return shlex.join(argument(each) if isinstance(each, Path) else each for each in arguments)


def show_it(what: Path) -> str:
    """Returns the command that opens a capture or a trace, and what it is for."""
    return f"show it: {suggest('open', what)}"


def print_json(value: dict[str, Any]) -> None:
    """Prints the JSON object of `--json`."""
    sys.stdout.write(json.dumps(value) + "\n")


class _Table(Table):
    """A table without spaces after the last cell, which a narrow terminal would wrap into an empty line."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(_printable, cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = (part for part in super().__rich_console__(console, options) if isinstance(part, Segment))  # all are
        for line in Segment.split_lines(parts):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def table(right: list[str], left: list[str]) -> Table:
    """Returns an empty table: first the right-aligned columns, for numbers, then the left-aligned ones."""
    grid = _Table(box=None, pad_edge=False, header_style="bold")
    for name in right:
        grid.add_column(name, justify="right")
    for name in left:
        grid.add_column(name)
    return grid


def working(text: str) -> AbstractContextManager[object]:
    """Shows a spinner on stderr during a step of unknown length; silent if stderr is not a terminal."""
    errors = Console(stderr=True)
    return errors.status(text) if errors.is_terminal else nullcontext()


@contextlib.contextmanager
def progress(text: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr that vanishes when done; silent if stderr is not a terminal.

    Yields a function to tell how much is done, of how much, and a new text.
    """
    errors = _Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(text, total=total)

        def tell(done: int, total: int, text: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=text)

        _BARS.append(errors)
        try:
            yield tell
        finally:
            _BARS.remove(errors)

"""What `--help` prints: whole names, whole texts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import typer
from rich.text import Text
from test_front_door import commands_of

from tests.paths import ROOT
from tracekern.cli.app import app


def entries(group) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """The commands of a group as they are called; those of `run` are imported then."""
    yield from ((name, group.resolve_command(None, [name])[1]) for name in getattr(group, "commands", ()))


def help_texts(command, name="tracekern") -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for inner, entry in entries(command):
        yield from help_texts(entry, f"{name} {inner}")


def test_help_texts_are_the_same_with_markup_and_without():
    """Wide terminals show them with, narrow ones without."""
    for name, text in help_texts(typer.main.get_command(app)):
        assert Text.from_markup(text).plain == text, name


def test_the_example_of_check_works_from_nothing(tmp_path):
    """It makes its own capture, of the name that the examples of other commands read."""
    commands = commands_of(typer.main.get_command(app))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("check", "report"):
        example = commands[name,].epilog.removeprefix("Example: ")
        line = re.sub(r"\btracekern ", f"{shlex.quote(sys.executable)} -m tracekern ", example)
        ended = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, (example, ended.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {"my-capture", "report.html"}

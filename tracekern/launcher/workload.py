"""What the workloads of `tracekern run` share: flags of their options, and what passes between launcher and ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import field
from typing import Any, Generic, TypeVar

from tracekern.errors import BadInput

Options = TypeVar("Options")
Report = TypeVar("Report")

PROGRESS = "tracekern-progress "
"""Prefix of a rank's line with the number of finished calls and of all calls."""
REPORT = "tracekern-report "
"""Prefix of a rank's last line, its report as JSON."""


def flag(default: Any, help_text: str, *names: str, **about: Any) -> Any:
    """Returns the dataclass field of an option that the command line takes.

    names: other names than the field's. about: more for typer.Option, and `kind`, the type that a user gives where that
    is not the field's.
    """
    return field(default=default, metadata={"names": names, "help": help_text, **about})


def options_from(variable: str, options: Callable[..., Options]) -> Options:
    """Returns a run's options from a rank's environment variable, which has the fields as JSON. Raises BadInput."""
    text = os.environ.get(variable, "{}")
    try:
        return options(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{variable} is {text!r}: {error}") from None


def tell(prefix: str, text: str) -> None:
    """Tells the launcher PROGRESS or REPORT."""
    sys.stdout.write(f"{prefix}{text}\n")
    sys.stdout.flush()


class Lines(Generic[Report]):
    """Takes the lines of the ranks: progress, reports, and what else they print, which goes to standard error."""

    def __init__(self, report: Callable[..., Report], on_progress: Callable[[int, int], None] | None) -> None:
        self._report, self._on_progress = report, on_progress
        self.reports: dict[int, Report] = {}

    def take(self, rank: int, line: str) -> None:
        if line.startswith(PROGRESS):
            done, total = line[len(PROGRESS) :].split()
            if rank == 0 and self._on_progress:
                self._on_progress(int(done), int(total))
        elif line.startswith(REPORT):
            values = json.loads(line[len(REPORT) :])
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            self.reports[values["rank"]] = self._report(**values)
        else:
            sys.stderr.write(f"[rank {rank}] {line}\n")

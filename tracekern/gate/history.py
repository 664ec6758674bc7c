"""A history of checks, one JSON line each, and the slow drift in it, each step of which is too small for the gate."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.errors import BadInput
from tracekern.files import write_whole
from tracekern.gate.baseline import commit_info, held, now
from tracekern.gate.compare import Change, Rules, Verdict, compare, in_all, needed_for
from tracekern.gate.run import Run, difference

FORMAT = "tracekern-history"
VERSION = 1


@dataclass(frozen=True)
class Entry:
    created: str
    commit: str
    outcome: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Drift:
    since: Entry
    change: Change


def append(path: Path, runs: Sequence[Run], outcome: str) -> list[Entry]:
    """Adds a line. Returns all entries, the new one last. Raises BadInput like require_new()."""
    entry = Entry(now(), commit_info()["id"], outcome, tuple(runs))
    line = {"format": FORMAT, "version": VERSION, "created": entry.created, "commit": entry.commit, "outcome": outcome}
    text = json.dumps({**line, "runs": [run.as_dict() for run in runs]}) + "\n"
    with held(Path(os.path.realpath(path)).parent):  # else a line that another check adds meanwhile would be lost
        before = require_new(path, runs)
        old = path.read_text() if path.exists() else ""
        write_whole(path, old + ("" if not old or old.endswith("\n") else "\n") + text)
    return [*before, entry]


def require_new(path: Path, runs: Sequence[Run]) -> list[Entry]:
    """Returns the entries of the history; none if there is no file yet.

    Raises BadInput if the file is not a history, or has one of the runs already: the same run twice is no trend.
    """
    entries = read(path) if path.exists() else []
    appended = {run.run_id: entry.created for entry in entries for run in entry.runs if run.run_id}
    for run in runs:
        if run.run_id in appended:
            raise BadInput(f"{path}: has {run.source} since {appended[run.run_id]}; append new launches of the program")
    return entries


def read(path: Path) -> list[Entry]:
    """Reads a history. Raises BadInput naming the line that append() did not write."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error}); name a history that --append wrote, or a new file") from None
    return [_entry(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def comparable(entries: Sequence[Entry]) -> list[Entry]:
    """Returns the entries with the device, hosts and shape of the newest."""
    newest = entries[-1].runs[0]
    return [entry for entry in entries if not _differs(entry.runs[0], newest)]


def drift(entries: Sequence[Entry], rules: Rules) -> list[Drift] | None:
    """Returns the metrics that grew up to the newest entry.

    Each starts from the first comparable entry with enough runs that all have the metric. Returns None if there are too
    few entries or runs to compare.
    """
    *before, newest = comparable(entries)
    before = [entry for entry in before if len(entry.runs) >= rules.min_runs]
    metrics_of = [in_all(entry.runs) for entry in before]
    since: dict[int, list[str]] = {}
    for name in sorted(in_all(newest.runs)):
        first = next((number for number, names in enumerate(metrics_of) if names.issuperset(needed_for(name))), None)
        if first is not None and any(fnmatchcase(name, pattern) for pattern in rules.metrics):
            since.setdefault(first, []).append(name)
    every = dataclasses.replace(rules, metrics=("*",))
    found = [
        (before[number], compare(_only(names, before[number]), _only(names, newest), every))
        for number, names in sorted(since.items())
    ]
    if not any(comparison.changes for _, comparison in found):
        return None
    return [Drift(entry, change) for entry, comparison in found for change in comparison.of(Verdict.REGRESSED)]


def series(entries: Sequence[Entry]) -> dict[str, list[tuple[str, float, float, float]]]:
    """Returns, by metric, (label, lowest, median, highest of the runs) of each comparable entry."""
    result: dict[str, list[tuple[str, float, float, float]]] = {}
    for number, entry in enumerate(comparable(entries), 1):
        label = f"{number}: {entry.created[:10]} {entry.commit[:7]}".rstrip()
        for name in dict.fromkeys(name for run in entry.runs for name in run.metrics):
            values = [run.metrics[name] for run in entry.runs if name in run.metrics]
            row = (label, min(values), float(np.median(values)), max(values))
            result.setdefault(name, []).append(row)
    return result


def _only(names: Sequence[str], entry: Entry) -> list[Run]:
    needed = dict.fromkeys(needed for name in names for needed in needed_for(name))
    return [dataclasses.replace(run, metrics={name: run.metrics[name] for name in needed}) for run in entry.runs]


def _differs(first: Run, second: Run) -> bool:
    same_place = (first.device, first.backend, first.nodes) == (second.device, second.backend, second.nodes)
    return not same_place or bool(difference(first, second))


def _entry(where: str, line: str) -> Entry:
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: is not JSON ({str(error)[:60]}); wanted a line that --append wrote") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("runs"), list):
        raise BadInput(f"{where}: is no line of a history; wanted one that --append wrote")
    if values.get("version") != VERSION or not values["runs"]:
        got = str(values.get("version"))[:20]
        raise BadInput(
            f"{where}: history version {got} with {len(values['runs'])} runs, wanted {VERSION}; start a new file"
        )
    runs = tuple(Run.from_dict(where, run) for run in values["runs"])
    created, commit, outcome = (str(values.get(key, "")) for key in ("created", "commit", "outcome"))
    return Entry(created, commit, outcome, runs)

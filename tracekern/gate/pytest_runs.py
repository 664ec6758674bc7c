"""The runs of a pytest session by test: saves and compares them, and collects failures."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.analysis.statistics import STATISTICS
from tracekern.errors import BadInput
from tracekern.formatting import count, growth, metric_value, whole_number
from tracekern.gate.baseline import keep, numbered, write_document
from tracekern.gate.compare import (
    Rules,
    Verdict,
    compare,
    gone,
    gone_metrics,
    has_sign_of_growth,
    losses_of,
    needed_for,
    sides_differ,
)
from tracekern.gate.run import Run

FORMAT = "tracekern-pytest"
VERSION = 1
FOLDER = "pytest"
_LIMIT = re.compile(rf"({'|'.join(STATISTICS)}):(\d+(?:\.\d+)?)%")

Tests = dict[str, list[Run]]


@dataclass
class TestRuns:
    __test__ = False  # pytest must not take it for a test

    storage: Path
    save: bool
    baseline: Path | None
    before: Tests
    limits: dict[str, float]
    """Statistic -> relative growth that fails a test."""
    tests: Tests = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @staticmethod
    def open(storage: Path, save: bool, compare_with: str | None, limits: Sequence[str]) -> TestRuns:
        """Reads the baseline before any test runs. Raises BadInput."""
        parsed = dict(map(parse_limit, limits))
        path = find(storage, compare_with or "latest") if compare_with or parsed else None
        return TestRuns(storage, save, path, read(path) if path else {}, parsed)

    def finish(self, all_passed: bool) -> None:
        """Compares the runs, and saves them unless something failed."""
        for test, runs in self.tests.items():
            self.failures += [f"{test}: cannot say: {problem}" for problem in losses_of(runs)]
        if self.baseline:
            self.lines.append(f"compared with {self.baseline}")
            for test, runs in self.tests.items():
                self._compare(test, runs)
        if self.save and not (all_passed and self.tests and not self.failures):
            self.lines.append("not saved: " + ("something failed" if self.tests else "no test opened a capture"))
        elif self.save:
            self.lines.append(f"saved {count(len(self.tests), 'test')} as {write(self.storage, self.tests)}")

    def _compare(self, test: str, runs: list[Run]) -> None:
        base = self.before.get(test)
        if base is None:
            self.lines.append(f"{test}: not in the baseline")
            return
        rules = Rules(across_hosts=True)
        if problems := sides_differ(base[0], runs[0], rules, or_else=", or save a new baseline"):
            self.failures += [f"{test}: cannot say: {problem}" for problem in problems]
            return
        self.failures += [
            f"{test}: cannot say: {gone(name)}"
            for name in gone_metrics(base, runs)
            if name.rpartition(".")[2] in self.limits
        ]
        proven = min(len(base), len(runs)) >= rules.min_runs
        for name in runs[0].metrics:
            statistic = name.rpartition(".")[2]
            values = [[run.metrics[name] for run in side if name in run.metrics] for side in (base, runs)]
            if not all(values) or (self.limits and statistic not in self.limits):
                continue
            before, after = (float(np.median(side)) for side in values)
            grown = after / before - 1 if before else float("inf") if after else 0.0
            line = f"{test}: {name} {metric_value(name, before)} -> {metric_value(name, after)} ({growth(grown)})"
            limit = self.limits.get(statistic, float("inf"))
            missing = [needed for needed in needed_for(name) if any(needed not in run.metrics for run in base)]
            if grown > limit and missing:
                self.failures.append(
                    f"{line}; cannot say: base lacks {missing[0]}, keep a new baseline with --tracekern-save"
                )
            elif grown > limit and (_is_proven if proven else _is_sign)(name, base, runs, limit):
                self.failures.append(f"{line}, more than {100 * limit:g} %{'' if proven else UNPROVEN}")
            else:
                self.lines.append(line)


UNPROVEN = " (fewer than 5 runs a side: a sign, no proof)"


def _is_proven(name: str, base: list[Run], runs: list[Run], limit: float) -> bool:
    comparison = compare(base, runs, Rules(floor=limit, metrics=(glob.escape(name),), across_hosts=True))
    return any(change.metric == name for change in comparison.of(Verdict.REGRESSED))


def _is_sign(name: str, base: list[Run], runs: list[Run], limit: float) -> bool:
    before, after = ([run for run in side if name in run.metrics] for side in (base, runs))
    return has_sign_of_growth(before, after, name, Rules(floor=limit))


def parse_limit(text: str) -> tuple[str, float]:
    """Parses "p50:15%" as ("p50", 0.15). Raises BadInput."""
    match = _LIMIT.fullmatch(text.strip())
    if not match:
        raise BadInput(f"--tracekern-compare-fail: got {text!r}, wanted {'|'.join(STATISTICS)}:PERCENT, as in p50:15%")
    return match[1], float(match[2]) / 100


def find(storage: Path, text: str) -> Path:
    """Returns the baseline that `text` names. Raises BadInput if there is none."""
    wanted = whole_number(text)
    if text != "latest" and wanted is None:
        return Path(text)
    kept = numbered(storage / FOLDER)
    chosen = [path for number, path in kept if wanted in (None, number)]
    if not chosen:
        which = "" if text == "latest" else f" {text}"
        raise BadInput(f"no baseline{which} in {storage / FOLDER}; keep one with --tracekern-save")
    return chosen[-1]


def write(storage: Path, tests: Tests) -> Path:
    content = {"tests": {test: [run.as_dict() for run in runs] for test, runs in tests.items()}}
    return keep(storage / FOLDER, lambda path, commit: write_document(path, FORMAT, VERSION, commit, content))


def read(path: Path) -> Tests:
    """Reads a baseline. Raises BadInput for a file that write() did not make."""
    try:
        document: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read ({str(error)[:80]}); name one that --tracekern-save wrote") from None
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        raise BadInput(f"{path}: is no baseline of tests of version {VERSION}; keep a new one with --tracekern-save")
    tests = document.get("tests")
    if not isinstance(tests, dict) or not all(isinstance(runs, list) and runs for runs in tests.values()):
        raise BadInput(f"{path}: holds no tests; keep a new one with --tracekern-save")
    return {test: [Run.from_dict(str(path), run) for run in runs] for test, runs in tests.items()}

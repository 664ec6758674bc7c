"""Limits that hold without a baseline: `wait_token.p99=20us` on the command line or in pyproject.toml.

[tool.tracekern.budgets]
"wait_token.p99" = "20us"
dispatch_recv.wait_token.wait_share = "30%"   # the name needs quotes only where it has spaces or brackets
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.analysis.statistics import STATISTICS
from tracekern.errors import BadInput, packages_for
from tracekern.formatting import is_share, similar
from tracekern.gate.run import Run

_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "%": 0.01}
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s|%)")


@dataclass(frozen=True)
class Budget:
    name: str
    """A metric, with or without its stage: `wait_token.p99` applies to every stage that has the event."""
    limit: float
    """ns, or a share in 0..1."""


@dataclass(frozen=True)
class BudgetResult:
    metric: str
    budget: Budget
    value: float
    """Median over the runs."""

    @property
    def ok(self) -> bool:
        return self.value <= self.budget.limit


def parse_budget(text: str) -> Budget:
    """Parses a text such as "wait_token.p99=20us". Raises BadInput."""
    name, equals, limit = (part.strip() for part in text.partition("="))
    if not equals:
        raise BadInput(f"budget {text!r}: wanted NAME=LIMIT, as in wait_token.p99=20us")
    return _budget(name, limit)


def read_budgets(pyproject: Path) -> list[Budget]:
    """Reads the budgets in [tool.tracekern.budgets]; none if the file or the table is missing. Raises BadInput."""
    if not pyproject.is_file():
        return []
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        with packages_for(f"{pyproject}: reading it on Python 3.10"):
            import tomli as tomllib
    try:
        document: Any = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        as_in = 'a budget is a line such as "wait_token.p99" = "20us"'
        raise BadInput(
            f"{pyproject}: cannot be read ({error}); fix it, or choose another with --config; {as_in}"
        ) from None
    for key in ("tool", "tracekern", "budgets"):
        document = document.get(key, {})
        if not isinstance(document, Mapping):
            raise BadInput(f"{pyproject}: {key} is no table; wanted [tool.tracekern.budgets] with lines NAME = LIMIT")
    try:
        limits = list(_flat(document))
        budgets = {name: _budget(name, limit) for name, limit in limits}
    except BadInput as error:
        raise BadInput(f"{pyproject}: {error}") from None
    if twice := [name for at, (name, _) in enumerate(limits) if name in dict(limits[:at])]:
        raise BadInput(f"{pyproject}: budget {twice[0]} is there twice, with quotes and without; keep one")
    return list(budgets.values())


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields names and limits. The dots of a key without quotes make tables of it: wait_token.p99 = "20us"."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def check_budgets(budgets: Iterable[Budget], runs: Sequence[Run]) -> list[BudgetResult]:
    """Checks every metric that a budget names, by its median over `runs`. Raises BadInput for an unknown name."""
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    results = []
    for budget in budgets:
        meant = [name for name in known if name == budget.name or name.endswith(f".{budget.name}")]
        if not meant:
            without_stage = [".".join(name.split(".")[-2:]) for name in known]
            raise BadInput(f"budget {budget.name}: no such metric; {similar(budget.name, [*known, *without_stage])}")
        for name in meant:
            value = float(np.median([run.metrics[name] for run in runs if name in run.metrics]))
            results.append(BudgetResult(name, budget, value))
    return results


def _budget(name: str, limit: Any) -> Budget:
    if name.rpartition(".")[2] not in STATISTICS or not name.rpartition(".")[0]:
        raise BadInput(f"budget {name}: wanted EVENT.STATISTIC, the statistic one of {', '.join(STATISTICS)}")
    match = _LIMIT.fullmatch(limit.strip()) if isinstance(limit, str) else None
    if not match or (match[2] == "%") != is_share(name) or (match[2] == "%" and float(match[1]) > 100):
        wanted = "a share of 100% at most, as in 30%" if is_share(name) else "a time with its unit, as in 20us"
        raise BadInput(f"budget {name}: limit is {limit!r}, wanted {wanted}")
    return Budget(name, float(match[1]) * _UNITS[match[2]])

"""Writes the figures of the documentation anew from benchmarks/results. Run it after a benchmark:

    python benchmarks/figures.py

A comment in a page names the figures in front of it:

    `pipelined` takes 60 or 953<!--= .0f: [load.rows.pipelined.call.median_us for load in moe_4.loads] --> us

It holds a format and a Python expression over the results, by the names of their files. A list of n values stands for
the last n numbers in front of the comment; texts in it are written as they are. tests/test_docs.py fails while a page
would change.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

from numpy import quantile

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMENT = re.compile(r"(<!--= \S*: .*? -->)", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:-\d\d-\d\d)?(?!\w)")


class Result(dict[str, Any]):
    """A JSON object whose fields are attributes."""

    __getattr__ = dict.__getitem__


def pick(rows: list[Result], **wanted: Any) -> list[Result]:
    """Returns the rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def one(rows: list[Result], **wanted: Any) -> Result:
    """Returns the only row that has these values."""
    (row,) = pick(rows, **wanted)
    return row


def added(row: Result) -> float:
    """Returns what tracing adds to a call in percent: the median of the pairs."""
    return 100 * (row.pair_ratio - 1)


def ends(values: Any) -> list[float]:
    """Returns the least and the greatest value."""
    ordered = sorted(values)
    return [ordered[0], ordered[-1]]


def ratio(value: float) -> str:
    """Returns how many times as long something takes, to three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def numbers(text: str) -> list[str]:
    """Returns the numbers of a text, such as the name of a row, as they are."""
    return NUMBER.findall(text)


def cpu_s(size: Result) -> float:
    """Returns the CPU seconds of all questions of benchmarks/analysis.py, each in its fastest round."""
    return sum(min(found.cpu_s) for name, found in size.questions.items() if name != "all of a report")


def read_results() -> dict[str, Any]:
    """Returns all results by name, and what expressions may call."""
    paths = (ROOT / "benchmarks" / "results").glob("*.json")
    results = {path.stem: json.loads(path.read_text(), object_hook=Result) for path in paths}
    return results | {
        found.__name__: found for found in (pick, one, added, ends, ratio, numbers, cpu_s, mean, median, quantile)
    }


def fill(text: str, names: dict[str, Any]) -> str:
    """Returns a page with the figures of its comments. Raises ValueError if a comment has too few numbers before it."""
    parts = COMMENT.split(text)
    for idx in range(1, len(parts), 2):
        form, _, expression = parts[idx].removeprefix("<!--= ").removesuffix(" -->").partition(": ")
        found = eval(" ".join(expression.split()), dict(names))
        values = [value if isinstance(value, str) else format(value, form) for value in _as_list(found)]
        places = list(NUMBER.finditer(parts[idx - 1]))[-len(values) :]
        if len(places) < len(values):
            raise ValueError(f"{parts[idx]}: {len(places)} numbers in front of it, wanted {len(values)}")
        for place, value in reversed(list(zip(places, values, strict=True))):
            parts[idx - 1] = parts[idx - 1][: place.start()] + value + parts[idx - 1][place.end() :]
    return "".join(parts)


def _as_list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def main() -> None:
    names = read_results()
    for page in PAGES:
        old = page.read_text("utf-8")
        if (new := fill(old, names)) != old:
            page.write_text(new, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()

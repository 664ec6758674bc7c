"""Writes the figures of the documentation anew from benchmarks/results. Run it after a benchmark:

    python benchmarks/figures.py

docs/figures.txt says which numbers of a page they are, and where they come from:

    [docs/moe.md]
    `pipelined` takes {} or {} us
        .0f: [load.rows.pipelined.call.median_us for load in moe_4.loads]

First a part of the page, which has it once: {} stands for a figure, {#} for a number that another entry writes. With
... in it, all numbers between its two ends are figures. Then a format and a Python expression over the results, by the
names of their files: a value, or a list of as many as there are figures. Texts are written as they are.
tests/cli/test_docs.py fails while a page would change.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from numpy import quantile

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = ROOT / "docs" / "figures.txt"
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
    """Returns what tracing adds to a kernel, or a call, in percent."""
    return 100 * (row.on_over_off - 1)


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


class Figure(NamedTuple):
    """What docs/figures.txt says of some numbers of a page."""

    place: str
    form: str
    expression: str

    def values(self, names: dict[str, Any]) -> list[str]:
        found = eval(self.expression, dict(names))
        listed = found if isinstance(found, list) else [found]
        return [value if isinstance(value, str) else format(value, self.form) for value in listed]

    def numbers_in(self, page: str) -> list[tuple[int, int]]:
        """Returns where the figures are. Raises ValueError unless the page has the place once."""
        number = f"(?:{NUMBER.pattern})"
        special = {"{}": f"({number})", "{#}": number, "...": "(?s:.*?)"}
        parts = re.split(r"(\{#?\}|\.\.\.|\s+)", self.place)
        pattern = (special.get(part) or (r"\s+" if part.isspace() else re.escape(part)) for part in parts)
        found = list(re.finditer("".join(pattern), page))
        if len(found) != 1:
            raise ValueError(f"{self.place}: the page has it {len(found)} times, wanted once")
        if "..." in self.place:
            return [place.span() for place in NUMBER.finditer(page, *found[0].span())]
        return [found[0].span(number) for number in range(1, found[0].re.groups + 1)]


def read_figures() -> dict[Path, list[Figure]]:
    """Returns the figures of each page."""
    pages: dict[Path, list[Figure]] = {page: [] for page in PAGES}
    for block in re.split(r"^\[(.*)\]$", FIGURES.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        if "\n" not in block:
            own = pages[ROOT / block]
            continue
        lines = [line for line in block.splitlines() if line]
        for place, source in zip(lines[::2], lines[1::2], strict=True):
            form, _, expression = source.strip().partition(": ")
            own.append(Figure(place, form.removesuffix(":"), expression))
    return pages


def fill(text: str, figures: list[Figure], names: dict[str, Any]) -> str:
    """Returns a page with its figures. Raises ValueError for a place that has another number of them."""
    for figure in figures:
        values, places = figure.values(names), figure.numbers_in(text)
        if len(values) != len(places):
            raise ValueError(f"{figure.place}: {len(places)} figures, {len(values)} values")
        for (start, end), value in reversed(list(zip(places, values, strict=True))):
            text = text[:start] + value + text[end:]
    return text


def main() -> None:
    names = read_results()
    for page, figures in read_figures().items():
        old = page.read_text("utf-8")
        if (new := fill(old, figures, names)) != old:
            page.write_text(new, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()

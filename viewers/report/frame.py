"""The frame of a page: one HTML file that needs nothing else. Parts come in as text and Plotly figures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracekern.errors import packages_for
from tracekern.formatting import escape

_UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:ns|us|ms|s|x)\b|%)")
"""A number and its unit stay on one line."""

_ASSETS = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True)
class Figure:
    """A Plotly figure. A colour that starts with "--" is the name of a CSS variable in assets/page.css."""

    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    height: int
    says: str
    """What the figure shows, for who cannot see it."""


@dataclass(frozen=True)
class Gantt:
    """Spans of one iteration as columns; assets/page.js draws them."""

    name: str
    rows: Sequence[str]
    short_rows: Sequence[str]
    ranks: Sequence[int]
    """The rank of each row."""
    kinds: Sequence[tuple[str, str]]
    """(event, class) of each kind of span."""
    columns: dict[str, list[Any]]
    """row, kind, start (ns from the start of the iteration), duration (ns), detail; one entry a span."""
    height: int


@dataclass(frozen=True)
class Choice:
    """Figures to choose one from, each with its name."""

    figures: Sequence[tuple[str, Figure]]


@dataclass(frozen=True)
class Answer:
    text: str
    """HTML; the first thing a reader sees."""
    body: Sequence[str | Figure | Choice | Sequence[Gantt]] = ()
    """HTML, figures, and pictures to choose one from."""
    aside: str = ""
    """HTML; what limits the answer."""


@dataclass(frozen=True)
class Part:
    key: str
    title: str
    question: str
    answer: Answer


@dataclass
class _Specs:
    """What the script of the page draws, in the order of the page, and the command below choices of pictures."""

    open_command: str
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, height: int, says: str, **content: Any) -> str:
        self.entries.append({"kind": kind, "says": says, **content})
        return (
            f'<div class="figure" role="img" aria-label="{escape(says)}" data-figure="{len(self.entries) - 1}" '
            f'style="height:{height}px"></div>'
        )


def render(title: str, lead: str, parts: Sequence[Part], foot: str, open_command: str = "") -> str:
    """Returns the page. `lead` and `foot` are HTML. `open_command`, which shows all spans, is printed below pictures
    that leave some out. Raises BadInput where plotly is not installed."""
    specs = _Specs(open_command)
    sections = _UNIT_SPACE.sub("\u00a0", "\n".join(_section(part, specs) for part in parts))
    links = "".join(f'<a href="#{part.key}">{escape(part.title)}</a>' for part in parts)
    figures = json.dumps(specs.entries, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<header><p class="brand">tracekern</p><h1>{escape(title)}</h1>{lead}<nav>{links}</nav>'
        '<noscript><p class="warn">The pictures need JavaScript, which is off; text and tables do not.</p></noscript>'
        "</header>\n"
        f"<main>\n{sections}\n</main>\n<footer>{foot}</footer>\n"
        f'<script type="application/json" id="figures">{figures}</script>\n'
        f"<script>{_plotly()}</script>\n<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """An HTML table of escaped cells; the last `numbers` columns align right."""
    first_number = len(columns) - numbers
    style = ["" if place < first_number else ' class="number"' for place in range(len(columns))]
    head = "".join(f"<th{css}>{escape(name)}</th>" for css, name in zip(style, columns, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{css}>{cell}</td>" for css, cell in zip(style, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _section(part: Part, specs: _Specs) -> str:
    answer = part.answer
    body = "".join(_block(block, specs) for block in answer.body)
    aside = f'<p class="aside">{answer.aside}</p>' if answer.aside else ""
    return (
        f'<section id="{part.key}"><p class="kicker">{escape(part.title)}</p><h2>{escape(part.question)}</h2>'
        f'<p class="answer">{answer.text}</p>{body}{aside}</section>'
    )


def _block(block: str | Figure | Choice | Sequence[Gantt], specs: _Specs) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Figure):
        return _plot(block, specs)
    if isinstance(block, Choice):
        return _choice([name for name, _ in block.figures], [_plot(figure, specs) for _, figure in block.figures])
    choices = [
        specs.add(
            "gantt",
            gantt.height,
            f"Spans of the {gantt.name}",
            name=gantt.name,
            rows=gantt.rows,
            shortRows=gantt.short_rows,
            ranks=gantt.ranks,
            kinds=gantt.kinds,
            columns=gantt.columns,
        )
        for gantt in block
    ]
    return _choice([gantt.name for gantt in block], choices) + _command(specs.open_command)


def _plot(figure: Figure, specs: _Specs) -> str:
    return specs.add("plot", figure.height, figure.says, data=figure.data, layout=figure.layout)


def _choice(names: Sequence[str], panes: Sequence[str]) -> str:
    """A button for each pane, of which the first is shown."""
    buttons = "".join(
        f'<button type="button" aria-pressed="{"true" if place == 0 else "false"}">{escape(name)}</button>'
        for place, name in enumerate(names)
    )
    shown = "".join(f'<div class="pane"{" hidden" if place else ""}>{pane}</div>' for place, pane in enumerate(panes))
    return f'<div class="choice"><div class="buttons">{buttons}</div>{shown}</div>'


def _command(text: str) -> str:
    """A line to copy."""
    return f'<p class="command"><code>{escape(text)}</code><button type="button">copy</button></p>'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _plotly() -> str:
    with packages_for("the page"):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())

"""The page of `tracekern report`: each part answers the question above it."""

from __future__ import annotations

import importlib
import pkgutil
from datetime import datetime, timezone
from functools import cache
from typing import Any

import tracekern.viewers.report.questions as package
from tracekern import __version__
from tracekern.analysis.findings import Findings
from tracekern.formatting import count, duration, escape, sentence
from tracekern.viewers.report.frame import Answer, Part, render
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.verdict import part_of


@cache
def questions() -> tuple[Question, ...]:
    """Every question that has a file in viewers/report/questions, in the order of the page."""
    modules = (
        importlib.import_module(f"{package.__name__}.{file.name}") for file in pkgutil.iter_modules(package.__path__)
    )
    return tuple(sorted((module.QUESTION for module in modules), key=lambda entry: (entry.order, entry.key)))


def report_page(findings: Findings, name: str, capture: str, open_command: str) -> str:
    """The whole page as HTML.

    `name`: the title. `capture`: where the numbers come from. `open_command`: what to type to see all spans. Raises
    BadInput where plotly is not installed.
    """
    damaged = Answer(escape(sentence(findings.damage))) if findings.damage else None
    entries = [entry for entry in questions() if not damaged or entry.key == "trust"]
    answers = ((entry, damaged or entry.draw(findings)) for entry in entries)
    parts = [Part(entry.key, entry.title, entry.text, answer) for entry, answer in answers if answer is not None]
    foot = f"{escape(capture)} · tracekern {__version__}"
    return render(name, _lead(findings, capture), parts, foot, open_command)


def _lead(findings: Findings, capture: str) -> str:
    summary = findings.summary
    devices = sorted({rank.device for rank in summary.ranks})
    nodes = len({rank.node for rank in summary.ranks})
    facts = [
        count(len(summary.ranks), "rank"),
        *([summary.title] if summary.title else []),
        *([f"on {count(nodes, 'node')}"] if nodes > 1 else []),
        ", ".join(devices),
        *(_made_at(rank.metadata) for rank in findings.timeline.ranks[:1]),
        count(summary.num_spans, "span"),
        *([] if findings.damage else [duration(summary.duration_ns), part_of(findings)]),
    ]
    warning = "" if summary.aligned else "<p class='warn'>UNALIGNED: times of different ranks cannot be compared.</p>"
    return f"<p>{escape(' · '.join(fact for fact in facts if fact))}</p>{warning}"


def _made_at(metadata: dict[str, Any]) -> str:
    """When the capture was made, to the minute: "2026-11-21 18:02 UTC"; "" where that is not known."""
    try:
        made = datetime.fromisoformat(str(metadata.get("created", "")))
    except ValueError:
        return ""
    return f"{made.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC" if made.tzinfo else f"{made:%Y-%m-%d %H:%M}"

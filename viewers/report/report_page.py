"""The page of `tracekern report`: each part answers the question that stands above it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from tracekern import __version__
from tracekern.analysis.findings import Findings
from tracekern.formatting import count, duration, escape
from tracekern.viewers.report.balance import balance_part
from tracekern.viewers.report.cause import cause_part
from tracekern.viewers.report.frame import Part, render
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.matrix import matrix_part
from tracekern.viewers.report.path import path_part
from tracekern.viewers.report.steadiness import steadiness_part
from tracekern.viewers.report.time import time_part
from tracekern.viewers.report.trust import trust_part


def report_page(findings: Findings, name: str, capture: str, open_command: str) -> str:
    """The whole page as HTML.

    `name`: the title. `capture`: where the numbers come from. `open_command`: what to type to see all spans. Raises
    BadInput where plotly is not installed.
    """
    parts = [
        _summary_part(findings),
        time_part(findings),
        matrix_part(findings),
        cause_part(findings),
        path_part(findings),
        steadiness_part(findings, open_command),
        balance_part(findings),
        trust_part(findings),
    ]
    return render(name, _lead(findings, capture), parts, f"{escape(capture)} · tracekern {__version__}")


def _summary_part(findings: Findings) -> Part:
    lines = headlines(findings)
    items = "".join(f"<li><span class='word'>{line.word}</span><span>{escape(line.text)}</span></li>" for line in lines)
    return Part(
        "summary",
        "Summary",
        "What dominates, who is it, and how sure is that?",
        "",
        [f"<ul class='lines'>{items}</ul>"],
    )


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
        duration(summary.duration_ns),
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

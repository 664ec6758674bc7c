"""A question of the report, and what draws its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tracekern.analysis.findings import Findings
from tracekern.viewers.report.frame import Answer


@dataclass(frozen=True)
class Question:
    """One part of the page. Each module in viewers/report/questions has one, as QUESTION."""

    key: str
    """The address of the part within the page."""
    title: str
    text: str
    draw: Callable[[Findings], Answer | None]
    """Returns None of a capture that has nothing to do with the question: the page then lacks it."""
    order: int = 80
    """Place in the page, the lowest first, then by key; what has no order comes before Trust."""

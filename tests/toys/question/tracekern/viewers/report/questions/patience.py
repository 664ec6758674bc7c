"""How patient is a run? The toy's part of the report."""

from __future__ import annotations

from tracekern.analysis.patience import find_patience

from tracekern.analysis.findings import Findings
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question


def draw(findings: Findings) -> Answer:
    found = find_patience(findings)
    row = [f"{found.num_waits}", f"{found.longest_ns}", f"{found.num_causes}"]
    return Answer("As patient as <b>this</b>.", [table(["waits", "longest", "causes"], [row])], "Who knows?")


QUESTION = Question("patience", "Patience", "Who waits without a word?", draw)

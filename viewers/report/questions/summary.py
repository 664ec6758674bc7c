"""What costs time, how much, and how sure is that? The lines of the terminal."""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.formatting import escape, sentence
from tracekern.viewers.report.frame import Answer
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.question import Question


def draw(findings: Findings) -> Answer:
    lines = headlines(findings)
    first = [sentence(line.text) for line in lines if line.word == "died"]
    items = "".join(
        f"<li><span class='word'>{line.word}</span><span>{escape(line.text)}</span></li>"
        for line in lines
        if line.word not in ("died", "verdict")
    )
    said = next(line.text for line in lines if line.word == "verdict")
    return Answer(f"<b>{escape(' '.join([*first, said]))}</b>", [f"<ul class='lines'>{items}</ul>"])


QUESTION = Question("summary", "Summary", "What costs time, how much, and how sure is that?", draw, order=10)

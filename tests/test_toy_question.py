"""One more question of the report is two new files: one that computes, one that draws."""

from __future__ import annotations

import html
import re
from pathlib import Path

from package_copy import PackageCopy
from toolchains import ROOT

from tracekern.analysis.findings import Findings
from tracekern.timeline.load import load
from tracekern.viewers.report.report_page import questions

COMPUTES = """
from dataclasses import dataclass

from tracekern.analysis.findings import Findings


@dataclass(frozen=True)
class Patience:
    num_waits: int
    longest_ns: int
    num_causes: int


def find_patience(findings: Findings) -> Patience:
    waits = findings.waits
    return Patience(len(waits), int(waits.wait_ns.max()), len(findings.causes.costs))
"""

DRAWS = """
from tracekern.analysis.findings import Findings
from tracekern.analysis.patience import find_patience
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question


def draw(findings: Findings) -> Answer:
    found = find_patience(findings)
    row = [f"{found.num_waits}", f"{found.longest_ns}", f"{found.num_causes}"]
    return Answer("As patient as <b>this</b>.", [table(["waits", "longest", "causes"], [row])], "Who knows?")


QUESTION = Question("patience", "Patience", "Who waits without a word?", draw)
"""


def test_a_question_is_two_new_files(tmp_path: Path):
    copy = PackageCopy.make(tmp_path / "copy")
    copy.add("analysis/patience.py", COMPUTES)
    copy.add("viewers/report/questions/patience.py", DRAWS)
    capture = ROOT / "traces" / "cpu_8_ranks"
    made = copy.run("-m", "tracekern", "report", capture, "-o", "page.html", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "page.html").read_text()
    keys = [question.key for question in questions()]
    assert re.findall('<section id="([^"]+)"', page) == [*keys[:-1], "patience", "trust"]
    assert '<a href="#patience">Patience</a>' in page
    part = page.split('id="patience"')[1].split("</section>")[0]
    assert "<h2>Who waits without a word?</h2>" in part
    findings = Findings(load(capture))
    waits = findings.waits.wait_ns
    cells = [html.unescape(cell) for cell in re.findall("<td[^>]*>([^<]*)</td>", part)]
    assert cells == [str(number) for number in (len(waits), waits.max(), len(findings.causes.costs))]


def test_the_questions_of_the_report_are_those_of_the_documentation():
    rows = re.findall(r"^\| (\w+) \| ([^|]+\?) \|", (ROOT / "docs" / "report.md").read_text(), re.MULTILINE)
    assert [(question.title, question.text) for question in questions()] == rows

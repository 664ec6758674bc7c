"""What the documentation shows is what results and commands say. Its figures are written by benchmarks/figures.py."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys

import pytest

import tracekern.fabric
from tests.paths import ROOT
from tracekern.analysis.findings import Findings

sys.path.insert(0, str(ROOT / "benchmarks"))
from figures import NUMBER, PAGES, Figure, Result, fill, read_figures, read_results

RESULTS = read_results()


def test_results_say_of_what_they_are():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        found = json.loads(path.read_text())
        assert found["benchmark"] == path.stem
        assert found["device"], path
        assert re.match(r"\d{4}-\d\d-\d\d", found["date"]), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page):
    """`python benchmarks/figures.py` writes those that are not."""
    text = page.read_text("utf-8")
    assert fill(text, read_figures()[page], RESULTS) == text


def test_figures_are_written_from_results():
    names = {"run": Result(date="2026-11-25", us=[1234.5, 0.25])}
    figures = [Figure("On {} {#} ranks", "", "run.date"), Figure("took {} or, at best, {} us", ",.1f", "run.us")]
    page = "On {} 8 ranks took {} or,\nat best, {} us"
    new = page.format("2026-11-25", "1,234.5", "0.2")
    assert fill(page.format("2000-01-01", "1", "-2.0"), figures, names) == new
    assert fill("took 1 or 2 us", [Figure("took ... us", ".0f", "run.us")], names) == "took 1234 or 0 us"
    with pytest.raises(ValueError, match="took {} us: 1 figures, 2 values"):
        fill("took 1 us", [Figure("took {} us", ",.1f", "run.us")], names)
    with pytest.raises(ValueError, match="the page has it 2 times, wanted once"):
        fill("took 1 us, took 2 us", [Figure("took {} us", "", "run.date")], names)


def test_what_pages_say_never_happened_did_not():
    captures = RESULTS["clocks"].captures
    assert not any(capture.tightened or capture.outside or capture.backwards for capture in captures)
    assert RESULTS["clocks_gpu_4"].containment.outside_hard == 0
    flows = RESULTS["flows_4"]
    assert (flows.violations, flows.records_lost, flows.doubts) == (0, 0, [])


def test_reports_are_shown_as_they_are(command_line):
    """The lines of each `tracekern report traces/...` that a page shows, in their order."""
    block = re.compile(r"tracekern report (traces/\w+)\n(?:[^`]*```text\n)?([^`]*)```")
    shown = [(page, *found) for page in PAGES for found in block.findall(page.read_text("utf-8"))]
    assert {page.name for page, *_ in shown} >= {"README.md", "walkthrough.md", "moe.md"}
    for page, capture, text in shown:
        printed = iter(command_line("report", ROOT / capture).stdout.splitlines())
        wanted = [line for line in text.splitlines() if line.strip() not in ("", "...")]
        assert [line for line in wanted if line not in printed] == [], page


def test_the_api_page_says_what_docstrings_say():
    rows = re.findall(r"^\| `(tracekern[\w.]+)` \|.*\| (.*) \|$", (ROOT / "docs" / "api.md").read_text(), re.M)
    documented = {name.rpartition(".")[2] for name, _ in rows}
    assert documented >= {*tracekern.__all__, *tracekern.fabric.__all__} - {"__version__"}
    for name, told in rows:
        if name.startswith("tracekern.moe.gemm.vllm."):  # imports vLLM
            continue
        paragraph = inspect.getdoc(pkgutil.resolve_name(name)).partition("\n\n")[0]
        assert told == " ".join(paragraph.split()), name


def test_the_questions_of_the_report_are_those_that_it_has():
    from tracekern.viewers.report.report_page import questions

    rows = re.findall(r"^\| (\w+) \| [^|]+\? \|", (ROOT / "docs" / "report.md").read_text(), re.MULTILINE)
    assert [question.title for question in questions()] == rows


def test_the_variants_of_all_families_are_told_with_the_number_of_their_kernels():
    from tracekern.moe.families import FAMILY_OF

    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (ROOT / "docs" / "moe.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((name, str(len(family.variants[name]))) for name, family in FAMILY_OF.items())


def test_the_wait_that_is_followed_through_all_stages():
    """The parts of the longest wait, the gap that it leads back to, a peer's gap, and what the run saves."""
    findings = Findings(tracekern.load(ROOT / "traces" / "h200x4_late_host"))
    waits, spans, schedule = findings.waits, findings.timeline.spans, findings.recorded.schedule
    longest = int(waits.wait_ns.argmax())
    first_ns = int(schedule.start[schedule.order].min())
    launches = findings.timeline.launches
    gap = {
        launches[row].rank: int(schedule.start[row] - schedule.end[schedule.before[row]]) / 1e3
        for row in schedule.order.tolist()
        if (launches[row].name, launches[row].sequence) == ("dispatch_send", 0)
    }
    cause = findings.answer.costs[0]
    figures = [
        *(f"{(int(times[waits.row[longest]]) - first_ns) / 1e3:,.1f}" for times in (spans.start, spans.end)),
        *(f"{int(values[longest]) / 1e3:.1f}" for values in (waits.late_ns, waits.drain_ns)),
        *(f"{gap[0]:,.2f}", f"{gap[3]:,.2f}", f"{gap[1]:,.1f}", f"{gap[0] - gap[1]:.1f}"),
        f"{cause.saving.by_iteration[0] / 1e3:.0f}",
        *(f"{ns / 1e6:.2f}" for ns in (cause.saving.whole_ns, findings.answer.makespan_ns)),
    ]
    page = (ROOT / "docs" / "analysis.md").read_text("utf-8")
    section = page.partition("One wait through all stages")[2].partition("## ")[0]
    shown = NUMBER.findall(section)
    assert [figure for figure in figures if figure not in shown] == []

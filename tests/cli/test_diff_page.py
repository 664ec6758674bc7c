"""The page of `tracekern diff`, in a real browser."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from report_pages import figures_of, look_at
from timelines import WAIT, make_timeline

from tests.paths import TRACES
from tracekern.analysis.difference import CAVEAT, differences
from tracekern.analysis.findings import analyze
from tracekern.analysis.statistics import phase_statistics
from tracekern.timeline.model import OPEN_END, Flows, Spans, Timeline
from tracekern.timeline.select import select
from tracekern.viewers.diff_page import Side, diff_page


def page_of(first: Timeline, second: Timeline, path: Path) -> Path:
    sides = tuple(Side(name, analyze(of), phase_statistics(of)) for name, of in (("<a>", first), ("b", second)))
    numbers = differences(sides[0].statistics, sides[1].statistics)
    path.write_text(diff_page(sides, numbers, ["different shapes"], CAVEAT))
    return path


def test_the_page_works_in_a_browser(command_line, tmp_path, browser):
    path = tmp_path / "diff.html"
    result = command_line("diff", TRACES / "h200x4", TRACES / "cpu_8_ranks", "-o", path)
    assert result.returncode == 0, result.stderr
    with browser.tab(390) as tab:
        tab.page.goto(path.as_uri())
        figures = look_at(tab.page)
        assert len(figures) == 3
        assert [figure for figure in figures if figure["overflow"] > 0] == []
        assert tab.page.locator(".warn").count() == 2  # other shapes, other places
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.complaints == []
        assert [url for url in tab.requested if not url.startswith(("data:", path.as_uri()))] == []


def test_bars_are_the_medians_of_both_sides(tmp_path):
    first = make_timeline(2)
    longer = np.where(first.spans.event == 0, 250, 0)  # copy_token
    spans = first.spans
    second = first.replace(spans=Spans(**{**vars(spans), "end": spans.end + longer}))
    path = page_of(first, second, tmp_path / "diff.html")
    bars = figures_of(path)[1]
    names = bars["layout"]["yaxis"]["ticktext"]
    size = {"ns": 1, "us": 1e3}[bars["layout"]["xaxis"]["title"]["text"].split()[-1]]
    drawn = [dict(zip(names, [value * size for value in trace["x"]], strict=True)) for trace in bars["data"]]
    assert drawn[0]["dispatch.copy_token"] == pytest.approx(500)
    assert drawn[1]["dispatch.copy_token"] == pytest.approx(750)
    assert "+50.0\u00a0%" in path.read_text()
    assert "&lt;a&gt;" in path.read_text()


def test_poor_captures_get_a_page(tmp_path, browser):
    whole, nothing = make_timeline(), make_timeline(spans=Spans(), flows=Flows())
    pairs = {
        "nothing on one side": (whole, nothing),
        "nothing at all": (nothing, nothing),
        "one rank": (select(whole, None, [0]), whole),
    }
    with browser.tab(390) as tab:
        for which, sides in pairs.items():
            tab.page.goto(page_of(*sides, tmp_path / "diff.html").as_uri())
            if which != "nothing at all":
                look_at(tab.page)
            assert tab.page.locator("h2").count() == 5, which
            assert tab.complaints == [], which


def hung() -> Timeline:
    whole = make_timeline()
    end = whole.spans.end.copy()
    end[np.flatnonzero(whole.spans.event == WAIT)[-1]] = OPEN_END
    return whole.replace(spans=dataclasses.replace(whole.spans, end=end))


def faulty() -> Timeline:
    whole = make_timeline()
    metadata = {**whole.ranks[0].metadata, "fault_text": "a wait timed out"}
    return whole.replace(ranks=(dataclasses.replace(whole.ranks[0], metadata=metadata), *whole.ranks[1:]))


@pytest.mark.parametrize(
    ("first", "second", "missing"),
    [
        (make_timeline(), hung(), {"hang": "A"}),
        (faulty(), make_timeline(), {"fault": "B", "why": "A"}),
        (faulty(), hung(), {"hang": "A", "fault": "B", "why": "A"}),
    ],
)
def test_the_lines_of_both_sides_stand_beside_each_other(tmp_path, first, second, missing):
    text = page_of(first, second, tmp_path / "diff.html").read_text()
    rows = re.findall(r"<span class='word'>(\w+)</span></td>\s*<td>.*?<b>A</b> (.*?)<br><b>B</b> (.*?)</td>", text)
    assert [word for word, *_ in rows] == [
        *(word for word in missing if word != "why"),
        "verdict",
        "why",
        "waiting",
        "idle",
        "bound",
        "trust",
    ]
    assert {word: "A" if a == "-" else "B" for word, a, b in rows if "-" in (a, b)} == missing

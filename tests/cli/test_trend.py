"""The page of a gate's history, in a real browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from report_pages import look_at

from tracekern.viewers.trend import trend_page

CREPT, STEADY, SHARE = "combine.reduce_token.p50", "dispatch.copy_token.p50", "dispatch.wait_token.wait_share"


def series_of(checks: int) -> dict[str, list[tuple[str, float, float, float]]]:
    def points(values: list[float]) -> list[tuple[str, float, float, float]]:
        return [(f"{i}: 2026-11-21 abcdef0", 0.99 * v, v, 1.02 * v) for i, v in enumerate(values, 1)]

    return {
        CREPT: points([4000 * 1.02**i for i in range(checks)]),
        STEADY: points([2000.0] * checks),
        SHARE: points([0.0] * checks),
    }


def figures_of(page: str) -> list[dict[str, Any]]:
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_works_in_a_browser(tmp_path, browser):
    path = tmp_path / "trend.html"
    path.write_text(trend_page("NVIDIA H200", series_of(6), {CREPT: 0.104}))
    with browser.tab(390) as tab:
        tab.page.goto(path.as_uri())
        figures = look_at(tab.page)
        assert len(figures) == 3
        assert [figure for figure in figures if figure["overflow"] > 0] == []
        assert "combine.reduce_token.p50 +10.4\u00a0%" in tab.page.inner_text("#crept")
        assert tab.page.locator("#checks tbody tr").count() == 6
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.complaints == []
        assert [url for url in tab.requested if not url.startswith(("data:", path.as_uri()))] == []


def test_points_are_percent_of_the_first_check():
    crept, *others = figures_of(trend_page("CPU", series_of(3), {CREPT: 0.04}))
    assert crept["says"].startswith(CREPT)
    low, high, line = crept["data"]
    assert line["y"] == pytest.approx([0, 2, 4.04])
    assert low["y"][0] == pytest.approx(-1)
    assert high["y"][2] == pytest.approx(100 * (1.02 * 1.0404 - 1))
    assert {figure["says"].split()[0] for figure in others} == {STEADY, SHARE}


@pytest.mark.parametrize(
    ("metric", "values", "drawn", "unit", "said"),
    [
        (SHARE, [0.0, 0.02, 0.2], [0, 2, 20], " %", "median 2 %, 2 % to 2 %"),
        (STEADY, [0.0, 32.0, 64.0], [0, 32, 64], " ns", "median 32 ns, 32 ns to 32 ns"),
        (STEADY, [0.0, 0.0, 0.0], [0, 0, 0], " ns", "median 0 ns, 0 ns to 0 ns"),
    ],
)
def test_what_begins_at_zero_is_drawn_in_its_own_unit(metric, values, drawn, unit, said):
    points = [(f"{i}: 2026-11-21", value, value, value) for i, value in enumerate(values, 1)]
    page = trend_page("CPU", {metric: points}, {})
    (figure,) = figures_of(page)
    line = figure["data"][2]
    assert line["y"] == pytest.approx(drawn)
    assert figure["layout"]["yaxis"]["ticksuffix"] == unit
    assert figure["layout"]["yaxis"]["range"][0] == 0
    assert line["hovertext"][1] == f"2: 2026-11-21<br>{said}"
    assert "not in percent of the first check, which is zero" in page


def test_a_metric_that_only_some_checks_have_stands_at_their_numbers():
    """An event was renamed between the second check and the third."""
    points = [(f"{i}: 2026-11-21", 9.0, 9.0, 9.0) for i in range(1, 6)]
    page = trend_page("CPU", {CREPT: points[:2], STEADY: points[2:]}, {})
    old, new = figures_of(page)
    assert [figure["data"][2]["x"] for figure in (old, new)] == [[1, 2], [3, 4, 5]]
    assert old["layout"]["xaxis"] == new["layout"]["xaxis"]
    assert "5 checks" in page


@pytest.mark.parametrize(
    ("checks", "drifts", "said"),
    [(1, None, "one check"), (2, {}, "Nothing crept since"), (2, None, "nothing can be compared")],
)
def test_what_cannot_be_said(checks, drifts, said):
    assert said in trend_page("<b>a device</b>", series_of(checks), drifts)
    assert "<b>a device</b>" not in trend_page("<b>a device</b>", series_of(checks), {})

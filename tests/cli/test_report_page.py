"""The report as a whole page, of captures that are not like the others: one rank, very long names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from report_pages import figures_of, look_at
from scenarios import Scenario
from timelines import COPY, EVENTS, LAUNCH, make_launch, make_timeline

from tests.paths import TRACES
from tracekern.analysis.findings import Findings, analyze
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, Flows, Problem, Spans, Track, TrackKind
from tracekern.timeline.select import select
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.report_page import report_page


def page_of(findings: Findings, path: Path) -> Path:
    path.write_text(report_page(findings, path.stem, path.stem, "tracekern open trace.pftrace.gz"))
    return path


def test_the_page_of_one_rank_draws_without_a_complaint(browser, tmp_path):
    """Its 64 experts have one label on their axis, at the very edge."""
    findings = analyze(select(load(TRACES / "cpu_8_ranks"), ranks=[0]))
    one = findings.balance.experts[0]
    experts = tuple(dataclasses.replace(one, name=str(place), tokens_received=place) for place in range(64))
    findings.balance = dataclasses.replace(findings.balance, experts=experts)
    page = page_of(findings, tmp_path / "report.html")
    with browser.tab() as tab:
        tab.page.goto(page.as_uri())
        figures = look_at(tab.page)
        assert "Load of each expert" in [figure["name"] for figure in figures]
        assert tab.complaints == []
    links = next(figure for figure in figures_of(page) if figure["says"].startswith("GB/s"))
    assert [place for place, row in enumerate(links["data"][0]["z"]) if any(row)] == [0]  # to ranks that are not here
    assert "7 of 8 ranks left out" in page.read_text().split('id="matrix"')[1].split("</section>")[0]


def test_very_long_names_stay_on_the_page(browser, tmp_path):
    events = tuple(dataclasses.replace(event, name=f"{event.name}_{'x' * 300}") for event in EVENTS)
    launches = tuple(make_launch(rank, "kernel_" + "y" * 89) for rank in range(2))
    page = page_of(analyze(make_timeline(2, events=events, launches=launches)), tmp_path / "report.html")
    with browser.tab(390) as tab:
        tab.page.goto(page.as_uri())
        assert [figure for figure in look_at(tab.page) if figure["cut"]] == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    rows = next(figure for figure in figures_of(page) if figure["says"] == "Parts of the critical path")
    for layout in (rows["layout"], rows["layout"]["narrow"]):
        assert all("…" in name for name in layout["yaxis"]["ticktext"] if "kernel_" in name)


def test_rows_of_several_streams_tell_which(browser, tmp_path):
    timeline = make_timeline(2)
    kernels = timeline.spans.take(timeline.spans.event == LAUNCH)
    kernels = dataclasses.replace(kernels, track=len(timeline.tracks) + np.arange(2))
    spans = Spans(**{name: np.append(getattr(timeline.spans, name), more) for name, more in vars(kernels).items()})
    tracks = [dataclasses.replace(track, stream=7 * (track.block == 1)) for track in timeline.tracks]
    tracks += [Track(rank, TrackKind.LAUNCH, "stream 7", 7) for rank in (0, 1)]
    page = page_of(analyze(timeline.replace(tracks=tuple(tracks), spans=spans)), tmp_path / "report.html")
    drawn = next(figure for figure in figures_of(page) if figure["kind"] == "gantt")
    assert "rank 1 stream 7" in drawn["rows"]
    assert "block 1 warp 1 stream 7 sender" in drawn["rows"]
    for names in (drawn["rows"], drawn["shortRows"]):
        assert len(set(zip(drawn["ranks"], names, strict=True))) == len(names)
    with browser.tab() as tab:
        tab.page.goto(page.as_uri())
        figure = tab.page.locator(".pane:not([hidden]) .figure")
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        texts = tab.page.evaluate("() => document.querySelector('.pane:not([hidden]) .figure').data.at(-1).text")
        assert any("rank 1 block 1 warp 1 stream 7 sender" in text for text in texts)


def test_a_path_of_many_short_stretches_is_drawn_from_its_begin_to_its_end(tmp_path):
    """Each is far below a pixel, and there are more than a figure can hold."""
    run = Scenario(2)
    for _ in range(2_500):
        run.launch("dispatch", late={0: 100, 1: 100})
        for rank in run.ranks:
            run.work(rank, 50)
    findings = analyze(run.timeline())
    makespan = findings.critical_path.whole.makespan_ns
    figures = figures_of(page_of(findings, tmp_path / "report.html"))
    route = next(figure for figure in figures if figure["says"] == "Ranks that the critical path runs through")
    assert len(findings.critical_path.whole.stretches) > 4_000
    for lines in route["data"]:
        assert lines["line"]["simplify"] is False  # or the browser leaves them out
        starts, ends = np.array(lines["x"][::3]), np.array(lines["x"][1::3])
        assert starts.min() < 0.01 * ends.max()
        assert ends.max() * 1e3 == pytest.approx(makespan, rel=0.01)
    assert route["layout"]["xaxis"]["range"] == [0, makespan / 1e3]


def test_of_many_ranks_the_one_that_died_and_the_one_of_a_bad_clock_are_shown(tmp_path):
    findings = analyze(make_timeline(64))
    ranks = list(findings.summary.ranks)
    ranks[40] = dataclasses.replace(ranks[40], state="salvaged")
    ranks[50] = dataclasses.replace(ranks[50], clock_hard_ns=5e6)
    problems = (*(Problem("warning", "w", 0, -1, f"small trouble {number}") for number in range(40)),)
    findings.summary = dataclasses.replace(findings.summary, ranks=tuple(ranks))
    problems = (*problems, *(Problem("error", "open_span", rank, -1, f"open {rank}") for rank in range(40)))
    problems = (*problems, Problem("error", "e", 63, -1, "large trouble"))
    findings.timeline = findings.timeline.replace(problems=problems)
    trust = page_of(findings, tmp_path / "report.html").read_text().replace("\u00a0", " ").split('id="trust"')[1]
    shown = re.findall(r"<td>rank (\d+)</td>", trust)
    assert len(shown) == 16
    assert {"40", "50"} < set(shown)
    assert "and 48 more ranks; these are the worst" in trust
    assert trust.index("Large trouble") < trust.index("large trouble") < trust.index("open 0")


def test_spans_that_never_ended_are_told_where_no_wait_is_among_them():
    timeline = make_timeline()
    spans = timeline.spans
    end = np.where(spans.event == COPY, OPEN_END, spans.end)
    rows = np.flatnonzero(spans.event == COPY)
    only = timeline.replace(spans=dataclasses.replace(spans, end=end).take(rows), flows=Flows())
    said = {line.word: line.text for line in headlines(analyze(only))}
    assert said["waiting"].startswith(f"no span of a kernel has ended, {len(rows)} spans began")
    assert f"; {len(rows)} spans never ended" in said["trust"]

"""The report as a whole page, of captures that are not like the others: one rank, very long names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from report_pages import figures_of, look_at
from scenarios import Scenario, exchange
from timelines import COPY, EVENTS, LAUNCH, make_launch, make_timeline

from tests.paths import TRACES
from tracekern.analysis.findings import Findings, analyze
from tracekern.analysis.waits.distribution import distribute
from tracekern.analysis.why.critical_path import PathKind
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, Flows, Problem, Spans, Track, TrackKind
from tracekern.timeline.select import select
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.questions import steadiness
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


@pytest.mark.parametrize(
    ("rates", "shown"),
    [((36.0, 1250.4, 0.0123), ["36.0", "1,250", "0.0123"]), ((None, None, None), ["36", "1,250", "7"])],
)
def test_cells_of_links_show_three_digits_of_a_rate_and_all_of_a_count(tmp_path, rates, shown):
    findings = analyze(load(TRACES / "h200x4"))
    links = tuple(
        dataclasses.replace(link, gb_per_s=rate, tokens=tokens)
        for link, rate, tokens in zip(findings.balance.links, rates, (36, 1250, 7), strict=False)
    )
    findings.balance = dataclasses.replace(findings.balance, links=links)
    page = page_of(findings, tmp_path / "report.html")
    figure = next(figure for figure in figures_of(page) if figure["says"].endswith("rows send, columns receive"))
    assert sorted(text for row in figure["data"][0]["text"] for text in row if text) == sorted(shown)


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


def test_what_the_path_has_in_small_parts_keeps_its_kind(tmp_path):
    findings = analyze(load(TRACES / "cpu_8_ranks"))
    page = page_of(findings, tmp_path / "report.html")
    figure = next(figure for figure in figures_of(page) if figure["says"] == "Parts of the critical path")
    assert figure["layout"]["yaxis"]["ticktext"][-1].endswith("smaller parts")
    parts = findings.critical_path.whole.parts
    kinds = {"in a kernel": PathKind.PHASE, "on a link": PathKind.LINK, "before a kernel": PathKind.GAP}
    for name, kind in kinds.items():
        drawn = next(bars["x"] for bars in figure["data"] if bars["name"] == name)
        assert sum(drawn) == pytest.approx(sum(part.time_ns for part in parts if part.kind is kind) / 1e6)


def test_of_waits_whose_signals_are_not_on_record_nobody_says_that_no_rank_came_late(tmp_path):
    """Rank 2 alone is late, and it is left out: what is left waited for it all the same."""
    late = exchange(4, num_launches=3, late={2: 20_000}).timeline()
    findings = analyze(select(late, ranks=[0, 1, 3]))
    assert findings.waits.unmatched.sum() > 0.9 * findings.waits.wait_ns.sum()
    said = {line.word: line.text for line in headlines(findings)}
    assert said["verdict"].startswith("No cause is named: 1 of 4 ranks left out: 2, and what is not here ")
    matrix = page_of(findings, tmp_path / "report.html").read_text().split('id="matrix"')[1].split("</section>")[0]
    assert "No rank can be named: the signals that ended" in matrix


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


def test_words_in_a_table_are_not_cut_in_two_by_a_long_cell_beside_them(browser, tmp_path):
    findings = analyze(load(TRACES / "h200x4"))
    tightened = [
        dataclasses.replace(rank, clock_round_trip_ns=123_456.0 if rank.rank else None)
        for rank in findings.summary.ranks
    ]
    findings.summary = dataclasses.replace(findings.summary, ranks=tuple(tightened))
    page = page_of(findings, tmp_path / "report.html")
    with browser.tab(1400) as tab:
        tab.page.goto(page.as_uri())
        for width in (1400, 390):
            tab.page.set_viewport_size({"width": width, "height": 900})
            cut = tab.page.evaluate(
                """[...document.querySelectorAll('#trust td')].filter((cell) => cell.textContent == 'reference')
                .map((cell) => { const text = document.createRange(); text.selectNodeContents(cell);
                                 return text.getClientRects().length; })"""
            )
            assert cut == [1]


def test_the_distribution_of_one_phase_says_which_and_how_long(tmp_path, monkeypatch):
    """Within a decade, where powers of ten would be one number or none."""
    findings = analyze(load(TRACES / "h200x4"))
    (entry,) = distribute(findings.waits, [findings.phases[0].phase])
    entry = dataclasses.replace(entry, wait_ns=np.array([20, 400]), share=np.array([0.5, 1.0]))
    monkeypatch.setattr(steadiness, "distribute", lambda *_: [entry])
    page = page_of(findings, tmp_path / "report.html")
    figure = next(figure for figure in figures_of(page) if figure["says"].startswith("Empirical"))
    assert figure["layout"]["showlegend"]
    assert figure["data"][0]["name"] == str(entry.phase)
    said = [ns for ns in figure["layout"]["xaxis"]["tickvals"] if 20 <= ns <= 400]
    assert said == [20, 50, 100, 200]


def test_long_legends_and_titles_of_axes_fit_a_phone(browser, tmp_path, monkeypatch):
    findings = analyze(load(TRACES / "h200x4"))
    entries = [
        dataclasses.replace(entry, phase=entry.phase._replace(stage=f"layer_{number}_" + "of_templates" * 6))
        for number, entry in enumerate(distribute(findings.waits, [phase.phase for phase in findings.phases[:6]]))
    ]
    monkeypatch.setattr(steadiness, "distribute", lambda *_: entries)
    findings.phases = findings.phases[:1]
    page = page_of(findings, tmp_path / "report.html")
    with browser.tab(390) as tab:
        tab.page.goto(page.as_uri())
        figures = look_at(tab.page)
        figure = next(figure for figure in figures if figure["name"].startswith("Empirical"))
        assert figure["cut"] == []
        legend, title = tab.page.evaluate(
            """(() => { const figure = document.querySelector('[aria-label^=Empirical]');
            return ['.legend', '.ytitle'].map((name) => figure.querySelector(name).getBoundingClientRect()); })()"""
        )
        assert legend["bottom"] <= title["top"] + 1
        gaps = tab.page.evaluate(
            """[...document.querySelectorAll('.figure')].map((figure) => [figure, figure.querySelector('.xtitle')])
            .filter(([_, title]) => title && title.textContent.includes('over all warps')).map(([figure, title]) =>
            title.getBoundingClientRect().top
            - Math.max(...[...figure.querySelectorAll('.xtick')].map((tick) => tick.getBoundingClientRect().bottom)))"""
        )
        assert len(gaps) == 2
        assert min(gaps) > -3  # of lines of text, whose boxes are higher than their letters


def test_spans_that_never_ended_are_told_where_no_wait_is_among_them():
    timeline = make_timeline()
    spans = timeline.spans
    end = np.where(spans.event == COPY, OPEN_END, spans.end)
    rows = np.flatnonzero(spans.event == COPY)
    only = timeline.replace(spans=dataclasses.replace(spans, end=end).take(rows), flows=Flows())
    said = {line.word: line.text for line in headlines(analyze(only))}
    assert said["waiting"].startswith(f"no span of a kernel has ended, {len(rows)} spans began")
    assert f"; {len(rows)} spans never ended" in said["trust"]

"""`tracekern report`: what it says in the terminal, and its page in a real browser, on real and on poor captures."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from captures import CaptureSpec, write_capture
from report_pages import figures_of, look_at
from timelines import LAUNCH, WAIT, make_launch, make_rank, make_timeline, overwrite_begins

from tests.paths import TRACES
from tracekern.analysis.doubt import Blame, Interval
from tracekern.analysis.findings import Findings, analyze
from tracekern.analysis.questions.gantt import choose_spans
from tracekern.formatting import duration, percent
from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.load import load
from tracekern.timeline.model import Flows, Problem, Spans, Timeline, TrackKind
from tracekern.timeline.select import take_spans
from tracekern.viewers.report.headlines import headlines, steadiness
from tracekern.viewers.report.report_page import report_page
from tracekern.viewers.report.verdict import charged


@pytest.fixture(scope="module")
def findings() -> Findings:
    return analyze(load(TRACES / "h200x4"))


def page_of(findings: Findings, path: Path) -> Path:
    path.write_text(report_page(findings, "h200x4", "traces/h200x4", "tracekern open trace.pftrace.gz"))
    return path


"""What can be seen of each figure that is not hidden."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("width", "color_scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_works_in_a_browser_without_a_network(findings, tmp_path, browser, width, color_scheme):
    path = page_of(findings, tmp_path / "report.html")
    with browser.tab(width, color_scheme=color_scheme) as tab:
        page = tab.page
        page.goto(path.as_uri())
        figures = look_at(page)
        assert len(figures) >= 5
        assert [figure for figure in figures if figure["overflow"] > 0 or figure["cut"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="best iteration").click()
        page.wait_for_function("() => document.querySelector('.pane:not([hidden]) .main-svg')")
        shown = page.locator(".pane:not([hidden]) .figure")
        assert shown.get_attribute("aria-label").startswith("Spans of the best iteration")
        assert tab.complaints == []
        assert [url for url in tab.requested if not url.startswith(("data:", path.as_uri()))] == []


def test_bars_of_time_sum_to_the_whole(findings, tmp_path):
    figure = figures_of(page_of(findings, tmp_path / "report.html"))[0]
    assert np.allclose(np.sum([trace["x"] for trace in figure["data"]], axis=0), 100)
    waits = next(trace["x"] for trace in figure["data"] if trace["name"] == "wait")
    assert waits == pytest.approx((100 * findings.time.wait / findings.time.total).tolist())


def test_matrix_says_which_side_waits(findings, tmp_path):
    figure = next(
        entry
        for entry in figures_of(page_of(findings, tmp_path / "report.html"))
        if entry["kind"] == "plot" and entry["data"][0]["type"] == "heatmap"
    )
    assert figure["layout"]["yaxis"]["title"]["text"] == "waits (rank)"
    assert figure["layout"]["xaxis"]["title"]["text"] == "is waited for (rank)"
    drawn = [[10**value if value is not None else 0 for value in row] for row in figure["data"][0]["z"]]
    assert np.allclose(drawn, findings.matrix.sum_ns)
    assert figure["data"][0]["hovertext"][3][0].startswith("rank 3 waits for rank 0")


def test_costs_and_path_are_shown_as_they_were_found(findings, tmp_path):
    page = page_of(findings, tmp_path / "report.html")
    figures = {entry["says"]: entry for entry in figures_of(page)}
    table = page.read_text().replace("\u00a0", " ").split('id="cause"')[1].split("</section>")[0]
    costs = [cost for cost in findings.answer.costs if cost.saving.whole_ns > 0][:12]
    whole = [(cost.saving.whole_ns, findings.answer.makespan_ns) for cost in costs]
    saved = [f"{duration(ns)} ({percent(ns, makespan_ns)})" for ns, makespan_ns in whole]
    assert re.findall(r"<tr><td>.*?</td><td></td><td class=\"number\">(.*?)</td>", table) == saved
    assert "never a price" in table
    path = figures["Parts of the critical path"]
    assert path["layout"]["xaxis"]["title"]["text"] == "ms of the critical path"
    assert sum(sum(trace["x"]) for trace in path["data"]) * 1e6 == pytest.approx(
        findings.critical_path.whole.makespan_ns
    )
    route = figures["Ranks that the critical path runs through"]
    lengths = [end - start for t in route["data"] for start, end in zip(t["x"][::3], t["x"][1::3], strict=True)]
    assert sum(lengths) * 1e6 == pytest.approx(findings.critical_path.whole.makespan_ns)


def test_the_host_that_costs_most_is_named_and_the_longest_waiter_is_not(tmp_path):
    found = analyze(load(TRACES / "h200x2_late_rank"))
    lines = {line.word: line.text for line in headlines(found)}
    assert found.time.ranks[int(found.time.wait.argmax())] != 1
    assert lines["verdict"].startswith("Rank 1's gaps before kernels are 302 us longer than its peers', most before ")
    assert "most before dispatch_send (host or an unrecorded kernel). The run would be" in lines["verdict"]
    assert "long, is rank 1's gaps before kernels (host or an unrecorded kernel)" in lines["bound"], "the same words"
    assert lines["why"].startswith("307 us more than its peers, by the mean of 20 iterations; ranks that are all ")
    page = page_of(found, tmp_path / "report.html").read_text().replace("\u00a0", " ")
    assert "<td><b>rank 1&#x27;s gaps before kernels</b></td><td>named</td>" in page


@pytest.mark.parametrize(
    ("lo_ns", "late_ns", "hi_ns", "said"),
    [
        (9_000, 10_000, 11_000, "10.0 us ±1.00 us"),
        (9_000, 10_000, 11_002, "10.0 us ±1.00 us"),
        (9_600, 10_000, 10_402, "10.0 us ±402 ns"),  # rounded to ns
        (0, 600, 9_000, "600 ns (-600 ns to +8.40 us)"),
        (10_000, 10_000, 10_500, "10.0 us (-0 ns to +500 ns)"),
        (10_000, 10_000, 10_000, "10.0 us"),
    ],
)
def test_doubt_to_one_side_is_not_said_of_both(lo_ns, late_ns, hi_ns, said):
    limits = Interval(lo_ns, hi_ns)
    assert charged(Blame(0, late_ns, limits, limits)) == said


def test_gantt_draws_spans_where_they_are(findings, tmp_path):
    gantts = [entry for entry in figures_of(page_of(findings, tmp_path / "report.html")) if entry["kind"] == "gantt"]
    assert [entry["name"].split()[0] for entry in gantts] == ["worst", "median", "best"]
    *_, worst = findings.iterations.best_median_worst()
    spans, drawn = choose_spans(findings.timeline, findings.iterations, worst).spans, gantts[0]["columns"]
    start = int(findings.iterations.start[worst])
    assert [start + value for value in drawn["start"]] == spans.start.tolist()
    assert drawn["duration"] == (spans.end - spans.start).tolist()
    names = [gantts[0]["kinds"][kind][0] for kind in drawn["kind"]]
    assert names == [findings.timeline.events[event].name for event in spans.event.tolist()]


def test_names_from_a_capture_are_only_text(tmp_path, browser):
    evil = "</script><img src=x onerror=alert(1)>"
    timeline = make_timeline(launches=tuple(make_launch(rank, evil) for rank in range(2)), title=evil)
    ranks = tuple(dataclasses.replace(rank, device=evil, metadata={"command": evil}) for rank in timeline.ranks)
    path = page_of(analyze(timeline.replace(ranks=ranks)), tmp_path / "report.html")
    with browser.tab() as tab:
        tab.page.goto(path.as_uri())
        look_at(tab.page)
        assert tab.page.locator("img").count() == 0
        assert tab.complaints == []


def without(timeline: Timeline, event: int) -> Timeline:
    kept = timeline.spans.event != event
    return timeline.replace(spans=timeline.spans.take(kept), flows=Flows())


POOR = {
    "one rank": make_timeline(1),
    "no waits": without(make_timeline(), WAIT),
    "no launches": without(make_timeline(), LAUNCH),
    "nothing at all": make_timeline(spans=Spans(), flows=Flows()),
    "no rank": Timeline("ns", (), (), (), ()),
    "unaligned": make_timeline(aligned=False, ranks=tuple(make_rank(rank, clock=None) for rank in range(2))),
    "waits without signals": make_timeline(flows=Flows()),
    "64 ranks": make_timeline(64),
}


@pytest.mark.parametrize("name", POOR)
def test_poor_captures_get_a_clear_answer(name):
    lines = headlines(analyze(POOR[name]))
    assert [line.word for line in lines if line.word not in ("why", "idle")] == ["verdict", "waiting", "bound", "trust"]
    assert all(line.text for line in lines)


@pytest.mark.parametrize("name", ["no rank", "waits without signals", pytest.param("64 ranks", marks=pytest.mark.soak)])
def test_poor_captures_get_a_page(name, tmp_path, browser):
    path = page_of(analyze(POOR[name]), tmp_path / "report.html")
    with browser.tab(390) as tab:
        tab.page.goto(path.as_uri())
        look_at(tab.page)
        assert tab.page.locator("h2").count() == tab.page.locator(".answer").count()
        assert tab.complaints == []


def test_what_is_missing_is_said():
    said = {name: {line.word: line.text for line in headlines(analyze(timeline))} for name, timeline in POOR.items()}
    assert said["one rank"]["verdict"] == "One rank: no other to compare it with."
    assert "no waits on record" in said["no waits"]["waiting"]
    assert steadiness(analyze(POOR["no launches"])) == "no whole iteration on record"
    assert "no kernel left a span" in said["nothing at all"]["waiting"]
    assert said["unaligned"]["verdict"] == "No cause is named: the ranks' clocks are not aligned."
    assert "UNALIGNED" in said["unaligned"]["trust"]
    assert "cannot be said" in steadiness(analyze(POOR["unaligned"]))
    told = said["waits without signals"]["verdict"]
    assert told == "No cause is named: the signals that ended 100 % of the waits are not on record."


def test_ranks_without_a_dump_are_told_first():
    text = "3 of 4 ranks have no dump: 1-3"
    lost = Problem("error", "missing_rank", 1, -1, text, 3)
    lines = {line.word: line.text for line in headlines(analyze(make_timeline(1).replace(problems=(lost,))))}
    assert lines["trust"].startswith(f"{text}; ")
    assert lines["verdict"].startswith(f"No cause is named: {text}, and what is not here ")


def test_an_iteration_or_a_rank_without_spans_is_no_trouble(findings):
    timeline = findings.timeline
    is_lane = np.array([track.kind == TrackKind.LAUNCH for track in timeline.tracks])[timeline.spans.track]
    sequence = np.array([*(launch.sequence for launch in timeline.launches), -1])[timeline.spans.launch]
    of_rank = timeline.track_ranks()[timeline.spans.track]
    for is_gone in (sequence == 1, ~is_lane & (sequence == 1), ~is_lane & (of_rank == 0), ~is_lane, is_lane):
        poor = analyze(take_spans(timeline, ~is_gone))
        assert all(line.text for line in headlines(poor))
        assert report_page(poor, "poor", "poor", "open").count("<section") == 9


def test_waits_whose_begin_was_overwritten_are_told_and_in_no_quantile(tmp_path):
    timeline = make_timeline(2)
    rows = np.flatnonzero(timeline.spans.event == WAIT)
    launches = tuple(dataclasses.replace(launch, records_overwritten=20) for launch in timeline.launches)
    found = analyze(overwrite_begins(timeline, rows[:3]).replace(launches=launches))
    page = page_of(found, tmp_path / "r.html").read_text()
    assert "The flight recorder overwrote the begin of 3 waits" in page
    assert "all numbers are of what the flight recorder kept" in page
    lines = {line.word: line.text for line in headlines(found)}
    assert "no record lost; 40 older ones overwritten" in lines["trust"]
    assert lines["part"] == "all numbers are of what the flight recorder kept"
    nothing_whole = page_of(analyze(overwrite_begins(timeline, rows)), tmp_path / "n.html").read_text()
    assert "<td>unknown</td><td>unknown</td>" in re.sub(r"<td[^>]*>", "<td>", nothing_whole)


def test_a_first_iteration_that_hides_the_others_says_how_to_see_them(findings, command_line):
    (bound,) = [line.text for line in headlines(findings) if line.word == "bound"]
    window = re.search(r"start-up and the first iteration are 69 % of it: --window (\S+) leaves them out", bound)[1]
    others = command_line("report", TRACES / "h200x4", "--window", window, "--json")
    assert "which is 783 us long, is rank 0's gaps before kernels" in json.loads(others.stdout)["bound"]
    assert not any("--window" in line.text for line in headlines(analyze(load(TRACES / "h200x4_late_host"))))


def late_from(number: int, stage: str) -> Timeline:
    """A kept capture in which all from this stage of this iteration on comes 20 ms later."""
    timeline = load(TRACES / "h200x4_late_host")
    own = LaunchIterations(timeline)
    is_behind = own.stage_of_launch >= own.stages.index(stage)
    is_later = (own.of_launch > number) | (own.of_launch == number) & is_behind
    later = np.where(np.append(is_later, False)[timeline.spans.launch], 20_000_000, 0)
    spans = timeline.spans
    return timeline.replace(spans=dataclasses.replace(spans, start=spans.start + later, end=spans.end + later))


@pytest.mark.parametrize("number", [1, 3])
def test_any_iteration_that_hides_the_others_says_how_to_see_them(number):
    timeline = late_from(number, "dispatch_send")
    (bound,) = [line.text for line in headlines(analyze(timeline)) if line.word == "bound"]
    share, first, last = re.search(
        rf"iteration {number} is (\d+) % of it: --window (\d+)us:(\d+)us leaves", bound
    ).groups()
    assert int(share) > 50
    others = analyze(timeline, window=(int(first) * 1000, int(last) * 1000))
    kept = {1: [2, 3, 4, 5], 3: [0, 1, 2]}[number]
    assert [one.iteration for one in others.critical_path.iterations] == kept
    assert not any(f"iteration {number}" in line.text for line in headlines(others))


def test_a_large_capture_stays_a_small_page(tmp_path):
    """Many more spans than can be drawn: aggregates and at most 20,000 rectangles."""
    directory = write_capture(tmp_path / "large", CaptureSpec(num_ranks=4, num_blocks=8, groups=100, launches=5))
    findings = analyze(load(directory))
    assert findings.summary.num_spans >= 150_000
    path = page_of(findings, tmp_path / "report.html")
    assert path.stat().st_size <= 8_000_000
    assert 0 < sum(len(entry["columns"]["row"]) for entry in figures_of(path) if entry["kind"] == "gantt") <= 20_000


def test_command_prints_the_lines_and_writes_the_page(command_line, tmp_path, findings):
    result = command_line("report", TRACES / "h200x4", "-o", tmp_path / "report.html")
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=1) for line in result.stdout.partition("\n\n")[0].splitlines()]
    assert lines == [[line.word, line.text] for line in headlines(findings)]
    assert "report.html" in result.stderr
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_whole_report_is_of_the_same_part(command_line, tmp_path):
    place = tmp_path / "my capture"
    shutil.copytree(TRACES / "h200x4", place)
    (place / "trace.pftrace.gz").unlink()
    chosen = ["--unaligned", "--window", "0:1ms", "--ranks", "0-2", "--link-limit", "300.0"]
    result = command_line("report", place, *chosen)
    _, command = result.stderr.strip().split(": ", 1)
    words = shlex.split(command)
    assert words[words.index("report") :] == ["report", str(place), *chosen, "-o", "report.html"]
    assert command_line("report", place, "-o", tmp_path / "report.html").returncode == 0
    assert html.escape(f"open {shlex.quote(str(place))}") in (tmp_path / "report.html").read_text()


def test_json_has_the_same_lines_and_the_answer_as_data(command_line, findings):
    told = json.loads(command_line("report", TRACES / "h200x2_late_rank", "--json").stdout)
    found = analyze(load(TRACES / "h200x2_late_rank"))
    answer, path = told.pop("answer"), told.pop("critical_path")
    del told["longest_waits"], told["stages"]
    assert told.pop("full_rings") == []
    assert [part["time_ns"] for part in path["parts"]] == [part.time_ns for part in found.critical_path.whole.parts]
    assert told == {"file": None, **{line.word: line.text for line in headlines(found)}}
    (cause,) = answer["causes"]
    assert (cause["kind"], cause["rank"], cause["peer"], cause["is_host"]) == ("host", 1, None, False)
    assert (cause["stage"], cause["phase"]) == ("dispatch_send", None)
    assert cause["saved_ns"] == found.answer.causes[0].saving.whole_ns
    assert cause["saved_at_least_ns"] == found.answer.causes[0].at_least_ns
    assert cause["pattern"] == {"begin": 0, "until": None, "stride": 1}
    assert f"{cause['excess_ns'] / 1e3:.0f} us longer than its peers'" in told["verdict"]
    assert cause["by_iteration"]["mean_ns"] * answer["num_iterations"] == pytest.approx(cause["saved_ns"], rel=0.01)
    assert cause["more_than_peers_ns"] > cause["alike_ns"] > 0
    assert (answer["silence"], answer["note"]) == (None, "")
    assert [cost["saved_ns"] for cost in answer["costs"]] == [cost.saving.whole_ns for cost in found.answer.costs]
    assert answer["makespan_ns"] == found.answer.makespan_ns > answer["even_hosts_ns"] > 0


def test_json_of_a_run_whose_costs_are_not_known(command_line):
    told = command_line("report", TRACES / "h200x4", "--ranks", "0-2", "--json").stdout
    answer = json.loads(told, parse_constant=pytest.fail)["answer"]
    assert (answer["causes"], answer["costs"], answer["silence"]) == ([], [], "no cost")
    assert answer["note"].startswith("1 of 4 ranks left out: 3")

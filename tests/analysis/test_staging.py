"""How much of staging hides: sums by hand and against plain loops over spans, in the report and in Perfetto."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from int4_experts import draw_layer
from report_pages import figures_of
from timelines import EVENTS, make_launch, make_spans, make_timeline, overwrite_begins
from trace_processor import Case

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.staging import EXPOSED, MULTIPLIES, Staging, staging
from tracekern.formatting import percent
from tracekern.moe.gemm import fused_moe_apply
from tracekern.moe.gemm.kernels import STAGINGS
from tracekern.timeline.join.side_by_side import side_by_side
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Field, Timeline
from tracekern.viewers.report.questions.staging import describe_staging
from tracekern.viewers.report.report_page import report_page

VALUES = ("sweeps", "sweep_ns", "stage_ns", "park_ns", "decode_ns", "multiply_ns", "hidden_ns")
Sums = dict[tuple[int, str, int, int], tuple[int, ...]]
"""VALUES by (rank, kernel, expert, warp)."""


def sums_of(found: Staging) -> Sums:
    kernels = [found.kernels[kernel] for kernel in found.kernel.tolist()]
    keys = zip(found.rank.tolist(), kernels, found.expert.tolist(), found.warp.tolist(), strict=True)
    return dict(zip(keys, zip(*(getattr(found, name).tolist() for name in VALUES), strict=True), strict=True))


def slow_sums(timeline: Timeline) -> Sums:
    """The same, a span at a time: a sweep's spans follow it."""
    sums, spans = defaultdict(lambda: [0] * len(VALUES)), timeline.spans
    names = [timeline.events[event].name for event in spans.event.tolist()]
    for sweep in [row for row, name in enumerate(names) if name == "sweep"]:
        track = timeline.tracks[spans.track[sweep]]
        expert = int(spans.begin_payload[sweep]) & 0x1FFF
        steps, row = [], sweep + 1
        while row < len(spans) and spans.track[row] == spans.track[sweep] and spans.end[row] <= spans.end[sweep]:
            steps.append(row)
            row += 1
        if not steps:
            continue
        own = sums[track.rank, timeline.launches[spans.launch[sweep]].name, expert, track.warp]
        own[0] += 1
        own[1] += int(spans.end[sweep] - spans.start[sweep])
        for step in steps:
            ns, group = int(spans.end[step] - spans.start[step]), int(spans.begin_payload[step]) & 0x3FF
            if names[step] in EXPOSED:
                own[2 + EXPOSED.index(names[step])] += ns
                continue
            assert names[step] in MULTIPLIES
            own[5] += ns
            staged = [other for other in steps if names[other] == "stage" and spans.start[other] <= spans.start[step]]
            own[6] += ns if any(int(spans.begin_payload[other]) & 0x3FF > group for other in staged) else 0
    return {key: tuple(values) for key, values in sums.items()}


@pytest.fixture(scope="module", params=STAGINGS)
def timeline(request, tmp_path_factory) -> Timeline:
    directory = tmp_path_factory.mktemp("staging")
    layer = draw_layer(9, 2, 4, size=256)
    given = (layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2)
    with tracekern.capture(directory, device="cpu", clock="cycles", records_per_track=4096) as capture:
        fused_moe_apply(*given, staging=request.param, detail=2, capture=capture)
    return load(directory)


def test_sums_are_those_of_a_plain_loop(timeline):
    found = sums_of(staging(timeline))
    assert found == slow_sums(timeline)
    assert {kernel for _, kernel, _, _ in found} == {"k2", "k4"}
    for _, sweep_ns, stage, park, decode, multiply, hidden in found.values():
        assert 0 < hidden < multiply
        assert stage + park + decode + multiply <= sweep_ns


# ---- by hand ----

GROUP = (Field("group", 10), Field("half", 1))
SWEEP, STAGE, PARK, LOAD_B, DECODE, MULTIPLY = range(len(EVENTS), len(EVENTS) + 6)
STEP_EVENTS = (
    *EVENTS,
    EventType("sweep", EventClass.WORK, "completion", None, (Field("expert", 13), Field("phase", 1))),
    *(EventType(name, EventClass.WORK, "completion", None, GROUP) for name in ("stage", "park", "load_b")),
    *(EventType(name, EventClass.WORK, "completion", None, GROUP) for name in ("decode", "multiply")),
)


def by_hand(rows: list[tuple[int, int, int, int, int]]) -> Timeline:
    """From (track, event, start, end, payload). Track 3 is warp 1 of block 0 of rank 0, 8 warp 0 of rank 1."""
    launches = tuple(make_launch(rank, "k2") for rank in range(2))
    spans = make_spans((track, event, track // 6, *rest, 0) for track, event, *rest in rows)
    return make_timeline(2, events=STEP_EVENTS, spans=spans, launches=launches, flows=type(make_timeline().flows)())


AHEAD = [
    (3, SWEEP, 100, 200, 5),
    (3, STAGE, 100, 110, 0),
    (3, PARK, 110, 114, 0),
    (3, STAGE, 120, 127, 1),
    (3, LOAD_B, 127, 130, 0),  # under way: group 1
    (3, DECODE, 130, 132, 0),
    (3, MULTIPLY, 132, 150, 0),
    (3, PARK, 150, 155, 1),
    (3, LOAD_B, 155, 157, 1),  # nothing is
    (3, MULTIPLY, 160, 180, 1),
]
LATE = [
    (8, SWEEP, 100, 200, 7),
    (8, STAGE, 100, 110, 0),
    (8, MULTIPLY, 110, 130, 0),
    (8, STAGE, 130, 140, 1),
    (8, MULTIPLY, 140, 160, 1),
]


def test_what_is_staged_when_it_is_due_hides_nothing():
    found = sums_of(staging(by_hand(AHEAD + LATE)))
    assert found == {(0, "k2", 5, 1): (1, 100, 17, 9, 2, 43, 21), (1, "k2", 7, 0): (1, 100, 20, 0, 0, 40, 0)}


def test_steps_outside_a_sweep_and_sweeps_without_steps_do_not_count():
    others = [
        (3, SWEEP, 300, 400, 5),
        (3, MULTIPLY, 420, 430, 0),
        (3, MULTIPLY, 390, 410, 0),
        (8, SWEEP, 50, OPEN_END, 1),
        (9, MULTIPLY, 100, 120, 0),
    ]
    found = sums_of(staging(by_hand(AHEAD + others)))
    assert found == {(0, "k2", 5, 1): (1, 100, 17, 9, 2, 43, 21)}


def test_a_sweep_whose_begin_was_overwritten_has_no_expert():
    timeline = by_hand(AHEAD + LATE)
    (sweep, _) = timeline.rows_of("sweep")
    assert list(sums_of(staging(overwrite_begins(timeline, [sweep])))) == [(1, "k2", 7, 0)]


@pytest.mark.parametrize("rows", [[], [(3, SWEEP, 100, 200, 5)], [(3, MULTIPLY, 100, 200, 5)]])
def test_without_steps_there_is_no_part_of_the_page(rows):
    findings = analyze(by_hand(rows) if rows else load(TRACES / "cpu_8_ranks"))
    assert findings.staging is None
    assert 'id="staging"' not in report_page(findings, "name", "capture", "open")


# ---- what is shown ----


def test_the_text_has_both_shares_of_each_kernel():
    assert describe_staging(staging(by_hand(AHEAD + LATE))) == (
        f"in 2 sweeps of k2 {percent(21, 21 + 48)} of staging was hidden, the rest took {percent(48, 200)}"
    )


def test_the_page_has_a_row_for_each_expert_and_a_column_for_each_warp(timeline, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text(report_page(analyze(timeline), "name", "capture", "open"))
    figures = {figure["says"]: figure for figure in figures_of(page) if figure["says"].startswith("Exposed staging")}
    assert len(figures) == 2
    sums = sums_of(staging(timeline))
    for kernel in ("k2", "k4"):
        figure = figures[f"Exposed staging of {kernel}: rows are experts, columns are warps"]
        experts = sorted({expert for _, name, expert, _ in sums if name == kernel})
        assert figure["layout"]["yaxis"]["ticktext"] == [f"0 · {expert}" for expert in experts]
        for expert, cells in zip(experts, figure["data"][0]["z"], strict=True):
            for warp, share in enumerate(cells):
                _, sweep_ns, *exposed, _, _ = sums[0, kernel, expert, warp]
                assert share == pytest.approx(100 * sum(exposed) / sweep_ns)


SQL = f"select rank, kernel, expert, warp, {', '.join(VALUES)} from tk_staging"


def test_the_view_has_the_same_numbers(timeline, tmp_path: Path):
    rows = Case(timeline, tmp_path / "trace.pftrace").query(SQL)
    assert {tuple(row[:4]): tuple(row[4:]) for row in rows} == sums_of(staging(timeline))


def test_the_view_keeps_the_sides_of_two_captures_apart(timeline, tmp_path: Path):
    both = Case(side_by_side(timeline, timeline), tmp_path / "trace.pftrace")
    for side in "AB":
        rows = both.query(f"{SQL} where side = '{side}'")
        assert {tuple(row[:4]): tuple(row[4:]) for row in rows} == sums_of(staging(timeline))


def test_the_view_has_the_share_that_is_hidden(tmp_path: Path):
    rows = Case(by_hand(AHEAD), tmp_path / "trace.pftrace").query("select hidden_percent from tk_staging")
    assert rows == [(pytest.approx(100 * 21 / (21 + 28)),)]

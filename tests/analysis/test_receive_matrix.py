"""What came from where: sums against plain loops over spans and against the routing, and what the report shows."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from report_pages import figures_of
from timelines import EVENTS, make_spans, make_timeline, overwrite_begins

from tests.paths import TRACES
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.receive_matrix import ReceiveMatrix, receive_matrix
from tracekern.formatting import duration
from tracekern.moe.routing import draw_batch
from tracekern.moe.workload.options import MoeRun
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Field, Timeline
from tracekern.timeline.select import select
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.report_page import report_page

SHAPE = MoeRun(ranks=4, variant="low_latency", tokens=12, hidden=256, experts=16, topk=4, iterations=3)
Sums = dict[tuple[int, int, int], tuple[int, ...]]
"""(waits, tokens, wait_ns, copies, copy_ns) by (rank, local expert, source)."""


@pytest.fixture(scope="module")
def capture(command_line, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("receive") / "capture"
    words = []
    for name in ("ranks", "variant", "tokens", "hidden", "experts", "topk", "iterations", "seed"):
        words += [f"--{name}", getattr(SHAPE, name)]
    ran = command_line("run", "moe", *words, "--backend", "cpu", "-o", directory)
    assert ran.returncode == 0, ran.stderr
    return directory


@pytest.fixture(scope="module")
def timeline(capture) -> Timeline:
    return load(capture)


def sums_of(matrix: ReceiveMatrix) -> Sums:
    pairs = zip(matrix.rank.tolist(), matrix.local_expert.tolist(), matrix.source.tolist(), strict=True)
    columns = (matrix.waits, matrix.tokens, matrix.wait_ns, matrix.copies, matrix.copy_ns)
    return dict(zip(pairs, zip(*(column.tolist() for column in columns), strict=True), strict=True))


def values_of(fields: tuple[Field, ...], payload: int) -> dict[str, int]:
    values = {}
    for field in fields:
        values[field.name] = payload & ((1 << field.bits) - 1)
        payload >>= field.bits
    return values


def slow_sums(timeline: Timeline, wait: str, copy: str) -> Sums:
    """The same by the events' names, a span at a time."""
    sums = defaultdict(lambda: [0] * 5)
    spans = timeline.spans
    for row in range(len(spans)):
        event, ns = timeline.events[spans.event[row]], int(spans.end[row] - spans.start[row])
        if event.name not in (wait, copy) or spans.end[row] == OPEN_END:
            continue
        begin, end = (
            values_of(fields, int(payload))
            for fields, payload in (
                (event.begin_fields, spans.begin_payload[row]),
                (event.end_fields, spans.end_payload[row]),
            )
        )
        source = begin["peer"] if event.name == wait else begin["src_rank"]
        of_pair = sums[timeline.tracks[spans.track[row]].rank, begin["local_expert"], source]
        more = [1, end["tokens"], ns, 0, 0] if event.name == wait else [0, 0, 0, 1, ns]
        of_pair[:] = np.add(of_pair, more).tolist()
    return {pair: tuple(sums[pair]) for pair in sorted(sums)}


def test_sums_are_those_of_a_loop_over_spans(timeline):
    found = sums_of(receive_matrix(timeline))
    assert found == slow_sums(timeline, "wait_count", "copy_token")
    assert len(found) == SHAPE.experts * SHAPE.ranks  # those without a token, too


def test_tokens_are_those_of_the_routing(timeline):
    tokens = defaultdict(int)
    for source in range(SHAPE.ranks):
        for iteration in range(SHAPE.iterations):
            drawn = {"routing": SHAPE.routing, "uneven": SHAPE.uneven}
            batch = draw_batch(SHAPE.shape, seed=SHAPE.seed, rank=source, iteration=iteration, **drawn)
            for expert in batch.topk_idx.flatten().tolist():
                tokens[(*divmod(expert, SHAPE.shape.num_local_experts), source)] += 1
    found = sums_of(receive_matrix(timeline))
    assert {pair: sums[1] for pair, sums in found.items() if sums[1]} == tokens
    assert all(sums[0] == SHAPE.iterations and sums[1] == sums[3] for sums in found.values())


# ---- events of other kernels ----

PEER, LOCAL_EXPERT = Field("peer", 10), Field("local_expert", 13)
AWAIT, TAKE, RESULTS, CLAIM = range(len(EVENTS), len(EVENTS) + 4)
OTHER_EVENTS = (
    *EVENTS,
    EventType("await_few", EventClass.WAIT, "completion", None, (PEER, LOCAL_EXPERT), (Field("tokens", 16),)),
    EventType(
        "take",
        EventClass.WORK,
        "issue",
        None,
        (Field("src_rank", 10), LOCAL_EXPERT, Field("place", 16)),
        (Field("token", 16),),
    ),
    EventType("wait_results", EventClass.WAIT, "completion", None, (PEER, LOCAL_EXPERT)),
    EventType("claim", EventClass.WORK, "issue", None, (Field("src_rank", 10), LOCAL_EXPERT), (Field("begin", 22),)),
)


def other_timeline() -> Timeline:
    """Tracks 2 and 3 are warps of rank 0, 8 one of rank 1."""
    rows = [
        (2, AWAIT, 0, 100, 150, 3 | 1 << 10, 7),
        (2, AWAIT, 0, 200, 220, 3 | 1 << 10, 2),
        (2, CLAIM, 0, 220, 230, 3 | 1 << 10, 40),
        (3, TAKE, 0, 300, 311, 3 | 1 << 10 | 5 << 23, 60),
        (3, RESULTS, 0, 400, 900, 3 | 1 << 10, 0),
        (8, AWAIT, 0, 100, 104, 0 | 4 << 10, 0),
        (8, AWAIT, 0, 200, OPEN_END, 0 | 4 << 10, 0),
        (8, TAKE, 0, 300, 302, 1 | 4 << 10, 5),
    ]
    return make_timeline(2, events=OTHER_EVENTS, spans=make_spans(rows), flows=type(make_timeline().flows)())


def test_events_are_known_by_their_fields_and_only_what_ended_counts():
    timeline = other_timeline()
    found = sums_of(receive_matrix(timeline))
    assert found == {(0, 1, 3): (2, 9, 70, 1, 11), (1, 4, 0): (1, 0, 4, 0, 0), (1, 4, 1): (0, 0, 0, 1, 2)}
    assert found == slow_sums(timeline, "await_few", "take")
    matrix = receive_matrix(timeline)
    assert matrix.sources.tolist() == [0, 1, 3]  # rank 3 is not in the capture
    assert matrix.grid(matrix.tokens).tolist() == [[0, 0, 9], [0, 0, 0]]


def test_a_wait_whose_begin_was_overwritten_has_no_pair():
    timeline = other_timeline()
    (first, *_) = np.flatnonzero(timeline.spans.event == AWAIT)
    assert sums_of(receive_matrix(overwrite_begins(timeline, [first])))[0, 1, 3] == (1, 2, 20, 1, 11)


def test_without_such_waits_there_is_no_matrix_no_line_and_no_part_of_the_page(tmp_path):
    findings = analyze(load(TRACES / "cpu_8_ranks"))
    assert findings.received is None
    assert "receive" not in [line.word for line in headlines(findings)]
    assert 'id="receive"' not in report_page(findings, "name", "capture", "open")


def test_a_window_has_what_reaches_into_it(timeline):
    middle = int(np.median(timeline.spans.start))
    findings = analyze(timeline, window=(0, middle))
    assert sums_of(findings.received) == sums_of(receive_matrix(select(timeline, (0, middle))))
    assert findings.received.waits.sum() < receive_matrix(timeline).waits.sum()


# ---- what the report shows ----


def test_the_line_names_the_largest_expert_and_the_latest_source(timeline):
    (line,) = [line.text for line in headlines(analyze(timeline)) if line.word == "receive"]
    sums = sums_of(receive_matrix(timeline))
    by_expert, by_source = defaultdict(int), defaultdict(int)
    for (rank, expert, source), (_, tokens, wait_ns, _, _) in sums.items():
        by_expert[rank, expert] += tokens
        by_source[source] += wait_ns
    rank, expert = max(by_expert, key=lambda key: (by_expert[key], *(-number for number in key)))
    latest = max(by_source, key=by_source.__getitem__)
    total = sum(by_expert.values())
    assert line.startswith(f"{total:,} tokens came for 16 experts; ")
    assert f"local expert {expert} of rank {rank} got most: {by_expert[rank, expert]:,}, " in line
    waited = duration(sum(by_source.values()))
    assert f"; warps waited {waited} for the counts, " in line
    assert f" of it for those of rank {latest}; " in line
    assert line.endswith(f"copies took {duration(sum(copy_ns for *_, copy_ns in sums.values()))}")


def test_the_command_prints_the_line_and_tells_the_matrices_as_json(command_line, capture, timeline):
    printed = command_line("report", capture).stdout.partition("\n\n")[0]
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines())
    told = json.loads(command_line("report", capture, "--json").stdout)
    assert told["receive"] == lines["receive"]
    found: Sums = {}
    for of_rank in told["receive_matrix"]:
        for row, expert in enumerate(of_rank["local_experts"]):
            for column, source in enumerate(of_rank["sources"]):
                names = ("tokens", "wait_ns", "copies", "copy_ns")
                found[of_rank["rank"], expert, source] = tuple(of_rank[name][row][column] for name in names)
    assert found == {pair: sums[1:] for pair, sums in sums_of(receive_matrix(timeline)).items()}


def page_of(timeline: Timeline, path: Path) -> Path:
    path.write_text(report_page(analyze(timeline), "name", "capture", "tracekern open capture"))
    return path


def test_the_page_has_a_matrix_of_tokens_of_waits_and_of_copies(timeline, tmp_path):
    figures = [
        figure for figure in figures_of(page_of(timeline, tmp_path / "page.html")) if "receive" in figure["says"]
    ]
    matrix = receive_matrix(timeline)
    drawn = [figure["data"][0]["text"] for figure in figures if "rows are experts" in figure["says"]]
    says = ("{:,.0f}".format, duration, duration)
    for cells, column, say in zip(drawn, (matrix.tokens, matrix.wait_ns, matrix.copy_ns), says, strict=True):
        assert cells == [[say(value) if value else "" for value in row] for row in matrix.grid(column).tolist()]

"""Waits within and between nodes, where runs with known waits put them, and what nodes are called."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from report_pages import figures_of, look_at
from simulator import Case, LatencyOut, Shape, Truth, simulate
from timelines import make_rank, make_timeline
from trace_processor import Case as Trace

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import Findings, analyze
from tracekern.analysis.questions.nodes import node_waits
from tracekern.analysis.questions.summary import summarize
from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.join.nodes import name_nodes
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.report_page import report_page

SLOW = LatencyOut(50_000, ranks=(4, 5, 6, 7))
"""What leaves the second of two nodes of four."""
COLUMNS = ("node", "peer_node", "count", "wait_ns", "late_ns", "drain_ns")
SQL = "select node, peer_node, waits, wait_ns, late_ns, drain_ns from tk_node_waits"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    case = Case(Shape.PIPELINE, 8, 10, (SLOW,), 0.02, num_warps=7, ranks_per_node=4)
    return simulate(case, 3, tmp_path_factory.mktemp("nodes") / "capture")


@pytest.fixture(scope="module")
def findings(truth: Truth) -> Findings:
    return analyze(tracekern.load(truth.directory))


def test_sums_are_those_of_the_true_waits(truth: Truth, findings: Findings):
    found = findings.nodes
    assert (found.nodes, found.ranks) == (("node-0", "node-1"), ((0, 1, 2, 3), (4, 5, 6, 7)))
    wanted = {name: np.zeros((2, 2)) for name in ("count", "wait_ns", "late_ns")}
    own_rank_ns = np.zeros(2)
    for wait in truth.waits:
        node, peer = truth.case.node(wait.rank), truth.case.node(wait.peer)
        if wait.rank == wait.peer:
            own_rank_ns[node] += wait.end_ns - wait.begin_ns
            continue
        wanted["count"][node, peer] += 1
        wanted["wait_ns"][node, peer] += wait.end_ns - wait.begin_ns
        wanted["late_ns"][node, peer] += max(wait.late_until_ns - wait.begin_ns, 0)
    assert np.array_equal(found.count, wanted["count"])
    ticks_ns = 2 * 32 * found.count
    assert (np.abs(found.wait_ns - wanted["wait_ns"]) <= ticks_ns).all()
    assert (found.late_lo_ns - ticks_ns <= wanted["late_ns"]).all()
    assert (wanted["late_ns"] <= found.late_hi_ns + ticks_ns).all()
    assert (found.late_lo_ns <= found.late_ns).all()
    assert (found.late_ns <= found.late_hi_ns).all()
    assert found.own_rank_ns == pytest.approx(own_rank_ns, rel=0.01)
    assert not found.unknown_count.any()
    assert found.wait_ns.sum() - found.wait_ns.trace() == found.across_ns


def test_the_sums_are_those_of_the_matrix_of_ranks(findings: Findings):
    waited = findings.matrix.sum_ns - np.diag(findings.matrix.sum_ns.diagonal())
    assert findings.nodes.wait_ns.tolist() == waited.reshape(2, 4, 2, 4).sum(axis=(1, 3)).tolist()


def test_waits_for_unknown_ranks_are_told_and_between_no_nodes():
    timeline = make_timeline(4)
    ranks = tuple(make_rank(rank, node=f"node-{rank // 2}") for rank in range(4))
    waits = analyze_waits(timeline)
    unknown = dataclasses.replace(waits, peer=np.where(waits.rank == 3, np.int32(-1), waits.peer))
    every, found = (node_waits(timeline.replace(ranks=ranks), entry) for entry in (waits, unknown))
    of_last = waits.rank == 3
    assert found.unknown_count.tolist() == [0, of_last.sum()]
    assert found.unknown_ns.tolist() == [0, waits.wait_ns[of_last].sum()]
    assert every.wait_ns.sum() - found.wait_ns.sum() == found.unknown_ns.sum()


@pytest.mark.parametrize(
    ("machines", "hosts", "settings", "names"),
    [
        ("xxyy", "aaaa", {}, ["a#0", "a#0", "a#1", "a#1"]),
        ("xyzz", "aabb", {}, ["a#0", "a#1", "b", "b"]),
        ("xxyy", "abcd", {}, ["a", "a", "c", "c"]),
        ("xxxx", "aaaa", {"nodes": 2}, ["a/0", "a/0", "a/1", "a/1"]),
        ("xxxx", "aaaa", {"nodes": 3}, ["a", "a", "a", "a"]),
        ("xxxx", "aaaa", {"nodes": "two"}, ["a", "a", "a", "a"]),
        ("xxyy", "aabb", {"nodes": 4}, ["a", "a", "b", "b"]),
        ("", "aabb", {}, ["a", "a", "b", "b"]),
    ],
    ids=[
        *("one name on two machines", "and another machine", "containers", "parts", "no equal parts", "no number"),
        *("machines come before parts", "older dumps"),
    ],
)
def test_a_node_is_a_machine_or_a_part_of_the_only_one(machines: str, hosts: str, settings: dict, names: list[str]):
    pieces = []
    for rank, host in enumerate(hosts):
        machine = {"machine": machines[rank]} if machines else {}
        metadata = {"node": host, "num_ranks": 4, "settings": settings, **machine}
        pieces.append(make_timeline(1, ranks=(make_rank(rank, node=host, metadata=metadata),)))
    named = [piece.ranks[0] for piece in name_nodes(pieces)]
    assert [rank.node for rank in named] == names
    assert [rank.machine for rank in named] == list(machines or hosts), "clocks are those of machines"


def test_parts_of_one_machine_are_nodes_in_a_report():
    found = analyze(tracekern.load(TRACES / "h200_two_hop")).nodes
    assert [node[-2:] for node in found.nodes] == ["/0", "/1"]
    assert found.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_interfaces_of_engines_are_on_record():
    ranks = summarize(tracekern.load(TRACES / "fabric_late_rank")).ranks
    assert {rank.nics for rank in ranks} == {("tcp 127.0.0.1", "tcp 127.0.0.2")}


def test_a_run_on_one_node_says_nothing_of_nodes(tmp_path: Path):
    findings = analyze(tracekern.load(simulate(Case(Shape.RING, 4, 8), 1, tmp_path / "capture").directory))
    assert findings.nodes is None
    assert "nodes" not in [line.word for line in headlines(findings)]
    assert 'id="nodes"' not in report_page(findings, "name", "capture", "open")


def test_terminal_and_json_say_the_same(command_line, truth: Truth, findings: Findings):
    said = command_line("report", truth.directory)
    assert said.returncode == 0, said.stderr
    assert "waits by pair of nodes" in said.stdout
    rows = said.stdout.split("waits by pair of nodes")[1].splitlines()[2:]
    assert [row.split()[-2:] for row in rows] == [
        [findings.nodes.nodes[idx] for idx in pair] for pair in findings.nodes.pairs()
    ]
    told = json.loads(command_line("report", truth.directory, "--json").stdout)
    assert told["nodes"] in said.stdout
    assert told["node_waits"] == json.loads(json.dumps(findings.nodes.as_dict()))
    ranks = json.loads(command_line("info", truth.directory, "--json").stdout)["ranks"]
    assert {rank["host"] for rank in ranks} == {"node-0", "node-1"}


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_has_the_nodes(findings: Findings, tmp_path: Path, browser, width: int):
    path = tmp_path / "report.html"
    path.write_text(report_page(findings, "name", "capture", "open"))
    (figure,) = (figure for figure in figures_of(path) if "between nodes" in figure["says"])
    cells = [[10 ** (cell or -np.inf) for cell in row] for row in figure["data"][0]["z"]]
    assert np.array(cells) == pytest.approx(findings.nodes.wait_ns)
    with browser.tab(width) as tab:
        tab.page.goto(path.as_uri())
        assert [figure for figure in look_at(tab.page) if figure["overflow"] > 0 or figure["cut"]] == []
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.page.locator("#nodes table").count() == 2


def test_a_table_and_sql_give_the_same_sums(findings: Findings, tmp_path: Path):
    timeline, found = findings.timeline, findings.nodes
    tracekern.save(timeline, tmp_path / "spans.parquet")
    spans = pl.read_parquet(tmp_path / "spans.parquet")
    asked = spans.filter((pl.col("class") == "wait") & pl.col("flow_sources").is_not_null())
    sums = asked.group_by("node", "peer_node").agg(pl.len(), pl.sum("duration_ns")).rows()
    wanted = [tuple(row[name] for name in COLUMNS) for row in found.as_dict()["waits"]]
    assert sorted(sums) == sorted(row[:4] for row in wanted)
    assert Trace(timeline, tmp_path / "trace.pftrace.gz").query(SQL) == wanted

"""Why a single wait lasted: chains of a known run, and of kept captures, link by link and to the nanosecond."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scenarios import rows_of
from scenarios_causes import COPY_NS, CallScenario, chain, every_kind_of_wait, pipeline

from tests.paths import TRACES
from tracekern.analysis.findings import Findings
from tracekern.analysis.waits.analyze import Phase
from tracekern.analysis.why.chain import Chain
from tracekern.analysis.why.critical_path import PathKind, PathPart
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.questions.time import draw

DELAY_NS = 50_000
LINK_NS = 60  # 40 ns to signal, 20 ns to see it


def phase(name: str, rank: int, ns: int) -> PathPart:
    return PathPart(rank, PathKind.PHASE, Phase(*name.split(".")), -1, ns)


def link(rank: int, peer: int, ns: int = LINK_NS) -> PathPart:
    return PathPart(rank, PathKind.LINK, Phase("", ""), peer, ns)


def longest(timeline: Timeline, event: str) -> Chain:
    return next(one for one in Findings(timeline).longest_waits if one.phase.event == event)


def test_a_wait_at_the_end_of_a_chain_leads_to_the_rank_that_made_it_long():
    found = longest(chain(DELAY_NS, num_calls=1).timeline(), "wait_token")
    assert (found.rank, found.wait_ns) == (2, 2 * COPY_NS + DELAY_NS + 2 * LINK_NS)
    assert found.links == (
        link(1, 2),
        phase("dispatch.copy_token", 1, COPY_NS),
        link(0, 1),
        phase("dispatch.copy_token", 0, COPY_NS + DELAY_NS),
    )


def test_a_wait_for_a_rank_whose_host_was_late_leads_to_the_gap_before_its_kernel():
    found = longest(pipeline(gap={2: DELAY_NS}).timeline(), "wait_token")
    assert (found.links[0].kind, found.links[0].rank) == (PathKind.LINK, 2)
    assert (found.links[-1].kind, found.links[-1].rank) == (PathKind.GAP, 2)
    assert found.links[-1].time_ns > 0.9 * DELAY_NS


def test_what_lies_before_the_wait_is_no_part_of_why_it_lasted():
    run = CallScenario(2)
    run.launch("dispatch")
    run.work(0, 9_000)
    run.signal(0, 1)
    run.work(1, 8_900)
    run.wait(1, 0)
    found = longest(run.timeline(), "wait_token")
    assert (found.wait_ns, found.links) == (160, (link(0, 1), phase("dispatch.copy_token", 0, 100)))


def test_a_wait_that_nothing_on_record_ended_has_no_chain():
    run = CallScenario(2)
    run.launch("dispatch")
    run.wait_other(0, 700)
    found = longest(run.timeline(), "wait_other")
    assert (found.wait_ns, found.links) == (700, ())


@pytest.mark.parametrize("wrong_ns", [0, -400, 300])
def test_the_links_of_every_wait_sum_to_it(wrong_ns: int):
    timeline = every_kind_of_wait().timeline(clock_error={1: wrong_ns})
    findings = Findings(timeline)
    chains = findings.chains([(0, row) for row in findings.waits.row.tolist()])
    ended = np.isin(np.arange(len(findings.waits)), findings.moments.graphs[0].run_graph.heard)
    assert 0 < ended.sum() < len(chains)
    for one, was_ended in zip(chains, ended.tolist(), strict=True):
        assert sum(part.time_ns for part in one.links) == (one.wait_ns if was_ended else 0)


def test_of_clocks_that_are_not_aligned_none_is_told():
    assert Findings(chain(DELAY_NS).timeline().replace(aligned=False)).longest_waits == ()


def test_the_longest_waits_are_in_the_window():
    timeline = chain(DELAY_NS).timeline()
    second = int(timeline.spans.start[rows_of(timeline, "wait_token")[2]])
    assert longest(timeline, "wait_token").start_ns < second
    (found,) = (
        one for one in Findings(timeline, window=(second, second + 10)).longest_waits if one.phase.event == "wait_token"
    )
    assert found.start_ns <= second + 10
    assert found.start_ns + found.wait_ns >= second


def test_json_and_page_tell_why_the_longest_waits_of_a_kept_capture_lasted(command_line, tmp_path):
    page = tmp_path / "report.html"
    told = json.loads(command_line("report", TRACES / "h200x4_late_host", "-o", page, "--json").stdout)
    first = told["longest_waits"][0]
    assert (first["rank"], first["phase"], first["wait_ns"]) == (3, "dispatch_send.wait_counts", 553_761)
    assert [(part["kind"], part["rank"], part["peer"], part["phase"]) for part in first["chain"]] == [
        ("link", 0, 3, None),
        ("phase", 0, None, "dispatch_send.count_tokens"),
        ("host", 0, None, None),
    ]
    assert sum(part["time_ns"] for part in first["chain"]) == first["wait_ns"]
    *others, last = told["longest_waits"]
    assert (last["phase"], last["wait_ns"], last["is_start_up"]) == ("rank_barrier.wait_barrier", 110_976, True)
    assert not any(wait["is_start_up"] for wait in others)
    assert min(wait["wait_ns"] for wait in others) < last["wait_ns"] < first["wait_ns"], "it comes last all the same"
    path = told["critical_path"]
    assert sum(part["time_ns"] for part in path["parts"]) == path["end_ns"] - path["start_ns"]
    text = page.read_text().replace("\u00a0", " ")
    assert "<code>rank_barrier.wait_barrier</code> of rank 2, in start-up</td>" in text
    assert "<b>1.44 us</b> ← rank 0&#x27;s gaps before kernels (its host) <b>550 us</b></td>" in text


def test_a_long_chain_is_cut_in_the_middle_on_the_page():
    findings = Findings(chain(DELAY_NS, num_calls=1, num_ranks=12).timeline())
    _, said, *_ = str(draw(findings).body[-1]).split("</tr>")
    assert len(findings.longest_waits[0].links) == 22
    assert said.count("←") == 7
    assert "← 15 more <b>14.5 us</b> ← dispatch.copy_token of rank 0 <b>52.0 us</b>" in said

"""A run that broke off: fault line, verdict and sums tell the same, and an open wait counts in all of them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.flight_pairs import make_pair
from tests.rank_pool import RankPool
from tests.timelines import WAIT, make_rank, timeline_of
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.held_up import find_held_up
from tracekern.analysis.waits.statistics import wait_statistics
from tracekern.analysis.why.answer import Silence
from tracekern.comm.ranks.group import Group
from tracekern.errors import CommTimeout
from tracekern.record.session import capture
from tracekern.timeline.load import load
from tracekern.timeline.model import Timeline
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.report_page import report_page

LIMIT_S = 0.3


def come_too_late(group: Group, directory: str) -> None:
    """Rank 1 leaves out the third call and comes when rank 0 has given up."""
    pipeline, call = make_pair(group, timeout_s=60.0)
    with capture(directory, device=pipeline.comm.device, records_per_track=256) as session:
        for iteration in range(2):
            assert call(iteration, session)
        pipeline.comm.set_timeout(LIMIT_S)
        if group.rank == 1:
            group.barrier()
        with pytest.raises(CommTimeout):
            call(2, session)
        if group.rank == 0:
            group.barrier()
    pipeline.reset()


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faulted")
    pool = RankPool(2)
    try:
        pool.call(come_too_late, str(directory))
    finally:
        pool.close()
    return directory


def lines_of(timeline: Timeline) -> dict[str, str]:
    return {line.word: line.text for line in headlines(analyze(timeline))}


def test_fault_and_verdict_name_the_rank_that_did_not_come(faulted: Path):
    lines = lines_of(load(faulted))
    assert lines["fault"].startswith("rank 0 dispatch_send block 0 warp ")
    assert re.search(r" gave up on rank 1 after [\d.]+ m?s; ", lines["fault"])
    assert "channel counts slot 0: wanted call 3, has " in lines["fault"]
    assert " of call 2; see what rank 1 was doing" in lines["fault"]
    assert lines["fault"].endswith("; rank 1 came after that")
    assert lines["verdict"].startswith("Rank 1 did not come in time: rank 0 waited ")
    assert "wanted call 3, has " in lines["verdict"]
    assert "why" not in lines
    assert "next" not in lines
    answer = analyze(load(faulted)).answer
    assert (answer.causes, answer.costs, answer.silence) == ((), (), Silence.NO_COST)


def test_an_open_wait_counts_in_every_sum(faulted: Path):
    findings = analyze(load(faulted))
    endless = findings.waits.endless & (findings.waits.rank == 0)
    waited_ns = int(findings.waits.wait_ns[endless].sum())
    assert LIMIT_S * 1e9 <= waited_ns < 60e9
    (of_peer,) = [s for s in wait_statistics(findings.waits, by=("rank", "peer")) if (s.rank, s.peer) == (0, 1)]
    assert of_peer.num_endless >= 1
    assert of_peer.sum_ns >= waited_ns
    assert findings.matrix.sum_ns[0, 1] == of_peer.sum_ns
    assert findings.phases[0].sum_ns >= waited_ns
    assert findings.time.wait[0] >= waited_ns
    assert findings.summary.ranks[0].wait_share > 0.9
    waits = {event.event: event for event in findings.summary.ranks[0].events}
    assert waits["wait_counts"].longest_ns >= LIMIT_S * 1e9
    assert waits["wait_counts"].longest_peer == 1
    worst = findings.verdict
    assert worst.rank == 1
    assert findings.blames[0].late_ns >= waited_ns
    assert " that never ended" in lines_of(findings.timeline)["waiting"]
    page = report_page(findings, "faulted", "faulted", "open faulted")
    assert "Rank 1 did not come in time" in page
    assert "never ended. They count until their kernel ended" in page
    assert "rank 0 waits for rank 1" in page


def test_programs_are_told_the_same(faulted: Path, command_line):
    told = json.loads(command_line("report", faulted, "--json").stdout)
    held = told["held_up"]
    assert held["missing"] == [1]
    assert held["came_after"] == [1]
    (wait,) = held["waits"]
    assert (wait["rank"], wait["peer"], wait["phase"]) == (0, 1, "dispatch_send")
    assert wait["lasts_ns"] >= LIMIT_S * 1e9
    assert told["answer"]["causes"] == told["answer"]["costs"] == []
    info = json.loads(command_line("info", faulted, "--json").stdout)
    assert info["ranks"][0]["wait_share"] > 0.9


def fault_of(rank: int, peer: int, cause: str = "peer_aborted", **more: object) -> dict[str, object]:
    numbers = dict.fromkeys(("block", "warp", "slot", "wanted_epoch", "seen_epoch", "seen_value"), 0)
    texts = {"cause": cause, "kernel": "send", "channel": "counts", "on_timeout": "raise"}
    return {**texts, **numbers, "rank": rank, "peer": peer, "waited_ns": 10**9 + rank, "aborted_by": 0, **more}


def with_faults(*faults: dict[str, object] | None, **of_ranks: object) -> Timeline:
    timeline = timeline_of([], len(faults))
    ranks = [
        dataclasses.replace(make_rank(rank, **of_ranks), metadata={"fault": fault, "fault_text": f"rank {rank} said"})
        if fault
        else make_rank(rank)
        for rank, fault in enumerate(faults)
    ]
    return timeline.replace(ranks=tuple(ranks))


def test_of_a_chain_the_last_is_named():
    held = find_held_up(with_faults(fault_of(0, 2, "timeout"), None, None, fault_of(3, 0)), None)
    assert (held.missing, [wait.rank for wait in held.waits]) == ((2,), [0, 3])


def test_ranks_that_wait_for_each_other_accuse_nobody():
    timeline = with_faults(fault_of(0, 1, "timeout"), fault_of(1, 0))
    assert find_held_up(timeline, None).missing == ()
    assert lines_of(timeline)["verdict"].startswith("All ranks on record waited for each other: rank 1 waited 1.00 s ")


def test_an_interrupted_rank_is_the_verdict():
    timeline = with_faults(fault_of(0, 1, was_interrupted=True), fault_of(1, 1, waited_ns=0, was_interrupted=True))
    assert lines_of(timeline)["verdict"] == "Rank 0 was interrupted (Ctrl-C), and that ended the run."


@pytest.mark.parametrize("damage", [{"slot": "x"}, {"channel": 3}, {"wanted_call": 1}, {"value_name": "token"}])
def test_a_damaged_fault_is_left_out(damage: dict[str, object]):
    lines = lines_of(with_faults({**fault_of(0, 1, "timeout"), **damage}, None))
    assert lines["fault"] == "rank 0 said"
    assert lines["verdict"].startswith("The run broke off")


def test_a_moment_of_waiting_is_no_hang_and_a_second_is():
    for began, is_stuck in ((8_000, False), (9_000 - 10**9, True)):
        timeline = timeline_of([(0, WAIT, 1, began)], num_ranks=2)
        assert (find_held_up(timeline, analyze(timeline).hang) is not None) == is_stuck
    assert lines_of(timeline)["verdict"] == (
        "Rank 1 did not come in time: rank 0 waited 1.00 s for rank 1 (dispatch.wait_token, slot=0)."
    )

"""Chains of waits: where they lead, however long they are, and in whatever order the ranks stand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scenarios_causes import CallScenario, chain

import tracekern
from tracekern.analysis.causes.analyze import analyze_causes
from tracekern.analysis.causes.blame import Target
from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.analyze import Phase, analyze_waits
from tracekern.timeline.flows import join_flows
from tracekern.timeline.model import Marks, Timeline
from tracekern.viewers.report.questions import cause

TRACES = Path(__file__).resolve().parent.parent / "traces"
DELAY_NS = 50_000


@pytest.mark.parametrize("num_ranks", [3, 13, 14, 30])
def test_a_chain_leads_to_the_rank_that_was_slow_however_many_wait_in_between(num_ranks: int):
    timeline = chain(DELAY_NS, num_calls=1, num_ranks=num_ranks).timeline()
    longest = analyze_causes(timeline, analyze_waits(timeline)).chains[0]
    copy, wait = Phase("dispatch", "copy_token"), Phase("dispatch", "wait_token")
    assert (longest.rank, longest.target, longest.phase) == (0, Target.WORK, copy)
    assert longest.waiters == tuple((rank, wait) for rank in range(num_ranks - 1, 0, -1)[:12])
    assert longest.is_cut == (num_ranks > 13)
    drawn = str(cause.draw(analyze(timeline)).body[-1])
    assert (" ← … ← <b>rank 0: dispatch.copy_token</b>" in drawn) == longest.is_cut


@pytest.mark.parametrize("in_two_kernels", [False, True])
def test_of_several_waits_the_longest_is_followed(in_two_kernels: bool):
    run = CallScenario(4)
    run.launch("take")
    for rank, ns in ((2, 5_000), (0, DELAY_NS)):
        run.work(rank, ns)
        run.signal(rank, 1)
        run.wait(1, rank)
    if in_two_kernels:
        run.launch("give")
    run.signal(1, 3)
    run.wait(3, 1)
    timeline = run.timeline()
    chains = analyze_causes(timeline, analyze_waits(timeline)).chains
    (of_last,) = (found for found in chains if found.waiters[0][0] == 3)
    assert [rank for rank, _ in of_last.waiters] == [3, 1]
    assert of_last.rank == 0


@pytest.mark.parametrize(
    ("late_us", "drain_us", "work_us", "waiters", "rank", "target"),
    [
        (30, 20, 10, [2, 1], 0, Target.WORK),
        (20, 30, 10, [2], 0, Target.LINK),
        (10, 20, 30, [2], 1, Target.WORK),
    ],
)
def test_a_chain_ends_where_most_of_the_time_went(late_us, drain_us, work_us, waiters, rank, target):
    run = CallScenario(3)
    run.launch("dispatch")
    run.work(0, 1000 * late_us)
    run.signal(0, 1, ns=1000 * drain_us)
    run.wait(1, 0)
    run.work(1, 1000 * work_us)
    run.signal(1, 2)
    run.wait(2, 1)
    timeline = run.timeline()
    longest = analyze_causes(timeline, analyze_waits(timeline)).chains[0]
    assert [waiter for waiter, _ in longest.waiters] == waiters
    assert (longest.rank, longest.target) == (rank, target)


def ranks_reversed(timeline: Timeline) -> Timeline:
    """The same Timeline with the tracks and launches of the last rank first."""
    tracks = sorted(range(len(timeline.tracks)), key=lambda idx: -timeline.tracks[idx].rank)
    launches = sorted(range(len(timeline.launches)), key=lambda idx: -timeline.launches[idx].rank)
    spans = timeline.spans
    track = np.argsort(tracks)[spans.track].astype(np.int32)
    launch = np.append(np.argsort(launches), -1)[spans.launch].astype(np.int32)
    order = np.argsort(track, kind="stable")
    reversed_ = timeline.replace(
        ranks=timeline.ranks[::-1],
        tracks=tuple(timeline.tracks[idx] for idx in tracks),
        launches=tuple(timeline.launches[idx] for idx in launches),
        spans=dataclasses.replace(spans, track=track, launch=launch).take(order),
        marks=Marks(),
    )
    return reversed_.replace(flows=join_flows(reversed_)[0])


def test_chains_do_not_depend_on_the_order_of_ranks():
    timeline = tracekern.load(TRACES / "h200x4")
    late_ns = np.sort(analyze_waits(timeline).late_ns)
    assert late_ns[-1001] == late_ns[-1000], "as late as each other, and only one of them among the longest 1,000"
    found = [
        sorted(map(str, analyze_causes(one, analyze_waits(one)).chains)) for one in (timeline, ranks_reversed(timeline))
    ]
    assert found[0] == found[1]

"""`run moe --device-driven`: calls back to back behind barriers on the device, which no figure counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_run_graph import assert_replayed

import tracekern
from tests.warm_ranks import run_moe
from tracekern.analysis.findings import analyze
from tracekern.dump.format import ALIGN
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.moe.calls.call import BATCHES_TOKENS
from tracekern.moe.calls.wire import busiest_bytes, count_rows, least_call_us
from tracekern.moe.workload.calls_back_to_back import CALLS_AT_ONCE
from tracekern.moe.workload.options import MoeRun
from tracekern.timeline.model import Timeline

SMALL = {"ranks": 2, "tokens": 8, "hidden": 128, "experts": 4, "topk": 2, "iterations": 6, "backend": "cpu"}


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("back_to_back") / "capture"
    report = run_moe(MoeRun(**SMALL, variant="pipelined", host_driven=False), directory)
    assert report.ok, report.errors
    return report, directory


@pytest.mark.parametrize("wrong_ns", [0, 331_000, -331_000])
def test_each_call_is_behind_a_barrier_that_no_figure_counts(captured, wrong_ns: int):
    """Whatever the clocks are off by, as long as it is within their bounds."""
    _, directory = captured
    timeline = off_by(tracekern.load(directory), wrong_ns)
    aligns = [launch for launch in timeline.launches if launch.name == ALIGN]
    assert sorted((launch.rank, launch.sequence) for launch in aligns) == [(r, n) for r in range(2) for n in range(6)]
    findings = analyze(timeline)
    assert len(findings.iterations) == 6
    gaps = [timeline.launches[idx].name for idx in findings.moments.launches.gaps.launch.tolist()]
    assert ALIGN not in gaps
    assert len(gaps) == len(timeline.launches) - len(aligns)
    assert_replayed(timeline)
    error_ns = 2 * max(rank.clock.hard_ns for rank in timeline.ranks)  # of two ranks' clocks, as far as is proven
    for idx, launch in enumerate(timeline.launches):
        if launch.is_align:
            begun = findings.moments.schedule.start[idx] - findings.iterations.start[launch.sequence]
            assert begun <= error_ns, f"the barrier of call {launch.sequence} began {begun} ns behind its first kernel"


def off_by(timeline: Timeline, wrong_ns: int) -> Timeline:
    """The timeline with rank 1's clock off by so much, and a bound that says so."""
    spans, later = timeline.spans, wrong_ns * (timeline.track_ranks()[timeline.spans.track] == 1)
    ranks = [
        dataclasses.replace(rank, clock=dataclasses.replace(rank.clock, hard_ns=rank.clock.hard_ns + abs(wrong_ns)))
        for rank in timeline.ranks
    ]
    moved = dataclasses.replace(spans, start=spans.start + later, end=spans.end + later)
    return timeline.replace(spans=moved, ranks=tuple(ranks))


def test_all_regions_are_there_before_the_first_call(captured):
    _, directory = captured
    for rank in range(2):
        waited = {launch.waited_ns for launch in read_dump(directory / f"rank_{rank:05}.tkdump").launches}
        assert waited == {0}


def test_every_rank_reports_the_time_of_each_call(captured):
    report, _ = captured
    for rank in report.ranks:
        assert not rank.is_host_driven
        assert rank.num_checked == 6
        assert len(rank.iteration_ms) == 6
        assert min(rank.iteration_ms) > 0


@pytest.mark.parametrize("keep", ["first", "last"])
def test_more_calls_than_are_queued_at_once(tmp_path, keep):
    num_calls = CALLS_AT_ONCE + 6
    options = MoeRun(**{**SMALL, "iterations": num_calls}, variant="low_latency", keep=keep, host_driven=False)
    report = run_moe(options, tmp_path / "capture")
    assert report.ok, report.errors
    assert [len(rank.iteration_ms) for rank in report.ranks] == [num_calls, num_calls]


def test_inputs_and_results_serve_in_turn_where_not_all_may_be_held(tmp_path):
    tokens = BATCHES_TOKENS // 2
    options = MoeRun(**{**SMALL, "tokens": tokens, "hidden": 8, "iterations": 5}, variant="fused", host_driven=False)
    report = run_moe(options, tmp_path / "capture")
    assert report.ok, report.errors
    assert {launch.waited_ns for launch in tracekern.load(tmp_path / "capture").launches} == {0}
    assert [rank.num_checked for rank in report.ranks] == [2, 2]


def test_a_variant_without_kernels_is_refused():
    with pytest.raises(BadInput, match="variant sorted has no kernels to queue"):
        MoeRun(**SMALL, variant="sorted", host_driven=False)


def test_a_token_travels_once_to_each_rank_that_has_experts_of_it():
    chosen = [np.array([[0, 1], [2, 3], [0, 2]], np.int32), np.array([[0, -1], [3, 2], [1, 0]], np.int32)]
    once, each = count_rows(chosen, 2, 4)
    assert once.tolist() == [[2, 2], [2, 1]]
    assert each.tolist() == [[3, 3], [3, 2]]
    assert busiest_bytes(once, 100) == 200
    assert least_call_us(chosen, 4, 371) == pytest.approx(2 * 2 / 1e3)

"""What a low latency call leaves out of the record: waits of warps with nothing to do, nothing that is needed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tracekern
from tests.paths import ROOT
from tracekern.analysis.findings import analyze
from tracekern.analysis.statistics import phase_statistics
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.gate.run import difference, make_run
from tracekern.moe.experts import draw_experts
from tracekern.moe.low_latency.kernels import LEFT_OUT
from tracekern.moe.low_latency.pipeline import LowLatencyPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import Timeline, field_values
from tracekern.timeline.select import take_spans
from tracekern.viewers.report.headlines import headlines

SHAPE = MoeShape(num_ranks=4, max_tokens=1, num_experts=256, topk=8, hidden=128, dtype="bf16")
GPU = {"num_blocks": 128, "warps_per_block": 32}
"""The grid of an H100 or H200: two groups of 16 sub-warps a block."""
DETAILS = "all", "work", "peers"
MOST_SPANS = 1_350
"""Of a rank and call of SHAPE."""


def one_call(group: Group, directory: str, keep: str = "first", clock: str = "realtime") -> None:
    """One call in each detail: all warps' waits, what is recorded by default, and no waits for warps of the block."""
    pipeline = LowLatencyPipeline(group, SHAPE, **GPU)
    batch = draw_batch(SHAPE, seed=7, rank=group.rank, iteration=0, routing="zipf", uneven=False)
    for detail in DETAILS:
        how = {"keep": keep, "clock": clock, "detail": detail, "device": pipeline.comm.device}
        with tracekern.capture(Path(directory) / detail, records_per_track=32, **how) as capture:
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, draw_experts(SHAPE), capture=capture)
            pipeline.synchronize()


@pytest.fixture(scope="module")
def recorded(pools, tmp_path_factory) -> dict[str, Timeline]:
    directory = tmp_path_factory.mktemp("left_out")
    pools(4).call(one_call, str(directory))
    return {detail: tracekern.load(directory / detail) for detail in DETAILS}


def number_of(timeline: Timeline) -> Counter[tuple[int, str, str]]:
    """Spans by rank, kernel and event."""
    spans, found = timeline.spans, Counter[tuple[int, str, str]]()
    for event, launch in zip(spans.event.tolist(), spans.launch.tolist(), strict=True):
        entry = timeline.launches[launch]
        found[entry.rank, entry.name, timeline.events[event].name] += 1
    return found


def thinned(timeline: Timeline, sub_warps: int) -> Timeline:
    """The timeline of a capture with all detail, without what a low latency kernel leaves out by default.

    sub_warps: of a group.
    """
    spans = timeline.spans
    name = np.array([*(event.name for event in timeline.events), ""])[spans.event]
    kernel = np.array([*(launch.name for launch in timeline.launches), ""])[spans.launch]
    run = spans.launch.astype(np.int64) * len(timeline.tracks) + spans.track
    sub_warp = np.array([track.warp for track in timeline.tracks])[spans.track] % sub_warps

    def in_runs_with(*events: str) -> np.ndarray:
        return np.isin(run, run[np.isin(name, events)])

    block = spans.launch.astype(np.int64) * 1024 + np.array([track.block for track in timeline.tracks])[spans.track]
    has_tokens = np.isin(block, block[np.isin(name, ("cast_token", "reduce_token"))])
    polls_or_tells = in_runs_with("wait_count", "signal_count", "wait_results", "signal_combine_ack")
    copies, sends = in_runs_with("copy_token"), in_runs_with("send_result")
    is_of_token = _is_token_barrier(timeline, name)
    kept = np.ones(len(spans), bool)
    for event, wanted in (
        ("wait_grid", has_tokens | polls_or_tells),  # of earlier kernels
        ("wait_group", (sub_warp == 1) | copies | in_runs_with("signal_dispatch_ack")),
        ("wait_sub_warps", np.where(is_of_token, has_tokens, np.where(kernel == "dispatch", copies, sends))),
    ):
        kept[name == event] = wanted[name == event]
    left = take_spans(timeline, kept)
    return dataclasses.replace(left, flows=join_flows(left)[0])


def _is_token_barrier(timeline: Timeline, name: np.ndarray) -> np.ndarray:
    """[num_spans] of wait_sub_warps: whether the warps of a block meet, or those that share a token, not a group's."""
    result = np.zeros(len(timeline.spans), bool)
    rows = np.flatnonzero(name == "wait_sub_warps")
    (event,) = (event for event in timeline.events if event.name == "wait_sub_warps")
    barrier = field_values(event, "barrier", timeline.spans, rows)  # None in captures of earlier kernels
    result[rows] = barrier is not None and barrier <= 1
    return result


def test_a_call_of_one_token_has_at_most_1350_spans_a_rank(recorded):
    for rank in range(4):
        total = {
            detail: sum(n for key, n in number_of(timeline).items() if key[0] == rank)
            for detail, timeline in recorded.items()
        }
        assert total["all"] > 9_000
        assert total["work"] <= MOST_SPANS


def test_what_is_left_out_are_waits_of_warps_with_nothing_to_do(recorded):
    every, work = number_of(recorded["all"]), number_of(recorded["work"])
    assert work == number_of(thinned(recorded["all"], sub_warps=16))
    fewer = {event for _, _, event in every if event in LEFT_OUT}
    assert fewer == set(LEFT_OUT)
    assert {key[2] for key in every if every[key] != work[key]} == fewer
    assert not any(launch.records_lost for launch in recorded["work"].launches)


def test_each_message_is_on_record_with_all_that_a_log_of_receives_says(recorded):
    """rank, expert, src_rank, slot and token_idx of the [RECV] line."""
    timeline = recorded["work"]
    (event,) = (event for event in timeline.events if event.name == "copy_token")
    rows = np.flatnonzero(timeline.spans.event == timeline.events.index(event))
    names = ("src_rank", "local_expert", "slot", "token")
    columns = [field_values(event, name, timeline.spans, rows).tolist() for name in names]
    rank = [timeline.tracks[track].rank for track in timeline.spans.track[rows].tolist()]
    seen = {(at, local, source, slot, token) for at, source, local, slot, token in zip(rank, *columns, strict=True)}
    sent = set()
    for source in range(4):
        batch = draw_batch(SHAPE, seed=7, rank=source, iteration=0, routing="zipf", uneven=False)
        for token, experts in enumerate(batch.topk_idx.tolist()):
            sent |= {(expert // 64, expert % 64, source, 0, token) for expert in experts if expert >= 0}
    assert len(sent) > 16
    assert seen == sent


def test_without_waits_for_warps_of_the_block_all_others_are_on_record(recorded):
    work, peers = number_of(recorded["work"]), number_of(recorded["peers"])
    assert peers == Counter({key: count for key, count in work.items() if key[2] not in LEFT_OUT})


@pytest.mark.parametrize("detail", ["all", "work"])
@pytest.mark.parametrize(("event", "at_least"), [("wait_group", 1_000), ("wait_sub_warps", 50)])
def test_who_came_last_where_warps_meet_is_known_of_all_that_are_on_record(recorded, detail, event, at_least):
    waits, timeline = analyze(recorded[detail]).waits, recorded[detail]
    mine = np.isin(waits.row, timeline.rows_of(event))
    assert mine.sum() > at_least
    assert np.all(waits.last_arrival[mine] >= 0)


def test_the_wait_of_a_warp_group_is_charged_to_the_warp_that_came_last(recorded):
    for timeline in (recorded["all"], recorded["work"]):
        waits, start = analyze(timeline).waits, timeline.spans.start
        of_wait = dict(zip(waits.row.tolist(), waits.last_arrival.tolist(), strict=True))
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row in timeline.rows_of("wait_group").tolist():
            track = timeline.tracks[timeline.spans.track[row]]
            groups.setdefault((track.rank, track.block, track.group), []).append(row)
        assert len(groups) == 4 * 256
        assert all(start[of_wait[row]] == start[rows].max() for rows in groups.values() for row in rows)
        late = waits.late_ns[np.isin(waits.row, timeline.rows_of("wait_group"))]
        assert late.sum() > 0


def test_the_report_says_what_was_left_out(recorded):
    told = {detail: {line.word: line.text for line in headlines(analyze(one))} for detail, one in recorded.items()}
    assert told["work"]["waiting"].endswith(f"; left out: {', '.join(LEFT_OUT)} of warps with nothing to do")
    assert told["peers"]["waiting"].endswith(f"; left out: {', '.join(LEFT_OUT)} of all warps")
    assert "left out" not in told["all"]["waiting"]


def test_the_gate_does_not_compare_it_with_all_detail(recorded):
    every, work, again, peers = (
        make_run(detail, phase_statistics(recorded[detail]), recorded[detail], recorded[detail].ranks[0].metadata)
        for detail in ("all", "work", "work", "peers")
    )
    assert (
        difference(every, work)
        == f"left_out is {', '.join(LEFT_OUT)} of warps with nothing to do in work, missing in all"
    )
    assert difference(work, again) == ""
    assert difference(work, peers).startswith("left_out is ")


@pytest.mark.parametrize(("capture", "sub_warps"), [("h100_low_latency", 16), ("h100x2_low_latency", 8)])
def test_a_report_of_gpus_says_the_same_without_it(capture, sub_warps):
    """Captures with all detail, and the same as they would be recorded by default."""
    timeline = tracekern.load(ROOT / "traces" / capture)
    thin = thinned(timeline, sub_warps)
    assert len(thin.spans) < len(timeline.spans) / 2
    found, without = analyze(timeline), analyze(thin)
    told, told_without = ({line.word: line.text for line in headlines(one)} for one in (found, without))
    figures = dict.fromkeys(("waiting", "idle"), "")
    assert {**told_without, **figures} == {**told, **figures}
    assert without.stages.idle_ns == pytest.approx(found.stages.idle_ns, rel=0.01, abs=1000)
    paths = [each.critical_path.whole for each in (found, without)]
    assert paths[0].parts[:2] == paths[1].parts[:2]
    assert paths[0].makespan_ns == paths[1].makespan_ns
    costs = [{one.candidate: one.saving.whole_ns for one in each.answer.costs[:1]} for each in (found, without)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("keep", "clock"), [("last", "realtime"), ("first", "cycles")], ids=["ring", "cycles"])
def test_other_formats_leave_it_out_too(pools, tmp_path, keep, clock):
    pools(4).call(one_call, str(tmp_path), keep, clock)
    every, work = (number_of(tracekern.load(tmp_path / detail)) for detail in ("all", "work"))
    taken_back = {"wait_group"} if keep == "last" else set()  # a ring has overwritten what was there
    for key in every:
        if key[2] not in LEFT_OUT:
            assert work[key] == every[key]
        elif key[2] not in taken_back:
            assert work[key] < every[key]
    if not taken_back:
        assert sum(work.values()) <= 4 * MOST_SPANS


def test_a_detail_that_is_none_is_refused(tmp_path):
    with pytest.raises(BadInput, match="detail='most': wanted 'work', 'all' to see"):
        tracekern.capture(tmp_path / "capture", detail="most")

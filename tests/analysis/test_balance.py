"""Balance against counts in plain loops, unions of intervals against marked ticks, and what the events do not say."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import COPY, EVENTS, SIGNAL, WAIT, make_rank, make_spans, make_timeline, make_tracks, timelines

import tracekern
from tests.paths import TRACES
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.balance import BYTES_OF_DTYPE, Balance, analyze_balance, load_imbalance
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import DTYPES
from tracekern.moe.workload.options import MoeRun
from tracekern.timeline.intervals import union_ns
from tracekern.timeline.model import EventClass, EventType, Field, Spans, Timeline
from tracekern.viewers.report.questions import balance

PEER, SLOT, EXPERT = Field("peer", 10), Field("slot", 22), Field("expert", 16)
RECEIVE, SCALE, SEND = range(len(EVENTS), len(EVENTS) + 3)
ALL_EVENTS = (
    *EVENTS,
    EventType("receive_token", EventClass.WORK, "issue", None, (PEER, SLOT, EXPERT)),
    EventType("scale_token", EventClass.WORK, "issue", None, (EXPERT, Field("row", 32))),
    EventType("send_token", EventClass.WORK, "issue", None, (PEER, SLOT, EXPERT)),
)


def build(rows: list[tuple[int, int, int, int, int]], num_ranks: int = 2, **settings: object) -> Timeline:
    """rows: (track, event, start, end, payload); tracks 2 to 5 are rank 0's warps, 8 to 11 rank 1's."""
    return make_timeline(
        num_ranks,
        ranks=tuple(make_rank(rank, metadata={"settings": settings}) for rank in range(num_ranks)),
        tracks=make_tracks(num_ranks),
        events=ALL_EVENTS,
        spans=make_spans((track, event, 0, start, end, payload, 0) for track, event, start, end, payload in rows),
        flows=type(make_timeline().flows)(),
    )


def test_links():
    rows = [(2, COPY, 100, 200, 1), (3, COPY, 150, 300, 1), (2, SIGNAL, 200, 260, 1), (3, COPY, 400, 500, 1 | 1 << 10)]
    rows += [(2, COPY, 600, 900, 0)]  # to itself: no link
    (link,) = analyze_balance(build(rows, hidden=500, dtype="bf16"), link_limit=20.0).links
    assert (link.source, link.destination, link.tokens, link.bytes) == (0, 1, 3, 3000)
    assert link.busy_ns == 300
    assert link.gb_per_s == 10.0
    assert link.utilisation == 0.5
    by_pair = analyze_balance(build(rows, hidden=500, dtype="bf16"), link_limit={(0, 1): 40.0}).links[0]
    assert by_pair.utilisation == 0.25
    from_capture = analyze_balance(build(rows, hidden=500, dtype="bf16", link_gb_per_s=100.0)).links[0]
    assert from_capture.limit_gb_per_s == 100.0
    no_number = analyze_balance(build(rows, hidden=500, dtype="bf16", link_gb_per_s="fast")).links[0]
    assert no_number.limit_gb_per_s is None


def test_each_pair_of_ranks_is_a_link_of_its_own():
    """Copies and signals of a pair count together."""
    rows = []
    for peer, track, ns in ((1, 2, 100), (2, 3, 300), (2, 8, 50), (0, 14, 20)):
        rows += [(track, COPY, 0, ns, peer), (track, SIGNAL, ns, ns + 10, peer)]
    links = analyze_balance(build(rows, num_ranks=3)).links
    assert [(link.source, link.destination, link.tokens, link.busy_ns) for link in links] == [
        (0, 2, 1, 310),
        (0, 1, 1, 110),
        (1, 2, 1, 60),
        (2, 0, 1, 30),
    ]


def test_without_a_size_there_is_no_rate():
    balance = analyze_balance(build([(2, COPY, 100, 200, 1)]), link_limit=20.0)
    (link,) = balance.links
    assert (link.bytes, link.gb_per_s, link.utilisation) == (None, None, None)
    assert link.busy_ns == 100


@pytest.mark.parametrize("settings", [[1, 2], "text", 3, None])
def test_settings_may_be_anything_that_json_holds(settings):
    timeline = build([(2, COPY, 100, 200, 1)])
    ranks = tuple(dataclasses.replace(rank, metadata={"settings": settings}) for rank in timeline.ranks)
    assert analyze_balance(timeline.replace(ranks=ranks)).links[0].bytes is None


def test_loads():
    expert = 5 << 32
    rows = [
        (2, RECEIVE, 0, 100, 1 | expert),
        (3, WAIT, 0, 400, 1),
        (4, SCALE, 100, 350, 5),
        (8, COPY, 0, 70, 0 | 3 << 10),
        (8, SIGNAL, 70, 90, 0),
    ]
    balance = analyze_balance(build(rows))
    first, second = balance.ranks
    assert (first.busy_ns, first.wait_ns, first.num_spans, first.tokens_received) == (350, 400, 2, 1)
    assert (second.busy_ns, second.wait_ns, second.tokens_sent) == (90, 0, 1)
    assert load_imbalance(balance.ranks) == pytest.approx(350 / 220)
    assert [(load.rank, load.name, load.busy_ns) for load in balance.experts] == [(0, "5", 350)]
    assert [(load.rank, load.name, load.busy_ns) for load in balance.blocks] == [
        (0, "0", 100),
        (0, "1", 250),
        (1, "0", 90),
    ]
    assert [(load.rank, load.name, load.busy_ns) for load in balance.roles] == [
        (0, "", 350),
        (0, "sender", 0),
        (1, "", 90),
    ]


def test_work_for_the_experts_of_another_rank_is_no_load_of_them():
    """Experts 0 to 2 live on rank 0, 3 to 5 on rank 1; each rank sends to all of them."""
    rows = []
    for rank, track in ((0, 2), (1, 8)):
        rows += [(track, SCALE, 100 * expert, 100 * expert + 100, expert) for expert in range(rank * 3, rank * 3 + 3)]
        rows += [(track + 1, SEND, 100 * expert, 100 * expert + 50, 1 - rank | expert << 32) for expert in range(6)]
    found = [(load.rank, load.name, load.num_spans) for load in analyze_balance(build(rows)).experts]
    assert found == [(rank, str(rank * 3 + expert), 2) for rank in (0, 1) for expert in range(3)]


def answer_of(timeline: Timeline) -> str:
    return re.sub("<[^>]+>", "", balance.draw(analyze(timeline)).text)


def test_ranks_and_experts_that_did_nothing_count_in_the_mean():
    rows = [(2, RECEIVE, 100 * start, 100 * start + 50, 1) for start in range(6)]
    rows += [(8, RECEIVE, 100 * start, 100 * start + 50, 0 | 5 << 32) for start in range(2)]
    balance = analyze_balance(build(rows, num_ranks=4, experts=16))
    assert [(load.rank, load.busy_ns) for load in balance.ranks] == [(0, 300), (1, 100), (2, 0), (3, 0)]
    assert load_imbalance(balance.ranks) == 3.0
    assert balance.num_experts == 16
    told = answer_of(build(rows, num_ranks=4, experts=16))
    assert "rank 0, works 3.00 x as long as the mean" in told
    assert "expert 0 on rank 0 gets 6 tokens, 12.0 x the mean" in told
    assert "expert 0 on rank 0 gets 6 tokens, 1.5 x the mean" in answer_of(build(rows, num_ranks=4))
    assert "expert 0 on rank 0 gets 6 tokens, 16.0 x the mean" in answer_of(build(rows[:6], num_ranks=4, experts=16))


def test_experts_of_ranks_that_are_not_here_are_not_idle():
    timeline = build([(2, RECEIVE, 0, 50, 1), (8, RECEIVE, 0, 50, 0 | 5 << 32)], experts=16)
    ranks = tuple(dataclasses.replace(rank, metadata={**rank.metadata, "num_ranks": 4}) for rank in timeline.ranks)
    assert analyze_balance(timeline.replace(ranks=ranks)).num_experts == 2


def test_of_many_experts_the_one_that_is_named_is_drawn(monkeypatch):
    monkeypatch.setattr(balance, "_MAX_EXPERTS", 2)
    rows = [(2, RECEIVE, 100 * start, 100 * start + 50, 1 | min(start, 3) << 32) for start in range(6)]
    answer = balance.draw(analyze(build(rows)))
    assert "expert 3 on rank 0 gets 3 tokens" in answer.text
    (bars,) = [part for part in answer.body if getattr(part, "says", "") == "Load of each expert"]
    assert bars.data[0]["y"] == [1, 3]
    assert "<p class='aside'>and 2 more experts; these are the busiest</p>" in answer.body


@pytest.mark.parametrize(("experts", "found"), [("many", 1), (None, 1), (0, 1), ([16], 1), (16, 16)])
def test_the_number_of_experts_may_be_anything_that_json_holds(experts: object, found: int):
    assert analyze_balance(build([(2, RECEIVE, 0, 50, 1)], experts=experts)).num_experts == found


def test_time_inside_another_span_counts_once():
    rows = [(2, COPY, 0, 1000, 1), (2, WAIT, 300, 700, 1), (2, SIGNAL, 800, 900, 1)]
    load = analyze_balance(build(rows)).ranks[0]
    assert (load.busy_ns, load.wait_ns) == (600, 400)


def test_overlap():
    rows = [(2, COPY, 0, 100, 1), (3, COPY, 50, 150, 1), (4, SCALE, 120, 400, 5), (5, SCALE, 10, 20, 5)]
    first, second = analyze_balance(build(rows)).overlaps
    assert (first.communication_ns, first.both_ns) == (150, 40)
    assert first.share == pytest.approx(40 / 150)
    assert second.communication_ns == 0
    assert math.isnan(second.share)


INTERVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(-30, 30), st.integers(0, 12)), max_size=25)


@given(INTERVALS, st.sampled_from([0, 10**17]))
def test_unions_against_marked_ticks(rows: list[tuple[int, int, int]], apart: int):
    marked = {(owner, tick) for owner, start, length in rows for tick in range(start, start + length)}
    owner, start, length = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    start = start + owner * apart
    spans = Spans(start=start, end=start + length)
    found = union_ns(spans, np.arange(len(rows)), owner, 4)
    assert found.tolist() == [sum(mark[0] == number for mark in marked) for number in range(4)]


def test_unions_of_more_owners_than_16_bits_tell_apart():
    owner = np.array([0, 1 << 16, 1, (1 << 16) + 1])
    spans = Spans(start=np.array([0, 5, 0, 0]), end=np.array([10, 20, 1, 2]))
    found = union_ns(spans, np.arange(4), owner, (1 << 16) + 2)
    assert {int(place): int(found[place]) for place in np.flatnonzero(found)} == {0: 10, 1: 1, 65536: 15, 65537: 2}


def test_the_kept_capture_against_its_routing():
    timeline = tracekern.load(TRACES / "cpu_8_ranks")
    kept = timeline.ranks[0].metadata["settings"]  # of an older run: with an option that is no more
    options = MoeRun(**{field.name: kept[field.name] for field in dataclasses.fields(MoeRun) if field.name in kept})
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for rank in range(options.ranks):
        for iteration in range(options.iterations):
            batch = draw_batch(
                options.shape,
                seed=options.seed,
                rank=rank,
                iteration=iteration,
                routing=options.routing,
                uneven=options.uneven,
            )
            for expert in batch.topk_idx.flatten().tolist():
                if expert >= 0:
                    sent[rank] += 1
                    received[expert // options.shape.num_local_experts] += 1
    balance = analyze_balance(timeline)
    assert {load.rank: load.tokens_received for load in balance.ranks} == dict(received)
    # Every token comes back: a rank also sends the results of what it received.
    assert {load.rank: load.tokens_sent for load in balance.ranks} == {
        rank: sent[rank] + received[rank] for rank in range(options.ranks)
    }
    assert sum(load.tokens_received for load in balance.experts) == sum(received.values())
    assert all(link.bytes == link.tokens * options.hidden * 2 for link in balance.links)


def test_sizes_of_number_types_are_those_of_the_kernels():
    assert DTYPES.items() <= BYTES_OF_DTYPE.items()


@given(timelines(), st.booleans())
def test_any_timeline_has_a_balance(timeline: Timeline, aligned: bool):
    balance = analyze_balance(timeline.replace(aligned=aligned))
    assert_consistent(balance)
    assert len(balance.overlaps) == len(timeline.ranks)


def assert_consistent(balance: Balance) -> None:
    for loads in (balance.blocks, balance.roles):
        for name in ("busy_ns", "wait_ns", "num_spans", "tokens_sent"):
            assert sum(getattr(load, name) for load in loads) == sum(getattr(load, name) for load in balance.ranks)
    for overlap in balance.overlaps:
        assert 0 <= overlap.both_ns <= overlap.communication_ns


def test_nothing_on_record():
    balance = analyze_balance(Timeline("ns", (), (), (), ()))
    assert dataclasses.astuple(balance) == ((), (), (), (), 0, (), (), ())
    assert math.isnan(load_imbalance(balance.ranks))

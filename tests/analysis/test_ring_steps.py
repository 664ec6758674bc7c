"""What limits a ring of int4 experts: sums by hand and against a plain loop, and what the report says of them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest
from int4_experts import draw_layer
from timelines import EVENTS, make_launch, make_spans, make_timeline

import tracekern
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.balance import analyze_balance
from tracekern.analysis.questions.ring_steps import (
    CONSUMER_STEPS,
    PRODUCER_STEPS,
    SAMPLE,
    TILE,
    Limit,
    RingSteps,
    ring_steps,
)
from tracekern.moe.gemm import fused_moe_apply, prepare_weights
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Field, Timeline
from tracekern.viewers.report.questions.staging import describe_rings
from tracekern.viewers.report.report_page import report_page

Sums = dict[tuple[int, str], list[int]]
"""(rank, kernel) -> tiles, their ns, those of each step of consumers, decoding, and the producer's."""


def sums_of(found: RingSteps) -> Sums:
    return {
        (int(found.rank[row]), found.kernels[found.kernel[row]]): [
            int(found.tiles[row]),
            int(found.tile_ns[row]),
            *found.consumer_ns[row].tolist(),
            int(found.decode_ns[row]),
            *found.producer_ns[row].tolist(),
        ]
        for row in range(len(found))
    }


def slow_sums(timeline: Timeline) -> Sums:
    """The same, a span at a time."""
    sums: Sums = defaultdict(lambda: [0] * 7)
    spans, names = timeline.spans, [timeline.events[event].name for event in timeline.spans.event.tolist()]
    for row, name in enumerate(names):
        own = sums[timeline.tracks[spans.track[row]].rank, timeline.launches[spans.launch[row]].name]
        ns = int(spans.end[row] - spans.start[row])
        if name in PRODUCER_STEPS:
            own[5 + PRODUCER_STEPS.index(name)] += ns
        if name != TILE:
            continue
        inside = [
            step
            for step, what in enumerate(names)
            if what in (*CONSUMER_STEPS, SAMPLE)
            and spans.track[step] == spans.track[row]
            and spans.start[row] <= spans.start[step]
            and spans.end[step] <= spans.end[row]
        ]
        if inside:
            own[0] += 1
            own[1] += ns
        for step in inside:
            times = int(timeline.field(step, "decodes")[0]) if names[step] == SAMPLE else 1
            own[2 + (*CONSUMER_STEPS, SAMPLE).index(names[step])] += times * int(spans.end[step] - spans.start[step])
    for own in sums.values():
        own[4] = min(own[4], own[3])
    return {key: own for key, own in sums.items() if any(own)}


@pytest.fixture(scope="module", params=["ring", "wide"])
def timeline(request, tmp_path_factory) -> Timeline:
    directory = tmp_path_factory.mktemp("rings")
    layer = draw_layer(9, 2, 4, size=256)
    weights = [prepare_weights(words, request.param) for words in (layer.w13, layer.w2)]
    with tracekern.capture(directory, device="cpu", clock="cycles", records_per_track=4096) as capture:
        fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, *weights, detail=2, capture=capture)
    return tracekern.load(directory)


def test_sums_are_those_of_a_plain_loop(timeline):
    found = ring_steps(timeline)
    assert sums_of(found) == slow_sums(timeline)
    assert {"k2", "k4"} <= {kernel for _, kernel in sums_of(found)}
    assert bool((found.consumer_ns.sum(axis=1) <= found.tile_ns).all())


def test_a_stage_has_one_sample_inside_its_multiplication(timeline):
    """Block of 128 channels: two words of two tiles. Both products have 256 channels, which is one stage."""
    spans = timeline.spans
    stages, samples = timeline.rows_of("multiply_stage"), timeline.rows_of(SAMPLE)
    assert len(stages) == len(samples) == len(timeline.rows_of("wait_stage")) > 0
    assert spans.track[stages].tolist() == spans.track[samples].tolist()
    assert timeline.field(stages, "stage").tolist() == timeline.field(samples, "stage").tolist()
    assert set(timeline.field(samples, "decodes").tolist()) == {2 * 2 * 2}
    assert bool((spans.start[stages] <= spans.start[samples]).all())
    assert bool((spans.end[samples] <= spans.end[stages]).all())


def test_the_balance_sees_the_tiles_of_rings(timeline):
    experts = analyze_balance(timeline).experts
    tiles = timeline.rows_of(TILE)
    assert {int(load.name) for load in experts} == set(timeline.field(tiles, "expert").tolist())
    named = sum(len(timeline.rows_of(name)) for name in (TILE, "epilogue", "rank_choices"))
    assert sum(load.num_spans for load in experts) == named


def test_the_report_says_what_limits_a_ring(timeline):
    findings = analyze(timeline)
    told = describe_rings(findings.ring_steps)
    assert "rank 0 k2 consumers waited" in told
    for row in range(len(findings.ring_steps)):
        limit = findings.ring_steps.limit(row)
        assert told.split("; ")[row].endswith(f"{limit.value} limits it" if limit else "was in no step")
    page = report_page(findings, "rings", "rings", "")
    assert 'id="staging"' in page
    assert "wait_stage" in page


def test_captures_without_steps_have_none(tmp_path: Path):
    layer = draw_layer(3, 1, 2, size=128)
    weights = [prepare_weights(words) for words in (layer.w13, layer.w2)]
    with tracekern.capture(tmp_path, device="cpu") as capture:
        fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, *weights, capture=capture)
    assert ring_steps(tracekern.load(tmp_path)) is None


# ---- by hand ----

STAGE = (Field("stage", 24),)
RING_EVENTS = (
    *EVENTS,
    EventType(TILE, EventClass.WORK, "completion", None, (Field("width", 7),)),
    *(EventType(name, EventClass.WAIT, "completion", None, STAGE) for name in ("wait_stage", "wait_slot")),
    *(EventType(name, EventClass.WORK, "completion", None, STAGE) for name in ("multiply_stage", "issue_copy")),
    EventType(SAMPLE, EventClass.WORK, "completion", None, (*STAGE, Field("decodes", 8))),
)
NUMBER = {event.name: number for number, event in enumerate(RING_EVENTS)}


def by_hand(*rows: tuple[int, str, int, int]) -> Timeline:
    """From (track, event, start, end). Track 3 is warp 1 of block 0 of rank 0, 2 warp 0 there."""
    launches = tuple(make_launch(rank, "k2") for rank in range(2))
    spans = make_spans((track, NUMBER[event], track // 6, start, end, 4 << 24, 0) for track, event, start, end in rows)
    return make_timeline(2, events=RING_EVENTS, spans=spans, launches=launches, flows=type(make_timeline().flows)())


WAITING = ((3, TILE, 100, 200), (3, "wait_stage", 100, 160), (3, "multiply_stage", 160, 200), (3, SAMPLE, 165, 170))
WORKING = ((3, TILE, 100, 200), (3, "wait_stage", 100, 110), (3, "multiply_stage", 110, 190), (3, SAMPLE, 120, 130))
RECORDING = ((3, TILE, 100, 200), (3, "wait_stage", 100, 110), (3, "multiply_stage", 110, 140))
SLOTS, COPIES = ((2, "wait_slot", 100, 190), (2, "issue_copy", 190, 200)), ((2, "issue_copy", 100, 190),)


@pytest.mark.parametrize(
    ("rows", "limit"),
    [
        ((*WAITING, *SLOTS), Limit.MEMORY),
        ((*WAITING, *COPIES), Limit.PRODUCER),
        ((*WORKING, *SLOTS), Limit.CONSUMERS),
        (WAITING, Limit.MEMORY),
        ((*RECORDING, *SLOTS), None),  # 60 of 100 ns are in no step
    ],
)
def test_what_limits_a_ring_is_where_its_warps_are(rows, limit):
    found = ring_steps(by_hand(*rows))
    assert found.limit(0) is limit


def test_steps_outside_a_tile_and_tiles_without_steps_do_not_count():
    others = (
        (3, TILE, 300, 400),
        (3, "multiply_stage", 390, 410),
        (3, SAMPLE, 420, 430),
        (8, TILE, 50, OPEN_END),
        (9, "multiply_stage", 100, 120),
    )
    found = ring_steps(by_hand(*WORKING, *SLOTS, *others))
    assert sums_of(found) == {(0, "k2"): [1, 100, 10, 80, 40, 90, 10]}


def test_decoding_is_at_most_all_of_the_multiplication():
    found = ring_steps(by_hand((3, TILE, 0, 100), (3, "multiply_stage", 0, 30), (3, SAMPLE, 0, 20)))
    assert sums_of(found) == {(0, "k2"): [1, 100, 0, 30, 30, 0, 0]}


# ---- fill ----


def fill_by_hand(num_stages: int, first: int = 0, last_copied: int = 60) -> Timeline:
    """A ring of 2 slots with 2 consumers and 3 stages on record, from `first` on; the slower one is 5 ns behind."""
    events = (
        *RING_EVENTS,
        EventType("produce_stages", EventClass.WORK, "completion", None, (Field("slots", 4),), (Field("stages", 32),)),
    )
    number = {event.name: place for place, event in enumerate(events)}
    rows = [(4, number["produce_stages"], 0, 0, 200, 2, num_stages)]
    for stage, (copied, entered, freed) in enumerate([(8, 5, 50), (20, 50, 90), (last_copied, 90, 140)]):
        rows.append((4, number["issue_copy"], 0, copied - 3, copied, first + stage, 0))
        for track, later in ((2, 0), (3, 5)):
            rows.append((track, number["wait_stage"], 0, entered + later, entered + later + 6, first + stage, 0))
            rows.append((track, number["multiply_stage"], 0, entered + later + 6, freed + later, first + stage, 0))
    flows = type(make_timeline().flows)()
    tracks = tuple(dataclasses.replace(track, block=0) for track in make_timeline(1).tracks)
    launches = (make_launch(0, "k2"),)
    return make_timeline(1, events=events, spans=make_spans(rows), launches=launches, tracks=tracks, flows=flows)


def fill_of(timeline: Timeline) -> list[tuple[int, int]]:
    (counter,) = (counter for counter in count_events(timeline) if counter.name.startswith("stage fill"))
    assert (counter.rank, counter.name, counter.unit) == (0, "stage fill, block 0", "slots")
    return list(zip(counter.time.tolist(), counter.value.tolist(), strict=True))


def test_a_ring_is_filled_by_copies_and_emptied_by_the_last_consumer():
    assert fill_of(fill_by_hand(3)) == [(8, 1), (20, 2), (55, 1), (60, 2), (95, 1), (145, 0)]


def test_fill_ends_where_stages_follow_that_are_not_on_record():
    assert fill_of(fill_by_hand(9)) == [(8, 1), (20, 2), (55, 1), (60, 0)]


def test_fill_begins_when_the_last_consumer_enters_the_tile():
    """Until 10, other stages were in the ring."""
    assert fill_of(fill_by_hand(9, first=4))[0] == (10, 1)


def test_a_slot_is_filled_again_before_its_last_consumer_has_ended_its_span():
    assert fill_of(fill_by_hand(3, last_copied=53)) == [(8, 1), (20, 2), (95, 1), (145, 0)]


def test_rings_are_never_fuller_than_their_slots(timeline):
    counters = [counter for counter in count_events(timeline) if counter.name.startswith("stage fill")]
    assert counters
    assert all(0 < counter.value.max() <= 5 and counter.value[-1] == 0 for counter in counters)

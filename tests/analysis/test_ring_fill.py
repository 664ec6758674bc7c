"""What rings hold, against a count at every moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import make_launch, make_spans, make_timeline

from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.full_rings import DryRing, FullRing
from tracekern.analysis.waits.ring_fill import RingFill, fullest_first, slots_of_rings
from tracekern.dump.event_table import parse_event
from tracekern.errors import BadInput
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import Channel, ChannelKind, EventClass, EventType, Field, Flows, Timeline
from tracekern.viewers.report.questions.time import QUESTION, named_rings

SLOTS = 4
FIELDS = (Field("peer", 4), Field("channel", 4), Field("value", 20))
TAIL = Channel("tail", ChannelKind.COUNT, ("channel",))
HEAD = Channel("head", ChannelKind.CREDIT, ("channel",), SLOTS, "tail")
EVENTS = (
    EventType("signal_tail", EventClass.SIGNAL, "completion", TAIL, FIELDS),
    EventType("return_credit", EventClass.SIGNAL, "completion", HEAD, FIELDS),
)
FILL, FREE = 0, 1

Step = tuple[int, int, int, int]
"""FILL or FREE, end of the signal, channel, position."""


def ring(steps: list[Step], **changes: object) -> Timeline:
    """Rings from rank 0 to rank 1, of one launch. Each signal takes 1 ns."""
    rows = []
    for side, end, channel, position in steps:
        value = position + SLOTS * side
        payload = (0 if side else 1) | channel << 4 | value << 8
        track = 2 if side == FILL else 8
        rows.append((track, side, side, end - 1, end, payload, 0))
    launches = (make_launch(0), make_launch(1))
    return make_timeline(2, events=EVENTS, spans=make_spans(rows), flows=Flows(), launches=launches, **changes)


def test_a_counter_adds_up_all_rings_of_a_rank():
    steps = [(FILL, 10, 0, 2), (FILL, 20, 1, 3), (FREE, 30, 0, 1), (FILL, 40, 0, 4), (FREE, 60, 0, 4), (FREE, 70, 1, 3)]
    (counter,) = count_events(ring(steps))
    assert (counter.rank, counter.name, counter.unit) == (1, "tail ring fill", "slots")
    assert counter.time.tolist() == [10, 20, 30, 40, 60, 70]
    assert counter.value.tolist() == [2, 5, 4, 6, 3, 0]


def test_the_report_tells_how_full_each_ring_was():
    timeline = ring([(FILL, 10, 0, 2), (FREE, 30, 0, 1), (FILL, 40, 0, 5), (FREE, 60, 0, 5)])
    (fill,) = fullest_first(slots_of_rings(timeline))
    assert (fill.channel, fill.tail, fill.slots, fill.sender, fill.receiver) == ("head", "tail", SLOTS, 0, 1)
    assert (fill.num_rings, fill.most_slots) == (1, 4)
    assert fill.mean_slots == (2 * 20 + 1 * 10 + 4 * 20) / 50
    assert fullest_first(slots_of_rings(timeline, (0, 35)))[0].most_slots == 2
    (drawn,) = [part for part in QUESTION.draw(analyze(timeline)).body if "rank 0 to rank 1" in str(part)]
    assert ">2.6<" in drawn


def test_the_table_has_the_rings_that_the_summary_names():
    """However many others are dry for longer, and where a channel names no tail."""
    findings = analyze(ring([(FILL, 10, 0, 2), (FREE, 30, 0, 2)]))
    vars(findings).update(
        ring_fills=tuple(RingFill("head", "tail", SLOTS, 0, peer, 1, 1.0, 4) for peer in range(1, 20)),
        dry_rings=tuple(DryRing("head", "tail", 0, peer, 1, 900, 1000) for peer in range(1, 19)),
        full_rings=(FullRing("head", SLOTS, 0, 19, 1, 500, 1000), FullRing("room", 0, 1, 0, 1, 10, 1000)),
    )
    assert [(named.channel, named.receiver) for named in named_rings(findings)] == [("head", 19), ("room", 0)]
    said = " ".join(map(str, QUESTION.draw(findings).body))
    assert "head, rank 0 to rank 19<" in said
    assert "Rank 0&#x27;s ring (channel room) is full 1.0 % of the time of rank 1&#x27;s kernels" in said
    assert "and 11 more rings" in said


@given(st.data())
def test_every_moment_is_right(data):
    steps: list[Step] = []
    for channel in range(data.draw(st.integers(1, 3))):
        tail = head = end = 0
        for _ in range(data.draw(st.integers(0, 12))):
            end += data.draw(st.integers(1, 5))
            if data.draw(st.booleans()) and head < tail:
                head = data.draw(st.integers(head + 1, tail))
                steps.append((FREE, end, channel, head))
            elif tail < head + SLOTS:
                tail = data.draw(st.integers(tail + 1, head + SLOTS))
                steps.append((FILL, end, channel, tail))
    counters = count_events(ring(sorted(steps, key=lambda step: step[0])))
    whole = [channel for channel in range(3) if {step[0] for step in steps if step[2] == channel} == {FILL, FREE}]
    assert bool(counters) == bool(whole)
    for counter in counters:
        for time in range(70):
            before = [step for step in steps if step[1] <= time and step[2] in whole]
            held = [
                max([0, *(step[3] for step in before if step[0] == FILL and step[2] == channel)])
                - max([0, *(step[3] for step in before if step[0] == FREE and step[2] == channel)])
                for channel in whole
            ]
            shown = counter.value[counter.time <= time]
            assert (int(shown[-1]) if len(shown) else 0) == sum(held)


def test_a_late_signal_of_an_earlier_position_changes_nothing():
    (counter,) = count_events(ring([(FILL, 10, 0, 4), (FREE, 30, 0, 3), (FREE, 40, 0, 2)]))
    assert (counter.time.tolist(), counter.value.tolist()) == ([10, 30], [4, 1])


def test_between_clocks_that_are_not_aligned_there_is_no_fill():
    steps = [(FILL, 10, 0, 2), (FREE, 30, 0, 2)]
    assert count_events(ring(steps))
    assert count_events(ring(steps, aligned=False)) == ()


def test_without_a_tail_there_is_no_fill():
    timeline = ring([(FILL, 10, 0, 2), (FREE, 30, 0, 2)])
    plain = tuple(
        EventType(e.name, e.event_class, e.ends_at, Channel(e.channel.name, e.channel.kind, e.channel.key), FIELDS)
        for e in EVENTS
        if e.channel
    )
    assert count_events(timeline.replace(events=plain)) == ()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("head credit initial=4 tail=tail channel", ("head", "credit", ("channel",), 4, "tail")),
        ("head credit tail=tail channel", ("head", "credit", ("channel",), 0, "tail")),
        ("head credit channel", ("head", "credit", ("channel",), 0, "")),
    ],
)
def test_a_channel_names_its_tail(text, parsed):
    fields = "channel:4 value:8"
    event = {"name": "e", "class": "signal", "ends_at": "issue", "begin_fields": fields, "end_fields": ""}
    assert parse_event("here", event | {"channel": text}).channel == parsed
    with pytest.raises(BadInput, match="is no field"):
        parse_event("here", event | {"channel": "tail count tail=tail channel"})


def test_two_calls_begin_with_empty_rings():
    launches = (make_launch(0, epoch=1), make_launch(1, epoch=1), make_launch(0, epoch=2), make_launch(1, epoch=2))
    rows = [(2, FILL, 0, 9, 10, 1 | 3 << 8, 0), (8, FREE, 1, 19, 20, 7 << 8, 0)]
    rows += [(2, FILL, 2, 29, 30, 1 | 3 << 8, 0), (8, FREE, 3, 39, 40, 7 << 8, 0)]
    both = make_timeline(2, events=EVENTS, spans=make_spans(rows), flows=Flows(), launches=launches)
    (counter,) = count_events(both)
    assert counter.value.tolist() == [3, 0, 3, 0]


def test_a_dry_ring_is_named_with_the_rank_that_sent_late():
    """Rank 1 waits from 2 on for a token that rank 0 sends at 40."""
    wanted = (Field("peer", 4), Field("channel", 4), Field("wanted", 20))
    events = (*EVENTS, EventType("wait_tail", EventClass.WAIT, "completion", TAIL, wanted))
    rows = [(2, FILL, 0, 40, 41, 1 | 1 << 8, 0), (8, 2, 1, 2, 45, 1 << 8, 0), (8, FREE, 1, 50, 51, 5 << 8, 0)]
    timeline = make_timeline(2, events=events, spans=make_spans(rows), launches=(make_launch(0), make_launch(1)))
    findings = analyze(timeline.replace(flows=join_flows(timeline)[0]))
    (ring,) = findings.dry_rings
    assert (ring.channel, ring.tail, ring.sender, ring.receiver, ring.num_rings) == ("head", "tail", 0, 1, 1)
    assert ring.dry_ns == 40 - 2
    (fill,) = findings.ring_fills
    assert (fill.mean_slots, fill.most_slots) == (1.0, 1)

"""Rings that are full: which ring, for how long, and of whose kernels' time."""

from __future__ import annotations

import dataclasses

import numpy as np
from test_flows import End, build

from tracekern.analysis.findings import analyze
from tracekern.analysis.waits.analyze import WaitKind, analyze_waits
from tracekern.analysis.waits.full_rings import FullRing, find_starved, full_rings
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import OPEN_END, ChannelKind, Timeline
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.questions.time import QUESTION


def wait(start: int, end: int, level: int, epoch: int = 1, slot: int = 0) -> End:
    return End(False, 0, 1, slot, epoch, start, end, level)


def give_back(start: int, level: int, epoch: int = 1, slot: int = 0) -> End:
    return End(True, 1, 0, slot, epoch, start, start + 10, level)


def joined(ends: list[End], kind: ChannelKind = ChannelKind.CREDIT, initial: int = 3) -> Timeline:
    timeline, _ = build(ends, kind)
    events = tuple(
        dataclasses.replace(event, channel=dataclasses.replace(event.channel, initial=initial))
        for event in timeline.events
    )
    timeline = timeline.replace(events=events)
    return timeline.replace(flows=join_flows(timeline)[0])


ENDS = [
    wait(0, 50, level=3),  # for nobody
    wait(100, 200, level=4),  # full until 160
    give_back(160, level=4),
    wait(300, 310, level=4),  # has come long ago
    wait(120, 320, level=5, epoch=2),  # another warp: full until 180
    give_back(180, level=5, epoch=2),
    wait(400, 420, level=4, slot=1),  # a ring that is full for a shorter time
    give_back(405, level=4, slot=1),
]


def test_a_ring_is_full_while_any_warp_waits_for_room():
    timeline = joined(ENDS)
    # Two launches, 0 to 420 and 120 to 320; both warps together wait from 100 to 180.
    wanted = FullRing("token", 3, sender=0, receiver=1, num_rings=2, full_ns=80, kernels_ns=420 + 200)
    assert full_rings(timeline, find_starved(timeline, analyze_waits(timeline), WaitKind.CREDIT, None)) == (wanted,)
    (line,) = [line.text for line in headlines(analyze(timeline)) if line.word == "waiting"]
    said = "rank 1's ring of 3 slots (channel token, the fullest of 2) is full 13 % of the time of rank 0's kernels"
    assert line.endswith(said)
    assert f"<p>R{said[1:]}.</p>".replace("'", "&#x27;") in QUESTION.draw(analyze(timeline)).body


def test_of_rings_back_to_back_both_are_told_of():
    """The first is full because the second is: the longest time alone would name the wrong one."""
    behind = [wait(200, 230, level=5, slot=1), give_back(225, level=5, slot=1)]
    timeline, rows = build([*ENDS, *behind], ChannelKind.CREDIT)
    second = [
        dataclasses.replace(event, channel=dataclasses.replace(event.channel, name="second"))
        for event in timeline.events
    ]
    event = timeline.spans.event + len(second) * np.array([end.slot for end in rows])
    spans = dataclasses.replace(timeline.spans, event=event.astype(timeline.spans.event.dtype))
    timeline = timeline.replace(events=(*timeline.events, *second), spans=spans)
    timeline = timeline.replace(flows=join_flows(timeline)[0])
    (line,) = [line.text for line in headlines(analyze(timeline)) if line.word == "waiting"]
    assert "ring (channel token) is full" in line
    assert "ring (channel second) is full" in line


def test_a_window_counts_what_reaches_into_it():
    timeline = joined(ENDS)
    findings = analyze(timeline, window=(350, 500))
    (ring,) = findings.full_rings
    assert (ring.num_rings, ring.full_ns, ring.kernels_ns) == (1, 5, 420)


def test_a_ring_that_nobody_frees_is_full_until_the_end():
    timeline = joined([wait(100, OPEN_END, level=4), give_back(0, level=3), End(True, 0, 1, 0, 1, 300, 310, 9)])
    (ring,) = full_rings(timeline, find_starved(timeline, analyze_waits(timeline), WaitKind.CREDIT, None))
    assert (ring.sender, ring.receiver, ring.full_ns, ring.kernels_ns) == (0, 1, 210, 210)


def test_a_sender_that_is_late_fills_no_ring():
    timeline = joined(ENDS, ChannelKind.COUNT)
    assert analyze(timeline).full_rings == ()


def test_a_ring_that_is_hardly_ever_full_is_not_told_of():
    timeline = joined([*ENDS[:3], wait(100_000, 100_010, level=4)])
    assert len(analyze(timeline).full_rings) == 1
    assert not any("is full" in line.text for line in headlines(analyze(timeline)))

"""Joining signals and waits against an obvious join, for all kinds of channels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern.analysis.waits.analyze import analyze_waits
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    ClockFit,
    EventClass,
    EventType,
    Field,
    Launch,
    Rank,
    Spans,
    Timeline,
    Track,
    TrackKind,
)
from tracekern.timeline.select import take_spans

NUM_RANKS = 3
JOINING = [kind for kind in ChannelKind if kind.has_pairs]
PEER, SLOT, LEVEL = Field("peer", 4), Field("slot", 12), Field("level", 39)


@dataclass(frozen=True)
class End:
    """A signal or a wait."""

    is_signal: bool
    rank: int
    peer: int
    slot: int
    epoch: int
    start: int
    end: int
    level: int = 0


def build(ends: list[End], kind: ChannelKind, signal_peer: bool = True, wait_peer: bool = True, hard_ns: float = 0.0):
    """A Timeline of one track per rank and epoch."""
    channel = Channel("token", kind, ("slot",))

    def event(name: str, event_class: EventClass, level: str, has_peer: bool) -> EventType:
        fields = ((PEER,) if has_peer else ()) + (SLOT, Field(level, LEVEL.bits))
        return EventType(name, event_class, "completion", channel, fields)

    events = (
        event("wait_token", EventClass.WAIT, "wanted", wait_peer),
        event("signal_token", EventClass.SIGNAL, "value", signal_peer),
    )
    epochs = sorted({end.epoch for end in ends})
    places = [(rank, epoch) for rank in range(NUM_RANKS) for epoch in epochs]
    ends = sorted(ends, key=lambda end: (places.index((end.rank, end.epoch)), end.start))
    payloads = []
    for end in ends:
        shift, payload = 0, 0
        values = packed(end, signal_peer if end.is_signal else wait_peer)
        for field, value in zip(events[end.is_signal].begin_fields, values, strict=True):
            payload |= value << shift
            shift += field.bits
        payloads.append(payload)
    place = [places.index((end.rank, end.epoch)) for end in ends]
    spans = Spans(
        track=np.array(place, np.int32),
        event=np.array([end.is_signal for end in ends], np.int32),
        launch=np.array(place, np.int32),
        start=np.array([end.start for end in ends], np.int64),
        end=np.array([end.end for end in ends], np.int64),
        begin_payload=np.array(payloads, np.uint64),
        end_payload=np.zeros(len(ends), np.uint64),
    )
    fit = ClockFit("reference", hard_ns, 0.0)
    timeline = Timeline(
        unit="ns",
        ranks=tuple(Rank(rank, "n", "d", "cpu", "closed", 1e9, 1, fit) for rank in range(NUM_RANKS)),
        tracks=tuple(Track(rank, TrackKind.DEVICE, str(epoch)) for rank, epoch in places),
        events=events,
        launches=tuple(Launch(rank, i, "k", 0, 0, epoch, 1, 1, 1, 9, 0, 9) for i, (rank, epoch) in enumerate(places)),
        spans=spans,
    )
    return timeline, ends


def packed(end: End, has_peer: bool) -> list[int]:
    return [end.peer] * has_peer + [end.slot, end.level]


def meets(signal: End, wait: End, signal_peer: bool, wait_peer: bool) -> bool:
    if (signal.slot, signal.epoch) != (wait.slot, wait.epoch):
        return False
    if not signal_peer and not wait_peer:
        return signal.rank == wait.rank
    return (not signal_peer or signal.peer == wait.rank) and (not wait_peer or wait.peer == signal.rank)


def obvious_join(ends: list[End], kind: ChannelKind, signal_peer: bool, wait_peer: bool) -> set[tuple[int, int]]:
    edges = set()
    by_start = sorted(range(len(ends)), key=lambda idx: (ends[idx].start, idx))
    for wait in (idx for idx in by_start if not ends[idx].is_signal and ends[idx].end != OPEN_END):
        mine = [s for s in by_start if ends[s].is_signal and meets(ends[s], ends[wait], signal_peer, wait_peer)]
        own = [
            idx
            for idx in by_start
            if not ends[idx].is_signal
            and (ends[idx].rank, ends[idx].epoch) == (ends[wait].rank, ends[wait].epoch)
            and mine
            and meets(ends[mine[0]], ends[idx], signal_peer, wait_peer)
        ]
        if kind is ChannelKind.BARRIER:
            mine = mine[-1:]
        elif kind.has_levels:
            mine = [signal for signal in mine if ends[signal].level >= ends[wait].level > 0][:1]
        elif len(own) == len(mine):
            mine = [mine[own.index(wait)]] if mine else []
        else:
            mine = mine[:1]
        edges |= {(signal, wait) for signal in mine}
    return edges


@st.composite
def ends(draw: st.DrawFn, signal_peer: bool, wait_peer: bool) -> list[End]:
    found = []
    for start in range(draw(st.integers(0, 25))):
        is_signal = draw(st.booleans())
        found.append(
            End(
                is_signal,
                rank=draw(st.integers(0, NUM_RANKS - 1)),
                peer=draw(st.integers(0, NUM_RANKS - 1)),
                slot=draw(st.sampled_from([0, 1, (1 << SLOT.bits) - 1])),
                epoch=draw(st.sampled_from([1, 0xFFFFFFFF])),
                start=start,
                end=OPEN_END if draw(st.integers(0, 5)) == 0 else start + 100,
                level=draw(st.integers(0, 6)) + draw(st.sampled_from([0, 0, 1 << 32])),
            )
        )
    return found


@pytest.mark.parametrize(
    ("signal_peer", "wait_peer"), [(True, True), (False, False), (True, False), (False, True)], ids=str
)
@pytest.mark.parametrize("kind", JOINING)
@given(data=st.data())
def test_the_join_is_the_obvious_one(kind: ChannelKind, signal_peer: bool, wait_peer: bool, data: st.DataObject):
    timeline, rows = build(data.draw(ends(signal_peer, wait_peer)), kind, signal_peer, wait_peer)
    flows, problems = join_flows(timeline)
    found = set(zip(flows.signal.tolist(), flows.wait.tolist(), strict=True))
    assert len(found) == len(flows)
    assert found == obvious_join(rows, kind, signal_peer, wait_peer)
    closed = sum(not end.is_signal and end.end != OPEN_END and (end.level > 0 or not kind.has_levels) for end in rows)
    unmatched = sum(problem.count for problem in problems if problem.kind == "unmatched_wait")
    assert unmatched == closed - len({wait for _, wait in found})


def known_at_the_end(timeline: Timeline, peers: list[int]) -> Timeline:
    """The waits take what comes first: they say `peer` at their end, not at their begin."""
    wait, signal = timeline.events
    is_wait = timeline.spans.event == 0
    end_payload = timeline.spans.end_payload.copy()
    end_payload[is_wait] = peers
    return timeline.replace(
        events=(dataclasses.replace(wait, end_fields=(PEER,)), signal),
        spans=dataclasses.replace(timeline.spans, end_payload=end_payload),
    )


def test_a_wait_that_says_at_its_end_whose_message_it_took_meets_that_one():
    sent = [End(True, rank, 0, 5, 1, start=10 * rank, end=10 * rank + 5) for rank in range(3)]
    taken = [End(False, 0, 0, 5, 1, start=30 + idx, end=60 + idx) for idx in range(2)]
    hung = End(False, 0, 0, 5, 1, start=40, end=OPEN_END)
    timeline, rows = build([*sent, *taken, hung], ChannelKind.DATA, wait_peer=False)
    timeline = known_at_the_end(timeline, [2, 1, 0])
    flows, _ = join_flows(timeline)
    assert [(rows[signal].rank, rows[wait].start) for signal, wait in zip(flows.signal, flows.wait, strict=True)] == [
        (2, 30),
        (1, 31),
    ]
    waits = analyze_waits(timeline.replace(flows=flows))
    assert waits.peer.tolist() == [2, 1, -1]
    assert analyze_waits(timeline).peer.tolist() == [2, 1, -1]  # the same without arrows


def test_a_barrier_meets_all_whomever_its_end_names():
    arrivals = [End(True, rank, 0, 5, 1, start=10 * rank, end=10 * rank + 5) for rank in range(3)]
    timeline, rows = build([*arrivals, End(False, 0, 0, 5, 1, start=0, end=50)], ChannelKind.BARRIER, wait_peer=False)
    flows, _ = join_flows(known_at_the_end(timeline, [2]), every_barrier_signal=True)
    assert {rows[signal].rank for signal in flows.signal} == {0, 1, 2}


def test_a_barrier_can_give_every_signal():
    arrivals = [End(True, rank, 0, 5, 1, start=10 * rank, end=10 * rank + 5) for rank in range(3)]
    waits = [End(False, 0, 0, 5, 1, start=0, end=50), End(False, 0, 0, 5, 1, start=1, end=OPEN_END)]
    timeline, rows = build(arrivals + waits, ChannelKind.BARRIER, wait_peer=False)
    flows, _ = join_flows(timeline)
    assert [(rows[signal].rank, rows[wait].start) for signal, wait in zip(flows.signal, flows.wait, strict=True)] == [
        (2, 0)
    ]
    flows, _ = join_flows(timeline, every_barrier_signal=True)
    assert {rows[signal].rank for signal in flows.signal} == {0, 1, 2}
    assert {rows[wait].start for wait in flows.wait} == {0}


def test_a_wait_that_ends_before_its_signal_begins_is_told_beyond_the_clocks():
    pair = [End(True, 0, 1, 0, 1, start=1000, end=1010), End(False, 1, 0, 0, 1, start=0, end=800)]
    for hard_ns, wanted in ((99.0, [("backwards_flow", 1)]), (100.0, [])):
        timeline, _ = build(pair, ChannelKind.DATA, hard_ns=hard_ns)
        flows, problems = join_flows(timeline)
        assert len(flows) == 1
        assert [(problem.kind, problem.rank) for problem in problems] == wanted
    assert join_flows(timeline.replace(aligned=False))[1] == ()


def test_between_ranks_of_one_clock_order_is_exact():
    for early, wanted in ((0, []), (1, ["backwards_flow"])):
        pair = [End(True, 0, 1, 0, 1, start=1000, end=1010), End(False, 1, 0, 0, 1, start=0, end=1000 - early)]
        timeline, _ = build(pair, ChannelKind.DATA, hard_ns=100.0)
        shared = tuple(dataclasses.replace(rank, clock_id="GPU a") for rank in timeline.ranks)
        _, problems = join_flows(timeline.replace(ranks=shared))
        assert [problem.kind for problem in problems] == wanted


@pytest.mark.parametrize("is_signal", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_may_end_early_by_what_a_cycle_clock_leaves_open(rank: int, is_signal: bool):
    """In one rank both ends stand in one launch, and add; between ranks one of them does, beside 100 ns of clocks."""
    pair = [End(True, 0, rank, 0, 1, start=1000, end=1010), End(False, rank, 0, 0, 1, start=0, end=800)]
    timeline, rows = build(pair, ChannelKind.DATA, hard_ns=50.0 * rank)
    (row,) = [row for row, end in enumerate(rows) if end.is_signal == is_signal]
    off = timeline.spans.launch[row]
    for error_ns, wanted in ((99.0, 1), (100.0, 0), (np.inf, 0)):
        launches = list(timeline.launches)
        launches[off] = dataclasses.replace(launches[off], stamp_error_ns=error_ns)
        _, problems = join_flows(timeline.replace(launches=tuple(launches)))
        assert [problem.kind for problem in problems] == ["backwards_flow"] * wanted


def test_wide_keys_of_many_launches_are_told_apart():
    """Epoch and key together have more than 64 bits."""
    low, high = 0, (1 << 55) - 1
    what = ((True, low), (True, high), (False, high))
    rows = [
        End(is_signal, 0, 0, int(key > 0), epoch, 10 * epoch, 10 * epoch + 1)
        for epoch in range(1, 301)
        for is_signal, key in what
    ]
    timeline, ends = build(rows, ChannelKind.DATA, signal_peer=False, wait_peer=False)
    payload = np.array([high if end.slot else low for end in ends], np.uint64)
    events = tuple(dataclasses.replace(event, begin_fields=(Field("slot", 55),)) for event in timeline.events)
    spans = dataclasses.replace(timeline.spans, begin_payload=payload)
    flows, problems = join_flows(timeline.replace(events=events, spans=spans))
    assert problems == ()
    assert len(flows) == 300
    assert (spans.start[flows.signal] == spans.start[flows.wait]).all()
    assert (payload[flows.signal] == high).all()


def test_kernels_without_epochs_are_told_apart_by_their_sequence():
    ends = [
        End(is_signal, is_signal ^ 1, is_signal, 0, epoch, start=1000 * epoch, end=1000 * epoch + 10)
        for epoch in (1, 2)
        for is_signal in (True, False)
    ]
    timeline, _ = build(ends, ChannelKind.DATA)
    launches = tuple(Launch(e.rank, e.launch_idx, "k", e.epoch, 0, 0, 1, 1, 1, 9, 0, 9) for e in timeline.launches)
    flows, problems = join_flows(timeline.replace(launches=launches))
    assert problems == ()
    assert (timeline.spans.start[flows.signal] == timeline.spans.start[flows.wait]).all()
    assert len(flows) == 2


@given(ends(True, True))
def test_channels_of_one_name_and_two_kinds_are_two(rows: list[End]):
    """Two kernels, one an epoch, name their channels alike: tokens here, credits there."""
    timeline, rows = build(rows, ChannelKind.DATA)
    of_credits = build([], ChannelKind.CREDIT)[0].events
    is_second = np.array([launch.epoch != 1 for launch in timeline.launches], bool)[timeline.spans.launch]
    spans = dataclasses.replace(timeline.spans, event=timeline.spans.event + 2 * is_second.astype(np.int32))
    flows, _ = join_flows(timeline.replace(events=(*timeline.events, *of_credits), spans=spans))
    found = set(zip(flows.signal.tolist(), flows.wait.tolist(), strict=True))
    wanted = set()
    for kind, mine in ((ChannelKind.DATA, ~is_second), (ChannelKind.CREDIT, is_second)):
        idx = np.flatnonzero(mine).tolist()
        wanted |= {(idx[s], idx[w]) for s, w in obvious_join([rows[i] for i in idx], kind, True, True)}
    assert found == wanted


def in_a_graph_and_plain(kind: ChannelKind, graph: str) -> Timeline:
    """Rank 0 signals rank 1, plainly at 1000 and as the launch of a graph at 5000, the first of its name each time."""
    ends = [
        End(is_signal, is_signal ^ 1, is_signal, 0, epoch, start=start, end=start + 10, level=1)
        for epoch, start in ((1, 1000), (2, 5000))
        for is_signal in (True, False)
    ]
    timeline, _ = build(ends, kind)
    launches = [dataclasses.replace(launch, epoch=0) for launch in timeline.launches]
    launches = [
        dataclasses.replace(launch, name=f"{graph}{launch.name}") if before.epoch == 2 else launch
        for launch, before in zip(launches, timeline.launches, strict=True)
    ]
    return timeline.replace(launches=tuple(launches))


@pytest.mark.parametrize("kind", JOINING)
def test_a_kernel_in_a_graph_does_not_meet_the_plain_one(kind: ChannelKind):
    timeline = in_a_graph_and_plain(kind, "decode/")
    for lost in ((), (True, 1000), (True, 5000)):
        is_lost = np.array(
            [
                (event, start) == lost
                for event, start in zip(timeline.spans.event == 1, timeline.spans.start, strict=True)
            ]
        )
        seen = take_spans(timeline, ~is_lost)
        flows, problems = join_flows(seen)
        assert len(flows) == (1 if lost else 2)
        assert (seen.spans.start[flows.signal] == seen.spans.start[flows.wait]).all()
        assert [problem.kind for problem in problems] == (["unmatched_wait"] if lost else [])


def test_launches_whose_names_look_like_those_of_graphs_meet_where_only_they_can():
    """Named layer/send and layer2/receive: one only signals, the other only waits."""
    timeline = in_a_graph_and_plain(ChannelKind.DATA, "")
    is_wait = timeline.spans.event == 0
    names = np.array(["layer/send"] * len(timeline.launches), object)
    names[timeline.spans.launch[is_wait]] = "layer2/receive"
    launches = [dataclasses.replace(one, name=name) for one, name in zip(timeline.launches, names, strict=True)]
    assert len(join_flows(timeline.replace(launches=tuple(launches)))[0]) == 2


def test_a_kernel_without_epochs_beside_one_that_has_them():
    meeting = [
        End(is_signal, 0, 0, 5, epoch, start=1000 * epoch, end=1000 * epoch + 10)
        for epoch in (1, 2, 3)
        for is_signal in (True, False)
    ]
    timeline, _ = build(meeting, ChannelKind.BARRIER)
    launches = [dataclasses.replace(launch, sequence=launch.epoch, epoch=0) for launch in timeline.launches]
    other = Launch(0, 99, "other", 0, 0, 7, 1, 1, 1, 9, 0, 9)
    flows, problems = join_flows(timeline.replace(launches=(*launches, other)))
    assert problems == ()
    assert len(flows) == 3
    assert (timeline.spans.start[flows.signal] == timeline.spans.start[flows.wait]).all()


def test_waits_of_several_warps_meet_the_first_of_signals_that_say_the_same():
    """A tail that did not move is published again: 12 of 59,634 were, in a library's ring."""
    tails = [End(True, 0, 1, 7, 1, start=at, end=at + 5) for at in (100, 900)]
    waits = [End(False, 1, 0, 7, 1, start=at, end=at + 150) for at in (0, 10)]
    timeline, _ = build(tails + waits, ChannelKind.DATA)
    # Of two warps, each of which waits once.
    track = timeline.spans.track.copy()
    track[np.flatnonzero(timeline.spans.event == 0)[1]] = 2
    timeline = timeline.replace(
        tracks=(*timeline.tracks[:2], dataclasses.replace(timeline.tracks[1], warp=1)),
        spans=dataclasses.replace(timeline.spans, track=track),
    )
    flows, (problem,) = join_flows(timeline)
    assert timeline.spans.start[flows.signal].tolist() == [100, 100]
    assert (problem.kind, problem.severity, problem.count) == ("duplicate_signal", "warning", 1)
    assert problem.text == (
        "channel token: 1 key signalled more than once, such as slot 7 by rank 0; waits are joined to the first signal"
    )
    lossy = tuple(dataclasses.replace(launch, records_lost=1) for launch in timeline.launches)
    flows, problems = join_flows(timeline.replace(launches=lossy))
    assert len(flows) == 0, "the first on record may be the second"
    assert [problem.kind for problem in problems] == ["unmatched_wait"]


@pytest.mark.parametrize("kind", [ChannelKind.CREDIT, ChannelKind.COUNT])
@pytest.mark.parametrize("initial", [0, 4])
def test_a_wait_for_what_was_there_from_the_start_meets_no_signal(kind: ChannelKind, initial: int):
    """The slots of a ring are free at first: 11,424 waits of a library's ring wanted 0."""
    waits = [End(False, 0, 1, 0, 1, start=at, end=at + 5, level=level) for at, level in ((0, initial), (100, 5))]
    timeline, _ = build([*waits, End(True, 1, 0, 0, 1, start=50, end=60, level=8)], kind)
    channel = dataclasses.replace(timeline.events[0].channel, initial=initial)
    events = tuple(dataclasses.replace(event, channel=channel) for event in timeline.events)
    timeline = timeline.replace(events=events)
    flows, problems = join_flows(timeline)
    assert problems == ()
    assert timeline.spans.start[flows.wait].tolist() == [100]
    waits = analyze_waits(timeline.replace(flows=flows))
    assert waits.completion.tolist() == [5, 0]
    assert not waits.unmatched.any()


def test_what_a_count_waits_for_is_the_sender():
    ends = [End(False, 0, 1, 0, 1, start=0, end=100, level=3), End(True, 1, 0, 0, 1, start=90, end=95, level=4)]
    late = {}
    for kind in (ChannelKind.COUNT, ChannelKind.CREDIT):
        timeline, _ = build(ends, kind)
        waits = analyze_waits(timeline.replace(flows=join_flows(timeline)[0]))
        late[kind] = (waits.late_sender.tolist(), waits.late_receiver.tolist())
    assert late == {ChannelKind.COUNT: ([90], [0]), ChannelKind.CREDIT: ([0], [90])}


def test_a_credit_that_came_too_late_stands_for_one_that_was_overwritten():
    grants = [End(True, 1, 0, 0, 1, start=2000, end=2010, level=8)]
    waits = [End(False, 0, 1, 0, 1, start=at, end=at + 50, level=level) for at, level in ((100, 4), (2000, 8))]
    timeline, _ = build(grants + waits, ChannelKind.CREDIT)
    assert [problem.kind for problem in join_flows(timeline)[1]] == ["backwards_flow"]
    lossy = tuple(dataclasses.replace(launch, records_overwritten=2) for launch in timeline.launches)
    flows, problems = join_flows(timeline.replace(launches=lossy))
    assert timeline.spans.start[flows.wait].tolist() == [2000]
    assert [(problem.kind, problem.severity) for problem in problems] == [("unmatched_wait", "note")]


def test_a_signal_for_the_next_launch_is_told_of_and_found_with_one_epoch():
    """The key names the call, and a launch raises the flag that the next one waits for; nobody raises the first."""
    meeting = [End(False, 0, 1, call, call, start=1000 * call, end=1000 * call + 50) for call in (1, 2, 3)]
    meeting += [End(True, 1, 0, call + 1, call, start=1000 * call + 500, end=1000 * call + 510) for call in (1, 2)]
    timeline, _ = build(meeting, ChannelKind.DATA)
    numbered = [dataclasses.replace(launch, sequence=launch.epoch, epoch=0) for launch in timeline.launches]
    for launches in (timeline.launches, tuple(numbered)):
        flows, (problem,) = join_flows(timeline.replace(launches=launches))
        assert len(flows) == 0
        assert "no signal on record of 3 waits on channel " in problem.text
        assert "; 2 of those would have one in a launch of another epoch" in problem.text
    lossy = tuple(dataclasses.replace(launch, records_lost=1) for launch in timeline.launches)
    assert "epoch" not in join_flows(timeline.replace(launches=lossy))[1][0].text
    flows, (problem,) = join_flows(
        timeline.replace(launches=tuple(dataclasses.replace(launch, epoch=1) for launch in timeline.launches))
    )
    assert len(flows) == 2
    assert problem.text.endswith("no signal on record of 1 wait on channel token")

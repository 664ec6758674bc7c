"""Which put carried a signal, by hand and against a plain search."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from timelines import make_launch, make_rank, make_spans

from tracekern.timeline.join import puts
from tracekern.timeline.model import (
    Channel,
    ChannelKind,
    EventClass,
    EventType,
    Field,
    Flows,
    Int64,
    Marks,
    Timeline,
    Track,
    TrackKind,
)

RESULTS = Channel("results", ChannelKind.DATA, ("local_expert",))
_ROUTE = (Field("peer", 10), Field("local_expert", 8))
_PUT = (*_ROUTE, Field("token", 16), Field("epoch_bits", 3))
_NUMBER = (*_ROUTE, Field("tokens", 16), Field("epoch_bits", 3))
SIGNAL, WAIT, PUT, ROW, COMMAND, CAME, ROW_CAME = range(7)
EVENTS = (
    EventType("signal_results", EventClass.SIGNAL, "completion", RESULTS, _ROUTE),
    EventType("wait_results", EventClass.WAIT, "completion", RESULTS, _ROUTE),
    EventType("put_results", EventClass.SYNC, "completion", None, _NUMBER),
    EventType("put_row", EventClass.SYNC, "completion", None, _PUT),
    EventType("command", EventClass.SYNC, "completion", None, (Field("peer", 10),)),
    EventType("results_came", EventClass.SYNC, "completion", None, _NUMBER),
    EventType("row_came", EventClass.SYNC, "completion", None, _PUT),
)
EXPERT, EPOCH = 3, 5
TIMES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=8)


def packed(*values: int) -> int:
    """The payload of a put or an arrival: peer, local_expert, token or tokens, the last bits of the epoch."""
    payload = 0
    for value, shift in zip(values, (0, 10, 18, 34), strict=False):
        payload |= value << shift
    return payload


def with_rows(came: list[tuple[int, int, int]]) -> Timeline:
    """A flag for two rows of rank 0, for which rank 1 waits from 0 to 1,000. came: of each row, and then of their
    number, when its put begins, is complete, and comes."""
    tracks = (
        Track(0, TrackKind.DEVICE, "warp"),
        Track(1, TrackKind.DEVICE, "warp"),
        Track(0, TrackKind.ENGINE, "proxy puts", role="proxy puts"),
        Track(1, TrackKind.ENGINE, "proxy arrivals", role="proxy arrivals"),
    )
    to, by = (packed(peer, EXPERT) for peer in (1, 0))
    rows = [(0, SIGNAL, 0, 300, 310, to, 0), (1, WAIT, 1, 0, 1000, by, 0)]
    marks = []
    for (begin, end, arrival), token in zip(came, (7, 8, 2), strict=True):
        put, mark = (PUT, CAME) if token == 2 else (ROW, ROW_CAME)
        rows += [(2, put, -1, begin, end, packed(1, EXPERT, token, EPOCH), 0), (2, COMMAND, -1, begin, begin + 1, 1, 0)]
        marks.append((arrival, mark, packed(0, EXPERT, token, EPOCH)))
    spans, marks = make_spans(rows), sorted(marks)
    time, event, payload = (np.array(column) for column in zip(*marks, strict=True))
    track, no_launch = np.full(3, 3, np.int32), np.full(3, -1, np.int32)
    arrivals = Marks(track, event.astype(np.int32), no_launch, time, payload.astype(np.uint64))
    flows = Flows(*(np.flatnonzero(spans.event == event) for event in (SIGNAL, WAIT)))
    launches = tuple(make_launch(rank, "combine", epoch=8 + EPOCH) for rank in range(2))
    ranks = tuple(make_rank(rank) for rank in range(2))
    return Timeline("ns", ranks, tracks, EVENTS, launches, spans, arrivals, flows)


def test_results_were_carried_by_what_came_last():
    late_row = puts.find_carried(with_rows([(100, 500, 480), (200, 900, 850), (305, 600, 590)]))
    assert late_row.came.tolist() == [850]
    late_number = puts.find_carried(with_rows([(100, 500, 480), (200, 500, 490), (305, 980, 970)]))
    assert late_number.came.tolist() == [970]


def test_a_picture_has_an_arrow_to_the_command_and_one_from_the_put():
    timeline = with_rows([(100, 500, 480), (200, 900, 850), (305, 600, 590)])
    flows, spans = puts.split_carried(timeline).flows, timeline.spans
    arrows = [
        tuple(EVENTS[spans.event[end]].name for end in arrow) for arrow in zip(flows.signal, flows.wait, strict=True)
    ]
    assert sorted(arrows) == [("put_row", "wait_results"), ("signal_results", "command")]


def columns(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> tuple[Any, Int64, Int64]:
    """The keys of both, and the times of each."""
    (key, time), (other_key, other_time) = (np.array(rows, np.int64).reshape(-1, 2).T for rows in (first, second))
    return (key, other_key), time, other_time


@given(begun=TIMES, ended=TIMES)
def test_an_end_is_of_the_last_begin_that_no_later_end_took(begun, ended):
    free, wanted = list(begun), []
    for key, time in sorted(ended, key=lambda end: -end[1]):
        if before := [began for its_key, began in free if its_key == key and began <= time]:
            free.remove((key, max(before)))
            wanted.append((key, max(before), time))
    found = puts._match(*columns(begun, ended))
    pairs = [(*begin, ended[end][1]) for begin, end in zip(begun, found, strict=True) if end >= 0]
    assert sorted(pairs) == sorted(wanted)


@given(own=TIMES, others=TIMES)
def test_the_nearest_of_the_same_key(own, others):
    for (key, time), found in zip(own, puts._nearest(*columns(own, others)), strict=True):
        away = [abs(other - time) for its_key, other in others if its_key == key]
        assert (found == -1) == (not away)
        assert not away or (others[found][0] == key and abs(others[found][1] - time) == min(away))

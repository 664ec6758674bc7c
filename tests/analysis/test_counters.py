"""Counters against a count at every moment, span by span."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from timelines import COPY, WAIT, make_spans, make_timeline, make_tracks, timelines

from tracekern.timeline.facts import counters
from tracekern.timeline.facts.counters import count_events
from tracekern.timeline.model import OPEN_END, EventClass, Flows, Timeline, TrackKind


def value_at(counter, time: int) -> int:
    before = counter.value[counter.time <= time]
    return int(before[-1]) if len(before) else 0


def stalled_at(timeline: Timeline, rank: int, time: int) -> int:
    """Warps of the rank inside a wait from `time` on."""
    spans = timeline.spans
    return len(
        {
            int(spans.track[i])
            for i in range(len(spans))
            if timeline.tracks[spans.track[i]].rank == rank
            and timeline.tracks[spans.track[i]].kind == TrackKind.DEVICE
            and timeline.events[spans.event[i]].event_class == EventClass.WAIT
            and spans.start[i] <= time
            and (spans.end[i] == OPEN_END or time < spans.end[i])
        }
    )


def in_flight_at(timeline: Timeline, rank: int, time: int) -> int:
    """Signals for waits of the rank that were sent by `time` and not received."""
    spans, flows = timeline.spans, timeline.flows
    count = 0
    for signal in set(flows.signal.tolist()):
        waits = [w for s, w in zip(flows.signal.tolist(), flows.wait.tolist(), strict=True) if s == signal]
        first = min(waits, key=lambda wait: (spans.end[wait], flows.wait.tolist().index(wait)))
        received, sent = spans.end[first], spans.end[signal]
        if sent == OPEN_END or sent >= received:
            sent = spans.start[signal]
        if timeline.tracks[spans.track[first]].rank == rank and sent <= time < received:
            count += 1
    return count


def moments(timeline: Timeline) -> list[int]:
    spans = timeline.spans
    return sorted({*spans.start.tolist(), *spans.end.tolist(), *(spans.end - 1).tolist()})


@given(timeline=timelines())
def test_counters_are_right_at_every_moment(timeline):
    found = {(counter.rank, counter.name): counter for counter in count_events(timeline)}
    for counter in found.values():
        assert (counter.time[1:] > counter.time[:-1]).all()
    for rank in [entry.rank for entry in timeline.ranks]:
        for time in moments(timeline):
            for name, counted in (("stalled warps", stalled_at), ("token in flight", in_flight_at)):
                counter = found.get((rank, name))
                assert (value_at(counter, time) if counter else 0) == counted(timeline, rank, time)


def test_a_ring_by_hand():
    found = {(counter.rank, counter.name): counter for counter in count_events(make_timeline(2))}
    stalled = found[0, "stalled warps"]
    assert (stalled.time.tolist(), stalled.value.tolist()) == ([1640, 3000], [4, 0])
    in_flight = found[0, "token in flight"]  # sent by rank 1 at 1100 + 640
    assert (in_flight.time.tolist(), in_flight.value.tolist()) == ([1740, 3000], [4, 0])


def test_nothing_is_in_flight_between_clocks_that_are_not_aligned():
    found = count_events(make_timeline(2, aligned=False))
    assert [(counter.rank, counter.name) for counter in found] == [(0, "stalled warps"), (1, "stalled warps")]


def test_endless_waits_beside_a_clock_that_is_years_ahead():
    rows = [(track, WAIT, 0, 100 + track, OPEN_END, 0, 0) for track in range(2, 18)]
    rows += [(20, WAIT, 0, 10**18, 10**18 + 5, 0, 0)]
    timeline = make_timeline(2, spans=make_spans(rows), flows=Flows(), aligned=False, tracks=make_tracks(2, 8))
    low, high = count_events(timeline)
    assert (low.time.tolist(), low.value.tolist()) == (list(range(102, 118)), list(range(1, 17)))
    assert (high.time.tolist(), high.value.tolist()) == ([10**18, 10**18 + 5], [1, 0])


def test_without_waits_there_are_none():
    assert count_events(make_timeline(spans=make_spans([(2, COPY, 0, 0, 9, 0, 0)]), flows=Flows())) == ()


def test_many_points_over_weeks_stay_in_order():
    step_ns = 10**11
    rows = [(2, WAIT, 0, i * step_ns, i * step_ns + 1000, 0, 0) for i in range(counters.MAX_POINTS)]
    (thinned,) = count_events(make_timeline(1, spans=make_spans(rows), flows=Flows()))
    assert len(thinned.time) <= counters.MAX_POINTS
    assert (np.diff(thinned.time) > 0).all()
    assert thinned.value.tolist() == [1] * (len(thinned.time) - 1) + [0]


def test_many_points_become_peaks(monkeypatch):
    rows = [(2, WAIT, 0, 10 * i, 10 * i + 4 + i % 3, 0, 0) for i in range(1000)]
    rows += [(3, WAIT, 0, 5003, 5004, 0, 0)]
    timeline = make_timeline(1, spans=make_spans(rows), flows=Flows())
    (exact,) = count_events(timeline)
    monkeypatch.setattr(counters, "MAX_POINTS", 100)
    (thinned,) = count_events(timeline)
    assert not exact.is_thinned
    assert thinned.is_thinned
    assert len(thinned.time) <= 100
    assert thinned.value.max() == exact.value.max() == 2
    assert (thinned.time[-1], thinned.value[-1]) == (exact.time[-1], 0)
    cells = [*thinned.time.tolist(), exact.time[-1] + 1]
    for start, stop, value in zip(cells, cells[1:], thinned.value.tolist(), strict=False):
        inside = exact.value[(exact.time >= start) & (exact.time < stop)]
        assert value == max([*inside.tolist(), value_at(exact, start - 1) if stop <= exact.time[-1] else 0])

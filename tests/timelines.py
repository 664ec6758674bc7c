"""Timelines built by hand and by hypothesis, for the tests of everything that reads one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    ClockFit,
    EventClass,
    EventType,
    Field,
    Flows,
    Launch,
    Marks,
    Problem,
    Rank,
    Spans,
    Timeline,
    Track,
    TrackKind,
)

COPY, SIGNAL, WAIT, BARRIER, HOST, LAUNCH = range(6)
_KEY = (Field("peer", 10), Field("slot", 22))
_TOKEN = Channel("token", ChannelKind.DATA, ("slot",))
EVENTS = (
    EventType("copy_token", EventClass.WORK, "issue", None, (*_KEY, Field("delta", 20, signed=True))),
    EventType("signal_token", EventClass.SIGNAL, "completion", _TOKEN, _KEY, (Field("value", 13), Field("epoch", 10))),
    EventType("wait_token", EventClass.WAIT, "completion", _TOKEN, _KEY, (Field("seen", 13), Field("peer", 10))),
    EventType("barrier", EventClass.SYNC, "completion", None, (Field("wide", 55),)),
    EventType("range", EventClass.HOST, "completion"),
    EventType("launch", EventClass.LAUNCH, "completion", None, (Field("epoch", 32), Field("sequence", 32))),
)
HOST_NAMES = ("step", "forward", "step", "Rückwärts → 反向 🚀")


def make_rank(rank: int, **changes: object) -> Rank:
    clock = ClockFit("ping-pong" if rank else "reference", 800.0 * rank, 90.0 * rank)
    values = {
        "rank": rank,
        "node": "node-a",
        "device": "simulated",
        "backend": "cpu",
        "state": "closed",
        "ticks_per_second": 1e9,
        "resolution_ticks": 32,
        "clock": clock,
        "metadata": {"run_id": "run-17", "command": "tracekern run moe", "note": "CPU backend: never durations"},
        **changes,
    }
    return Rank(**values)


def make_tracks(num_ranks: int, num_blocks: int = 2, num_warps: int = 2) -> tuple[Track, ...]:
    """Per rank one launch track, one host track and the warps of the blocks."""
    tracks = []
    for rank in range(num_ranks):
        tracks += [Track(rank, TrackKind.LAUNCH, "kernels"), Track(rank, TrackKind.HOST, "thread main")]
        for block in range(num_blocks):
            for warp in range(num_warps):
                name = f"block {block} warp {warp}"
                tracks.append(
                    Track(rank, TrackKind.DEVICE, name, block=block, warp=warp, role="sender" if warp else "")
                )
    return tuple(tracks)


def make_spans(rows: Iterable[tuple[int, int, int, int, int, int, int]]) -> Spans:
    """From (track, event, launch, start, end, begin_payload, end_payload), brought into the order of the model."""
    ordered = sorted(rows, key=lambda row: (row[0], row[3], -row[4]))
    columns = list(zip(*ordered, strict=True)) or [()] * 7
    types = (np.int32, np.int32, np.int32, np.int64, np.int64, np.uint64, np.uint64)
    return Spans(*(np.array(column, dtype) for column, dtype in zip(columns, types, strict=True)))


def make_launch(rank: int, name: str = "dispatch", sequence: int = 0, epoch: int = 7) -> Launch:
    return Launch(rank, sequence, name, sequence, 0, epoch, 2, 2, 4, 64, 0, 12)


def make_timeline(num_ranks: int = 2, **changes: object) -> Timeline:
    """A dispatch in which every warp copies, signals the next rank, and waits for the previous one."""
    tracks = make_tracks(num_ranks)
    rows = []
    for index, track in enumerate(tracks):
        start = 1000 + 100 * track.rank
        peer = (track.rank + 1) % num_ranks
        if track.kind == TrackKind.LAUNCH:
            rows.append((index, LAUNCH, track.rank, 900, 9000, 0, 0))
        elif track.kind == TrackKind.HOST:
            rows += [(index, HOST, -1, 500, 9500, 0, 0), (index, HOST, -1, 600, 9500, 3, 0)]
        else:
            payload = peer | track.block << 10
            rows.append((index, COPY, track.rank, start, start + 500, payload | 5 << 32, 0))
            rows.append((index, SIGNAL, track.rank, start + 500, start + 640, payload, 1))
            rows.append((index, WAIT, track.rank, start + 640, start + 2000, payload, 7))
    spans = make_spans(rows)
    values = {
        "unit": "ns",
        "ranks": tuple(make_rank(rank) for rank in range(num_ranks)),
        "tracks": tracks,
        "events": EVENTS,
        "launches": tuple(make_launch(rank) for rank in range(num_ranks)),
        "spans": spans,
        "flows": _ring_flows(tracks, spans, num_ranks),
        "host_names": HOST_NAMES,
        "title": "moe dispatch",
        **changes,
    }
    return Timeline(**values)


def overwrite_begins(timeline: Timeline, rows: Iterable[int]) -> Timeline:
    """As a flight recorder leaves it that overwrote the begin of these spans; their flows go, too."""
    rows = list(rows)
    events, event, payload = list(timeline.events), timeline.spans.event.copy(), timeline.spans.begin_payload.copy()
    for row in rows:
        fields = (Field("begin_overwritten", 1),)
        headless = dataclasses.replace(events[event[row]], channel=None, begin_fields=fields, is_headless=True)
        if headless not in events:
            events.append(headless)
        event[row], payload[row] = events.index(headless), 1
    known = ~np.isin(timeline.flows.signal, rows) & ~np.isin(timeline.flows.wait, rows)
    return timeline.replace(
        events=tuple(events),
        spans=dataclasses.replace(timeline.spans, event=event, begin_payload=payload),
        flows=Flows(timeline.flows.signal[known], timeline.flows.wait[known]),
    )


def _ring_flows(tracks: tuple[Track, ...], spans: Spans, num_ranks: int) -> Flows:
    place = {}
    for index in np.flatnonzero((spans.event == SIGNAL) | (spans.event == WAIT)):
        track = tracks[spans.track[index]]
        place[int(spans.event[index]), track.rank, track.block, track.warp] = index
    edges = [
        (signal, place[WAIT, (rank + 1) % num_ranks, block, warp])
        for (event, rank, block, warp), signal in place.items()
        if event == SIGNAL
    ]
    return Flows(*(np.array(column, np.int64) for column in zip(*edges, strict=True)))


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
_PAYLOAD = st.integers(0, (1 << 64) - 1)
# Few distinct times, so that spans touch, coincide and overlap; or far apart.
_TIME = st.one_of(st.integers(-20, 40), st.integers(-(10**9), 10**13))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any spans: nested, touching, of no length, overlapping in part, never closed; flows between any of them."""
    num_ranks = draw(st.integers(1, 3))
    tracks = make_tracks(num_ranks, num_blocks=draw(st.integers(1, 2)), num_warps=draw(st.integers(1, 2)))
    host_names = tuple(draw(st.lists(_TEXT, min_size=1, max_size=4)))
    launches = tuple(
        make_launch(rank, draw(_TEXT), sequence, draw(st.integers(0, 2**31)))
        for rank in range(num_ranks)
        for sequence in range(2)
    )
    rows = []
    for _ in range(draw(st.integers(0, 30))):
        index = draw(st.integers(0, len(tracks) - 1))
        track = tracks[index]
        start = draw(_TIME)
        end = draw(st.one_of(st.just(int(OPEN_END)), st.integers(0, 30).map(lambda length, s=start: s + length)))
        launch = draw(st.sampled_from([2 * track.rank, 2 * track.rank + 1, -1]))
        if track.kind == TrackKind.HOST:
            rows.append((index, HOST, -1, start, end, draw(st.integers(0, len(host_names) - 1)), 0))
        elif track.kind == TrackKind.LAUNCH:
            rows.append((index, LAUNCH, launch, start, end, 0, 0))
        else:
            rows.append((index, draw(st.integers(0, BARRIER)), launch, start, end, draw(_PAYLOAD), draw(_PAYLOAD)))
    spans = make_spans(rows)
    return Timeline(
        unit="ns",
        ranks=tuple(make_rank(rank) for rank in range(num_ranks)),
        tracks=tracks,
        events=EVENTS,
        launches=launches,
        spans=spans,
        marks=_draw_marks(draw, tracks),
        flows=_draw_flows(draw, spans),
        host_names=host_names,
        problems=(Problem("error", "lost_records", 0, 2, "3 records lost, 12 would have been enough", 3),),
        title=draw(_TEXT),
    )


def _draw_marks(draw: st.DrawFn, tracks: tuple[Track, ...]) -> Marks:
    devices = [index for index, track in enumerate(tracks) if track.kind == TrackKind.DEVICE]
    mark = st.tuples(st.sampled_from(devices), _TIME, _PAYLOAD)
    marks = sorted(draw(st.lists(mark, max_size=5)))
    return Marks(
        track=np.array([mark[0] for mark in marks], np.int32),
        event=np.full(len(marks), COPY, np.int32),
        launch=np.full(len(marks), -1, np.int32),
        time=np.array([mark[1] for mark in marks], np.int64),
        payload=np.array([mark[2] for mark in marks], np.uint64),
    )


def _draw_flows(draw: st.DrawFn, spans: Spans) -> Flows:
    signals, waits = (
        np.flatnonzero(spans.event == SIGNAL),
        np.flatnonzero((spans.event == WAIT) & (spans.end != OPEN_END)),
    )
    if not len(signals) or not len(waits):
        return Flows()
    edges = draw(
        st.lists(st.tuples(st.sampled_from(list(signals)), st.sampled_from(list(waits))), unique=True, max_size=20)
    )
    return Flows(np.array([edge[0] for edge in edges], np.int64), np.array([edge[1] for edge in edges], np.int64))


def timeline_of(open_spans: list[tuple[int, int, int, int]], num_ranks: int = 4, last_end: int = 9_000) -> Timeline:
    """Open spans are (rank, event, peer, start).

    Rank r's last closed span ended at 2,000 + r; a range of rank 0's host ended at last_end.
    """
    tracks = make_tracks(num_ranks, num_blocks=1, num_warps=4)
    device = [[i for i, t in enumerate(tracks) if t.rank == r and t.kind is TrackKind.DEVICE] for r in range(num_ranks)]
    host = next(i for i, t in enumerate(tracks) if t.kind is TrackKind.HOST)
    rows = [(host, 4, -1, last_end, last_end, 0, 0)]
    rows += [(device[rank][0], COPY, rank, 1_000, 2_000 + rank, 0, 0) for rank in range(num_ranks)]
    used = [0] * num_ranks
    for rank, event, peer, start in open_spans:
        rows.append((device[rank][used[rank]], event, rank, start, int(OPEN_END), peer, 0))
        used[rank] += 1
    return make_timeline(num_ranks).replace(
        tracks=tracks,
        spans=make_spans(rows),
        flows=Flows(),
        launches=tuple(make_launch(rank) for rank in range(num_ranks)),
        ranks=tuple(make_rank(rank) for rank in range(num_ranks)),
    )

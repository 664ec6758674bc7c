"""The analysis of waits once more, one wait at a time in plain Python: slow, and plain to see right.

And any Timelines to try it on: all kinds of channels, spans that overlap, coincide, have no length or never close.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import strategies as st
from scenarios import EVENTS, NUMBER
from timelines import make_launch, make_rank, make_spans

from tracekern.analysis.waits.analyze import CLASSES
from tracekern.timeline.facts.open_spans import endless_waits, known_ends
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.model import OPEN_END, ChannelKind, EventClass, Timeline, Track, TrackKind, unpack_field

NEVER = 1 << 61
Wait = dict[str, int]


def oracle(timeline: Timeline) -> list[Wait]:
    """The classes, slack_ns, wrong_order_ns and peer of every wait, in the order of the spans."""
    spans, found = timeline.spans, []
    signals: dict[int, list[int]] = defaultdict(list)
    for signal, wait in zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True):
        signals[wait].append(signal)
    last_warps, meetings = _last_warps(timeline), _meetings(timeline)
    ends, is_endless = known_ends(timeline), endless_waits(timeline)
    for row in range(len(spans)):
        event = timeline.events[spans.event[row]]
        if event.event_class is not EventClass.WAIT or (spans.end[row] == OPEN_END and not is_endless[row]):
            continue
        if is_endless[row]:
            wait = _endless(timeline, row, int(ends[row]))
        elif event.channel is None:
            wait = _at_barrier(timeline, row, last_warps.get(row, row)) | {"peer": -1}
            if row in last_warps:
                wait["peer"] = _rank(timeline, row)
        elif event.channel.kind is ChannelKind.BARRIER:
            last = meetings.get(_meeting(timeline, row))
            wait = _unmatched(timeline, row) if last is None else _at_barrier(timeline, row, last)
        elif signals[row]:
            wait = _for_signal(timeline, row, signals[row], event.channel.kind)
        else:
            wait = _unmatched(timeline, row)
            if event.channel.kind.has_levels and _wanted(timeline, row) <= event.channel.initial:
                wait["completion"] = wait.pop("unmatched")
        found.append({**dict.fromkeys((*CLASSES, "slack_ns"), 0), **wait, "row": row})
    _add_wrong_order(timeline, found)
    return found


def _rank(timeline: Timeline, row: int) -> int:
    return timeline.tracks[timeline.spans.track[row]].rank


def _wanted(timeline: Timeline, row: int) -> int:
    spans = timeline.spans
    fields = timeline.events[spans.event[row]].begin_fields
    return int(unpack_field(fields, "wanted", spans.begin_payload[row : row + 1])[0])


def _unmatched(timeline: Timeline, row: int) -> Wait:
    event, spans = timeline.events[timeline.spans.event[row]], timeline.spans
    peer = -1
    for fields, payload in ((event.begin_fields, spans.begin_payload), (event.end_fields, spans.end_payload)):
        if any(field.name == "peer" for field in fields):  # of two the end tells who came
            peer = int(unpack_field(fields, "peer", payload[row : row + 1])[0])
    known = peer in {rank.rank for rank in timeline.ranks}
    ns = int(timeline.spans.end[row] - timeline.spans.start[row])
    return {"unmatched": ns, "peer": peer if known else -1}


def _endless(timeline: Timeline, row: int, end: int) -> Wait:
    event, ns = timeline.events[timeline.spans.event[row]], end - int(timeline.spans.start[row])
    kind = event.channel.kind if event.channel else None
    late = {ChannelKind.DATA: "late_sender", ChannelKind.CREDIT: "late_receiver", ChannelKind.BARRIER: "barrier_late"}
    peer = -1
    if any(field.name == "peer" for field in event.begin_fields):
        peer = int(unpack_field(event.begin_fields, "peer", timeline.spans.begin_payload[row : row + 1])[0])
    is_known = peer in {rank.rank for rank in timeline.ranks}
    waits_for_nobody = kind is None or (kind.has_levels and _wanted(timeline, row) <= event.channel.initial)
    return {"peer": peer if is_known else -1, "completion" if waits_for_nobody else late[kind]: ns, "endless": 1}


def _for_signal(timeline: Timeline, row: int, signals: list[int], kind: ChannelKind) -> Wait:
    spans = timeline.spans
    begin, end = int(spans.start[row]), int(spans.end[row])
    ends = [(int(spans.end[s]) if spans.end[s] != OPEN_END else NEVER, int(spans.start[s]), s) for s in signals]
    done, there, signal = max(ends)
    late = min(max(there - begin, 0), end - begin)
    drain = max(0, min(end, done) - max(begin, there))
    wait = {"drain": drain, "visibility": end - begin - late - drain, "slack_ns": max(begin - done, 0)}
    wait["peer"] = _rank(timeline, signal)
    if kind is ChannelKind.CREDIT:
        return {**wait, "late_receiver": late}
    return {**wait, "late_sender": late, "done": done}


def _at_barrier(timeline: Timeline, row: int, last: int) -> Wait:
    """`last`: the span with which the last one came."""
    begin, end = int(timeline.spans.start[row]), int(timeline.spans.end[row])
    late = min(max(int(timeline.spans.start[last]) - begin, 0), end - begin)
    return {"barrier_late": late, "completion": end - begin - late, "peer": _rank(timeline, last)}


def _last_warps(timeline: Timeline) -> dict[int, int]:
    """Wait at a block or grid barrier -> the wait of the warp that came last."""
    spans = timeline.spans
    passes: dict[tuple[int, int, int], int] = defaultdict(int)
    meetings: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for row in range(len(spans)):
        event, track, launch = int(spans.event[row]), int(spans.track[row]), int(spans.launch[row])
        if timeline.events[event].name in ("wait_block", "wait_grid"):
            block = timeline.tracks[track].block if timeline.events[event].name == "wait_block" else -1
            meetings[event, launch, block, passes[event, launch, track]].append(row)
            passes[event, launch, track] += 1
    last = {}
    for rows in meetings.values():
        latest = max(rows, key=lambda row: int(spans.start[row]))
        if all(spans.end[row] == OPEN_END or spans.end[row] >= spans.start[latest] for row in rows):
            last.update(dict.fromkeys(rows, latest))
    return last


def _meeting(timeline: Timeline, row: int) -> tuple[int, int, int]:
    """(rank that is told or waits, round, epoch) of a span of the channel `meeting`."""
    spans = timeline.spans
    event, payload = timeline.events[spans.event[row]], spans.begin_payload[row : row + 1]
    number = int(unpack_field(event.begin_fields, "round", payload)[0])
    rank = timeline.tracks[spans.track[row]].rank
    if event.event_class is EventClass.SIGNAL:
        rank = int(unpack_field(event.begin_fields, "peer", payload)[0])
    return rank, number, timeline.launches[spans.launch[row]].epoch


def _meetings(timeline: Timeline) -> dict[tuple[int, int, int], int]:
    """The signal of the rank that came last."""
    last: dict[tuple[int, int, int], tuple[int, int]] = {}
    for row in range(len(timeline.spans)):
        if timeline.events[timeline.spans.event[row]].name == "signal_meeting":
            meeting, arrival = _meeting(timeline, row), (int(timeline.spans.start[row]), row)
            last[meeting] = max(last.get(meeting, arrival), arrival)
    return {meeting: row for meeting, (_, row) in last.items()}


def _add_wrong_order(timeline: Timeline, found: list[Wait]) -> None:
    spans = timeline.spans
    arrived: dict[tuple[int, int, int], int] = {}  # earliest arrival of what a later wait of the loop takes
    for wait in reversed(found):
        row = wait["row"]
        loop = int(spans.track[row]), int(spans.launch[row]), int(spans.event[row])
        late_until = int(spans.start[row]) + wait["late_sender"]
        wait["wrong_order_ns"] = (
            0 if "endless" in wait else max(0, late_until - max(int(spans.start[row]), arrived.get(loop, late_until)))
        )
        if "done" in wait:
            arrived[loop] = min(wait["done"], arrived.get(loop, wait["done"]))


@st.composite
def any_runs(draw: st.DrawFn) -> Timeline:
    """Spans of all events of `scenarios`, at any time, of any length, for any peer."""
    num_ranks = draw(st.integers(1, 3))
    tracks = tuple(
        Track(rank, TrackKind.DEVICE, f"warp {warp}", block=warp // 2, warp=warp % 2)
        for rank in range(num_ranks)
        for warp in range(3)
    )
    rows = []
    for _ in range(draw(st.integers(0, 40))):
        track = draw(st.integers(0, len(tracks) - 1))
        event = draw(st.integers(0, NUMBER["wait_other"]))
        start, length = draw(st.integers(1000, 1060)), draw(st.integers(-2, 40))
        payload, shift = 0, 0
        for field in EVENTS[event].begin_fields:
            value = draw(st.integers(0, num_ranks)) if field.name == "peer" else draw(st.integers(0, 1))
            payload |= value << shift
            shift += field.bits
        launch = 2 * tracks[track].rank + draw(st.integers(0, 1))
        rows.append((track, event, launch, start, start + length if length >= 0 else int(OPEN_END), payload, 0))
    timeline = Timeline(
        unit="ns",
        ranks=tuple(make_rank(rank) for rank in range(num_ranks)),
        tracks=tracks,
        events=EVENTS,
        launches=tuple(
            make_launch(r, sequence=number, epoch=7 + number) for r in range(num_ranks) for number in (0, 1)
        ),
        spans=make_spans(rows),
    )
    flows, _ = join_flows(timeline)
    order = np.array(draw(st.permutations(range(len(flows)))), np.int64)
    return timeline.replace(flows=type(flows)(flows.signal[order], flows.wait[order]))

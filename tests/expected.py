"""What a picture of a Timeline must show, worked out one span at a time and apart from the exporters."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.model import OPEN_END, EventClass, Field, Timeline, TrackKind

Slice = tuple[str, int, int, tuple[tuple[str, Any], ...]]
"""(name, start, duration, arguments)."""


def draw_end(timeline: Timeline, index: int) -> int:
    """Where a span's picture ends: an open one reaches to the next launch of its track, to the end of its own launch,
    or to the end of everything on its clock."""
    spans = timeline.spans
    if spans.end[index] != OPEN_END:
        return int(spans.end[index])
    rank_of = [track.rank for track in timeline.tracks]
    times = [
        (rank_of[track], time)
        for table, column in ((spans, spans.start), (spans, spans.end), (timeline.marks, timeline.marks.time))
        for track, time in zip(table.track.tolist(), column.tolist(), strict=True)
    ]
    own = rank_of[spans.track[index]]
    end = max(time for rank, time in times if timeline.aligned or rank == own)
    launch_ends = [
        int(spans.end[other])
        for other in range(len(spans))
        if timeline.tracks[spans.track[other]].kind is TrackKind.LAUNCH
        and spans.launch[other] == spans.launch[index] >= 0
    ]
    if timeline.tracks[spans.track[index]].kind is TrackKind.DEVICE and launch_ends:
        is_closed = launch_ends[-1] != OPEN_END and launch_ends[-1] >= spans.start[index]
        end = launch_ends[-1] if is_closed else end
    later = [
        int(spans.start[other])
        for other in range(index + 1, len(spans))
        if spans.track[other] == spans.track[index] and spans.launch[other] != spans.launch[index]
    ]
    return max(int(spans.start[index]), min([*later, end]))


def unpack(fields: tuple[Field, ...], payload: int) -> list[int]:
    values = []
    for field in fields:
        value = payload & ((1 << field.bits) - 1)
        if field.signed and value >> (field.bits - 1):
            value -= 1 << field.bits
        values.append(value)
        payload >>= field.bits
    return values


def begin_arguments(timeline: Timeline, event: int, launch: int, payload: int) -> dict[str, Any]:
    kind = timeline.events[event]
    arguments: dict[str, Any] = {}
    at_end = {field.name for field in kind.end_fields}
    for field, value in zip(kind.begin_fields, unpack(kind.begin_fields, payload), strict=True):
        arguments["begin_" + field.name if field.name in at_end else field.name] = value
    if launch >= 0 and kind.event_class is not EventClass.LAUNCH:
        arguments["launch"] = f"{timeline.launches[launch].name} #{timeline.launches[launch].sequence}"
        arguments["epoch"] = timeline.launches[launch].epoch
        if LaunchIterations(timeline).is_start_up[launch]:
            arguments["start_up"] = 1
    elif launch >= 0:
        shape = timeline.launches[launch]
        arguments |= {"blocks": shape.blocks_run or shape.num_blocks, "warps": shape.warps_per_block}
    return arguments


def span_slice(timeline: Timeline, index: int) -> Slice:
    spans = timeline.spans
    event, launch = int(spans.event[index]), int(spans.launch[index])
    kind = timeline.events[event]
    arguments = begin_arguments(timeline, event, launch, int(spans.begin_payload[index]))
    if spans.end[index] == OPEN_END:
        arguments["open"] = True
    else:
        for field, value in zip(kind.end_fields, unpack(kind.end_fields, int(spans.end_payload[index])), strict=True):
            reserved = {"launch", "epoch", "open", "released_by"}
            arguments["end_" + field.name if field.name in reserved else field.name] = value
    if (releaser := last_signal(timeline, index)) is not None:
        arguments["released_by"] = place(timeline, releaser)
    name = kind.name
    if kind.event_class is EventClass.HOST:
        name = timeline.host_names[int(spans.begin_payload[index])]
    elif kind.event_class is EventClass.LAUNCH and launch >= 0:
        name = timeline.launches[launch].name
    start = int(spans.start[index])
    return name, start, draw_end(timeline, index) - start, tuple(sorted(arguments.items()))


def last_signal(timeline: Timeline, wait: int) -> int | None:
    """Of the signals with an arrow to `wait` the one that arrived last; of two at once the later row of the picture."""
    spans, end = timeline.spans, draw_end(timeline, wait)
    signals = [
        signal
        for signal, its_wait in zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True)
        if its_wait == wait and end > spans.start[signal] and spans.end[wait] != OPEN_END
    ]

    def arrival(signal: int) -> tuple[int, ...]:
        ends = draw_end(timeline, signal)
        return min(ends, end), int(spans.track[signal]), int(spans.start[signal]), -ends, signal

    return max(signals, key=arrival, default=None)


def place(timeline: Timeline, index: int) -> str:
    """Where a kernel's span is: rank, block, warp and event."""
    track = timeline.tracks[timeline.spans.track[index]]
    rank = next((rank.label for rank in timeline.ranks if rank.rank == track.rank), "") or f"rank {track.rank}"
    if track.kind is TrackKind.DEVICE:
        row = f"block {track.block:03} warp {track.warp:02} {track.role}".rstrip()
    else:
        row = track.name
    return f"{rank} {row}: {timeline.events[timeline.spans.event[index]].name}"


def mark_slice(timeline: Timeline, index: int) -> Slice:
    marks = timeline.marks
    event = int(marks.event[index])
    arguments = begin_arguments(timeline, event, int(marks.launch[index]), int(marks.payload[index]))
    return timeline.events[event].name, int(marks.time[index]), 0, tuple(sorted(arguments.items()))


def slices_by_track(timeline: Timeline) -> dict[int, Counter[Slice]]:
    """Per track the spans and marks that its rows must show."""
    result: dict[int, Counter[Slice]] = {}
    for index, track in enumerate(timeline.spans.track.tolist()):
        result.setdefault(track, Counter())[span_slice(timeline, index)] += 1
    for index, track in enumerate(timeline.marks.track.tolist()):
        result.setdefault(track, Counter())[mark_slice(timeline, index)] += 1
    return result


def drawn_flows(timeline: Timeline) -> Counter[tuple[Slice, Slice]]:
    """The (signal, wait) pairs of arrows that do not point backwards."""
    pairs: Counter[tuple[Slice, Slice]] = Counter()
    for signal, wait in zip(timeline.flows.signal.tolist(), timeline.flows.wait.tolist(), strict=True):
        if draw_end(timeline, wait) > timeline.spans.start[signal]:
            pairs[span_slice(timeline, signal), span_slice(timeline, wait)] += 1
    return pairs

"""Since when two runs can be compared: the last event before a wait that ordered the waiter and the one it waited for.

Ordered are, from docs/analysis.md: two runs when one of them was released from a wait for the other; the streams of two
ranks when one was released from a wait for the other in launches that were over before the present ones began, or both
from a barrier of ranks; a run and the launches of a peer that it, or a launch before it on its stream, has heard
from already; the warps of a block or grid at each of their barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.timeline.intervals import one_line
from tracekern.timeline.model import Int64, Mask, Timeline, field_values

_NEVER = np.iinfo(np.int64).min
_LATE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Edges:
    """[n] waits of which both ends are known, in the order of Waits."""

    wait: Int64
    """Index into Waits."""
    waiter: Int64
    """Run that waited."""
    source: Int64
    """Run that it waited for."""
    begin: Int64
    release: Int64
    """When the lateness was over: begin + late_ns."""
    end: Int64

    def __len__(self) -> int:
        return len(self.wait)

    def take(self, which: Int64 | slice) -> Edges:
        columns = (self.wait, self.waiter, self.source, self.begin, self.release, self.end)
        return Edges(*(column[which] for column in columns))


def is_sorted(first: Int64, second: Int64) -> bool:
    """By `first`, and where that is the same by `second`."""
    return bool(np.all((first[1:] > first[:-1]) | ((first[1:] == first[:-1]) & (second[1:] >= second[:-1]))))


def find_edges(timeline: Timeline, graph: EventGraph, waits: Waits, chosen: Mask | None = None) -> Edges:
    """The waits (of the mask `chosen`, [num_waits]) whose releaser is on record, on another track."""
    releaser = np.where(waits.signal >= 0, waits.signal, waits.last_arrival)
    wait = np.flatnonzero(releaser >= 0 if chosen is None else (releaser >= 0) & chosen)
    waiter = graph.run_of_spans(timeline, waits.row[wait])
    source = graph.run_of_spans(timeline, releaser[wait])
    known = (waiter >= 0) & (source >= 0) & (waiter != source)
    if not known.all():
        wait, waiter, source = wait[known], waiter[known], source[known]
    row = waits.row[wait]
    begin = timeline.spans.start[row]
    return Edges(wait, waiter, source, begin, begin + waits.late_ns[wait], timeline.spans.end[row])


def last_ordered(timeline: Timeline, graph: EventGraph, waits: Waits, edges: Edges, which: Int64) -> Int64:
    """[n] time of the last event that ordered waiter and source before each wait edges[which].

    Where there was none: when the first launch of all began.
    """
    if not len(which):
        return np.empty(0, np.int64)
    schedule, runs = graph.schedule, graph.runs
    asked = edges.take(which)
    waiter_launch = runs.launch[asked.waiter].astype(np.int64)
    source_launch = runs.launch[asked.source].astype(np.int64)
    ordered = np.maximum(
        _by_earlier_launches(graph, edges, waits.late_ns[edges.wait] > 0)[which],
        _by_runs(edges, asked, waits.late_ns[edges.wait] > 0),
    )
    heard = _first_heard(edges, runs.launch[edges.source].astype(np.int64), len(schedule.rank))
    waiter_heard = heard(asked.waiter, source_launch) <= asked.begin
    source_heard = heard(asked.source, waiter_launch) <= asked.release
    ordered = np.maximum(ordered, np.where(waiter_heard, schedule.start[source_launch], _NEVER))
    ordered = np.maximum(ordered, np.where(source_heard, schedule.start[waiter_launch], _NEVER))
    ordered = np.maximum(ordered, _by_barriers(timeline, waits)[asked.wait])
    ordered = np.maximum(ordered, _by_meetings(timeline, graph, waits, edges, asked))
    return np.clip(ordered, schedule.start[schedule.order].min(), asked.begin)


def latest_before(group: Int64, time: Int64, asked_group: Int64, asked_time: Int64) -> Int64:
    """[m] index of the last of the [n] entries of the same group with time <= asked; -1 where there is none."""
    order = np.lexsort((time, group))
    # Asked behind entries of the same time: one sort of both gives each its place.
    both = np.lexsort(
        (
            np.repeat([0, 1], [len(time), len(asked_time)]),
            np.concatenate([time, asked_time]),
            np.concatenate([group, asked_group]),
        )
    )
    is_asked = both >= len(time)
    entries_before = np.cumsum(~is_asked)[is_asked]
    found = np.full(len(asked_time), -1, np.int64)
    asked = both[is_asked] - len(time)
    some = entries_before > 0
    candidate = order[entries_before[some] - 1]
    found[asked[some]] = np.where(group[candidate] == asked_group[asked[some]], candidate, -1)
    return found


def _by_earlier_launches(graph: EventGraph, edges: Edges, blocked: Mask) -> Int64:
    """[num_edges] by what is known of pairs of launches: when their streams last met, or that one has heard."""
    schedule, runs = graph.schedule, graph.runs
    meetings = group_rows(len(edges), runs.launch[edges.waiter], runs.launch[edges.source])
    waiter, source = meetings.columns
    first_end, last_end, released = np.full(len(waiter), _LATE), *np.full((2, len(waiter)), _NEVER)
    np.minimum.at(first_end, meetings.group, edges.end)
    np.maximum.at(last_end, meetings.group, edges.end)
    np.maximum.at(released, meetings.group[blocked], edges.release[blocked])

    streams = schedule.stream[waiter].astype(np.int64), schedule.stream[source].astype(np.int64)
    pair = np.minimum(*streams) << 32 | np.maximum(*streams)
    both_began = np.minimum(schedule.start[waiter], schedule.start[source])
    late = np.flatnonzero(released > _NEVER)
    late = late[np.lexsort((last_end[late], pair[late]))]
    to_line = one_line(pair[late], released[late], released[late])
    last_release = np.maximum.accumulate(released[late] + to_line) - to_line
    met = latest_before(pair[late], last_end[late], pair, both_began)
    ordered = np.where(met >= 0, last_release[met] if len(late) else _NEVER, _NEVER)
    # A stream has heard from a launch when one of its earlier launches has.
    for listener, speaker, heard_by in ((waiter, source, waiter), (source, waiter, source)):
        told = latest_before(
            streams[0] << 32 | source,
            first_end,
            schedule.stream[heard_by].astype(np.int64) << 32 | speaker,
            schedule.start[listener],
        )
        ordered = np.maximum(ordered, np.where(told >= 0, schedule.start[speaker], _NEVER))
    # Launches of one stream: the later one began when the earlier was over.
    same = streams[0] == streams[1]
    ordered = np.where(same, np.maximum(ordered, schedule.start[waiter]), ordered)
    return ordered[meetings.group]


def _by_runs(edges: Edges, asked: Edges, blocked: np.ndarray) -> Int64:
    """[n] release of the last late wait of these two runs for one another, in either direction."""
    lasting = edges.take(np.flatnonzero(blocked))
    num_runs = max(int(edges.waiter.max()), int(edges.source.max())) + 1

    def pair(some: Edges) -> Int64:
        return np.minimum(some.waiter, some.source) * num_runs + np.maximum(some.waiter, some.source)

    met = latest_before(pair(lasting), lasting.release, pair(asked), asked.begin)
    return np.where(met >= 0, lasting.release[met], _NEVER) if len(lasting) else np.full(len(asked), _NEVER)


def _first_heard(edges: Edges, source_launch: Int64, num_launches: int) -> Callable[[Int64, Int64], Int64]:
    """A look-up: [n] when a run had first got a signal from a launch; _LATE for never."""
    key = edges.waiter * num_launches + source_launch
    known, first = np.unique(key, return_index=True)  # the waits of a run are in their order
    end = edges.end[first]

    def look_up(run: Int64, launch: Int64) -> Int64:
        wanted = run * num_launches + launch
        found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.where(known[found] == wanted, end[found], _LATE)

    return look_up


def _by_barriers(timeline: Timeline, waits: Waits) -> Int64:
    """[num_waits] at a block or grid barrier: when the last warp came to the same kind of barrier before."""
    spans = timeline.spans
    ordered = np.full(len(waits), _NEVER)
    local = np.flatnonzero(waits.last_arrival >= 0)
    row = waits.row[local]
    keys = (spans.track[row], spans.launch[row], spans.event[row])
    order = np.lexsort((spans.start[row], *keys))
    again = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    ordered[local[order[1:][again]]] = spans.start[waits.last_arrival[local[order[:-1][again]]]]
    return ordered


def _by_meetings(timeline: Timeline, graph: EventGraph, waits: Waits, edges: Edges, asked: Edges) -> Int64:
    """[n] when the later of the two was released from the last barrier of ranks that the waiter had passed before."""
    met = np.flatnonzero((waits.kind[edges.wait] == WaitKind.BARRIER) & (waits.signal[edges.wait] >= 0))
    ordered = np.full(len(asked), _NEVER)
    if not len(met):
        return ordered
    meeting = _number_meetings(timeline, waits, edges.wait[met])
    stream_of_run = graph.schedule.stream[graph.runs.launch].astype(np.int64)
    stream, release = stream_of_run[edges.waiter[met]], edges.release[met]
    waiter, source = stream_of_run[asked.waiter], stream_of_run[asked.source]
    last = latest_before(stream, edges.end[met], waiter, asked.begin)
    some = np.flatnonzero(last >= 0)
    both = latest_before(
        stream << 32 | meeting, release, source[some] << 32 | meeting[last[some]], asked.release[some] - 1
    )
    some, both = some[both >= 0], both[both >= 0]
    ordered[some] = np.maximum(release[last[some]], release[both])
    return np.where(ordered <= asked.begin, ordered, _NEVER)


def _number_meetings(timeline: Timeline, waits: Waits, wait: Int64) -> Int64:
    """[n] a number for each barrier of ranks that the waits were at, the same for all ranks."""
    spans, row = timeline.spans, waits.row[wait]
    launch, event = spans.launch[row], spans.event[row]
    epochs = np.array([entry.epoch for entry in timeline.launches] + [0], np.int64)[launch]
    if not epochs.any():
        epochs = np.array([entry.sequence for entry in timeline.launches] + [0], np.int64)[launch]
    channels = list(dict.fromkeys(entry.channel for entry in timeline.events))
    channel = np.array([channels.index(entry.channel) for entry in timeline.events], np.int64)[event]
    number = group_rows(len(row), channel, epochs).group
    for name in sorted({key for entry in channels if entry for key in entry.key if key != "peer"}):
        value = np.zeros(len(row), np.int64)
        for place, entry in enumerate(timeline.events):
            mine = np.flatnonzero(event == place)
            known = field_values(entry, name, spans, row[mine])
            if known is not None:
                value[mine] = known
        number = group_rows(len(row), number, value).group
    return number

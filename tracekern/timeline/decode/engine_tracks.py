"""Tracks that threads of the host wrote: transfers, writes and waits of transfer engines, which overlap.

Their times are those of the host. Each track of an engine becomes as many as it takes for no two spans to
overlap, but where one lies within the other.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump
from tracekern.formatting import count
from tracekern.timeline.columns import join_rows, rows_of_ranges
from tracekern.timeline.decode.event_tables import EventNumbers
from tracekern.timeline.decode.problems import Seen
from tracekern.timeline.decode.record_columns import Batch, WriterRuns, read_runs
from tracekern.timeline.decode.span_records import decode_spans
from tracekern.timeline.decode.track_merge import TrackMerge, assign_lanes
from tracekern.timeline.model import Int32, Marks, Problem, Spans, Timeline, Track, TrackKind

QUIET = "nothing"
"""A mark that only says that a track goes on."""
WITHIN = ("queued", "command")
"""Events whose spans lie within the one before: part of a transfer."""


def add_engines(timeline: Timeline, dump: Dump) -> Timeline:
    """The timeline of a rank with the tracks of its engines behind its own. dump: of those alone."""
    if not dump.launches:
        return timeline
    runs, area = read_runs(dump)
    none = np.empty(0, np.int32)
    events, seen = EventNumbers(dump), Seen(runs, TrackMerge((), none, np.empty(0, np.int64), none))
    names = [dump.metadata["role_tables"][launch.role_table] for launch in dump.launches]
    tracks, problems = list(timeline.tracks), list(timeline.problems)
    spans: list[Spans] = []
    marks: list[Marks] = []
    for run in np.flatnonzero(runs.started).tolist():
        own = np.array([run], np.int64)
        records = area[rows_of_ranges(runs.first[own], runs.written[own])]
        batch = Batch(records, np.zeros(len(records), np.int32), own, runs, np.array([len(tracks)], np.int32))
        of_run, marked = decode_spans(batch, events, seen)
        lane = _lanes(of_run, events)
        of_run = dataclasses.replace(of_run, track=of_run.track + lane)
        last = np.where(of_run.is_open, fmt.MAX_NS, of_run.end)
        spans.append(of_run.take(np.lexsort((-last, of_run.start, lane))))
        marks.append(marked.take(np.flatnonzero(~_is_named(marked.event, events, (QUIET,)))))
        if number := int((of_run.end - of_run.start >= _longest_ns(dump))[~of_run.is_open].sum()):
            problems.append(_too_long(dump, len(tracks), number))
        if lost := int(runs.lost[run]):
            problems.append(_loss(dump.rank, len(tracks), lost))
        if torn := len(records) - len(of_run) - len(marked):
            text = f"rank {dump.rank}: {count(torn, 'record')} of a transfer engine of no known kind"
            problems.append(Problem("error", "torn_track", dump.rank, len(tracks), text, torn))
        if any(map(len, seen.backwards)):
            text = f"rank {dump.rank}: times of a transfer engine's track fall, or lie beyond its end"
            problems.append(Problem("error", "torn_track", dump.rank, len(tracks), text, 1))
            seen.backwards.clear()
        tracks += [_track(dump.rank, runs, names, run, number) for number in range(int(lane.max(initial=0)) + 1)]
    added = Timeline("ticks", (), (), events.types(), (), join_rows(spans, Spans()), join_rows(marks, Marks()))
    return _append(timeline, added).replace(tracks=tuple(tracks), problems=tuple(problems))


def _lanes(spans: Spans, events: EventNumbers) -> Int32:
    """[n] the lane of each span of a run, which are in the order of their begins."""
    within = _is_named(spans.event, events, WITHIN)
    lane = np.zeros(len(spans), np.int32)
    outer = np.flatnonzero(~within)
    last = np.where(spans.is_open, fmt.MAX_NS, spans.end)
    lane[outer] = assign_lanes(np.zeros(len(outer), np.int64), spans.start[outer], last[outer])
    before = np.maximum.accumulate(np.where(within, 0, np.arange(len(spans))))
    return np.where(within, lane[before], lane)


def _track(rank: int, runs: WriterRuns, names: list[list[str]], run: int, lane: int) -> Track:
    launch, warp = int(runs.launch[run]), int(runs.warp[run])
    name = names[launch][warp] if warp < len(names[launch]) else f"track {warp}"
    suffix = f" lane {lane + 1}" if lane else ""
    return Track(rank, TrackKind.ENGINE, f"{name}{suffix}", stream=launch, block=warp, warp=lane, role=name)


def _is_named(event: Int32, events: EventNumbers, names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return np.isin(event, [idx for idx, known in enumerate(events.types()) if known.name in names])


def _longest_ns(dump: Dump) -> int:
    """What a record says of a span that was longer than it can say."""
    return ((1 << 32) - 2) << int(dump.metadata["clock"]["shift"])


def _too_long(dump: Dump, track: int, number: int) -> Problem:
    text = (
        f"rank {dump.rank}: {count(number, 'span')} of a transfer engine lasted {_longest_ns(dump) / 1e9:.0f} s, or "
        "longer than a record can say"
    )
    return Problem("warning", "ambiguous_time", dump.rank, track, text, number)


def _loss(rank: int, track: int, lost: int) -> Problem:
    text = f"rank {rank}: {count(lost, 'record')} of a transfer engine found no room; traced(capture, records=...)"
    return Problem("error", "lost_records", rank, track, text, lost)


def _append(timeline: Timeline, added: Timeline) -> Timeline:
    """Both with the events of both. `added` is numbered as if its tracks came behind, and has no launches."""
    known = {event: idx for idx, event in enumerate(timeline.events)}
    number = np.array([known.setdefault(event, len(known)) for event in added.events] or [0], np.int32)
    spans, marks = added.spans, added.marks
    spans = dataclasses.replace(spans, event=number[spans.event], launch=np.full(len(spans), -1, np.int32))
    marks = dataclasses.replace(marks, event=number[marks.event], launch=np.full(len(marks), -1, np.int32))
    return timeline.replace(
        events=tuple(known),
        spans=join_rows([timeline.spans, spans], Spans()),
        marks=join_rows([timeline.marks, marks], Marks()),
    )

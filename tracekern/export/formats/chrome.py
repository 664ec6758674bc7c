"""Timeline -> Chrome JSON (.json, .json.gz), for tools that read nothing else; slower and larger than a Perfetto trace.

A process is a rank and has its number; one more holds what the trace says about itself. Thread numbers are unique over
the whole file and never a process number: viewers give such a thread a meaning of its own. The metadata of a warp's
thread says its block and warp.

A flow runs from an instant `sent` at the end of its signal (at its start, where the waiter saw the flag before the
signal's span closed) to an instant `released` at the end of its wait, each on the thread of its span: an arrow that was
bound to the wait itself would end at the wait's start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from tracekern.export import labels
from tracekern.export.drawing import (
    Drawing,
    argument_names,
    keep_one_row_per_block,
    launch_shape,
    prepare,
)
from tracekern.export.files import open_output
from tracekern.export.first_view import first_view
from tracekern.export.format import ExportStats, Format, Progress, TrackDetail
from tracekern.export.overview import Overview, to_draw
from tracekern.export.rows import sort_key
from tracekern.export.windows import Drawings, Windows
from tracekern.timeline.facts.counters import Counter, count_events
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.facts.span_facts import bytes_of_spans, groups_of_spans, has_rate
from tracekern.timeline.join.puts import split_carried
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Field, Int64, Launch, Marks, Timeline, TrackKind

_PLACE = ("block", "warp", "sm", "role", "group", "sub_warp")
"""What the metadata of a warp's thread says beside its name, for programs."""
_SPANS_AT_A_TIME = 1 << 16
_ROWS_PER_TRACK = 1 << 8  # in the sort order; lanes come after their track


def write_chrome(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
    max_spans: int | None = None,
    sought: Sequence[int] = (),
) -> ExportStats:
    """Writes the trace as JSON, gzipped when `path` ends in .gz. The file appears when it is whole.

    `tracks`, `progress`, `max_spans` and `sought` are those of write_perfetto().

    Raises:
        BadInput: the timeline is in ticks, or the file cannot be written.
    """
    timeline = split_carried(timeline)
    total_flows, of_other_warps, counters = len(timeline.flows), 0, count_events(timeline)
    if tracks == "block":
        timeline, of_other_warps = keep_one_row_per_block(timeline)
    drawing = prepare(timeline)
    if max_spans is not None:
        drawing = first_view(drawing, max_spans, sought)
    overview = Overview.total([drawing])
    with open_output(path) as sink:
        for lines in _Writer(overview).pieces([drawing], counters, of_other_warps, progress):
            sink.write(lines.encode("utf-8", "replace"))
    return overview.stats(path, of_other_warps + len(timeline.spans), total_flows)


def write_windows(
    windows: Windows,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
) -> ExportStats:
    """Writes what write_chrome() writes of the whole, one window after the other.

    Raises BadInput as write_chrome() does, or where there is no room for temporary files.
    """
    with to_draw(windows, tracks) as (drawings, overview, counters, rows), open_output(path) as sink:
        for lines in _Writer(overview).pieces(drawings, counters, rows.num_spans - overview.num_spans, progress):
            sink.write(lines.encode("utf-8", "replace"))
    return overview.stats(path, rows.num_spans, rows.num_flows)


FORMAT = Format("chrome", (".json", ".json.gz"), write_chrome, write_windows, 19_000, for_browser=True, order=2)


@dataclass
class _Row:
    """One thread of the file: a track, or a lane of one."""

    prefix: str
    """pid and tid, as JSON."""
    open_ends: list[int] = field(default_factory=list)


class _Part:
    """What is looked up of the spans of one drawing."""

    def __init__(self, drawing: Drawing, num_flows: int) -> None:
        """num_flows: those of parts before this one."""
        self._drawing, timeline = drawing, drawing.timeline
        self.sources, self.targets = _flows_by_span(drawing, num_flows)
        self.bytes, self.groups = bytes_of_spans(timeline).tolist(), groups_of_spans(timeline).tolist()
        texts, self.releaser = labels.describe_releasers(drawing)
        self.released_by = [f'"released_by":{_json(text)}' for text in texts]

    def span_tuples(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        spans = self._drawing.timeline.spans
        columns = (spans.track, spans.event, spans.launch, spans.start, spans.end, self._drawing.draw_end)
        payloads = (spans.begin_payload, spans.end_payload)
        return zip(*(column[first:last].tolist() for column in (*columns, *payloads)), strict=True)


class _Writer:
    def __init__(self, overview: Overview) -> None:
        self._overview, self._tables = overview, overview.tables
        self._time_shift = overview.time_shift
        self._lines: list[str] = []
        ranks = [rank.rank for rank in self._tables.ranks]
        self._banner_pid = max(ranks, default=-1) + 1
        self._next_tid = self._banner_pid + 1
        self._num_streams = {
            rank: len({t.stream for t in self._tables.tracks if t.rank == rank and t.kind == TrackKind.DEVICE})
            for rank in ranks
        }
        by_order = sorted(range(len(self._tables.tracks)), key=lambda i: sort_key(self._tables.tracks[i]))
        self._order = {track: order for order, track in enumerate(by_order)}
        self._rows: dict[int, list[_Row]] = {}
        self._begin_arguments = [_argument_formatter(event.begin_fields, event, 0) for event in self._tables.events]
        self._end_arguments = [_argument_formatter(event.end_fields, event, 1) for event in self._tables.events]
        self._launch_arguments = [
            _launch_arguments(launch, start_up)
            for launch, start_up in zip(
                self._tables.launches, launch_iterations(self._tables).is_start_up.tolist(), strict=True
            )
        ]
        self._num_spans = self._num_flows = 0
        """So far."""

    def pieces(
        self, drawings: Drawings, counters: Sequence[Counter], spans_left_out: int, progress: Progress | None
    ) -> Iterator[str]:
        """The file, piece by piece. drawings: those of which the overview is."""
        yield '{"displayTimeUnit":"ns","traceEvents":[\n'
        self._write_header(spans_left_out)
        self._write_counters(counters)
        yield self._take_lines()
        for number in range(len(drawings)):  # of which none is kept while the next one is read
            yield from self._part(drawings[number], progress)
        self._write_problems()
        yield self._take_lines()
        # An event without a comma behind it ends the list.
        end = _json({"ph": "M", "pid": self._banner_pid, "name": "process_labels", "args": {"labels": "tracekern"}})
        yield f'{end}\n],"metadata":{_json(labels.about(self._tables))}}}\n'

    def _part(self, drawing: Drawing, progress: Progress | None) -> Iterator[str]:
        part, num_spans = _Part(drawing, self._num_flows), len(drawing.timeline.spans)
        for first in range(0, num_spans, _SPANS_AT_A_TIME):
            last = min(first + _SPANS_AT_A_TIME, num_spans)
            for index, row in enumerate(part.span_tuples(first, last), first):
                self._write_span(part, index, *row)
            yield self._take_lines()
            if progress is not None:
                progress(self._num_spans + last, self._overview.num_spans)
        self._write_marks(drawing.timeline.marks)
        yield self._take_lines()
        self._num_spans += num_spans
        self._num_flows += int(drawing.flow_drawable.sum())

    def _take_lines(self) -> str:
        text = "".join(self._lines)
        self._lines.clear()
        return text

    def _write_header(self, spans_left_out: int) -> None:
        timeline, overview = self._tables, self._overview
        num_nodes = len({rank.node for rank in timeline.ranks})
        self._name_process(self._banner_pid, labels.title(timeline), 0)
        for rank in timeline.ranks:
            self._name_process(rank.rank, labels.rank_label(rank, num_nodes), rank.rank + 1)
        banner = labels.banner(timeline, spans_left_out, part=overview.part)
        prefix = self._new_thread(self._banner_pid, "about this trace", 0)
        start, end = overview.first_ns, overview.last_ns
        facts = labels.about(timeline) | labels.describe_first_waits(overview)
        facts["num_spans"] = labels.describe_spans(overview)
        facts["num_flows"] = labels.describe_flows(overview)
        arguments = _json(facts)
        self._event("X", start, prefix, _json(banner), "about", f',"dur":{_microseconds(end - start)}', arguments)

    def _write_counters(self, counters: Sequence[Counter]) -> None:
        for counter in counters:
            name = _json(f"{counter.name} (peaks)" if counter.is_thinned else counter.name)
            for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True):
                self._lines.append(
                    f'{{"ph":"C","name":{name},"pid":{counter.rank},'
                    f'"ts":{_microseconds(time + self._time_shift)},"args":{{"{counter.unit}":{value}}}}},\n'
                )

    def _write_span(
        self,
        part: _Part,
        index: int,
        track: int,
        event: int,
        launch: int,
        start: int,
        end: int,
        draw_end: int,
        begin: int,
        ended: int,
    ) -> None:
        kind = self._tables.events[event]
        parts = [self._begin_arguments[event](begin)]
        # A launch's own span names its launch and has the epoch among its fields.
        if launch >= 0 and kind.event_class is EventClass.LAUNCH:
            parts.append(_json(launch_shape(self._tables.launches[launch]))[1:-1])
        elif launch >= 0:
            parts.append(self._launch_arguments[launch])
        parts += self._derived_arguments(part, index, launch, kind, end - start)
        parts.append('"open":true' if end == OPEN_END else self._end_arguments[event](ended))
        if (releaser := part.releaser[index]) >= 0:
            parts.append(part.released_by[releaser])
        arguments = "{" + ",".join(filter(None, parts)) + "}"
        name = _json(_name(kind, launch, begin, self._tables.launches, self._tables.host_names))
        row = self._row_for(track, start, draw_end)
        row.open_ends.append(draw_end)
        duration = f',"dur":{_microseconds(draw_end - start)}'
        self._event("X", start, row.prefix, name, kind.event_class.value, duration, arguments)
        for flow_id, early in part.sources.get(index, ()):
            self._flow_end("s", "sent", start if early else draw_end, row.prefix, f',"id":{flow_id}')
        for flow_id in part.targets.get(index, ()):
            self._flow_end("f", "released", draw_end, row.prefix, f',"bp":"e","id":{flow_id}')

    def _derived_arguments(self, part: _Part, index: int, launch: int, kind: EventType, length: int) -> list[str]:
        parts = []
        if (group := part.groups[index]) >= 0:
            parts.append(f"{_json(self._tables.launches[launch].group_field)}:{group}")
        if (num_bytes := part.bytes[index]) >= 0:
            parts.append(f'"bytes":{num_bytes}')
            if has_rate(kind) and length > 0:
                parts.append(f'"gb_per_s":{num_bytes / length:.2f}')
        return parts

    def _flow_end(self, phase: str, name: str, time: int, prefix: str, extra: str) -> None:
        """An instant, and right after it the end of an arrow, which a viewer binds to the instant."""
        self._event("i", time, prefix, f'"{name}"', "flow", ',"s":"t"', "{}")
        self._event(phase, time, prefix, '"flow"', "flow", extra, "{}")

    def _row_for(self, track: int, start: int, end: int) -> _Row:
        """The first row of the track on which [start, end] lies inside, or beside, all others."""
        rows = self._rows_of(track)
        for row in rows:
            while row.open_ends and row.open_ends[-1] <= start:
                row.open_ends.pop()
            if not row.open_ends or row.open_ends[-1] >= end:
                return row
        rows.append(self._new_row(track, len(rows)))
        return rows[-1]

    def _rows_of(self, track: int) -> list[_Row]:
        if track not in self._rows:
            self._rows[track] = [self._new_row(track, 0)]
        return self._rows[track]

    def _new_row(self, track_idx: int, lane: int) -> _Row:
        track = self._tables.tracks[track_idx]
        name = labels.flat_label(track, self._num_streams.get(track.rank, 1)) + (f" (lane {lane + 1})" if lane else "")
        order = self._order[track_idx] * _ROWS_PER_TRACK + min(lane, _ROWS_PER_TRACK - 1)
        is_device = track.kind == TrackKind.DEVICE
        place = {key: getattr(track, key) for key in _PLACE} if is_device else {}
        return _Row(self._new_thread(track.rank, name, order, place))

    def _write_marks(self, marks: Marks) -> None:
        columns = (marks.track, marks.event, marks.launch, marks.time, marks.payload)
        for track, event, launch, time, payload in zip(*(column.tolist() for column in columns), strict=True):
            kind = self._tables.events[event]
            parts = [self._begin_arguments[event](payload), self._launch_arguments[launch] if launch >= 0 else ""]
            arguments = "{" + ",".join(filter(None, parts)) + "}"
            name = _json(_name(kind, launch, payload, self._tables.launches, self._tables.host_names))
            prefix = self._rows_of(track)[0].prefix
            self._event("i", time, prefix, name, kind.event_class.value, ',"s":"t"', arguments)

    def _write_problems(self) -> None:
        for problem, time in self._overview.problem_times():
            if problem.track >= 0:
                prefix = self._rows_of(problem.track)[0].prefix
            else:
                pid = problem.rank if problem.rank >= 0 else self._banner_pid
                prefix = self._new_thread(pid, "problems", -1)
            self._event("i", time, prefix, _json(problem.text), "problem", ',"s":"t"', "{}")

    def _new_thread(self, pid: int, name: str, order: int, place: Mapping[str, Any] = MappingProxyType({})) -> str:
        tid, self._next_tid = self._next_tid, self._next_tid + 1
        prefix = f'"pid":{pid},"tid":{tid}'
        for key, value in (("thread_name", {"name": name, **place}), ("thread_sort_index", {"sort_index": order})):
            self._lines.append(f'{{"ph":"M","name":"{key}",{prefix},"args":{_json(value)}}},\n')
        return prefix

    def _name_process(self, pid: int, name: str, order: int) -> None:
        for key, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": order})):
            self._lines.append(f'{{"ph":"M","name":"{key}","pid":{pid},"args":{_json(value)}}},\n')

    def _event(self, phase: str, time: int, prefix: str, name: str, category: str, extra: str, arguments: str) -> None:
        self._lines.append(
            f'{{"ph":"{phase}","name":{name},"cat":"{category}","ts":{_microseconds(time + self._time_shift)},'
            f'{prefix}{extra},"args":{arguments}}},\n'
        )


def _json(value: object) -> str:
    # Perfetto (v52) decodes the escapes of few names, so characters are written plainly. But it takes the quote after
    # an escaped backslash for an escaped one and refuses a file with a DEL in its metadata: these two are escaped.
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\\\\", "\\u005c").replace("\x7f", "\\u007f")


def _microseconds(value: int) -> str:
    return f"{value // 1000}.{value % 1000:03}"


def _name(kind: EventType, launch: int, payload: int, launches: tuple[Launch, ...], host_names: tuple[str, ...]) -> str:
    if kind.event_class is EventClass.HOST:
        return host_names[payload] or "(no name)"
    if kind.event_class is EventClass.LAUNCH and launch >= 0:
        return launches[launch].name
    return kind.name


def _launch_arguments(launch: Launch, is_start_up: bool) -> str:
    key = f'"launch_key":{_json(launch.key)},' if launch.key else ""
    of_group = f'"communicator":{_json(launch.members.label)},' if launch.members else ""
    start_up = '"start_up":1,' if is_start_up else ""
    return f'"launch":{_json(f"{launch.name} #{launch.sequence}")},{key}{of_group}{start_up}"epoch":{launch.epoch}'


def _argument_formatter(fields: tuple[Field, ...], event: EventType, which: int) -> Callable[[int], str]:
    """payload -> the fields as JSON members."""
    steps, shift = [], 0
    for entry, name in zip(fields, argument_names(event)[which], strict=True):
        sign = 1 << (entry.bits - 1) if entry.signed else 0
        steps.append((_json(name), shift, (1 << entry.bits) - 1, sign))
        shift += entry.bits

    def format_fields(payload: int) -> str:
        # (value ^ sign) - sign spreads the sign bit.
        return ",".join(f"{name}:{(payload >> shift & mask ^ sign) - sign}" for name, shift, mask, sign in steps)

    return format_fields


def _flows_by_span(drawing: Drawing, num_before: int) -> tuple[dict[int, list[tuple[int, bool]]], dict[int, list[int]]]:
    """Signal -> (flow id, whether it leaves early), wait -> flow ids; ids from 1, over all ranks and parts."""
    drawable = np.flatnonzero(drawing.flow_drawable)
    signal: Int64 = drawing.timeline.flows.signal[drawable]
    wait: Int64 = drawing.timeline.flows.wait[drawable]
    sources: dict[int, list[tuple[int, bool]]] = {}
    targets: dict[int, list[int]] = {}
    edges = zip(signal.tolist(), wait.tolist(), drawing.flow_early[drawable].tolist(), strict=True)
    for flow_id, (source, target, early) in enumerate(edges, num_before + 1):
        sources.setdefault(source, []).append((flow_id, early))
        targets.setdefault(target, []).append(flow_id)
    return sources, targets

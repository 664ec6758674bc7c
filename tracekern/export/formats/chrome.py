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
from tracekern.export.rows import sort_key
from tracekern.timeline.facts.counters import Counter, count_events
from tracekern.timeline.facts.span_facts import bytes_of_spans, groups_of_spans, has_rate
from tracekern.timeline.join.puts import split_carried
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Field, Int64, Launch, Timeline, TrackKind

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
    total_flows = len(timeline.flows)
    of_other_warps = 0
    counters = count_events(timeline)
    if tracks == "block":
        timeline, of_other_warps = keep_one_row_per_block(timeline)
    drawing = prepare(timeline)
    if max_spans is not None:
        drawing = first_view(drawing, max_spans, sought)
    num_flows = int(drawing.flow_drawable.sum())
    with open_output(path) as sink:
        for lines in _Writer(drawing).pieces(counters, of_other_warps, progress):
            sink.write(lines.encode("utf-8", "replace"))
    return ExportStats(
        spans=len(drawing.timeline.spans),
        flows=num_flows,
        bytes=os.path.getsize(path),
        marks=len(drawing.timeline.marks),
        spans_left_out=of_other_warps + len(timeline.spans) - len(drawing.timeline.spans),
        flows_left_out=total_flows - num_flows,
        part=drawing.part,
    )


FORMAT = Format("chrome", (".json", ".json.gz"), write_chrome, for_browser=True, order=2)


@dataclass
class _Row:
    """One thread of the file: a track, or a lane of one."""

    prefix: str
    """pid and tid, as JSON."""
    open_ends: list[int] = field(default_factory=list)


class _Writer:
    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._timeline = drawing.timeline
        self._time_shift = max(0, -drawing.first_ns)
        self._lines: list[str] = []
        ranks = [rank.rank for rank in self._timeline.ranks]
        self._banner_pid = max(ranks, default=-1) + 1
        self._next_tid = self._banner_pid + 1
        self._num_streams = {
            rank: len({t.stream for t in self._timeline.tracks if t.rank == rank and t.kind == TrackKind.DEVICE})
            for rank in ranks
        }
        by_order = sorted(range(len(self._timeline.tracks)), key=lambda i: sort_key(self._timeline.tracks[i]))
        self._order = {track: order for order, track in enumerate(by_order)}
        self._rows: dict[int, list[_Row]] = {}
        self._sources, self._targets = _flows_by_span(drawing)
        self._begin_arguments = [_argument_formatter(event.begin_fields, event, 0) for event in self._timeline.events]
        self._end_arguments = [_argument_formatter(event.end_fields, event, 1) for event in self._timeline.events]
        self._launch_arguments = [
            _launch_arguments(launch, start_up)
            for launch, start_up in zip(self._timeline.launches, drawing.is_start_up.tolist(), strict=True)
        ]
        self._bytes, self._groups = bytes_of_spans(self._timeline).tolist(), groups_of_spans(self._timeline).tolist()
        texts, self._releaser = labels.describe_releasers(drawing)
        self._released_by = [f'"released_by":{_json(text)}' for text in texts]

    def pieces(self, counters: Sequence[Counter], spans_left_out: int, progress: Progress | None) -> Iterator[str]:
        """The file, piece by piece."""
        yield '{"displayTimeUnit":"ns","traceEvents":[\n'
        self._write_header(spans_left_out)
        self._write_counters(counters)
        yield self._take_lines()
        num_spans = len(self._timeline.spans)
        for first in range(0, num_spans, _SPANS_AT_A_TIME):
            last = min(first + _SPANS_AT_A_TIME, num_spans)
            for index, row in enumerate(self._span_tuples(first, last), first):
                self._write_span(index, *row)
            yield self._take_lines()
            if progress is not None:
                progress(last, num_spans)
        self._write_marks()
        self._write_problems()
        yield self._take_lines()
        # An event without a comma behind it ends the list.
        end = _json({"ph": "M", "pid": self._banner_pid, "name": "process_labels", "args": {"labels": "tracekern"}})
        yield f'{end}\n],"metadata":{_json(labels.about(self._timeline))}}}\n'

    def _take_lines(self) -> str:
        text = "".join(self._lines)
        self._lines.clear()
        return text

    def _write_header(self, spans_left_out: int) -> None:
        timeline = self._timeline
        num_nodes = len({rank.node for rank in timeline.ranks})
        self._name_process(self._banner_pid, labels.title(timeline), 0)
        for rank in timeline.ranks:
            self._name_process(rank.rank, labels.rank_label(rank, num_nodes), rank.rank + 1)
        banner = labels.banner(timeline, spans_left_out, part=self._drawing.part)
        prefix = self._new_thread(self._banner_pid, "about this trace", 0)
        start, end = self._drawing.first_ns, self._drawing.last_ns
        facts = labels.about(timeline)
        facts |= labels.describe_first_waits(self._drawing, self._time_shift)
        facts["num_spans"] = labels.describe_spans(self._drawing)
        facts["num_flows"] = labels.describe_flows(self._drawing)
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

    def _span_tuples(self, first: int, last: int) -> Iterator[tuple[int, ...]]:
        spans = self._timeline.spans
        columns = (spans.track, spans.event, spans.launch, spans.start, spans.end, self._drawing.draw_end)
        payloads = (spans.begin_payload, spans.end_payload)
        return zip(*(column[first:last].tolist() for column in (*columns, *payloads)), strict=True)

    def _write_span(
        self,
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
        kind = self._timeline.events[event]
        parts = [self._begin_arguments[event](begin)]
        # A launch's own span names its launch and has the epoch among its fields.
        if launch >= 0 and kind.event_class is EventClass.LAUNCH:
            parts.append(_json(launch_shape(self._timeline.launches[launch]))[1:-1])
        elif launch >= 0:
            parts.append(self._launch_arguments[launch])
        parts += self._derived_arguments(index, launch, kind, end - start)
        parts.append('"open":true' if end == OPEN_END else self._end_arguments[event](ended))
        if (releaser := self._releaser[index]) >= 0:
            parts.append(self._released_by[releaser])
        arguments = "{" + ",".join(part for part in parts if part) + "}"
        name = _json(_name(kind, launch, begin, self._timeline.launches, self._timeline.host_names))
        row = self._row_for(track, start, draw_end)
        row.open_ends.append(draw_end)
        duration = f',"dur":{_microseconds(draw_end - start)}'
        self._event("X", start, row.prefix, name, kind.event_class.value, duration, arguments)
        for flow_id, early in self._sources.get(index, ()):
            self._flow_end("s", "sent", start if early else draw_end, row.prefix, f',"id":{flow_id}')
        for flow_id in self._targets.get(index, ()):
            self._flow_end("f", "released", draw_end, row.prefix, f',"bp":"e","id":{flow_id}')

    def _derived_arguments(self, index: int, launch: int, kind: EventType, length: int) -> list[str]:
        parts = []
        if (group := self._groups[index]) >= 0:
            parts.append(f"{_json(self._timeline.launches[launch].group_field)}:{group}")
        if (num_bytes := self._bytes[index]) >= 0:
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
        track = self._timeline.tracks[track_idx]
        name = labels.flat_label(track, self._num_streams.get(track.rank, 1)) + (f" (lane {lane + 1})" if lane else "")
        order = self._order[track_idx] * _ROWS_PER_TRACK + min(lane, _ROWS_PER_TRACK - 1)
        is_device = track.kind == TrackKind.DEVICE
        place = {key: getattr(track, key) for key in _PLACE} if is_device else {}
        return _Row(self._new_thread(track.rank, name, order, place))

    def _write_marks(self) -> None:
        marks = self._timeline.marks
        columns = (marks.track, marks.event, marks.launch, marks.time, marks.payload)
        for track, event, launch, time, payload in zip(*(column.tolist() for column in columns), strict=True):
            kind = self._timeline.events[event]
            parts = [self._begin_arguments[event](payload), self._launch_arguments[launch] if launch >= 0 else ""]
            arguments = "{" + ",".join(part for part in parts if part) + "}"
            name = _json(_name(kind, launch, payload, self._timeline.launches, self._timeline.host_names))
            prefix = self._rows_of(track)[0].prefix
            self._event("i", time, prefix, name, kind.event_class.value, ',"s":"t"', arguments)

    def _write_problems(self) -> None:
        for problem, time in self._drawing.problem_times():
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


def _flows_by_span(drawing: Drawing) -> tuple[dict[int, list[tuple[int, bool]]], dict[int, list[int]]]:
    """Signal -> (flow id, whether it leaves early), wait -> flow ids; ids from 1, over all ranks."""
    drawable = np.flatnonzero(drawing.flow_drawable)
    signal: Int64 = drawing.timeline.flows.signal[drawable]
    wait: Int64 = drawing.timeline.flows.wait[drawable]
    sources: dict[int, list[tuple[int, bool]]] = {}
    targets: dict[int, list[int]] = {}
    edges = zip(signal.tolist(), wait.tolist(), drawing.flow_early[drawable].tolist(), strict=True)
    for flow_id, (source, target, early) in enumerate(edges, 1):
        sources.setdefault(source, []).append((flow_id, early))
        targets.setdefault(target, []).append(flow_id)
    return sources, targets

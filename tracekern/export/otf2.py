"""Timeline -> OTF2 archive, for Vampir and the Score-P tools. Needs the PyPI package otf2.

A rank is a process, a track (and each lane of one) a location of it. Spans are regions, grouped by class, with their
fields as attributes; a mark is a region of no length. A flow is a message: sent where the signal ends, or begins if the
waiter saw it before, received where the wait ends. Each message has a tag of its own: tools that match by order, sender
and tag cannot mix them up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tracekern.errors import BadInput
from tracekern.export import labels
from tracekern.export.drawing import Drawing, keep_one_row_per_block, prepare
from tracekern.export.otf2_events import SpanEvents
from tracekern.export.perfetto import ExportStats, Progress, TrackDetail
from tracekern.export.rows import sort_key
from tracekern.timeline.model import OPEN_END, EventClass, Timeline, TrackKind

_TICKS_PER_SECOND = 1_000_000_000
_CHUNK_BYTES = 1 << 18
"""The least that OTF2 allows: it allots one of each kind to every location."""
_MAX_TAG = (1 << 32) - 1
_RowKey = tuple[int, int]
"""(track, lane): a location."""


def write_otf2(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
) -> ExportStats:
    """Writes a new directory `path` with the archive; its anchor is `path`/traces.otf2. It appears when it is whole.

    `tracks` and `progress` are those of write_perfetto().

    Raises:
        BadInput: the package otf2 is missing, `path` exists or cannot be written, or the timeline is in ticks or empty.
    """
    otf2 = _import_otf2()
    target = Path(path)
    if target.exists():
        raise BadInput(f"{target}: exists already; an OTF2 archive is a new directory, name one that is not there")
    if not len(timeline.spans) and not len(timeline.marks):
        raise BadInput(f"{target}: there is no span to write, and OTF2's reader refuses an archive without events")
    total_flows = len(timeline.flows)
    spans_left_out = 0
    if tracks == "block":
        timeline, spans_left_out = keep_one_row_per_block(timeline)
    drawing = prepare(timeline)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        _write_archive(otf2, temporary, drawing, progress)
        temporary.rename(target)
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    num_flows = int(drawing.flow_drawable.sum())
    return ExportStats(
        spans=len(timeline.spans),
        flows=num_flows,
        bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        marks=len(timeline.marks),
        spans_left_out=spans_left_out,
        flows_left_out=total_flows - num_flows,
    )


def _write_archive(otf2: Any, directory: Path, drawing: Drawing, progress: Progress | None) -> None:
    """Raises OSError where the library could not write all of it."""
    import _otf2

    with (
        _library_errors(_otf2) as errors,
        otf2.writer.open(
            os.fspath(directory),
            timer_resolution=_TICKS_PER_SECOND,
            chunk_size_events=_CHUNK_BYTES,
            chunk_size_definitions=_CHUNK_BYTES,
        ) as archive,
    ):
        _Writer(otf2, archive, drawing).write(progress)
        with contextlib.suppress(_otf2.Error):
            archive.close()
        archive.close = lambda: None  # its destructor would try again what has failed
        if errors:
            raise OSError(errors[0])


@contextlib.contextmanager
def _library_errors(library: Any) -> Iterator[list[str]]:
    """What the library complains of meanwhile: of some writes that fail it tells nobody but this callback."""
    from _otf2.Config import conf

    errors: list[str] = []

    def take(_data: int, _file: bytes, _line: int, _function: bytes, code: int, *_text: object) -> int:
        errors.append(library.Error_GetDescription(library.ErrorCode(code)))
        return code

    text, number, pointer = ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p
    callback = ctypes.CFUNCTYPE(number, pointer, text, ctypes.c_uint64, text, number, text, pointer)(take)
    register = conf.lib.OTF2_Error_RegisterCallback
    register.argtypes, register.restype = [pointer, pointer], pointer
    before = register(ctypes.cast(callback, pointer), None)
    try:
        yield errors
    finally:
        register(before, None)


def _import_otf2() -> Any:
    try:
        import otf2
    except ImportError as error:
        raise BadInput(
            f"writing an OTF2 archive needs the PyPI package otf2, which is not installed here ({error}); "
            "pip install otf2"
        ) from None
    return otf2


class _Span(NamedTuple):
    number: int
    """Index into Timeline.spans."""
    event: int
    launch: int
    start: int
    end: int
    """Where it is drawn to."""
    payload: int
    end_payload: int
    is_open: bool


class _Writer:
    """Locations are written one after the other; within one, time only rises."""

    def __init__(self, otf2: Any, archive: Any, drawing: Drawing) -> None:
        self._otf2, self._archive, self._definitions = otf2, archive, archive.definitions
        self._drawing, self._timeline = drawing, drawing.timeline
        self._time_shift = max(0, -drawing.first_ns)
        self._row_of_span, self._spans_of_row = _place_spans(drawing)
        self._marks_of_row: dict[_RowKey, list[int]] = {}
        for mark, track in enumerate(self._timeline.marks.track.tolist()):
            self._marks_of_row.setdefault((track, 0), []).append(mark)
        rows = {*self._spans_of_row, *self._marks_of_row}
        self._rows = sorted(rows, key=lambda row: (self._rank(row), *sort_key(self._timeline.tracks[row[0]]), row))
        self._number = {row: number for number, row in enumerate(self._rows)}
        self._locations = self._define_locations()
        self._comm = self._define_comm()
        self._events = SpanEvents(otf2, self._definitions, self._timeline)
        self._sent, self._received = _messages(drawing)

    def write(self, progress: Progress | None) -> None:
        done = 0
        for row, location in zip(self._rows, self._locations, strict=True):
            self._write_row(row, self._archive.event_writer_from_location(location))
            done += len(self._spans_of_row.get(row, ()))
            if progress is not None:
                progress(done, len(self._timeline.spans))
        self._events.close()
        for event_class in EventClass:
            if members := self._events.regions(event_class):
                self._definitions.group(event_class.value, group_type=self._otf2.GroupType.REGIONS, members=members)

    def _write_row(self, row: _RowKey, writer: Any) -> None:
        """Spans lie inside each other or follow each other: what ended is left before the next one is entered."""
        marks = self._timeline.marks
        steps: list[tuple[int, int, _Span | int]] = [(span.start, 0, span) for span in self._columns(row)]
        steps += [(int(marks.time[mark]), 1, mark) for mark in self._marks_of_row.get(row, ())]
        open_spans: list[_Span] = []
        for time, _, step in sorted(steps, key=lambda step: step[:2]):  # stable: the longer of two comes first
            while open_spans and open_spans[-1].end <= time:
                self._leave(open_spans.pop(), writer)
            if isinstance(step, _Span):
                self._enter(step, writer)
                open_spans.append(step)
            else:
                self._write_mark(step, writer)
        while open_spans:
            self._leave(open_spans.pop(), writer)

    def _columns(self, row: _RowKey) -> Iterator[_Span]:
        index, spans = np.array(self._spans_of_row.get(row, ()), np.int64), self._timeline.spans
        columns = (spans.event, spans.launch, spans.start, self._drawing.draw_end, spans.begin_payload)
        is_open = spans.end[index] == OPEN_END
        table = (index, *(column[index] for column in columns), spans.end_payload[index], is_open)
        return map(_Span._make, zip(*(column.tolist() for column in table), strict=True))

    def _enter(self, span: _Span, writer: Any) -> None:
        time = span.start + self._time_shift
        self._events.enter(writer, time, span.event, span.launch, span.payload, is_open=span.is_open)
        for flow, wait, is_early in self._sent.get(span.number, ()):
            if is_early:
                self._send(writer, time, flow, wait)

    def _leave(self, span: _Span, writer: Any) -> None:
        time = span.end + self._time_shift
        for flow, wait, is_early in self._sent.get(span.number, ()):
            if not is_early:
                self._send(writer, time, flow, wait)
        for flow, signal in self._received.get(span.number, ()):
            sender = self._number[self._row_of_span[signal]]
            writer.mpi_recv(time, sender=sender, communicator=self._comm, msg_tag=flow & _MAX_TAG, msg_length=0)
        end_payload = None if span.is_open else span.end_payload
        self._events.leave(writer, time, span.event, span.launch, span.payload, end_payload)

    def _write_mark(self, mark: int, writer: Any) -> None:
        marks = self._timeline.marks
        time = int(marks.time[mark]) + self._time_shift
        about = int(marks.event[mark]), int(marks.launch[mark]), int(marks.payload[mark])
        self._events.enter(writer, time, *about)
        self._events.leave(writer, time, *about)

    def _send(self, writer: Any, time: int, flow: int, wait: int) -> None:
        receiver = self._number[self._row_of_span[wait]]
        writer.mpi_send(time, receiver=receiver, communicator=self._comm, msg_tag=flow & _MAX_TAG, msg_length=0)

    def _define_locations(self) -> list[Any]:
        timeline, define, kinds = self._timeline, self._definitions, self._otf2.LocationType
        root = define.system_tree_node(labels.title(timeline), class_name="machine")
        nodes = {name: define.system_tree_node(name, class_name="node", parent=root) for name in _nodes(timeline)}
        groups = {
            rank.rank: define.location_group(labels.rank_label(rank, 1), system_tree_parent=nodes[rank.node])
            for rank in timeline.ranks
        }
        num_streams = {
            rank: len({t.stream for t in timeline.tracks if t.rank == rank and t.kind == TrackKind.DEVICE})
            for rank in groups
        }
        locations = []
        for track_idx, lane in self._rows:
            track = timeline.tracks[track_idx]
            name = labels.flat_label(track, num_streams[track.rank]) + (f" (lane {lane + 1})" if lane else "")
            kind = kinds.CPU_THREAD if track.kind == TrackKind.HOST else kinds.ACCELERATOR_STREAM
            locations.append(define.location(name, type=kind, group=groups[track.rank]))
        return locations

    def _define_comm(self) -> Any:
        """One communicator of all locations: a message runs from one to another, not just between ranks."""
        kinds, paradigm = self._otf2.GroupType, self._otf2.Paradigm.MPI
        members = tuple(self._locations)
        self._definitions.group("locations", group_type=kinds.COMM_LOCATIONS, paradigm=paradigm, members=members)
        group = self._definitions.group("tracks", group_type=kinds.COMM_GROUP, paradigm=paradigm, members=members)
        return self._definitions.comm("flows", group=group)

    def _rank(self, row: _RowKey) -> int:
        return self._timeline.tracks[row[0]].rank


def _nodes(timeline: Timeline) -> list[str]:
    return sorted({rank.node for rank in timeline.ranks})


def _place_spans(drawing: Drawing) -> tuple[list[_RowKey], dict[_RowKey, list[int]]]:
    """The row of each span, and the spans of each row: the first lane of its track in which it crosses no other."""
    spans = drawing.timeline.spans
    row_of_span: list[_RowKey] = []
    spans_of_row: dict[_RowKey, list[int]] = {}
    current = -1
    lanes: list[list[int]] = []
    columns = (spans.track.tolist(), spans.start.tolist(), drawing.draw_end.tolist())
    for index, (track, start, end) in enumerate(zip(*columns, strict=True)):
        if track != current:
            current, lanes = track, []
        for ends in lanes:
            while ends and ends[-1] <= start:
                ends.pop()
        lane = next((lane for lane, ends in enumerate(lanes) if not ends or ends[-1] >= end), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(end)
        row_of_span.append((track, lane))
        spans_of_row.setdefault((track, lane), []).append(index)
    return row_of_span, spans_of_row


def _messages(drawing: Drawing) -> tuple[dict[int, list[tuple[int, int, bool]]], dict[int, list[tuple[int, int]]]]:
    """Signal -> (number, wait, whether it leaves at the signal's start); wait -> (number, signal)."""
    flows = drawing.timeline.flows
    sent: dict[int, list[tuple[int, int, bool]]] = {}
    received: dict[int, list[tuple[int, int]]] = {}
    for flow in np.flatnonzero(drawing.flow_drawable).tolist():
        signal, wait = int(flows.signal[flow]), int(flows.wait[flow])
        sent.setdefault(signal, []).append((flow, wait, bool(drawing.flow_early[flow])))
        received.setdefault(wait, []).append((flow, signal))
    return sent, received

"""Timeline -> native Perfetto trace (.pftrace, .pftrace.gz) for ui.perfetto.dev.

How a flow is drawn: Perfetto's arrows run from the end of one slice to the start of another, but a wait is released
when it ends. So the end of a wait carries an instant `released`, a child of the wait, and the arrow ends there. It
starts at the end of the signal; where the waiter saw the flag before the signal's span closed, at an instant `sent`, a
child of the signal at its start. Both instants have the category `flow`. FLOWS_SQL joins them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import NotBuilt
from tracekern.export import labels
from tracekern.export.drawing import (
    Drawing,
    argument_names,
    keep_one_row_per_block,
    launch_shape,
    prepare,
)
from tracekern.export.files import Output, open_output
from tracekern.export.first_view import first_view, limit_flows
from tracekern.export.format import ExportStats, Format, Progress, TrackDetail
from tracekern.export.overview import Overview, to_draw
from tracekern.export.protobuf import (
    Interned,
    Interner,
    counter_descriptor,
    counter_packets,
    instant_packet,
    interned_annotation,
    interned_data,
    more_interned_data,
    slice_packets,
    track_descriptor,
)
from tracekern.export.rows import ROOT_UUID, SHARED_SEQUENCE, Row, lay_out
from tracekern.export.windows import Drawings, Windows
from tracekern.timeline.facts.counters import Counter, count_events
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.facts.span_facts import bytes_of_spans, groups_of_spans, has_rate
from tracekern.timeline.join.puts import split_carried
from tracekern.timeline.model import EventClass, EventType, Field, Flows, Int32, Int64, Launch, Timeline

FLOWS_SQL = """
select signal.id as signal_id, wait.id as wait_id
from flow
join slice source on source.id = flow.slice_out
join slice released on released.id = flow.slice_in
join slice signal on signal.id = iif(source.category = 'flow', source.parent_id, source.id)
join slice wait on wait.id = released.parent_id
"""
"""One row for each flow of a trace that tracekern wrote, in Perfetto SQL: the slices of its signal and its wait."""

_CHUNK_BYTES = 1 << 20
_NAME_SOURCES = {EventClass.LAUNCH: 1, EventClass.HOST: 2}  # NameSource in csrc/encode/perfetto.hpp


def write_perfetto(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
    max_flows: int | None = None,
    max_spans: int | None = None,
    sought: Sequence[int] = (),
    through_link: bool = True,
) -> ExportStats:
    """Writes the trace, gzipped when `path` ends in .gz. The file appears when it is whole.

    `tracks="block"` shows one row per block and role, that of its first warp. `progress` is called with the number of
    spans written and their total. Of more than `max_flows` arrows those of the longest waits are drawn, of
    more than `max_spans` spans and marks a first view, with the blocks of the tracks `sought` where they fit. Without
    `through_link` a link in the file's place is replaced.

    Raises:
        BadInput: the timeline is in ticks, the extension is not built, or the file cannot be written.
    """
    timeline = split_carried(timeline)
    total_flows, of_other_warps, counters = len(timeline.flows), 0, count_events(timeline)
    if tracks == "block":
        timeline, of_other_warps = keep_one_row_per_block(timeline)
    drawing = prepare(timeline)
    if max_spans is not None:
        drawing = first_view(drawing, max_spans, sought)
    if max_flows is not None:
        drawing = limit_flows(drawing, max_flows)
    overview = Overview.total([drawing])
    with open_output(path, through_link) as sink:
        _Encoder(overview, counters).write(sink, [drawing], of_other_warps, progress)
    return overview.stats(path, of_other_warps + len(timeline.spans), total_flows)


def write_windows(
    windows: Windows,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
) -> ExportStats:
    """Writes what write_perfetto() writes of the whole, one window after the other.

    Raises BadInput as write_perfetto() does, or where there is no room for temporary files.
    """
    with to_draw(windows, tracks) as (drawings, overview, counters, rows), open_output(path) as sink:
        _Encoder(overview, counters).write(sink, drawings, rows.num_spans - overview.num_spans, progress)
    return overview.stats(path, rows.num_spans, rows.num_flows)


FORMAT = Format("perfetto", (".pftrace", ".pftrace.gz"), write_perfetto, write_windows, for_browser=True, order=1)


class _Encoder:
    """Writes a trace, uncompressed, in pieces of about a megabyte."""

    def __init__(self, overview: Overview, counters: Sequence[Counter]) -> None:
        self._overview, self._counters = overview, counters
        self._interner, tables = Interner(), overview.tables
        about = [counter.without_points() for counter in counters]
        self._rows = lay_out(tables, overview.is_used, about, labels.marks_of_longest_wait(overview))
        host_names = [name or "(no name)" for name in tables.host_names]
        self._first_host_iid = self._interner.first_iid(Interned.EVENT_NAME, host_names)
        self._tables = self._make_tables()
        self._lanes = np.ones(len(tables.tracks), np.int64)
        self._num_spans = self._num_flows = 0
        """So far."""

    def write(self, sink: Output, drawings: Drawings, spans_left_out: int, progress: Progress | None) -> None:
        """drawings: those of which the overview is."""
        rows, time_shift = self._rows, self._overview.time_shift
        sink.write(self._prologue(spans_left_out))
        for counter, row_idx in zip(self._counters, rows.of_counter, strict=True):
            row = rows.rows[row_idx]
            sink.write(counter_packets(row.uuid, counter.time + time_shift, counter.value, row.sequence))
        for number in range(len(drawings)):  # of which none is kept while the next one is read
            self._write_part(sink, drawings[number], progress)
        lanes = [
            _descriptor(rows.lane(rows.of_track[track_idx], lane))
            for track_idx in np.flatnonzero(self._lanes > 1).tolist()
            for lane in range(1, int(self._lanes[track_idx]))
        ]
        # Instants of equal time become children of each other in file order: problems must come after `released`.
        sink.write(b"".join([*lanes, *self._problem_instants()]))

    def _write_part(self, sink: Output, drawing: Drawing, progress: Progress | None) -> None:
        encoder = self._encoder_of(drawing)
        sink.write(b"".join(more_interned_data(self._interner, one) for one in self._interner.sequences))
        chunk_bytes = max(_CHUNK_BYTES, encoder.max_packet_bytes)
        while True:
            buffer = bytearray(chunk_bytes)
            written = encoder.fill(buffer)
            if written == 0:
                break
            sink.write(memoryview(buffer)[:written])
            if progress is not None:
                progress(self._num_spans + encoder.spans_written, self._overview.num_spans)
        self._lanes = np.maximum(self._lanes, np.array(encoder.lanes_per_track, np.int64))
        self._num_spans += len(drawing.timeline.spans)
        self._num_flows += int(drawing.flow_drawn.sum())

    def _make_tables(self) -> dict[str, Any]:
        tables, rows, interner = self._overview.tables, self._rows, self._interner
        is_start_up = launch_iterations(tables).is_start_up.tolist()
        return {
            "tracks": [(rows.rows[row].uuid, rows.rows[row].sequence) for row in rows.of_track],
            "events": [_event_table_entry(event, interner, self._first_host_iid) for event in tables.events],
            "launches": [
                _launch_table_entry(launch, start_up, interner, rows.rows[rows.of_rank.get(launch.rank, 0)].sequence)
                for launch, start_up in zip(tables.launches, is_start_up, strict=True)
            ],
            "lane_stride": rows.lane_stride,
            "time_shift": self._overview.time_shift,
            "open_iid": interner.iid(Interned.ANNOTATION_NAME, "open"),
            "bytes_iid": interner.iid(Interned.ANNOTATION_NAME, "bytes"),
            "rate_iid": interner.iid(Interned.ANNOTATION_NAME, "gb_per_s"),
            "released_by_iid": interner.iid(Interned.ANNOTATION_NAME, "released_by"),
            "sent_iid": interner.iid(Interned.EVENT_NAME, "sent"),
            "released_iid": interner.iid(Interned.EVENT_NAME, "released"),
            "flow_category_iid": interner.iid(Interned.CATEGORY, "flow"),
        }

    def _encoder_of(self, drawing: Drawing) -> Any:
        timeline = drawing.timeline
        self._intern_host_names(timeline)
        spans = _columns(timeline.spans, ("track", "event", "launch", "start", "end", "begin_payload", "end_payload"))
        spans["draw_end"] = np.ascontiguousarray(drawing.draw_end)
        spans["releaser_iid"] = self._intern_releasers(drawing)
        spans["group"] = groups_of_spans(timeline)
        spans["bytes"] = bytes_of_spans(timeline)
        marks = _columns(timeline.marks, ("track", "event", "launch", "time", "payload"))
        return encoder_class()(self._tables, spans, marks, _flow_ends(drawing, self._num_flows))

    def _intern_host_names(self, timeline: Timeline) -> None:
        """Each rank gets only names on its own rows: it may have thousands."""
        named = np.flatnonzero(timeline.events_of(EventClass.HOST)[timeline.spans.event])
        iid = timeline.spans.begin_payload[named].astype(np.int64) + self._first_host_iid
        self._need_on_rows(Interned.EVENT_NAME, timeline.spans.track[named], iid)

    def _intern_releasers(self, drawing: Drawing) -> npt.NDArray[np.uint32]:
        """[num_spans] The number of the text that says what released a wait; 0 for other spans."""
        texts, which = labels.describe_releasers(drawing)
        numbers = [self._interner.number(Interned.ANNOTATION_STRING, text) for text in texts]
        iid = np.array([*numbers, 0], np.int64)[which]  # -1 is the last
        waits = np.flatnonzero(iid)
        self._need_on_rows(Interned.ANNOTATION_STRING, drawing.timeline.spans.track[waits], iid[waits])
        return iid.astype(np.uint32)

    def _need_on_rows(self, kind: Interned, track: Int32, iid: Int64) -> None:
        """Each sequence needs the numbers `iid` [n] of what is on its rows. track: [n]."""
        sequence_of = np.array([self._rows.rows[row].sequence for row in self._rows.of_track], np.int64)
        sequence = sequence_of[track]
        for own in np.unique(sequence).tolist():
            self._interner.need(kind, np.unique(iid[sequence == own]).tolist(), own)

    def _prologue(self, spans_left_out: int) -> bytes:
        overview, rows = self._overview, self._rows.rows
        flows_left_out = overview.num_drawable - overview.num_drawn
        banner = labels.banner(overview.tables, spans_left_out, flows_left_out, overview.part)
        facts = labels.about(overview.tables) | labels.describe_first_waits(overview)
        facts["num_spans"] = labels.describe_spans(overview)
        facts["num_flows"] = labels.describe_flows(overview)
        start, end = overview.first_ns + overview.time_shift, overview.last_ns + overview.time_shift
        # What `tracekern open` looks for comes first: rows and names of many ranks are larger than what it reads.
        parts = [_descriptor(rows[0]), slice_packets(ROOT_UUID, start, end, banner, facts, SHARED_SEQUENCE)]
        parts += [_descriptor(row) for row in rows[1:]]
        parts += [interned_data(self._interner, sequence) for sequence in sorted({row.sequence for row in rows})]
        return b"".join(parts)

    def _problem_instants(self) -> list[bytes]:
        instants, rows = [], self._rows
        for problem, time in self._overview.problem_times():
            row = rows.of_track[problem.track] if problem.track >= 0 else rows.of_rank.get(problem.rank, 0)
            arguments = {"severity": problem.severity, "kind": problem.kind, "count": str(problem.count)}
            place = rows.rows[row].uuid, time + self._overview.time_shift
            instants.append(instant_packet(*place, problem.text, "problem", arguments, SHARED_SEQUENCE))
        return instants


def encoder_class() -> Any:
    """The compiled encoder. Raises NotBuilt where there is none, and no trace can be written."""
    try:
        from tracekern._core import PerfettoEncoder
    except ImportError as error:
        raise NotBuilt(f"a Perfetto trace cannot be written: {error}; or write .json, which needs none of it") from None
    return PerfettoEncoder


def _columns(table: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: np.ascontiguousarray(getattr(table, name)) for name in names}


def _event_table_entry(event: EventType, interner: Interner, host_iid: int) -> tuple[Any, ...]:
    is_host = event.event_class is EventClass.HOST
    begin_names, end_names = argument_names(event)
    return (
        host_iid if is_host else interner.iid(Interned.EVENT_NAME, event.name),
        interner.iid(Interned.CATEGORY, event.event_class.value),
        _NAME_SOURCES.get(event.event_class, 0),
        _field_table(event.begin_fields, begin_names, interner),
        _field_table(event.end_fields, end_names, interner),
        has_rate(event),
    )


def _field_table(fields: tuple[Field, ...], names: list[str], interner: Interner) -> list[tuple[int, int, int, bool]]:
    table, shift = [], 0
    for field, name in zip(fields, names, strict=True):
        table.append((interner.iid(Interned.ANNOTATION_NAME, name), shift, field.bits, field.signed))
        shift += field.bits
    return table


def _launch_table_entry(
    launch: Launch, is_start_up: bool, interner: Interner, sequence: int
) -> tuple[int, bytes, bytes, int]:
    def number(name: str, value: int) -> bytes:
        return interned_annotation(interner.iid(Interned.ANNOTATION_NAME, name), value=value)

    def text(name: str, value: str) -> bytes:
        text_iid = interner.iid(Interned.ANNOTATION_STRING, value, sequence)
        return interned_annotation(interner.iid(Interned.ANNOTATION_NAME, name), text_iid=text_iid)

    which = text("launch", f"{launch.name} #{launch.sequence}")
    if launch.key:
        which += text("launch_key", launch.key)
    if launch.members:
        which += text("communicator", launch.members.label)
    if is_start_up:
        which += number("start_up", 1)
    shape = b"".join(number(name, value) for name, value in launch_shape(launch).items())
    group_iid = interner.iid(Interned.ANNOTATION_NAME, launch.group_field) if launch.group_field else 0
    name_iid = interner.iid(Interned.EVENT_NAME, launch.name, sequence)
    return name_iid, which + number("epoch", launch.epoch), shape, group_iid


def _flow_ends(drawing: Drawing, num_before: int) -> dict[str, Any]:
    """The flows that can be drawn, once in order of their signals and once in order of their waits. One id an edge.

    num_before: flows of parts before this one.
    """
    timeline = drawing.timeline
    flows = Flows(timeline.flows.signal[drawing.flow_drawn], timeline.flows.wait[drawing.flow_drawn])
    early = drawing.flow_early[drawing.flow_drawn]
    # The signal's rank is in the high bits: traces of several ranks can be joined without mixing their arrows.
    rank_of_flow = timeline.track_ranks()[timeline.spans.track[flows.signal]].astype(np.uint64)
    flow_id = (rank_of_flow + np.uint64(1) << np.uint64(40)) | np.arange(
        num_before, num_before + len(flows), dtype=np.uint64
    )
    ends = {}
    for side, span, ids in (
        ("signal", flows.signal[~early], flow_id[~early]),
        ("early", flows.signal[early], flow_id[early]),
        ("wait", flows.wait, flow_id),
    ):
        order = np.argsort(span, kind="stable")
        ends[f"{side}_span"] = span[order]
        ends[f"{side}_id"] = ids[order]
    return ends


def _descriptor(row: Row) -> bytes:
    if row.unit:
        return counter_descriptor(row.uuid, row.name, row.unit, row.parent_uuid, row.order, SHARED_SEQUENCE)
    return track_descriptor(row.uuid, row.name, row.parent_uuid, row.order, SHARED_SEQUENCE)

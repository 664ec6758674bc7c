"""Timeline -> native Perfetto trace (.pftrace, .pftrace.gz) for ui.perfetto.dev.

How a flow is drawn: Perfetto's arrows run from the end of one slice to the start of another, but a wait is released
when it ends. So the end of a wait carries an instant `released`, a child of the wait, and the arrow ends there. It
starts at the end of the signal; where the waiter saw the flag before the signal's span closed, at an instant `sent`, a
child of the signal at its start. Both instants have the category `flow`. FLOWS_SQL joins them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
    limit_flows,
    prepare,
)
from tracekern.export.files import Bytes, open_output
from tracekern.export.first_view import first_view
from tracekern.export.format import ExportStats, Format, Progress, TrackDetail
from tracekern.export.protobuf import (
    Interned,
    Interner,
    counter_descriptor,
    counter_packets,
    instant_packet,
    interned_annotation,
    interned_data,
    slice_packets,
    track_descriptor,
)
from tracekern.export.rows import ROOT_UUID, SHARED_SEQUENCE, Row, Rows, lay_out
from tracekern.timeline.facts.counters import Counter, count_events
from tracekern.timeline.facts.span_facts import bytes_of_spans, groups_of_spans, has_rate
from tracekern.timeline.join.puts import split_carried
from tracekern.timeline.model import EventClass, EventType, Field, Flows, Int64, Launch, Timeline

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
    total_flows = len(timeline.flows)
    of_other_warps = 0
    counters = count_events(timeline)
    if tracks == "block":
        timeline, of_other_warps = keep_one_row_per_block(timeline)
    drawing = prepare(timeline)
    if max_spans is not None:
        drawing = first_view(drawing, max_spans, sought)
    if max_flows is not None:
        drawing = limit_flows(drawing, max_flows)
    num_flows = int(drawing.flow_drawn.sum())
    with open_output(path, through_link) as sink:
        for piece in encode(drawing, counters, spans_left_out=of_other_warps, progress=progress):
            sink.write(piece)
    return ExportStats(
        spans=len(drawing.timeline.spans),
        flows=num_flows,
        bytes=os.path.getsize(path),
        marks=len(drawing.timeline.marks),
        spans_left_out=of_other_warps + len(timeline.spans) - len(drawing.timeline.spans),
        flows_left_out=total_flows - num_flows,
        part=drawing.part,
    )


FORMAT = Format("perfetto", (".pftrace", ".pftrace.gz"), write_perfetto, for_browser=True, order=1)


def encode(
    drawing: Drawing,
    counters: Sequence[Counter] = (),
    *,
    spans_left_out: int = 0,
    progress: Progress | None = None,
) -> Iterator[Bytes]:
    """The trace in pieces of about a megabyte, uncompressed."""
    rows = lay_out(drawing.timeline, counters, labels.marks_of_longest_wait(drawing))
    interner = Interner()
    time_shift = max(0, -drawing.first_ns)
    encoder = _make_encoder(drawing, rows, interner, time_shift)
    yield _prologue(drawing, rows, interner, time_shift, spans_left_out)
    for counter, row_idx in zip(counters, rows.of_counter, strict=True):
        row = rows.rows[row_idx]
        yield counter_packets(row.uuid, counter.time + time_shift, counter.value, row.sequence)
    chunk_bytes = max(_CHUNK_BYTES, encoder.max_packet_bytes)
    while True:
        buffer = bytearray(chunk_bytes)
        written = encoder.fill(buffer)
        if written == 0:
            break
        yield memoryview(buffer)[:written]
        if progress is not None:
            progress(encoder.spans_written, len(drawing.timeline.spans))
    lanes = [
        _descriptor(rows.lane(rows.of_track[track_idx], lane))
        for track_idx, num_lanes in enumerate(encoder.lanes_per_track)
        for lane in range(1, num_lanes)
    ]
    # Instants of equal time become children of each other in file order: problems must come after `released`.
    yield b"".join([*lanes, *_problem_instants(drawing, rows, time_shift)])


def encoder_class() -> Any:
    """The compiled encoder. Raises NotBuilt where there is none, and no trace can be written."""
    try:
        from tracekern._core import PerfettoEncoder
    except ImportError as error:
        raise NotBuilt(f"a Perfetto trace cannot be written: {error}; or write .json, which needs none of it") from None
    return PerfettoEncoder


def _make_encoder(drawing: Drawing, rows: Rows, interner: Interner, time_shift: int) -> Any:
    timeline = drawing.timeline
    host_iid = _intern_host_names(timeline, rows, interner)
    tables = {
        "tracks": [(rows.rows[row].uuid, rows.rows[row].sequence) for row in rows.of_track],
        "events": [_event_table_entry(event, interner, host_iid) for event in timeline.events],
        "launches": [
            _launch_table_entry(launch, start_up, interner, rows.rows[rows.of_rank.get(launch.rank, 0)].sequence)
            for launch, start_up in zip(timeline.launches, drawing.is_start_up.tolist(), strict=True)
        ],
        "lane_stride": rows.lane_stride,
        "time_shift": time_shift,
        "open_iid": interner.iid(Interned.ANNOTATION_NAME, "open"),
        "bytes_iid": interner.iid(Interned.ANNOTATION_NAME, "bytes"),
        "rate_iid": interner.iid(Interned.ANNOTATION_NAME, "gb_per_s"),
        "released_by_iid": interner.iid(Interned.ANNOTATION_NAME, "released_by"),
        "sent_iid": interner.iid(Interned.EVENT_NAME, "sent"),
        "released_iid": interner.iid(Interned.EVENT_NAME, "released"),
        "flow_category_iid": interner.iid(Interned.CATEGORY, "flow"),
    }
    spans = _columns(timeline.spans, ("track", "event", "launch", "start", "end", "begin_payload", "end_payload"))
    spans["draw_end"] = np.ascontiguousarray(drawing.draw_end)
    spans["releaser_iid"] = _intern_releasers(drawing, rows, interner)
    spans["group"] = groups_of_spans(timeline)
    spans["bytes"] = bytes_of_spans(timeline)
    marks = _columns(timeline.marks, ("track", "event", "launch", "time", "payload"))
    return encoder_class()(tables, spans, marks, _flow_ends(drawing))


def _columns(table: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: np.ascontiguousarray(getattr(table, name)) for name in names}


def _intern_host_names(timeline: Timeline, rows: Rows, interner: Interner) -> int:
    """Returns the number of the first name. Each rank gets only names on its own rows: it may have thousands."""
    first = interner.first_iid(Interned.EVENT_NAME, [name or "(no name)" for name in timeline.host_names])
    named = np.flatnonzero(timeline.events_of(EventClass.HOST)[timeline.spans.event])
    iid = timeline.spans.begin_payload[named].astype(np.int64) + first
    _need_on_rows(timeline, rows, interner, Interned.EVENT_NAME, named, iid)
    return first


def _intern_releasers(drawing: Drawing, rows: Rows, interner: Interner) -> npt.NDArray[np.uint32]:
    """[num_spans] The number of the text that says what released a wait; 0 for other spans."""
    texts, which = labels.describe_releasers(drawing)
    iid = np.where(which >= 0, which + interner.first_iid(Interned.ANNOTATION_STRING, texts), 0)
    waits = np.flatnonzero(iid)
    _need_on_rows(drawing.timeline, rows, interner, Interned.ANNOTATION_STRING, waits, iid[waits])
    return iid.astype(np.uint32)


def _need_on_rows(
    timeline: Timeline, rows: Rows, interner: Interner, kind: Interned, spans: npt.NDArray[np.intp], iid: Int64
) -> None:
    """Each sequence needs the numbers `iid` of those of the spans that are on its rows."""
    sequence_of = np.array([rows.rows[row].sequence for row in rows.of_track], np.int64)
    sequence = sequence_of[timeline.spans.track[spans]]
    for own in np.unique(sequence).tolist():
        interner.need(kind, np.unique(iid[sequence == own]).tolist(), own)


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


def _flow_ends(drawing: Drawing) -> dict[str, Any]:
    """The flows that can be drawn, once in order of their signals and once in order of their waits. One id an edge."""
    timeline = drawing.timeline
    flows = Flows(timeline.flows.signal[drawing.flow_drawn], timeline.flows.wait[drawing.flow_drawn])
    early = drawing.flow_early[drawing.flow_drawn]
    # The signal's rank is in the high bits: traces of several ranks can be joined without mixing their arrows.
    rank_of_flow = timeline.track_ranks()[timeline.spans.track[flows.signal]].astype(np.uint64)
    flow_id = (rank_of_flow + np.uint64(1) << np.uint64(40)) | np.arange(len(flows), dtype=np.uint64)
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


def _prologue(drawing: Drawing, rows: Rows, interner: Interner, time_shift: int, spans_left_out: int) -> bytes:
    timeline = drawing.timeline
    flows_left_out = int((drawing.flow_drawable & ~drawing.flow_drawn).sum())
    banner = labels.banner(timeline, spans_left_out, flows_left_out, drawing.part)
    facts = labels.about(timeline)
    start, end = drawing.first_ns + time_shift, drawing.last_ns + time_shift
    facts |= labels.describe_first_waits(drawing, time_shift)
    facts["num_spans"] = labels.describe_spans(drawing)
    facts["num_flows"] = labels.describe_flows(drawing)
    # What `tracekern open` looks for comes first: rows and names of many ranks are larger than what it reads.
    parts = [_descriptor(rows.rows[0]), slice_packets(ROOT_UUID, start, end, banner, facts, SHARED_SEQUENCE)]
    parts += [_descriptor(row) for row in rows.rows[1:]]
    parts += [interned_data(interner, sequence) for sequence in sorted({row.sequence for row in rows.rows})]
    return b"".join(parts)


def _problem_instants(drawing: Drawing, rows: Rows, time_shift: int) -> list[bytes]:
    instants = []
    for problem, time in drawing.problem_times():
        row = rows.of_track[problem.track] if problem.track >= 0 else rows.of_rank.get(problem.rank, 0)
        arguments = {"severity": problem.severity, "kind": problem.kind, "count": str(problem.count)}
        uuid = rows.rows[row].uuid
        instants.append(instant_packet(uuid, time + time_shift, problem.text, "problem", arguments, SHARED_SEQUENCE))
    return instants


def _descriptor(row: Row) -> bytes:
    if row.unit:
        return counter_descriptor(row.uuid, row.name, row.unit, row.parent_uuid, row.order, SHARED_SEQUENCE)
    return track_descriptor(row.uuid, row.name, row.parent_uuid, row.order, SHARED_SEQUENCE)

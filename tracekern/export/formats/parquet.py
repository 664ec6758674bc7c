"""Timeline -> Parquet (.parquet): a row for each span and mark, readable columns, for DuckDB, Polars and Spark.

Columns: span (its number, which flows refer to; null for a mark), rank, node, track, kind, block, warp, role, sm,
event, name (not the event's for host ranges and launches), class, ends_at, launch, launch_key, communicator (name or
ranks of the group that the launch is of, where that is not all of the run), sequence, epoch, peer_node (of the rank
whose signal ended this wait, or else of the `peer` that the span names), start_ns, end_ns,
duration_ns, open, flow_sources (spans of the signals that ended this wait), flow_targets (spans of the waits that this
signal ended), bytes (that the span moved or announced), the number of the warp group under the kernel's name for it,
and one for each field that any event has. What a row does not have is null; an open span has no end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.errors import packages_for
from tracekern.export import labels
from tracekern.export.drawing import Drawing, argument_names, prepare
from tracekern.export.format import ExportStats, Format, Progress, TrackDetail
from tracekern.export.windows import Drawings, RowsOfTracks, SpanNumbers, Windows
from tracekern.files import atomic_file
from tracekern.timeline.facts.roles import roles_of
from tracekern.timeline.facts.span_facts import bytes_of_spans, groups_of_spans, named_peers
from tracekern.timeline.model import (
    OPEN_END,
    EventClass,
    EventType,
    Field,
    Int32,
    Int64,
    Marks,
    Mask,
    Spans,
    Timeline,
    UInt64,
    unpack_field,
)

_ROWS_AT_A_TIME = 1 << 20
_COLUMNS = frozenset(
    ("span", "rank", "node", "track", "kind", "block", "warp", "role", "sm", "event", "name", "class", "ends_at")
    + (
        "launch",
        "launch_key",
        "communicator",
        "sequence",
        "epoch",
        "peer_node",
        "start_ns",
        "end_ns",
        "duration_ns",
        "open",
        "flow_sources",
        "flow_targets",
    )
)


def write_parquet(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
) -> ExportStats:
    """Writes the table, with what the trace says about itself in the key-value metadata of the schema.

    `progress` is called with the spans written and their total. Times are ns from `origin_ns` of the metadata.

    Raises:
        BadInput: the timeline is in ticks, pyarrow is missing, or the file cannot be written.
    """
    # `tracks` thins out what an eye has to take in. A table is asked: all its rows are there, and a query picks some.
    return _write([prepare(timeline)], path, progress)


def write_windows(
    windows: Windows,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
) -> ExportStats:
    """Writes what write_parquet() writes of the whole, its rows in the order of the windows."""
    return _write(windows.drawings(), path, progress)


FORMAT = Format("parquet", (".parquet",), write_parquet, write_windows, order=3)


def _write(drawings: Drawings, path: str | os.PathLike[str], progress: Progress | None) -> ExportStats:
    with packages_for("writing Parquet"):
        import pyarrow.parquet
    rows = RowsOfTracks.total(drawings[number].timeline for number in range(len(drawings)))
    empty = prepare(drawings[0].timeline.without_rows())
    numbers, num_spans = SpanNumbers(rows.spans), rows.num_spans
    about = labels.about(empty.timeline)
    schema = _TableMaker(empty, numbers).of_spans(0, 0).schema.with_metadata(about)

    def write_part(number: int, done: int) -> int:  # so that no part outlasts its turn
        """Returns how many spans it has."""
        tables = _TableMaker(drawings[number], numbers)
        for first in range(0, tables.num_spans, _ROWS_AT_A_TIME):
            last = min(first + _ROWS_AT_A_TIME, tables.num_spans)
            writer.write_table(tables.of_spans(first, last).cast(schema))
            if progress is not None:
                progress(done + last, num_spans)
        if tables.num_marks:
            writer.write_table(tables.of_marks().cast(schema))
        return tables.num_spans

    with atomic_file(path) as file, pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        done = 0
        for number in range(len(drawings)):
            done += write_part(number, done)
    return ExportStats(spans=num_spans, flows=rows.num_flows, bytes=os.path.getsize(path), marks=rows.num_marks)


class _TableMaker:
    """Arrow tables of a part's spans and marks, all with the same columns."""

    def __init__(self, drawing: Drawing, numbers: SpanNumbers) -> None:
        """numbers: those of the spans, if all parts before have taken theirs."""
        self._timeline = timeline = drawing.timeline
        self.num_spans, self.num_marks = len(timeline.spans), len(timeline.marks)
        self._number = numbers.take(timeline.spans.track)
        self._nodes = {rank.rank: rank.node for rank in timeline.ranks}
        peers, self._peer = np.unique(_peers(drawing), return_inverse=True)
        self._peer_nodes = [self._nodes.get(rank, "") for rank in peers.tolist()]
        self._fields = _field_sources(timeline)
        flows = timeline.flows
        self._derived = _derived_columns(timeline)
        self._flow_sources = _Neighbours(flows.wait, self._number[flows.signal])
        self._flow_targets = _Neighbours(flows.signal, self._number[flows.wait])

    def of_spans(self, first: int, last: int) -> Any:
        spans = self._timeline.spans.take(slice(first, last))
        is_open = spans.end == OPEN_END
        return _table(
            {
                "span": self._number[first:last],
                **self._shared_columns(spans, spans.begin_payload),
                "peer_node": _texts(self._peer_nodes, self._peer[first:last]),
                "start_ns": spans.start,
                "end_ns": _nullable(spans.end, is_open),
                "duration_ns": _nullable(spans.end - spans.start, is_open),
                "open": is_open,
                "flow_sources": self._flow_sources.lists(first, last),
                "flow_targets": self._flow_targets.lists(first, last),
                **self._field_columns(
                    spans.event, spans.begin_payload, spans.end_payload, ~is_open, slice(first, last)
                ),
            }
        )

    def of_marks(self) -> Any:
        marks = self._timeline.marks
        none = np.zeros(len(marks), bool)
        no_flows = _Neighbours(np.empty(0, np.int64), np.empty(0, np.int64)).lists(0, len(marks))
        return _table(
            {
                "span": _nullable(marks.time, ~none),
                **self._shared_columns(marks, marks.payload),
                "peer_node": _texts([""], np.zeros(len(marks), np.int64)),
                "start_ns": marks.time,
                "end_ns": marks.time,
                "duration_ns": np.zeros(len(marks), np.int64),
                "open": none,
                "flow_sources": no_flows,
                "flow_targets": no_flows,
                **self._field_columns(marks.event, marks.payload, marks.payload, none, None),
            }
        )

    def _shared_columns(self, rows: Spans | Marks, payload: UInt64) -> dict[str, Any]:
        tracks, events, launches = self._timeline.tracks, self._timeline.events, self._timeline.launches
        roles, role_names = roles_of(self._timeline, rows)
        groups = [launch.members.label if launch.members else "" for launch in launches]
        return {
            "rank": _numbers([track.rank for track in tracks], rows.track),
            "node": _texts([self._nodes.get(track.rank, "") for track in tracks], rows.track),
            "track": _texts([track.name for track in tracks], rows.track),
            "kind": _texts([track.kind.name.lower() for track in tracks], rows.track),
            "block": _numbers([track.block for track in tracks], rows.track, missing=-1),
            "warp": _numbers([track.warp for track in tracks], rows.track, missing=-1),
            "role": _texts(role_names, roles),
            "sm": _numbers([track.sm for track in tracks], rows.track, missing=-1),
            "event": _texts([event.name for event in events], rows.event),
            "name": self._names(rows, payload),
            "class": _texts([event.event_class.value for event in events], rows.event),
            "ends_at": _texts([event.ends_at for event in events], rows.event),
            # Launch -1 is no launch: the empty name and the missing number at the end.
            "launch": _texts([*(launch.name for launch in launches), ""], rows.launch % (len(launches) + 1)),
            "launch_key": _texts([*(launch.key for launch in launches), ""], rows.launch % (len(launches) + 1)),
            "communicator": _texts([*groups, ""], rows.launch % (len(launches) + 1)),
            "sequence": _numbers([*(launch.sequence for launch in launches), -1], rows.launch, missing=-1),
            "epoch": _numbers([*(launch.epoch for launch in launches), -1], rows.launch, missing=-1),
        }

    def _names(self, rows: Spans | Marks, payload: UInt64) -> Any:
        events, launches, host_names = self._timeline.events, self._timeline.launches, self._timeline.host_names
        names = [*(event.name for event in events), *(launch.name for launch in launches), *host_names]
        index = rows.event.astype(np.int64)
        is_launch = _is_of_class(events, EventClass.LAUNCH)[rows.event] & (rows.launch >= 0)
        is_host = _is_of_class(events, EventClass.HOST)[rows.event]
        index[is_launch] = len(events) + rows.launch[is_launch]
        index[is_host] = len(events) + len(launches) + payload[is_host].astype(np.int64)
        return _texts(names, index)

    def _field_columns(
        self, event: Int32, begin: UInt64, end: UInt64, has_end: Mask, which: slice | None
    ) -> dict[str, Any]:
        """which: of all spans, the rows; None for marks, which have nothing but fields."""
        columns = {}
        for name in [*self._fields, *(self._derived.keys() - self._fields.keys())]:
            values = np.full(len(event), -1, np.int64)
            if which is not None and name in self._derived:
                values = self._derived[name][which].copy()
            missing = values < 0
            for source in self._fields.get(name, []):
                rows = np.flatnonzero((event == source.event) & has_end if source.at_end else event == source.event)
                payload = end if source.at_end else begin
                values[rows] = unpack_field(source.fields, source.name, payload[rows])
                missing[rows] = False
            columns[name] = _nullable(values, missing)
        return columns


@dataclass(frozen=True)
class _FieldSource:
    """One event's field that feeds a column."""

    event: int
    at_end: bool
    fields: tuple[Field, ...]
    name: str


def _peers(drawing: Drawing) -> Int32:
    """[num_spans] the rank whose signal ended a wait, or else the one that the span names; -1 where it names none."""
    timeline = drawing.timeline
    peer = named_peers(timeline, np.arange(len(timeline.spans)))
    if any(rank.label for rank in timeline.ranks):  # two captures: each names its peers by its own numbers
        peer[:] = -1
    released = np.flatnonzero(drawing.releaser >= 0)
    peer[released] = timeline.track_ranks()[timeline.spans.track[drawing.releaser[released]]]
    return peer


def _derived_columns(timeline: Timeline) -> dict[str, Int64]:
    """Bytes of each span, and the number of its warp group under the name that its launch has for it; -1 for none."""
    columns = {"bytes": bytes_of_spans(timeline)} if any(event.bytes_each for event in timeline.events) else {}
    group = groups_of_spans(timeline)
    fields = np.array([*(launch.group_field for launch in timeline.launches), ""])
    own = fields[timeline.spans.launch]
    return columns | {str(name): np.where(own == name, group, -1) for name in np.unique(fields) if name}


def _field_sources(timeline: Timeline) -> dict[str, list[_FieldSource]]:
    """Column name -> the fields that it shows. Fields of one name share a column."""
    sources: dict[str, list[_FieldSource]] = {}
    for event_idx, event in enumerate(timeline.events):
        both = (event.begin_fields, event.end_fields)
        for at_end, (fields, names) in enumerate(zip(both, argument_names(event, _COLUMNS), strict=True)):
            for field, column in zip(fields, names, strict=True):
                if column in _COLUMNS:  # of a launch's own span: the columns of its launch say it
                    continue
                sources.setdefault(column, []).append(_FieldSource(event_idx, bool(at_end), fields, field.name))
    return sources


class _Neighbours:
    """For every span the numbers of the spans at the other ends of its flows."""

    def __init__(self, span: Int64, other: Int64) -> None:
        """span: index of the one end of each flow. other: number of the other."""
        order = np.argsort(span, kind="stable")
        self._span = span[order]
        self._other = other[order]

    def lists(self, first: int, last: int) -> Any:
        """A list per span of [first, last); null where there is none."""
        import pyarrow

        bounds = np.searchsorted(self._span, np.arange(first, last + 1))
        values = pyarrow.array(self._other[bounds[0] : bounds[-1]], pyarrow.int64())
        offsets = (bounds - bounds[0]).astype(np.int32)
        mask = pyarrow.array(np.diff(offsets) == 0)
        return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values, mask=mask)


def _table(columns: dict[str, Any]) -> Any:
    import pyarrow

    return pyarrow.table(columns)


def _nullable(values: Int64 | Int32, missing: Mask) -> Any:
    import pyarrow

    return pyarrow.array(values, mask=missing)


def _numbers(table: list[int], index: Any, missing: int | None = None) -> Any:
    values = np.array(table, np.int64)[index] if table else np.empty(0, np.int64)
    return _nullable(values, values == missing if missing is not None else np.zeros(len(values), bool))


def _texts(table: Sequence[str], index: Any) -> Any:
    """A column of table[index], each text stored once; the empty text is null."""
    import pyarrow

    codes: dict[str, int] = {}
    code_of = np.array([codes.setdefault(text, len(codes)) for text in table], np.int32)
    column = code_of[index] if table else np.empty(0, np.int32)
    indices = _nullable(column, column == codes.get("", -1))
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(codes, pyarrow.string()))


def _is_of_class(events: tuple[EventType, ...], event_class: EventClass) -> Mask:
    return np.array([event.event_class is event_class for event in events], bool)

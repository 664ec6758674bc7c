"""Decodes runs of SPAN_RECORD, one record a span: nothing has to be joined."""

from __future__ import annotations

import numpy as np

from tracekern.dump import format as fmt
from tracekern.timeline.decode.event_tables import EventNumbers
from tracekern.timeline.decode.problems import Seen
from tracekern.timeline.decode.record_columns import Batch, event_of, kind_of, payload_of
from tracekern.timeline.model import OPEN_END, Marks, Spans


def decode_spans(batch: Batch, events: EventNumbers, seen: Seen) -> tuple[Spans, Marks]:
    """The spans and marks of a batch, in the order of their begins."""
    records = batch.records.view(fmt.SPAN_RECORD)
    kind = kind_of(records)
    is_known = (kind == fmt.RecordKind.SPAN) | (kind == fmt.RecordKind.MARK)
    owner, event = batch.owner, event_of(records)
    if not is_known.all():
        seen.strange.append(batch.track[owner[~is_known]])
        records, kind, owner, event = records[is_known], kind[is_known], owner[is_known], event[is_known]
    begin, end, damaged = batch.runs.times.of_records(records, batch.some, owner)
    seen.backwards.append(batch.track[damaged])
    track, launch = batch.track[owner], batch.launch[owner]
    number = events.number(launch, event)
    payload = payload_of(records)
    begin_payload, end_payload = events.split(number, payload)

    spans = Spans(
        track=track,
        event=number,
        launch=launch,
        start=begin,
        end=end,
        begin_payload=begin_payload,
        end_payload=np.where(end == OPEN_END, np.uint64(0), end_payload),
    )
    marked = kind == fmt.RecordKind.MARK
    if not marked.any():
        return spans, Marks()
    marks = Marks(
        track=track[marked], event=number[marked], launch=launch[marked], time=begin[marked], payload=payload[marked]
    )
    return spans.take(~marked), marks

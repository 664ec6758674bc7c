"""Decodes runs of WIDE_RECORD, two records a span: of a flight recorder's ring, or in cycles of the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.timeline.columns import join_rows
from tracekern.timeline.decode.event_tables import EventNumbers
from tracekern.timeline.decode.pairing import pair
from tracekern.timeline.decode.problems import Seen
from tracekern.timeline.decode.record_columns import Batch, WriterRuns, event_of, kind_of, payload_of
from tracekern.timeline.model import OPEN_END, Int32, Int64, Marks, Spans, UInt64


def decode_pairs(batch: Batch, events: EventNumbers, seen: Seen) -> tuple[Spans, Marks]:
    """The spans and marks of a batch, in the order of their begins. Raises BadInput for impossible times."""
    runs, kinds = batch.runs, kind_of(batch.records)
    where = np.flatnonzero(kinds - np.uint8(1) < 3).astype(np.int32)  # begin, end or mark
    records = batch.records[where]
    kind, event, owner, payload = kinds[where], event_of(records), batch.owner[where], payload_of(records)
    ticks, backwards = _forward_only(runs.to_ticks(_stamps(records, runs), batch.some, owner), owner)
    launch, track = batch.launch, batch.track
    type_of = events.number(launch[owner], event)

    spanning = np.flatnonzero(kind != fmt.RecordKind.MARK).astype(np.int32)
    pairs = pair(kind[spanning] == fmt.RecordKind.BEGIN, event[spanning], owner[spanning])
    is_open = pairs.end < 0
    begin, end = spanning[pairs.begin], spanning[pairs.end]
    spans = Spans(
        track=track[owner[begin]],
        event=type_of[begin],
        launch=launch[owner[begin]],
        start=ticks[begin],
        end=np.where(is_open, OPEN_END, ticks[end]),
        begin_payload=payload[begin],
        end_payload=np.where(is_open, np.uint64(0), payload[end]),
    )
    marked = np.flatnonzero(kind == fmt.RecordKind.MARK).astype(np.int32)
    marks = Marks(
        track=track[owner[marked]],
        event=type_of[marked],
        launch=launch[owner[marked]],
        time=ticks[marked],
        payload=payload[marked],
    )
    is_cut = runs.overwritten[batch.some][owner[spanning[pairs.orphan]]] > 0
    cut, orphan = spanning[pairs.orphan[is_cut]], spanning[pairs.orphan[~is_cut]]
    if len(cut):
        first = np.searchsorted(owner, owner[cut])
        since_oldest = Spans(
            track=track[owner[cut]],
            event=events.without_begin(type_of[cut]),
            launch=launch[owner[cut]],
            start=ticks[first],
            end=ticks[cut],
            begin_payload=np.ones(len(cut), np.uint64),
            end_payload=payload[cut],
        )
        # In front of what begins later in the same run; the outer ones, which end later, in front of the inner ones.
        before = np.lexsort((np.concatenate([-cut, begin]), np.concatenate([first * 2, begin * 2 + 1])))
        spans = join_rows([since_oldest, spans], Spans()).take(before)
    strange = np.flatnonzero((kinds == fmt.RecordKind.EMPTY) | (kinds > fmt.RecordKind.MARK))
    seen.orphans.append(track[owner[orphan]])
    seen.strange.append(track[batch.owner[strange]])
    seen.backwards.append(track[backwards])
    return spans, marks


def _stamps(records: npt.NDArray[Any], runs: WriterRuns) -> Int64:
    """Ticks or cycles of records. Raises BadInput beyond the runs' max_ticks."""
    ticks: UInt64 = records["ticks"]
    if len(ticks) and int(ticks.max()) > runs.max_ticks:
        what = f"a record's ticks {int(ticks.max())} are beyond {runs.max_ticks}"
        raise BadInput(f"{runs.path}: {what}; damaged")
    return ticks.view(np.int64)


def _forward_only(ticks: Int64, owner: Int32) -> tuple[Int64, Int32]:
    """Ticks that never fall within a run, and the runs where they did: a torn record, or a clock that stepped back."""
    falls = (ticks[1:] < ticks[:-1]) & (owner[1:] == owner[:-1])
    backwards = np.unique(owner[1:][falls])
    for run in backwards.tolist():
        rows = slice(*np.searchsorted(owner, [run, run + 1]).tolist())
        ticks[rows] = np.maximum.accumulate(ticks[rows])
    return ticks, backwards

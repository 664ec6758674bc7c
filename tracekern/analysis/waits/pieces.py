"""Which pieces of activity are waits, and how much of each was lateness of the other side, how much the link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Mask, Timeline


@dataclass(frozen=True)
class WaitPieces:
    """[n] the pieces of activity that are waits."""

    piece: Int64
    """Ascending."""
    late_ns: Int64
    """Until the other side was there."""
    link_ns: Int64
    """From then to the end, where the wait was for a message."""
    unknown: Int64
    """[m] the pieces of activity that are waits for ranks without records, ascending."""

    @classmethod
    def of(cls, timeline: Timeline, graph: EventGraph, waits: Waits) -> WaitPieces:
        unknown = np.flatnonzero(_is_unknown(timeline, waits)[graph.activity.span])
        is_wait = np.zeros(len(timeline.spans), bool)
        is_wait[waits.row] = True
        piece = np.flatnonzero(is_wait[graph.activity.span])
        if graph.activity.is_flat:  # each wait is one piece
            return cls(piece, waits.late_ns, np.where(is_message(waits), waits.wait_ns - waits.late_ns, 0), unknown)
        wait = np.searchsorted(waits.row, graph.activity.span[piece])
        return cls(piece, *_divide(timeline, graph, waits, piece, wait), unknown)


def parts_of_pieces(timeline: Timeline, graph: EventGraph, waits: Waits, piece: Int64) -> tuple[Int64, Int64]:
    """([n] late_ns, [n] link_ns) of any pieces; 0 for one that is no wait."""
    late, link = np.zeros(len(piece), np.int64), np.zeros(len(piece), np.int64)
    if len(waits):
        span = graph.activity.span[piece]
        wait = np.minimum(np.searchsorted(waits.row, span), len(waits) - 1)
        some = np.flatnonzero(waits.row[wait] == span)
        late[some], link[some] = _divide(timeline, graph, waits, piece[some], wait[some])
    return late, link


def is_message(waits: Waits, wait: Int64 | slice = slice(None)) -> Mask:
    """[n] whether each (of the waits `wait`) was for one signal on record: what is not lateness is then the link's."""
    kind = waits.kind[wait]
    return np.asarray((kind == WaitKind.DATA) | (kind == WaitKind.CREDIT), bool)


def _is_unknown(timeline: Timeline, waits: Waits) -> Mask:
    """[num_spans] a wait whose signal is not on record, or one that was given up: no work of the rank that waits."""
    spans = timeline.spans
    names_another = [
        event.event_class is EventClass.WAIT and (event.channel is not None or event.has("peer"))
        for event in timeline.events
    ]
    unknown = np.asarray(np.array([*names_another, False], bool)[spans.event] & (spans.end == OPEN_END), bool)
    unknown[waits.row[waits.kind == WaitKind.UNMATCHED]] = True
    return unknown


def _divide(timeline: Timeline, graph: EventGraph, waits: Waits, piece: Int64, wait: Int64) -> tuple[Int64, Int64]:
    start = graph.activity.start[piece]
    length = graph.activity.end[piece] - start
    late = np.clip(timeline.spans.start[waits.row[wait]] + waits.late_ns[wait] - start, 0, length)
    return late, np.where(is_message(waits, wait), length - late, 0)

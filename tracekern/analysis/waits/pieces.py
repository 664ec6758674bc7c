"""How much of each piece of activity was lateness of the other side, and how much the link."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.waits.analyze import WaitKind, Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.timeline.model import Int64, Mask, Timeline


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


def _divide(timeline: Timeline, graph: EventGraph, waits: Waits, piece: Int64, wait: Int64) -> tuple[Int64, Int64]:
    start = graph.activity.start[piece]
    length = graph.activity.end[piece] - start
    late = np.clip(timeline.spans.start[waits.row[wait]] + waits.late_ns[wait] - start, 0, length)
    return late, np.where(is_message(waits, wait), length - late, 0)

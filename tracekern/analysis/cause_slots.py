"""What runs spent their time on up to some moment: sums over their pieces of activity, slot by slot.

A *slot* is the place of a phase among those of its stage; behind these there is one each for waits without a cause on
record, for lateness and for the link.
Pieces are gone through some runs at a time, so that what is summed up stays in the cache.
"""

from __future__ import annotations

import numpy as np

from tracekern.analysis.event_graph import EventGraph
from tracekern.analysis.wait_pieces import WaitPieces
from tracekern.timeline.model import Int64

_PIECES_AT_ONCE = 1 << 15


def slots_of_phases(graph: EventGraph) -> Int64:
    """[num_phases] the slot of each."""
    first_phase = np.searchsorted(graph.stage_of_phase, np.arange(len(graph.stages)))
    return np.arange(len(graph.phases)) - first_phase[graph.stage_of_phase]


def time_by_slot(graph: EventGraph, waits: WaitPieces, run: Int64, piece: Int64, in_piece_ns: Int64) -> Int64:
    """[num_slots, n] ns that each run spent in each slot until `in_piece_ns` after the start of its `piece`.

    A piece that is a wait counts with what is neither lateness nor link. 0 where the run is -1.
    """
    num_slots = int(slots_of_phases(graph).max(initial=-1)) + 4
    spent = np.zeros((num_slots, len(run)), np.int64)
    runs = graph.runs
    cuts = np.unique(np.searchsorted(runs.first, np.arange(0, len(graph.activity), _PIECES_AT_ONCE)))
    cuts = np.append(cuts[cuts < len(runs)], len(runs))
    part_of_run = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    if len(cuts) <= 1 << 16:
        part_of_run = part_of_run.astype(np.uint16)  # sorted by radix, in linear time
    known = np.flatnonzero(run >= 0)
    part = part_of_run[run[known]]
    known = known[np.argsort(part, kind="stable")]
    stops = np.cumsum(np.bincount(part, minlength=len(cuts) - 1))
    for number, asked in enumerate(np.split(known, stops[:-1])):
        if len(asked):
            pieces = slice(int(runs.first[cuts[number]]), int(runs.stop[cuts[number + 1] - 1]))
            first = runs.first[run[asked]] - pieces.start
            found = _spent(graph, waits, pieces, first, piece[asked] - pieces.start, in_piece_ns[asked])
            for slot, values in zip(spent, found, strict=True):
                slot[asked] = values
    return spent


def _spent(
    graph: EventGraph, waits: WaitPieces, pieces: slice, first: Int64, last: Int64, in_last_ns: Int64
) -> list[Int64]:
    """By slot: [n] ns in the pieces first..last, of the last one the first `in_last_ns`. Both count in `pieces`."""
    own = graph.activity.end[pieces] - graph.activity.start[pieces]
    here = slice(*np.searchsorted(waits.piece, (pieces.start, pieces.stop)))
    late, link = np.zeros_like(own), np.zeros_like(own)
    late[waits.piece[here] - pieces.start] = waits.late_ns[here]
    link[waits.piece[here] - pieces.start] = waits.link_ns[here]
    own -= late
    own -= link
    slot_of_phase = slots_of_phases(graph).astype(np.int16)
    unknown = int(slot_of_phase.max(initial=-1)) + 1
    slot = slot_of_phase[graph.phase[pieces]]
    slot[waits.unknown[slice(*np.searchsorted(waits.unknown, (pieces.start, pieces.stop)))] - pieces.start] = unknown
    sums = np.zeros(len(own) + 1, np.int64)

    def before_last(values: Int64) -> Int64:
        np.cumsum(values, out=sums[1:])
        return sums[last] - sums[first]

    in_late = np.minimum(in_last_ns, late[last])
    in_link = np.minimum(in_last_ns - in_late, link[last])
    in_own = in_last_ns - in_late - in_link
    rows = [
        before_last(np.where(slot == number, own, 0)) + np.where(slot[last] == number, in_own, 0)
        for number in range(unknown + 1)
    ]
    return [*rows, before_last(late) + in_late, before_last(link) + in_link]

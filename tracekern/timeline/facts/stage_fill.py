"""How many slots of a ring of int4 experts are full or on their way, block by block, where both sides are on record.

A stage takes a slot when its copies are started, at the end of `issue_copy`, and gives it back when the last consumer
ends its `multiply_stage`. Only tiles in detail have these spans, so a fill is known from the time when the last
consumer enters such a tile until the producer leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.model import OPEN_END, Int64, Timeline

_COPY, _WAIT, _MULTIPLY, _PRODUCE = "issue_copy", "wait_stage", "multiply_stage", "produce_stages"


@dataclass(frozen=True)
class StageFill:
    """Slots in use of one block's ring, in one stretch of stages that all its warps have on record."""

    rank: int
    block: int
    time: Int64
    """[n] ns, rising: from each on, up to the next, the ring holds `value`. The last one ends the stretch."""
    value: Int64
    """[n]; 0 at the last."""


def find_stage_fills(timeline: Timeline) -> list[StageFill]:
    """All stretches, in the order of launches, blocks and stages."""
    rows = {name: closed_rows(timeline, name) for name in (_COPY, _WAIT, _MULTIPLY, _PRODUCE)}
    if not all(map(len, rows.values())):
        return []
    blocks = np.array([track.block for track in timeline.tracks], np.int64)
    spans = timeline.spans

    def by_ring(name: str) -> dict[tuple[int, int], Int64]:
        own = rows[name]
        rings: dict[tuple[int, int], list[int]] = {}
        places = zip(spans.launch[own].tolist(), blocks[spans.track[own]].tolist(), own.tolist(), strict=True)
        for launch, block, row in places:
            rings.setdefault((launch, block), []).append(row)
        return {ring: np.array(found, np.int64) for ring, found in rings.items()}

    copies, waits, multiplies, whole = map(by_ring, (_COPY, _WAIT, _MULTIPLY, _PRODUCE))
    fills = []
    for ring in sorted(copies.keys() & waits.keys() & multiplies.keys() & whole.keys()):
        fills += _of_ring(timeline, ring[1], copies[ring], waits[ring], multiplies[ring], int(whole[ring][0]))
    return fills


def _of_ring(timeline: Timeline, block: int, copy: Int64, wait: Int64, multiply: Int64, whole: int) -> list[StageFill]:
    spans = timeline.spans
    num_consumers = len(np.unique(spans.track[multiply]))
    entered = _last_of_all(timeline.field(wait, "stage"), spans.start[wait], num_consumers)
    freed = _last_of_all(timeline.field(multiply, "stage"), spans.end[multiply], num_consumers)
    copied = _last_of_all(timeline.field(copy, "stage"), spans.end[copy], 1)
    stages = np.array(sorted(entered.keys() & freed.keys() & copied.keys()), np.int64)
    slots, num_stages = (int(timeline.field(whole, name)[0]) for name in ("slots", "stages"))
    rank = timeline.tracks[spans.track[whole]].rank
    fills = []
    for stretch in np.split(stages, np.flatnonzero(np.diff(stages) != 1) + 1):
        if not len(stretch):
            continue
        first, last = int(stretch[0]), int(stretch[-1])
        # Nothing is in the ring before its first stage, nor copied after its last one.
        begin = copied[first] if first == 0 else entered[first]
        end = freed[last] if last + 1 == num_stages else copied[last]
        up, down = (np.array([of[stage] for stage in stretch.tolist()], np.int64) for of in (copied, freed))
        changes = np.concatenate([up, down])
        time = np.unique(np.append(np.clip(changes, begin, end), [begin, end]))
        value = np.searchsorted(np.sort(up), time, "right") - np.searchsorted(np.sort(down), time, "right")
        # A consumer gives its slot back a little before its span ends, and the next copy may be faster.
        value = np.clip(value, 0, slots)
        value[-1] = 0
        if begin < end:
            fills.append(StageFill(rank, block, time, value))
    return fills


def _last_of_all(stage: Int64, time: Int64, wanted: int) -> dict[int, int]:
    """Stage -> the last of its times, of stages that have as many as wanted."""
    order = np.lexsort((time, stage))
    numbers, count = np.unique(stage, return_counts=True)
    last = time[order][np.cumsum(count) - 1]
    found = zip(numbers.tolist(), last.tolist(), count.tolist(), strict=True)
    return {number: at for number, at, times in found if times == wanted}


def closed_rows(timeline: Timeline, name: str) -> Int64:
    """Returns the closed spans of an event, none where no kernel has it."""
    if not any(event.name == name for event in timeline.events):
        return np.empty(0, np.int64)
    rows = timeline.rows_of(name)
    closed: Int64 = rows[timeline.spans.end[rows] != OPEN_END]
    return closed

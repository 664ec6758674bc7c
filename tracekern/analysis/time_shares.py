"""Where the warps' time went: work, wait, signal, sync, or no span at all. The parts sum to the whole, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.intervals import exposed
from tracekern.timeline.model import OPEN_END, EventClass, Int32, Int64, Spans, Timeline, TrackKind


@dataclass(frozen=True)
class TimeShares:
    """ns of warp time, `[num_ranks]` each: over all warps of the rank, from the first record of a launch to its last.

    `work` is time inside some span but in no wait, signal or sync; `unrecorded` is time between spans. A wait inside a
    signal counts as signal: the outer one opened first.
    """

    ranks: tuple[int, ...]
    work: Int64
    wait: Int64
    signal: Int64
    sync: Int64
    unrecorded: Int64

    @property
    def total(self) -> Int64:
        return self.work + self.wait + self.signal + self.sync + self.unrecorded


_STALLS = (EventClass.WAIT, EventClass.SIGNAL, EventClass.SYNC)


def share_time(timeline: Timeline) -> TimeShares:
    """The warp time of every rank, split by what the warp did. Spans that never closed do not count."""
    spans = timeline.spans
    is_device = np.array([track.kind == TrackKind.DEVICE for track in timeline.tracks], bool)
    closed = np.asarray((spans.end != OPEN_END) & is_device[spans.track], bool)
    class_idx = [_STALLS.index(event.event_class) if event.event_class in _STALLS else -1 for event in timeline.events]
    stall = np.array(class_idx, np.int64)[spans.event]
    rank_of_span = timeline.track_ranks()[spans.track]
    ranks = tuple(rank.rank for rank in timeline.ranks)

    stalled = exposed(spans, closed & (stall >= 0))
    wait, signal, sync = (_sum_per_rank(ranks, rank_of_span, stalled * (stall == idx)) for idx in range(len(_STALLS)))
    covered = _sum_per_rank(ranks, rank_of_span, exposed(spans, closed))
    lifetime = _lifetimes(timeline.spans.take(closed), rank_of_span[closed], ranks)
    return TimeShares(ranks, covered - wait - signal - sync, wait, signal, sync, lifetime - covered)


def _lifetimes(spans: Spans, rank_of_span: Int32, ranks: tuple[int, ...]) -> Int64:
    """First start to last end of each (track, launch), summed per rank. A track's launches follow one another."""
    if not len(spans):
        return np.zeros(len(ranks), np.int64)
    first = np.flatnonzero(np.append(True, (np.diff(spans.track) != 0) | (np.diff(spans.launch) != 0)))
    lifetime = np.maximum.reduceat(spans.end, first) - spans.start[first]
    return _sum_per_rank(ranks, rank_of_span[first], lifetime)


def _sum_per_rank(ranks: tuple[int, ...], rank_of: Int32, amount: Int64) -> Int64:
    return np.array([int(amount[rank_of == rank].sum()) for rank in ranks], np.int64)

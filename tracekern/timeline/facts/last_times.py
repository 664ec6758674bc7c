"""Until when each clock of a run was heard of: how long what never ended lasted at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.dump.format import MAX_NS
from tracekern.timeline.model import Int64, Mask, Timeline


@dataclass(frozen=True)
class TracksHeard:
    """What of the rows tells so. Adds up over the parts of a run."""

    last: Int64
    """[num_tracks] the last recorded time of each track; the lowest int64 where nothing was recorded."""
    is_open: Mask
    """[num_tracks] True where a span never closed."""

    @classmethod
    def of(cls, timeline: Timeline) -> TracksHeard:
        spans, marks, num_tracks = timeline.spans, timeline.marks, len(timeline.tracks)
        last, is_open = np.full(num_tracks, np.iinfo(np.int64).min), np.zeros(num_tracks, bool)
        np.maximum.at(last, spans.track, np.maximum(spans.start, spans.end))
        np.maximum.at(last, marks.track, marks.time)
        is_open[spans.track[spans.is_open]] = True
        return cls(last, is_open)

    def __add__(self, other: TracksHeard) -> TracksHeard:
        return TracksHeard(np.maximum(self.last, other.last), self.is_open | other.is_open)

    def by_clock(self, timeline: Timeline) -> Int64:
        """[num_tracks] the last recorded time, in `unit`, on the clock of each track.

        Of all ranks, or of the track's own rank where clocks are not aligned; the lowest int64 where nothing was
        recorded. A rank that died inside a span has recorded until then, and no other rank's time counts for it.
        """
        last: Int64 = self.last.copy()
        ranks = timeline.track_ranks()
        inside = set(ranks[self.is_open].tolist())
        died = {rank.rank: rank.died_ns for rank in timeline.ranks if rank.died_ns is not None and rank.rank in inside}
        for rank, died_ns in died.items():
            since_origin = max(0, min(died_ns - timeline.origin_ns, MAX_NS))  # as far as times of sound records go
            np.maximum(last, since_origin, out=last, where=ranks == rank)
        clocks = np.zeros_like(ranks) if timeline.aligned and timeline.unit == "ns" else ranks
        groups = [clocks == clock for clock in np.unique(clocks)] + [ranks == rank for rank in died]
        latest = [last[group].max() for group in groups]
        for group, time in zip(groups, latest, strict=True):
            last[group] = time
        return last


def last_times(timeline: Timeline) -> Int64:
    """[num_tracks] TracksHeard.by_clock() of a timeline that is all of a run, or all that is looked at."""
    return TracksHeard.of(timeline).by_clock(timeline)

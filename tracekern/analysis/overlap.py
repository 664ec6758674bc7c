"""For how long the kernels of one stream of a rank ran beside those of its other streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.intervals import union_ns
from tracekern.timeline.iterations import LaunchIterations
from tracekern.timeline.model import OPEN_END, Int64, Timeline, TrackKind


@dataclass(frozen=True)
class StreamOverlap:
    """The kernels of one stream of a rank, without those of set-up and start-up."""

    rank: int
    kernels: tuple[str, ...]
    """Their names, in the order of their first launches."""
    busy_ns: int
    """For how long one of them ran."""
    beside_ns: int
    """For how much of that a kernel of another stream of the rank ran, too."""

    @property
    def share(self) -> float:
        return self.beside_ns / self.busy_ns if self.busy_ns else 0.0


def stream_overlaps(timeline: Timeline) -> tuple[StreamOverlap, ...]:
    """Returns the streams of all ranks that have kernels on more than one, by rank, in the order of their tracks.

    Works on unaligned Timelines too: nothing is compared across ranks.
    """
    spans, is_measured = timeline.spans, LaunchIterations(timeline).is_measured
    row = np.flatnonzero(timeline.tracks_of(TrackKind.LAUNCH)[spans.track])
    row = row[(spans.end[row] != OPEN_END) & (spans.launch[row] >= 0)]
    row = row[is_measured[spans.launch[row]]]
    found: list[StreamOverlap] = []
    ranks = timeline.track_ranks()
    for rank in np.unique(ranks[spans.track[row]]).tolist():
        own = row[ranks[spans.track[row]] == rank]
        tracks, track = np.unique(spans.track[own], return_inverse=True)
        if len(tracks) < 2:
            continue
        for number in range(len(tracks)):
            is_here = track == number
            busy, others = (_covered_ns(timeline, own[chosen]) for chosen in (is_here, ~is_here))
            beside = busy + others - _covered_ns(timeline, own)
            names = dict.fromkeys(timeline.launches[launch].name for launch in spans.launch[own[is_here]].tolist())
            found.append(StreamOverlap(rank, tuple(names), busy, beside))
    return tuple(found)


def _covered_ns(timeline: Timeline, row: Int64) -> int:
    return int(union_ns(timeline.spans, row, np.zeros(len(row), np.int64), 1)[0])

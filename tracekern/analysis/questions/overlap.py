"""For how long the kernels of one stream of a rank, or the ranges of one of its threads, ran beside those of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.intervals import union_ns, unions
from tracekern.timeline.join.host_lanes import is_torch_lane
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


@dataclass(frozen=True)
class ThreadOverlap:
    """The ranges of one thread of a rank's host."""

    ranges: tuple[str, ...]
    """The first words of their names, in the order in which they came: "write" of "write layer0" and "write layer1"."""
    busy_ns: int
    """For how long one of them was open."""
    beside_ns: int
    """For how much of that a range of another thread was open, too."""


@dataclass(frozen=True)
class RankThreads:
    """The threads of a rank that have ranges."""

    rank: int
    covered_ns: int
    """For how long a range of any thread was open."""
    several_ns: int
    """For how much of that ranges of several threads were."""
    threads: tuple[ThreadOverlap, ...]
    """In the order of their tracks."""


def stream_overlaps(timeline: Timeline) -> tuple[StreamOverlap, ...]:
    """Returns the streams of all ranks that have kernels on more than one, by rank, in the order of their tracks.

    Works on unaligned Timelines too: nothing is compared across ranks.
    """
    spans, is_measured = timeline.spans, launch_iterations(timeline).is_measured
    row = np.flatnonzero(timeline.tracks_of(TrackKind.LAUNCH)[spans.track])
    row = row[(spans.end[row] != OPEN_END) & (spans.launch[row] >= 0)]
    row = row[is_measured[spans.launch[row]]]
    found: list[StreamOverlap] = []
    for rank, tracks in _ranks_of_several_tracks(timeline, row):
        for own, busy, beside in _beside(timeline, tracks):
            names = dict.fromkeys(timeline.launches[launch].name for launch in spans.launch[own].tolist())
            found.append(StreamOverlap(rank, tuple(names), busy, beside))
    return tuple(found)


def thread_overlaps(timeline: Timeline) -> tuple[RankThreads, ...]:
    """Returns the ranks on which ranges of several threads are on record. Those of torch.profiler do not count.

    Works on unaligned Timelines too: nothing is compared across ranks.
    """
    spans = timeline.spans
    has_ranges = [track.kind is TrackKind.HOST and not is_torch_lane(track) for track in timeline.tracks]
    row = np.flatnonzero(np.array(has_ranges, bool)[spans.track])
    row = row[spans.end[row] != OPEN_END]
    found: list[RankThreads] = []
    for rank, tracks in _ranks_of_several_tracks(timeline, row):
        threads = []
        for own, busy, beside in _beside(timeline, tracks):
            names = [timeline.host_names[label].partition(" ")[0] for label in spans.begin_payload[own].tolist()]
            threads.append(ThreadOverlap(tuple(dict.fromkeys(names)), busy, beside))
        every = np.concatenate(tracks)
        found.append(RankThreads(rank, _covered_ns(timeline, every), _several_ns(timeline, every), tuple(threads)))
    return tuple(found)


def _ranks_of_several_tracks(timeline: Timeline, row: Int64) -> Iterator[tuple[int, list[Int64]]]:
    """The rows of each track, rank by rank, of ranks that have rows on several."""
    track = timeline.spans.track[row]
    ranks = timeline.track_ranks()[track]
    for rank in np.unique(ranks).tolist():
        tracks = np.unique(track[ranks == rank]).tolist()
        if len(tracks) > 1:
            yield rank, [row[track == number] for number in tracks]


def _beside(timeline: Timeline, tracks: list[Int64]) -> Iterator[tuple[Int64, int, int]]:
    """(rows, busy ns, ns of that beside others) of each track."""
    covered = _covered_ns(timeline, np.concatenate(tracks))
    for number, own in enumerate(tracks):
        busy = _covered_ns(timeline, own)
        others = _covered_ns(timeline, np.concatenate(tracks[:number] + tracks[number + 1 :]))
        yield own, busy, busy + others - covered


def _covered_ns(timeline: Timeline, row: Int64) -> int:
    return int(union_ns(timeline.spans, row, np.zeros(len(row), np.int64), 1)[0])


def _several_ns(timeline: Timeline, row: Int64) -> int:
    """For how long spans of several tracks were open."""
    spans = timeline.spans
    row = row[np.lexsort((spans.start[row], spans.track[row]))]
    first, end = unions(spans.track[row], spans.start[row], spans.end[row])
    time = np.concatenate([spans.start[row][first], end])
    step = np.repeat([1, -1], len(end))
    order = np.argsort(time, kind="stable")
    lasted = np.diff(time[order])
    return int(lasted[np.cumsum(step[order])[:-1] > 1].sum())

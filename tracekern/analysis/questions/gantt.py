"""Which spans to draw of an iteration that has too many: those of the warps that waited most, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from tracekern.timeline.facts.iterations import Iterations
from tracekern.timeline.model import OPEN_END, EventClass, Int64, Spans, Timeline, TrackKind

MAX_SPANS = 20_000
"""Limit of the pictures of three iterations together."""
MIN_ROWS = 40


@dataclass(frozen=True)
class ChosenSpans:
    """The spans of some tracks within one iteration."""

    iteration: int
    """Row number in Iterations."""
    tracks: tuple[int, ...]
    """Indices into Timeline.tracks, in the order of the rows: rank by rank, kernels first."""
    spans: Spans
    num_spans_left_out: int


def choose_spans(timeline: Timeline, iterations: Iterations, row: int, max_spans: int = MAX_SPANS // 3) -> ChosenSpans:
    """Spans of the kernels, and of the warps with the longest waits, in the iteration of that row.

    Every rank gets the same number of rows: its kernels, then the warp of each role that waited longest, then others by
    how long they waited; in all at most MIN_ROWS or two a rank, and at most `max_spans` spans.
    """
    spans, num_tracks = timeline.spans, len(timeline.tracks)
    of_launch = np.append(iterations.of_launch, -1)  # index -1: no launch
    inside = (of_launch[spans.launch] == iterations.number[row]) & (spans.end != OPEN_END)
    count = np.bincount(spans.track[inside], minlength=num_tracks)
    is_wait = timeline.events_of(EventClass.WAIT)[spans.event] & inside
    waited = np.zeros(num_tracks, np.int64)
    np.add.at(waited, spans.track[is_wait], (spans.end - spans.start)[is_wait])
    chosen: list[int] = []
    for tracks in _one_of_each_rank(timeline, np.flatnonzero(count).tolist(), waited):
        if (
            len(chosen) + len(tracks) > max(MIN_ROWS, 2 * len(timeline.ranks))
            or count[chosen + tracks].sum() > max_spans
        ):
            break
        chosen += tracks
    kept = np.zeros(num_tracks, bool)
    kept[chosen] = True
    drawn = np.flatnonzero(inside & kept[spans.track])
    order = sorted(
        chosen, key=lambda idx: (timeline.tracks[idx].rank, timeline.tracks[idx].kind != TrackKind.LAUNCH, idx)
    )
    return ChosenSpans(row, tuple(order), spans.take(drawn), int(inside.sum()) - len(drawn))


def _one_of_each_rank(timeline: Timeline, tracks: list[int], waited: Int64) -> list[list[int]]:
    """The most telling track of each rank, then the second of each, and so on."""
    by_rank: dict[int, list[int]] = {rank.rank: [] for rank in timeline.ranks}
    roles_seen: set[tuple[int, str]] = set()
    first: list[int] = []
    rest: list[int] = []
    for idx in sorted(tracks, key=lambda idx: -int(waited[idx])):
        track = timeline.tracks[idx]
        if track.kind == TrackKind.LAUNCH:
            by_rank[track.rank].append(idx)
        elif track.kind == TrackKind.DEVICE:
            (rest if (track.rank, track.role) in roles_seen else first).append(idx)
            roles_seen.add((track.rank, track.role))
    for idx in [*first, *rest]:
        by_rank[timeline.tracks[idx].rank].append(idx)
    return [[idx for idx in row if idx is not None] for row in zip_longest(*by_rank.values())]

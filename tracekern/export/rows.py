"""Which row of a Perfetto picture every track gets.

One root, which the UI opens by itself: its row tells what must be known about the trace. Below it the ranks in order,
each row holding the kernels of the rank's first stream, so that a closed rank still shows something; below a rank its
other streams, its host threads and its blocks; below a block its warps. Plain rows, not processes: those come in any
order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tracekern.export import labels
from tracekern.timeline.model import Timeline, Track, TrackKind

ROOT_UUID = 1
SHARED_SEQUENCE = 1  # of the packets that belong to no rank; rank i of the timeline has i + 2
_LANES_PER_ROW = 1 << 6
"""What the UI sorts by is an int32: below one row there is room for 2^25 others."""


@dataclass(frozen=True)
class Row:
    uuid: int
    name: str
    parent_uuid: int
    order: int
    sequence: int = SHARED_SEQUENCE
    unit: str = ""
    """Of a counter's row: what it counts."""


@dataclass
class Rows:
    """`rows` is every row, parents first; `of_track` holds for each track the index of its row."""

    rows: list[Row] = field(default_factory=list)
    of_track: list[int] = field(default_factory=list)
    of_rank: dict[int, int] = field(default_factory=dict)

    @property
    def lane_stride(self) -> int:
        return len(self.rows) + ROOT_UUID

    def add(self, name: str, parent: int, order: int, sequence: int = SHARED_SEQUENCE, unit: str = "") -> int:
        parent_uuid = self.rows[parent].uuid if parent >= 0 else 0
        self.rows.append(Row(ROOT_UUID + len(self.rows), name, parent_uuid, order * _LANES_PER_ROW, sequence, unit))
        return len(self.rows) - 1

    def lane(self, row_idx: int, lane: int) -> Row:
        """The row for spans that overlap others of the same track: right after the track's own."""
        row = self.rows[row_idx]
        order = row.order + min(lane, _LANES_PER_ROW - 1)
        name = f"{row.name} (lane {lane + 1})"
        return Row(row.uuid + lane * self.lane_stride, name, row.parent_uuid or row.uuid, order, row.sequence)


def lay_out(timeline: Timeline) -> Rows:
    """Rows of the root, the ranks and the tracks that hold something. An empty track has none of its own."""
    rows = Rows()
    root = rows.add(labels.title(timeline), -1, 0)
    num_nodes = len({rank.node for rank in timeline.ranks})
    for order, rank in enumerate(sorted(timeline.ranks, key=lambda rank: rank.rank)):
        rows.of_rank[rank.rank] = rows.add(labels.rank_label(rank, num_nodes), root, order, SHARED_SEQUENCE + 1 + order)
    used = _used_tracks(timeline)
    tracks_of_rank: dict[int, list[int]] = {rank: [] for rank in rows.of_rank}
    rows.of_track = [root] * len(timeline.tracks)
    for track_idx, track in enumerate(timeline.tracks):
        if used[track_idx] and track.rank in rows.of_rank:
            tracks_of_rank[track.rank].append(track_idx)
    for rank_number, members in tracks_of_rank.items():
        _lay_out_rank(rows, timeline, rows.of_rank[rank_number], members)
    return rows


def _lay_out_rank(rows: Rows, timeline: Timeline, rank_row: int, members: list[int]) -> None:
    tracks = timeline.tracks
    sequence = rows.rows[rank_row].sequence
    num_streams = len({tracks[i].stream for i in members if tracks[i].kind == TrackKind.DEVICE})
    blocks: dict[tuple[int, int], list[int]] = {}
    order = 0
    for track_idx in sorted(members, key=lambda i: sort_key(tracks[i])):
        track = tracks[track_idx]
        if track.kind == TrackKind.LAUNCH and order == 0:
            rows.of_track[track_idx] = rank_row
        elif track.kind != TrackKind.DEVICE:
            rows.of_track[track_idx] = rows.add(track.name, rank_row, order, sequence)
        else:
            blocks.setdefault((track.block, track.stream), []).append(track_idx)
        order += 1
    for warps in blocks.values():
        label = labels.block_label(tracks[warps[0]], num_streams)
        if len(warps) == 1:
            track = tracks[warps[0]]
            name = label if track.warp <= 0 and not track.role else f"{label} {labels.warp_label(track)}"
            rows.of_track[warps[0]] = rows.add(name, rank_row, order, sequence)
        else:
            block_row = rows.add(label, rank_row, order, sequence)
            for warp_order, track_idx in enumerate(warps):
                name = labels.warp_label(tracks[track_idx])
                rows.of_track[track_idx] = rows.add(name, block_row, warp_order, sequence)
        order += 1


def sort_key(track: Track) -> tuple[int, int, int, int, str]:
    """The order of tracks below their rank: kernels, host threads, blocks."""
    kind = {TrackKind.LAUNCH: 0, TrackKind.HOST: 1, TrackKind.DEVICE: 2}[track.kind]
    return kind, track.block, track.stream, track.warp, track.name


def _used_tracks(timeline: Timeline) -> list[bool]:
    counts = np.bincount(timeline.spans.track, minlength=len(timeline.tracks))
    counts = counts + np.bincount(timeline.marks.track, minlength=len(timeline.tracks))
    for problem in timeline.problems:
        if problem.track >= 0:
            counts[problem.track] += 1
    return [bool(count) for count in counts]

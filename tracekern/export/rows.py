"""Which row of a Perfetto picture every track gets.

One root, which the UI opens by itself: its row says what must be known about the trace. Below it the ranks in order,
each row holding the kernels of the rank's first stream, so that a closed rank still shows something. Below a rank its
other streams, its Python threads, a group for each of its transfer engines, a closed group with its blocks, its
counters and a closed group with the lanes of torch's profiler; below a block its warps. Plain rows, not processes:
those come in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tracekern.export import labels
from tracekern.timeline.facts.counters import Counter
from tracekern.timeline.join.host_lanes import is_torch_lane
from tracekern.timeline.model import Mask, Timeline, Track, TrackKind

_BLOCKS = "blocks"
_TORCH = "torch profiler"
_ENGINE, _PROXY = "transfer engine", "proxy"
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
    """What a counter's row counts; "" for other rows."""


@dataclass
class Rows:
    """`rows` is every row, parents first; the others hold indices into it."""

    rows: list[Row] = field(default_factory=list)
    of_track: list[int] = field(default_factory=list)
    of_counter: list[int] = field(default_factory=list)
    of_rank: dict[int, int] = field(default_factory=dict)
    marked: dict[int, str] = field(default_factory=dict)

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


def lay_out(
    timeline: Timeline, is_used: Mask, counters: Sequence[Counter] = (), marked: Mapping[int, str] | None = None
) -> Rows:
    """Rows of the root, the ranks, the counters and the tracks that hold something. An empty track has no row.

    is_used: [num_tracks] where spans or marks are. `marked`: device tracks with the words
    to put before the names of their rows, for a viewer to find them by.
    """
    rows = Rows(marked=dict(marked or {}))
    root = rows.add(labels.title(timeline), -1, 0)
    num_nodes = len({rank.node for rank in timeline.ranks})
    for order, rank in enumerate(sorted(timeline.ranks, key=lambda rank: rank.rank)):
        rows.of_rank[rank.rank] = rows.add(labels.rank_label(rank, num_nodes), root, order, SHARED_SEQUENCE + 1 + order)
    used = _with_problems(timeline, is_used)
    tracks_of_rank: dict[int, list[int]] = {rank: [] for rank in rows.of_rank}
    rows.of_track = [root] * len(timeline.tracks)
    rows.of_counter = [root] * len(counters)
    for track_idx, track in enumerate(timeline.tracks):
        if used[track_idx] and track.rank in rows.of_rank:
            tracks_of_rank[track.rank].append(track_idx)
    for rank_number, members in tracks_of_rank.items():
        own_counters = [i for i, counter in enumerate(counters) if counter.rank == rank_number]
        _lay_out_rank(rows, timeline, rank_number, members, {i: counters[i] for i in own_counters})
    return rows


def _lay_out_rank(
    rows: Rows, timeline: Timeline, rank_number: int, members: list[int], counters: dict[int, Counter]
) -> None:
    tracks = timeline.tracks
    rank_row = rows.of_rank[rank_number]
    sequence = rows.rows[rank_row].sequence
    in_order = sorted(members, key=lambda i: sort_key(tracks[i]))
    above = [
        i for i in in_order if tracks[i].kind in (TrackKind.LAUNCH, TrackKind.HOST) and not is_torch_lane(tracks[i])
    ]
    for order, track_idx in enumerate(above):
        is_first_stream = order == 0 and tracks[track_idx].kind == TrackKind.LAUNCH
        own_row = rank_row if is_first_stream else rows.add(tracks[track_idx].name, rank_row, order, sequence)
        rows.of_track[track_idx] = own_row
    engines = sorted({tracks[i].stream for i in in_order if tracks[i].kind == TrackKind.ENGINE})
    for number, engine in enumerate(engines):
        own = [i for i in in_order if tracks[i].kind == TrackKind.ENGINE and tracks[i].stream == engine]
        is_proxy = tracks[own[0]].role.startswith(_PROXY)
        name = _PROXY if is_proxy else _ENGINE + (f" {number}" if len(engines) > 1 else "")
        _lay_out_engine(rows, timeline, rows.add(name, rank_row, len(above) + number, sequence), own)
    next_order = len(above) + len(engines)
    if on_device := [i for i in in_order if tracks[i].kind == TrackKind.DEVICE]:
        _lay_out_blocks(rows, timeline, rows.add(_BLOCKS, rank_row, next_order, sequence), on_device)
    below = next_order + 1
    for order, (counter_idx, counter) in enumerate(counters.items(), below):
        name = f"{counter.name} (peaks)" if counter.is_thinned else counter.name
        rows.of_counter[counter_idx] = rows.add(name, rank_row, order, SHARED_SEQUENCE, counter.unit)
    if lanes := [i for i in in_order if is_torch_lane(tracks[i])]:
        group = rows.add(_TORCH, rank_row, below + len(counters), sequence)
        for order, track_idx in enumerate(lanes):
            rows.of_track[track_idx] = rows.add(tracks[track_idx].name, group, order, sequence)


def _lay_out_engine(rows: Rows, timeline: Timeline, parent: int, members: list[int]) -> None:
    """A row for each of its tracks; those that hold what overlaps are below it."""
    row_of: dict[str, int] = {}
    sequence = rows.rows[parent].sequence
    for order, track_idx in enumerate(members):
        track = timeline.tracks[track_idx]
        name = rows.marked.get(track_idx, "") + track.name
        row = rows.add(name, row_of.get(track.role, parent), order, sequence)
        row_of.setdefault(track.role, row)
        rows.of_track[track_idx] = row


def _lay_out_blocks(rows: Rows, timeline: Timeline, parent: int, members: list[int]) -> None:
    tracks = timeline.tracks
    sequence = rows.rows[parent].sequence
    num_streams = len({tracks[i].stream for i in members})
    blocks: dict[tuple[int, int], list[int]] = {}
    for track_idx in members:
        blocks.setdefault((tracks[track_idx].block, tracks[track_idx].stream), []).append(track_idx)
    for order, warps in enumerate(blocks.values()):
        label = labels.block_label(tracks[warps[0]], num_streams)
        if len(warps) == 1:
            track = tracks[warps[0]]
            name = label if track.warp <= 0 and not track.role else f"{label} {labels.warp_label(track)}"
            rows.of_track[warps[0]] = rows.add(rows.marked.get(warps[0], "") + name, parent, order, sequence)
        else:
            block_row = rows.add(label, parent, order, sequence)
            for warp_order, track_idx in enumerate(warps):
                name = rows.marked.get(track_idx, "") + labels.warp_label(tracks[track_idx])
                rows.of_track[track_idx] = rows.add(name, block_row, warp_order, sequence)


def sort_key(track: Track) -> tuple[int, int, int, int, str]:
    """The order of tracks below their rank: kernels, Python threads, engines, blocks, lanes of torch's profiler."""
    kind = {TrackKind.LAUNCH: 0, TrackKind.HOST: 1, TrackKind.ENGINE: 2, TrackKind.DEVICE: 3}[track.kind]
    return 4 if is_torch_lane(track) else kind, track.block, track.stream, track.warp, track.name


def _with_problems(timeline: Timeline, is_used: Mask) -> list[bool]:
    of_problems = {problem.track for problem in timeline.problems}
    return [used or track in of_problems for track, used in enumerate(is_used.tolist())]

"""Which runs make up which track: launches of one stream follow each other, so one row of the picture holds all."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tracekern.dump.reader import Dump
from tracekern.timeline.decode.event_tables import groups_of_launches
from tracekern.timeline.decode.record_columns import WriterRuns
from tracekern.timeline.model import Int32, Int64, Track, TrackKind


@dataclass(frozen=True)
class TrackMerge:
    tracks: tuple[Track, ...]
    track: Int32
    """[num_runs] index into `tracks`; -1 for a run that left nothing."""
    sorted_runs: Int64
    """Runs of writers that left something, by (track, start)."""
    overlapping: Int32
    """Tracks that exist only because launches of one stream overlapped."""


def merge_tracks(dump: Dump, runs: WriterRuns) -> TrackMerge:
    """Tracks of the runs that left records or lost some."""
    streams = np.array([launch.stream for launch in dump.launches], np.int64)[runs.launch]
    used = np.flatnonzero((runs.written > 0) | (runs.attempted > 0))
    order = used[np.lexsort((runs.start[used], runs.warp[used], runs.block[used], streams[used]))]
    keys = (streams[order], runs.block[order], runs.warp[order])
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    group = np.cumsum(is_new) - 1
    lane = assign_lanes(group, runs.start[order], runs.last[order])
    by_lane = np.lexsort((np.arange(len(order)), lane, group))
    order, group, lane = order[by_lane], group[by_lane], lane[by_lane]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (group[1:] != group[:-1]) | (lane[1:] != lane[:-1])
    number = (np.cumsum(is_first) - 1).astype(np.int32)
    track = np.full(len(runs), -1, np.int32)
    track[order] = number
    firsts = np.flatnonzero(is_first)
    roles = _role_names(dump, runs, order, number)
    group_warps = _group_warps(dump, runs, order, number)
    tracks = []
    for idx, row in enumerate(firsts.tolist()):
        run = int(order[row])
        block, warp, suffix = int(runs.block[run]), int(runs.warp[run]), f" lane {lane[row] + 1}" if lane[row] else ""
        name = f"block {block} warp {warp}{suffix}"
        own_group, sub_warp = divmod(warp, group_warps[idx]) if idx in group_warps else (-1, -1)
        place = int(streams[run]), block, warp, int(runs.sm[run])
        tracks.append(
            Track(
                dump.rank,
                TrackKind.DEVICE,
                name,
                *place,
                *roles.get(idx, ("", ())),
                group=own_group,
                sub_warp=sub_warp,
            )
        )
    return TrackMerge(tuple(tracks), track, order, number[firsts[lane[firsts] > 0]])


def assign_lanes(group: Int64, start: Int64, last: Int64) -> Int64:
    """[n] 0 where launches follow each other; rows are sorted by (group, start).

    Overlapping ones get lanes 1, 2, ...
    """
    lane = np.zeros(len(group), np.int64)
    clash = (group[1:] == group[:-1]) & (start[1:] < last[:-1])
    for number in np.unique(group[1:][clash]).tolist():
        rows = slice(*np.searchsorted(group, [number, number + 1]).tolist())
        busy: list[tuple[int, int]] = []  # (last ticks, lane)
        for row in range(rows.start, rows.stop):
            lane[row] = heapq.heappop(busy)[1] if busy and busy[0][0] <= start[row] else len(busy)
            heapq.heappush(busy, (int(last[row]), int(lane[row])))
    return lane


def _role_names(
    dump: Dump, runs: WriterRuns, order: Int64, number: Int32
) -> dict[int, tuple[str, tuple[tuple[str, str], ...]]]:
    """Track -> Track.role and Track.kernel_roles, both in the order of the kernels' first launches."""
    tables = dump.metadata["role_tables"]
    kernels = list(dict.fromkeys(launch.name for launch in dump.launches))
    number_of = {name: idx for idx, name in enumerate(kernels)}
    of_launch = [number_of[launch.name] * len(tables) + launch.role_table for launch in dump.launches]
    place = number.astype(np.int64) * len(kernels) * len(tables) + np.array(of_launch, np.int64)[runs.launch[order]]
    found: dict[int, dict[int, list[str]]] = {}  # track -> kernel -> its roles there
    for code in np.unique(place << 16 | runs.role[order]).tolist():
        rest, role = divmod(code, 1 << 16)
        rest, table = divmod(rest, len(tables))
        track, kernel = divmod(rest, len(kernels))
        found.setdefault(track, {}).setdefault(kernel, []).extend(tables[table][role : role + 1])
    result = {}
    for track, own in found.items():
        every = _joined(name for names in own.values() for name in names)
        kernel_roles = tuple((kernels[kernel], _joined(names)) for kernel, names in own.items())
        result[track] = every, kernel_roles if any(role != every for _, role in kernel_roles) else ()
    return result


def _group_warps(dump: Dump, runs: WriterRuns, order: Int64, number: Int32) -> dict[int, int]:
    """Track -> warps of a group, of tracks whose launches with groups agree on it."""
    of_launch = [
        launch.warps_per_block // groups if groups else 0
        for launch, (groups, _) in zip(dump.launches, groups_of_launches(dump), strict=True)
    ]
    pairs = np.stack([number, np.array(of_launch, np.int64)[runs.launch[order]]], axis=1)
    pairs = np.unique(pairs[pairs[:, 1] > 0], axis=0)
    tracks, count = np.unique(pairs[:, 0], return_counts=True)
    agree = np.isin(pairs[:, 0], tracks[count == 1])
    return dict(pairs[agree].tolist())


def _joined(names: Iterable[str]) -> str:
    return "/".join(dict.fromkeys(names))

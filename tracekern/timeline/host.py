"""Lanes of the host: Python ranges of the capture and torch.profiler's trace, on the axis of the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracekern.dump.format import torch_profile_file_name
from tracekern.dump.reader import Dump
from tracekern.dump.torch_profile import LANE_PREFIX, STREAM_PREFIX, read_profile
from tracekern.errors import BadInput
from tracekern.timeline.clocks.host import apply_host
from tracekern.timeline.columns import join_rows
from tracekern.timeline.model import EventClass, EventType, Int64, Spans, Timeline, Track, TrackKind

_HOST_EVENT = EventType("host", EventClass.HOST, "completion")


@dataclass(frozen=True)
class HostLane:
    """One thread, or stream by CUPTI: [n] spans in CLOCK_REALTIME ns, sorted by (start, -end)."""

    name: str
    start: Int64
    end: Int64
    labels: tuple[str, ...]


def read_lanes(dumps: Sequence[Dump], host: Iterable[tuple[int, str | Path]]) -> dict[int, list[HostLane]]:
    """Rank -> its lanes: of the capture, of the profiles beside its dumps, and of those in `host`."""
    profiles = [(dump.rank, dump.path.parent / torch_profile_file_name(dump.rank)) for dump in dumps]
    profiles = [(rank, path) for rank, path in profiles if path.exists()] + [(rank, Path(path)) for rank, path in host]
    lanes = {dump.rank: host_lanes(dump) for dump in dumps}
    rank_of_file: dict[Path, int] = {}
    for rank, path in profiles:
        if rank not in lanes:
            raise BadInput(f"{path}: is for rank {rank}, which this capture does not have; ranks are {sorted(lanes)}")
        file = path.resolve()
        if file in rank_of_file:
            raise BadInput(
                f"{path}: is there for rank {rank_of_file[file]} already; name a profile once, and none of a capture"
            )
        rank_of_file[file] = rank
        lanes[rank] += torch_lanes(path)
    return lanes


def host_lanes(dump: Dump) -> list[HostLane]:
    """The ranges that `capture.range(...)` recorded, one lane a thread."""
    spans = dump.host_spans()
    lanes = []
    for number, thread in enumerate(dict.fromkeys(spans["thread"].tolist())):
        mine = spans[spans["thread"] == thread]
        labels = [label.decode(errors="replace") for label in mine["name"].tolist()]
        start = mine["start_ns"]
        end = np.maximum(mine["end_ns"], start)  # the wall clock may have been set back meanwhile
        lanes.append(_lane("python" if number == 0 else f"python thread {thread}", start, end, labels))
    return lanes


def torch_lanes(path: Path) -> list[HostLane]:
    """The lanes of a Chrome trace of torch.profiler (.json or .json.gz), one a thread and one a stream of a GPU.

    Raises BadInput when it is not one.
    """
    result = []
    for (_, lane), rows in read_profile(path).items():
        times = np.array([row[:2] for row in rows], np.int64)
        result.append(_lane(lane, times[:, 0], times[:, 1], [row[2] for row in rows]))
    return result


def is_torch_lane(track: Track) -> bool:
    """Whether the track is a lane of torch.profiler's trace."""
    return track.kind is TrackKind.HOST and track.name.startswith(LANE_PREFIX)


def is_stream_lane(track: Track) -> bool:
    """Whether the track is what CUPTI saw on a stream of the GPU, by torch.profiler's trace."""
    return track.kind is TrackKind.HOST and track.name.startswith(STREAM_PREFIX)


def _lane(name: str, start: Int64, end: Int64, labels: list[str]) -> HostLane:
    order = np.lexsort((-end, start))
    return HostLane(name, start[order], end[order], tuple(labels[idx] for idx in order.tolist()))


def add_lanes(piece: Timeline, lanes: Sequence[HostLane]) -> Timeline:
    """The piece with a HOST track for each lane."""
    if not lanes:
        return piece
    rank, clock = piece.ranks[0], piece.ranks[0].clock
    names: dict[str, int] = {}
    columns = []
    for number, lane in enumerate(lanes):
        count = len(lane.labels)
        labels = np.array([names.setdefault(label, len(names)) for label in lane.labels], np.uint64)
        columns.append(
            Spans(
                track=np.full(count, len(piece.tracks) + number, np.int32),
                event=np.full(count, len(piece.events), np.int32),
                launch=np.full(count, -1, np.int32),
                start=apply_host(clock, lane.start) if clock else lane.start,
                end=apply_host(clock, lane.end) if clock else lane.end,
                begin_payload=labels,
                end_payload=np.zeros(count, np.uint64),
            )
        )
    return piece.replace(
        tracks=(*piece.tracks, *(Track(rank.rank, TrackKind.HOST, lane.name) for lane in lanes)),
        events=(*piece.events, _HOST_EVENT),
        spans=join_rows([piece.spans, *columns], Spans()),
        host_names=tuple(names),
    )

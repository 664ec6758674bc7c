"""Lanes of the host: Python ranges of the capture and torch.profiler's trace, on the axis of the kernels."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.dump.format import MAX_NS, SampleKind, torch_profile_file_name
from tracekern.dump.reader import Dump
from tracekern.dump.torch_profile import LANE_PREFIX, STREAM_PREFIX, Row, read_profile
from tracekern.errors import BadInput
from tracekern.formatting import count, duration
from tracekern.timeline.clocks.host_times import apply_host, bracket_rows
from tracekern.timeline.columns import join_rows
from tracekern.timeline.model import EventClass, EventType, Int64, Problem, Spans, Timeline, Track, TrackKind

_SLACK_NS = 10**9
"""How far outside the capture an event may lie: profilers turn their own clock into wall time, some ms off."""
_LEAST_STEP_NS = 10_000
"""Smaller steps of the wall clock harm no lane that is in wall time."""
_LONGEST_UP_NS = 10 * 365 * 86400 * 10**9
"""No host, and no profiler, has been up for longer: times below are not since 1970."""
_Times = tuple[int, int]
_HOST_EVENT = EventType("host", EventClass.HOST, "completion")


@dataclass(frozen=True)
class HostLane:
    """One thread, or stream by CUPTI: [n] spans in ns of host time, sorted by (start, -end)."""

    name: str
    start: Int64
    end: Int64
    labels: tuple[str, ...]


def read_lanes(
    dumps: Sequence[Dump], host: Iterable[tuple[int, str | Path]]
) -> tuple[dict[int, list[HostLane]], list[Problem]]:
    """Rank -> its lanes: of the capture, of the profiles beside its dumps, and of those in `host`.

    Events of a profile outside the rank's capture are left out; the problems say how many.
    """
    profiles = [(dump.rank, dump.path.parent / torch_profile_file_name(dump.rank)) for dump in dumps]
    profiles = [(rank, path) for rank, path in profiles if path.exists()] + [(rank, Path(path)) for rank, path in host]
    lanes = {dump.rank: host_lanes(dump) for dump in dumps}
    dump_of = {dump.rank: dump for dump in dumps}
    rank_of_file: dict[Path, int] = {}
    problems = [problem for dump in dumps for problem in wall_clock_steps(dump)]
    for rank, path in profiles:
        if rank not in lanes:
            raise BadInput(f"{path}: is for rank {rank}, which this capture does not have; ranks are {sorted(lanes)}")
        file = path.resolve()
        if file in rank_of_file:
            raise BadInput(
                f"{path}: is there for rank {rank_of_file[file]} already; name a profile once, and none of a capture"
            )
        rank_of_file[file] = rank
        kept, outside = torch_lanes(path, rank, dump_of[rank].metadata["num_ranks"], wall_times(dump_of[rank]))
        lanes[rank] += kept
        problems += outside
    return lanes, problems


def host_lanes(dump: Dump) -> list[HostLane]:
    """The ranges that `capture.range(...)` recorded, one lane a thread."""
    spans = dump.host_spans()
    lanes = []
    for number, thread in enumerate(dict.fromkeys(spans["thread"].tolist())):
        mine = spans[spans["thread"] == thread]
        labels = [label.decode(errors="replace") for label in mine["name"].tolist()]
        start = mine["start_ns"]
        end = np.maximum(mine["end_ns"], start)  # an older version took the wall clock, which may have been set back
        lanes.append(_lane("python" if number == 0 else f"python thread {thread}", start, end, labels))
    return lanes


def torch_lanes(path: Path, rank: int, num_ranks: int, capture: _Times) -> tuple[list[HostLane], list[Problem]]:
    """The lanes of a Chrome trace of torch.profiler (.json or .json.gz), one a thread and one a stream of a GPU.

    Without events outside the capture, of which a problem tells: they would stretch the axis to years. Raises BadInput
    when it is not such a trace, or not of this rank.
    """
    first, last = capture
    result: list[HostLane] = []
    outside: list[Row] = []
    num_kept = 0
    profile = read_profile(path, rank, num_ranks)
    for (_, lane), rows in profile.lanes.items():
        kept: list[Row] = []
        for row in rows:
            is_within = first - _SLACK_NS <= row[0] <= row[1] <= last + _SLACK_NS
            (kept if is_within else outside).append(row)
        num_kept += len(kept)
        if kept:
            times = np.array([row[:2] for row in kept], np.int64)
            result.append(_lane(lane, times[:, 0], times[:, 1], [row[2] for row in kept]))
    problems = [
        Problem("warning", "left_out_profile_event", rank, -1, f"rank {rank}: {path.name}: left out: {what}", 1)
        for what in profile.left_out
    ]
    return result, problems + ([_left_out(path.name, rank, outside, num_kept, capture)] if outside else [])


def wall_times(dump: Dump) -> tuple[int, int]:
    """Host time, in ns, between which a rank captured: the earliest and the latest that its dump names."""
    brackets, ranges = bracket_rows(dump.clock_samples(), dump.rank), dump.host_spans()
    known = [int(dump.metadata["packed_ns"])]
    for rows, names in ((brackets, ("t0", "t3")), (ranges, ("start_ns", "end_ns"))):
        for name in names if len(rows) else ():
            known += [int(rows[name].min()), int(rows[name].max())]
    opened = opened_ns(dump.metadata)
    return min(known if opened is None else [opened, *known]), max(known)


def opened_ns(metadata: Mapping[str, Any]) -> int | None:
    """Host time, in ns, of the second in which a capture opened; None where the dump does not say."""
    try:
        return int(datetime.datetime.fromisoformat(str(metadata.get("created"))).timestamp()) * 10**9
    except (ValueError, OverflowError):
        return None


def wall_clock_steps(dump: Dump) -> list[Problem]:
    """A problem for each time that the wall clock of a rank's host was set, as its clock samples show it."""
    rows = dump.clock_samples()
    rows = rows[(rows["kind"] == SampleKind.WALL_CLOCK) & (rows["initiator"] == dump.rank)]
    ahead, doubt = rows["t1"] - (rows["t0"] + rows["t3"]) // 2, (rows["t3"] - rows["t0"]) // 2
    problems = []
    for before in np.flatnonzero(np.abs(np.diff(ahead)) > doubt[1:] + doubt[:-1] + _LEAST_STEP_NS).tolist():
        step_ns = int(ahead[before + 1] - ahead[before])
        way = "ahead" if step_ns > 0 else "back"
        when = _dates((int(rows["t0"][before]), int(rows["t3"][before + 1])), " and ")
        text = (
            f"rank {dump.rank}: the wall clock of {dump.metadata['node']} was set {way} by {duration(abs(step_ns))} "
            f"between {when} UTC, as it stood before; ranges and engines are in place, but later events of "
            "torch.profiler may be off by that"
        )
        problems.append(Problem("warning", "wall_clock_step", dump.rank, -1, text))
    return problems


def _left_out(name: str, rank: int, rows: Sequence[Row], num_kept: int, capture: _Times) -> Problem:
    """The problem of events of a profile that lie outside the capture."""
    number = len(rows)
    events = (min(row[0] for row in rows), max(row[1] for row in rows))
    times = f"they are of {_dates(events)}, the capture of {_dates(capture)} UTC"
    if backwards := sum(end < start for start, end, _ in rows):
        times += f"; {backwards:,} end before they begin"
    if num_kept:
        whole = count(num_kept + number, "event")
        text = f"{number:,} of {whole} of {name} lie outside the capture and are left out: {times}"
    else:
        why = "exported by another run, or without its base time?"
        if events[1] < _LONGEST_UP_NS < capture[0]:
            why = "its times do not count from 1970; export it with its base time (baseTimeNanoseconds)"
        text = f"no event of {name} lies within the capture, all {number:,} are left out: {times}; {why}"
    severity = "warning" if num_kept else "error"
    return Problem(severity, "left_out_profile_event", rank, -1, f"rank {rank}: {text}", number)


def _dates(times: _Times, between: str = " to ") -> str:
    seconds = [min(max(time, 0), MAX_NS) // 10**9 for time in times]
    return between.join(str(datetime.datetime.fromtimestamp(at, datetime.timezone.utc))[:19] for at in seconds)


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

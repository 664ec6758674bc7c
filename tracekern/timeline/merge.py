"""One Timeline from the captures of all ranks: read, decode, align, join with the host's lanes and the flows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import CLOCK_SAMPLE, torch_profile_file_name
from tracekern.dump.reader import Dump, read_dump
from tracekern.errors import BadInput
from tracekern.formatting import number_ranges
from tracekern.timeline.clocks.fit import apply_clock, fit_clocks, unaligned_clocks
from tracekern.timeline.clocks.flows import tighten_clocks
from tracekern.timeline.clocks.host import apply_host, relate_hosts
from tracekern.timeline.columns import join_rows
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.flows import join_flows
from tracekern.timeline.host import HostLane, host_lanes, torch_lanes
from tracekern.timeline.model import (
    OPEN_END,
    ClockFit,
    EventClass,
    EventType,
    Marks,
    Problem,
    Spans,
    Timeline,
    Track,
    TrackKind,
)

HOST_EVENT = EventType("host", EventClass.HOST, "completion")
HOST_LOSS = "lost_host_spans"
LOSS_KINDS = (
    *("lost_records", "torn_track", "orphan_end", "surplus_warps", "surplus_blocks", "shared_tracks"),
    *("launch_not_recorded", "launch_lost", HOST_LOSS, "lost_clock_samples", "missing_rank"),
)
"""Problems that `strict` refuses: data that should be there and is not. Not "salvaged", "running" or "open_span": what
a rank had recorded when it died or was looked at is there, and what never arrived is a torn track or a lost launch."""

_DECODE_THREADS = 2
_DUMPS = "rank_*.tkdump"

PathLike = str | Path


def load(
    paths: PathLike | Iterable[PathLike],
    *,
    unaligned: bool = False,
    strict: bool = False,
    partial: bool = False,
    host: Iterable[tuple[int, PathLike]] = (),
) -> Timeline:
    """The Timeline of a run, in ns on one axis, from capture directories or single dumps.

    unaligned: take every rank's clock as it is instead of refusing ranks that cannot be related. strict: refuse losses.
    partial: go on without ranks whose dump is missing. host: (rank, Chrome trace of torch.profiler) beside those in
    the capture. Raises BadInput, one line, for everything that cannot be used.
    """
    dumps = _read_dumps([paths] if isinstance(paths, str | Path) else list(paths))
    problems = _check_run(dumps, partial)
    lanes = _lanes_of_ranks(dumps, host)
    samples = np.concatenate([np.empty(0, CLOCK_SAMPLE), *(dump.clock_samples() for dump in dumps)])
    pieces = _decode_all(dumps)
    fits = _fit(samples, pieces, unaligned)
    pieces = [_to_ns(piece, fits[piece.ranks[0].rank]) for piece in pieces]
    timeline = concatenate([_add_host(piece, lanes[piece.ranks[0].rank]) for piece in pieces])
    timeline = timeline.replace(
        aligned=not unaligned, title=f"UNALIGNED {timeline.title}".strip() if unaligned else timeline.title
    )
    flows, flow_problems = join_flows(timeline)
    timeline = timeline.replace(flows=flows)
    ranks, clock_problems = tighten_clocks(timeline)
    problems = [*problems, *timeline.problems, *flow_problems, *clock_problems]
    timeline = timeline.replace(ranks=ranks, problems=tuple(problems))
    if strict:
        _refuse_losses(timeline)
    return timeline


def find_dumps(paths: Sequence[PathLike]) -> list[Path]:
    """The dump files of capture directories, or named one by one. Raises BadInput for a path that holds none."""
    found: list[Path] = []
    for path in map(Path, paths):
        dumps = sorted(path.glob(_DUMPS)) if path.is_dir() else [path]
        if not dumps:
            raise BadInput(f"{path}: no rank_*.tkdump in it: not a capture directory; {_advice(path)}")
        if not dumps[0].exists():
            raise BadInput(f"{path}: no such file or directory; name a capture directory or a dump")
        if dumps == [path] and path.suffix != ".tkdump" and any(path.parent.glob(_DUMPS)):
            raise BadInput(f"{path}: not a dump; name its capture directory, {path.parent}")
        found += dumps
    if not found:
        raise BadInput("no capture named; give one or more capture directories")
    return found


def _advice(directory: Path) -> str:
    """Where its captures may be: `run moe --variant all` and loops of launches leave them one level below."""
    below = sorted({dump.parent for dump in directory.glob(f"*/{_DUMPS}")})
    if not below:
        return "name the one given to capture()"
    return f"{below[0]} is one" + (f", and {len(below) - 1} more beside it are" if len(below) > 1 else "")


def _read_dumps(paths: Sequence[PathLike]) -> list[Dump]:
    return sorted(map(read_dump, find_dumps(paths)), key=lambda dump: dump.rank)


def _check_run(dumps: Sequence[Dump], partial: bool) -> list[Problem]:
    """One run, each rank once, none missing. Returns the problem of missing ranks where `partial` allows them."""
    first = dumps[0]
    for before, dump in zip(dumps, dumps[1:], strict=False):
        if dump.run_id != first.run_id:
            raise BadInput(
                f"{dump.path}: run {dump.run_id!r}, but {first.path} is of {first.run_id!r}; merge one run at a time"
            )
        if dump.metadata["num_ranks"] != first.metadata["num_ranks"]:
            raise BadInput(
                f"{dump.path}: says {dump.metadata['num_ranks']} ranks, {first.path} {first.metadata['num_ranks']}; "
                "merge captures of one run"
            )
        if dump.rank == before.rank:
            raise BadInput(f"{dump.path}: rank {dump.rank} is also in {before.path}; name each rank once")
    missing = sorted(set(range(first.metadata["num_ranks"])) - {dump.rank for dump in dumps})
    if not missing:
        return []
    text = f"{len(missing)} of {first.metadata['num_ranks']} ranks have no dump: {number_ranges(missing)}"
    if not partial:
        raise BadInput(
            f"{first.path.parent}: {text}; name the directories of all nodes, or go on without them with --partial"
        )
    return [Problem("error", "missing_rank", missing[0], -1, text, len(missing))]


def _lanes_of_ranks(dumps: Sequence[Dump], host: Iterable[tuple[int, PathLike]]) -> dict[int, list[HostLane]]:
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


def _decode_all(dumps: list[Dump]) -> list[Timeline]:
    """The ranks' Timelines in ticks, by rank. Empties `dumps`: a file stays mapped no longer than it is needed."""
    with ThreadPoolExecutor(_DECODE_THREADS) as pool:  # numpy works without the interpreter's lock
        pieces = list(pool.map(lambda _: decode(dumps.pop()), range(len(dumps))))
    return sorted(pieces, key=lambda piece: piece.ranks[0].rank)


def _fit(samples: npt.NDArray[Any], pieces: Sequence[Timeline], unaligned: bool) -> dict[int, ClockFit]:
    ranks = [piece.ranks[0] for piece in pieces]
    spans_ticks = {}
    for piece in pieces:
        times = (piece.spans.start, piece.spans.end[piece.spans.end != OPEN_END], piece.marks.time)
        filled = [column for column in times if len(column)]
        if filled:
            spans_ticks[piece.ranks[0].rank] = (int(min(map(np.min, filled))), int(max(map(np.max, filled))))
    if not unaligned:
        return fit_clocks(samples, ranks, spans_ticks)
    fits = unaligned_clocks(ranks, spans_ticks)
    for rank in ranks:  # each stands beside its own host at least: wall clock and device clock may lie years apart
        fits = relate_hosts(samples, [rank], fits, {}, {})
    return fits


def _to_ns(piece: Timeline, fit: ClockFit) -> Timeline:
    spans = piece.spans
    end = apply_clock(fit, spans.end)
    end[spans.end == OPEN_END] = OPEN_END
    return piece.replace(
        unit="ns",
        ranks=(dataclasses.replace(piece.ranks[0], clock=fit),),
        spans=dataclasses.replace(spans, start=apply_clock(fit, spans.start), end=end),
        marks=dataclasses.replace(piece.marks, time=apply_clock(fit, piece.marks.time)),
    )


def _add_host(piece: Timeline, lanes: Sequence[HostLane]) -> Timeline:
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
        events=(*piece.events, HOST_EVENT),
        spans=join_rows([piece.spans, *columns], Spans()),
        host_names=tuple(names),
    )


def concatenate(pieces: list[Timeline]) -> Timeline:
    """All ranks in one Timeline, rebased to the first event; without flows. Empties `pieces`."""
    events: dict[EventType, int] = {}
    names: dict[str, int] = {}
    spans, marks, problems = [], [], []
    num_tracks = num_launches = 0
    origin = min(
        (int(column.min()) for piece in pieces for column in (piece.spans.start, piece.marks.time) if len(column)),
        default=0,
    )
    for piece in pieces:
        number = np.array([events.setdefault(event, len(events)) for event in piece.events] or [0], np.int32)
        label = np.array([names.setdefault(name, len(names)) for name in piece.host_names] or [0], np.uint64)
        spans.append(_renumber_spans(piece, number, label, num_tracks, num_launches, origin))
        marks.append(
            dataclasses.replace(
                piece.marks,
                track=piece.marks.track + np.int32(num_tracks),
                event=number[piece.marks.event],
                launch=piece.marks.launch + np.int32(num_launches),
                time=piece.marks.time - origin,
            )
        )
        moved = (dataclasses.replace(p, track=p.track + num_tracks if p.track >= 0 else -1) for p in piece.problems)
        problems += list(moved)
        num_tracks += len(piece.tracks)
        num_launches += len(piece.launches)
    tracks = tuple(track for piece in pieces for track in piece.tracks)
    launches = tuple(launch for piece in pieces for launch in piece.launches)
    ranks = tuple(rank for piece in pieces for rank in piece.ranks)
    title = "; ".join(dict.fromkeys(piece.title for piece in pieces if piece.title))
    pieces.clear()
    return Timeline(
        unit="ns",
        ranks=ranks,
        tracks=tracks,
        events=tuple(events),
        launches=launches,
        spans=join_rows(spans, Spans()),
        marks=join_rows(marks, Marks()),
        host_names=tuple(names),
        problems=tuple(problems),
        origin_ns=origin,
        title=title,
    )


def _renumber_spans(
    piece: Timeline,
    number: npt.NDArray[np.int32],
    label: npt.NDArray[np.uint64],
    num_tracks: int,
    num_launches: int,
    origin: int,
) -> Spans:
    spans = piece.spans
    is_host = piece.events_of(EventClass.HOST)[spans.event]
    payload = spans.begin_payload
    if is_host.any():
        payload = payload.copy()
        payload[is_host] = label[payload[is_host]]
    return Spans(
        track=spans.track + np.int32(num_tracks),
        event=number[spans.event],
        launch=np.where(spans.launch < 0, np.int32(-1), spans.launch + np.int32(num_launches)),
        start=spans.start - origin,
        end=np.where(spans.end == OPEN_END, OPEN_END, spans.end - origin),
        begin_payload=payload,
        end_payload=spans.end_payload,
    )


def _refuse_losses(timeline: Timeline) -> None:
    losses = [problem for problem in timeline.problems if problem.kind in LOSS_KINDS]
    if losses:
        more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
        raise BadInput(f"{losses[0].text}{more}; record again, or merge without --strict")

"""One Timeline from the captures of all ranks: read, decode, fit clocks, join lanes and flows, tighten, refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.attempts import describe_later
from tracekern.dump.format import CLOCK_SAMPLE, ranks_of
from tracekern.dump.reader import Dump, read_dump
from tracekern.errors import BadInput
from tracekern.formatting import number_ranges
from tracekern.timeline.clocks.by_hosts import fit_by_hosts, round_trips
from tracekern.timeline.clocks.fit import UnrelatedClocks, apply_clock, fit_clocks, unaligned_clocks
from tracekern.timeline.clocks.flow_bounds import step_problems, tighten_clocks
from tracekern.timeline.clocks.host_times import apply_host, relate_hosts, time_of_death
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.facts.stages import stages_of
from tracekern.timeline.join.concatenate import concatenate
from tracekern.timeline.join.damage import damaged_times
from tracekern.timeline.join.engine_peers import name_peers
from tracekern.timeline.join.flows import join_flows
from tracekern.timeline.join.host_lanes import HostLane, add_lanes, read_lanes
from tracekern.timeline.join.members import group_problems, name_world_ranks
from tracekern.timeline.join.nodes import name_nodes
from tracekern.timeline.model import LOSS_KINDS, OPEN_END, ClockFit, Int32, Int64, Problem, Timeline, TrackKind

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
    """Reads a capture: all ranks on one time axis, in ns.

    Args:
        paths: Capture directories of one run, or single dumps.
        unaligned: Take each rank's clock as it is. Without it, ranks whose clocks cannot be related are refused.
        strict: Refuse a capture that lost anything.
        partial: Accept a capture in which dumps of ranks are missing.
        host: Pairs of a rank and a Chrome trace of torch.profiler, in addition to those in the capture.

    Raises:
        BadInput: Something cannot be used: one line that says what, and what to do.
    """
    dumps = _read([paths] if isinstance(paths, str | Path) else list(paths))
    beside = [*_check_run(dumps, partial), *_attempts(dumps)]
    lanes, outside = read_lanes(dumps, host)
    samples = np.concatenate([np.empty(0, CLOCK_SAMPLE), *(dump.clock_samples() for dump in dumps)])
    pieces = name_nodes(name_world_ranks(_decode(dumps)))
    pieces = _fit_clocks(pieces, samples, unaligned)
    timeline = _join_lanes(pieces, lanes, [*beside, *outside])
    timeline = _join_flows(timeline)
    timeline = _tighten(timeline)
    problems = (*damaged_times(timeline), *timeline.problems, *group_problems(timeline), *_unequal_keys(timeline))
    timeline = timeline.replace(problems=problems)
    if strict:
        _refuse_losses(timeline)
    return timeline


def _read(paths: Sequence[PathLike]) -> list[Dump]:
    return sorted(map(read_dump, _find_dumps(paths)), key=lambda dump: dump.rank)


def _find_dumps(paths: Sequence[PathLike]) -> list[Path]:
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
        if ranks_of(dump.metadata) != ranks_of(first.metadata):
            raise BadInput(f"{dump.path}: is of another group of ranks than {first.path}; merge one capture at a time")
        if dump.rank == before.rank:
            raise BadInput(f"{dump.path}: rank {dump.rank} is also in {before.path}; name each rank once")
    members = ranks_of(first.metadata)
    missing = sorted(set(members) - {dump.rank for dump in dumps})
    if not missing:
        return []
    text = f"{len(missing)} of {len(members)} ranks have no dump: {number_ranges(missing)}"
    if not partial:
        raise BadInput(
            f"{first.path.parent}: {text}; name the directories of all nodes, or go on without them with --partial"
        )
    return [Problem("error", "missing_rank", missing[0], -1, text, len(missing))]


def _attempts(dumps: Sequence[Dump]) -> list[Problem]:
    """Names captures of the same job that came later: a launcher started it again, or it was run again."""
    text = describe_later(dumps[0].path.parent)
    return [Problem("note", "attempts", dumps[0].rank, -1, text)] if text else []


def _decode(dumps: list[Dump]) -> list[Timeline]:
    """The ranks' Timelines in ticks, by rank. Empties `dumps`: a file stays mapped no longer than it is needed."""
    with ThreadPoolExecutor(_DECODE_THREADS) as pool:  # numpy works without the interpreter's lock
        pieces = list(pool.map(lambda _: decode(dumps.pop()), range(len(dumps))))
    return sorted(pieces, key=lambda piece: piece.ranks[0].rank)


def _fit_clocks(pieces: list[Timeline], samples: npt.NDArray[Any], unaligned: bool) -> list[Timeline]:
    """The ranks' Timelines in ns, on one axis unless `unaligned`. Empties `pieces`."""
    ranks = [piece.ranks[0] for piece in pieces]
    spans_ticks = {piece.ranks[0].rank: ticks for piece in pieces if (ticks := _first_and_last(piece))}
    if unaligned:
        fits = unaligned_clocks(ranks, spans_ticks)
        for rank in ranks:  # beside its own host at least: wall clock and device clock may be years apart
            fits = relate_hosts(samples, [rank], fits, {}, {})
    else:
        try:
            fits = fit_clocks(samples, ranks, spans_ticks)
        except UnrelatedClocks as unrelated:
            try:
                fits = fit_by_hosts(round_trips(pieces), samples, ranks, spans_ticks)
            except UnrelatedClocks:
                raise unrelated from None
    return [_to_ns(pieces.pop(0), fits[rank.rank], not unaligned) for rank in ranks]


def _first_and_last(piece: Timeline) -> tuple[int, int] | None:
    """The times of the first and the last event."""
    of_engine = piece.tracks_of(TrackKind.ENGINE)  # in the time of the host
    spans, marks = piece.spans, piece.marks
    if of_engine.any():
        spans, marks = spans.take(~of_engine[spans.track]), marks.take(~of_engine[marks.track])
    columns = (spans.start, spans.end[spans.end != OPEN_END], marks.time)
    filled = [column for column in columns if len(column)]
    return (int(min(map(np.min, filled))), int(max(map(np.max, filled)))) if filled else None


def _to_ns(piece: Timeline, fit: ClockFit, aligned: bool) -> Timeline:
    spans, of_engine = piece.spans, np.append(piece.tracks_of(TrackKind.ENGINE), False)

    def on_axis(ticks: Int64, track: Int32) -> Int64:
        times = apply_clock(fit, ticks)
        by_host = np.flatnonzero(of_engine[track])
        times[by_host] = apply_host(fit, ticks[by_host])
        return times

    end = on_axis(spans.end, spans.track)
    end[spans.end == OPEN_END] = OPEN_END
    return piece.replace(
        unit="ns",
        aligned=aligned,
        ranks=(dataclasses.replace(piece.ranks[0], clock=fit, died_ns=time_of_death(piece.ranks[0], fit)),),
        spans=dataclasses.replace(spans, start=on_axis(spans.start, spans.track), end=end),
        marks=dataclasses.replace(piece.marks, time=on_axis(piece.marks.time, piece.marks.track)),
    )


def _join_lanes(
    pieces: list[Timeline], lanes: Mapping[int, Sequence[HostLane]], problems: Sequence[Problem]
) -> Timeline:
    """All ranks in one Timeline, those of their hosts beside them. Empties `pieces`."""
    pieces[:] = [add_lanes(piece, lanes[piece.ranks[0].rank]) for piece in pieces]
    timeline = name_peers(concatenate(pieces))
    title = timeline.title if timeline.aligned else f"UNALIGNED {timeline.title}".strip()
    return timeline.replace(title=title, problems=(*problems, *timeline.problems))


def _join_flows(timeline: Timeline) -> Timeline:
    flows, problems = join_flows(timeline)
    return timeline.replace(flows=flows, problems=(*timeline.problems, *problems))


def _tighten(timeline: Timeline) -> Timeline:
    """Narrows the bounds of the clocks by the flows, and reports what contradicts them."""
    ranks, problems = tighten_clocks(timeline)
    return timeline.replace(ranks=ranks, problems=(*timeline.problems, *step_problems(timeline), *problems))


def _unequal_keys(timeline: Timeline) -> list[Problem]:
    """Names launches that are of one stage and have one number on all ranks, but another key on some."""
    stages, keys = stages_of(timeline), dict[tuple[str, int], dict[str, int]]()
    for stage, launch in zip(stages.of_launch.tolist(), timeline.launches, strict=True):
        keys.setdefault((stages.names[stage], launch.sequence), {}).setdefault(launch.key, launch.rank)
    unequal = [(launch, of_ranks) for launch, of_ranks in keys.items() if len(set(of_ranks.values())) > 1]
    if not unequal:
        return []
    (name, number), of_ranks = unequal[0]
    named = " and ".join(f"{key!r} on rank {rank}" for key, rank in list(of_ranks.items())[:2])
    more = f", and so {'is another one' if len(unequal) == 2 else f'are {len(unequal) - 1:,} others'}"
    text = (
        f"launch {number} of {name} is {named}{more if len(unequal) > 1 else ''}: ranks are compared launch by launch, "
        "whatever the keys; tracekern.start() begins at one that all have in common"
    )
    return [Problem("note", "unequal_keys", next(iter(of_ranks.values())), -1, text, len(unequal))]


def _refuse_losses(timeline: Timeline) -> None:
    losses = [problem for problem in timeline.problems if problem.kind in LOSS_KINDS]
    if losses:
        more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
        raise BadInput(f"{losses[0].text}{more}; record again, or merge without --strict")

"""One Timeline from the captures of all ranks: read, decode, fit clocks, join lanes and flows, tighten, refuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from tracekern.timeline.checks import finish, join_and_check
from tracekern.timeline.clocks.axis import device_times, fit_ranks, to_ns
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.join.concatenate import concatenate
from tracekern.timeline.join.engine_peers import name_peers
from tracekern.timeline.join.flows import find_astray
from tracekern.timeline.join.host_lanes import add_lanes, read_lanes
from tracekern.timeline.join.members import name_world_ranks
from tracekern.timeline.join.nodes import name_nodes
from tracekern.timeline.model import Problem, Timeline

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
    every: int = 1,
) -> Timeline:
    """Reads a capture: all ranks on one time axis, in ns.

    Args:
        paths: Capture directories of one run, or single dumps.
        unaligned: Take each rank's clock as it is. Without it, ranks whose clocks cannot be related are refused.
        strict: Refuse a capture that lost anything.
        partial: Accept a capture in which dumps of ranks are missing.
        host: Pairs of a rank and a Chrome trace of torch.profiler, in addition to those in the capture.
        every: Read each so-many-th launch of every kernel alone.

    Raises:
        BadInput: Something cannot be used: one line that says what, and what to do.
    """
    dumps = sorted((read_dump(path).each(every) for path in find_dumps(paths)), key=lambda dump: dump.rank)
    beside = [*check_run(dumps, partial), *note_attempts(dumps)]
    lanes, outside = read_lanes(dumps, host)
    samples = join_samples(dumps)
    pieces = name_nodes(name_world_ranks(_decode(dumps)))
    ticks = {piece.ranks[0].rank: times for piece in pieces if (times := device_times(piece))}
    fits = fit_ranks(pieces, ticks, samples, unaligned)
    pieces = [to_ns(pieces.pop(0), fit, not unaligned) for fit in [fits[piece.ranks[0].rank] for piece in pieces]]
    pieces[:] = [add_lanes(piece, lanes[piece.ranks[0].rank]) for piece in pieces]
    timeline = add_context(name_peers(concatenate(pieces)), [*beside, *outside])
    timeline, checks = join_and_check(timeline, {})
    return finish(timeline, checks, find_astray(timeline, checks.misfits.lacking), strict)


def find_dumps(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """The dump files of capture directories, or named one by one. Raises BadInput for a path that holds none."""
    found: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
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


def check_run(dumps: Sequence[Dump], partial: bool) -> list[Problem]:
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


def note_attempts(dumps: Sequence[Dump]) -> list[Problem]:
    """Names captures of the same job that came later: a launcher started it again, or it was run again."""
    text = describe_later(dumps[0].path.parent)
    return [Problem("note", "attempts", dumps[0].rank, -1, text)] if text else []


def _decode(dumps: list[Dump]) -> list[Timeline]:
    """The ranks' Timelines in ticks, by rank. Empties `dumps`: a file stays mapped no longer than it is needed."""
    with ThreadPoolExecutor(_DECODE_THREADS) as pool:  # numpy works without the interpreter's lock
        pieces = list(pool.map(lambda _: decode(dumps.pop()), range(len(dumps))))
    return sorted(pieces, key=lambda piece: piece.ranks[0].rank)


def join_samples(dumps: Sequence[Dump]) -> npt.NDArray[Any]:
    """[n] CLOCK_SAMPLE of all ranks."""
    return np.concatenate([np.empty(0, CLOCK_SAMPLE), *(dump.clock_samples() for dump in dumps)])


def add_context(timeline: Timeline, problems: Sequence[Problem]) -> Timeline:
    """The timeline with a title that says whether it is aligned, and with problems ahead of its own."""
    title = timeline.title if timeline.aligned else f"UNALIGNED {timeline.title}".strip()
    return timeline.replace(title=title, problems=(*problems, *timeline.problems))

"""A capture that does not fit into memory, as windows of whole calls: what load() returns, part by part."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump, peek_metadata, read_dump
from tracekern.errors import BadInput
from tracekern.timeline.checks import Checks, finish, join_and_check
from tracekern.timeline.clocks.axis import device_times, first_and_last, fit_ranks, join_times, times_to_ns, to_ns
from tracekern.timeline.clocks.flow_bounds import last_event_ns
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.join.concatenate import concatenate_at, find_origin
from tracekern.timeline.join.engine_peers import name_peers
from tracekern.timeline.join.flows import find_astray
from tracekern.timeline.join.host_lanes import HostLane, add_lanes, read_lanes
from tracekern.timeline.join.members import bits_of_ranks, name_world_ranks
from tracekern.timeline.join.nodes import name_nodes
from tracekern.timeline.load import PathLike, add_context, check_run, find_dumps, join_samples, note_attempts
from tracekern.timeline.model import Flows, Mask, Problem, Timeline
from tracekern.timeline.row_files import RowFile
from tracekern.timeline.run_rows import RunRows
from tracekern.timeline.spool import RankSpool
from tracekern.timeline.windows import find_cuts, parts_of


@dataclass(frozen=True)
class Extent:
    """What the metadata of a capture say of its size."""

    num_spans: int
    """Or marks, which are recorded alike."""
    has_engines: bool
    """Whether there are tracks of transfer engines."""
    unclosed: list[int]
    """Ranks that did not end."""

    @classmethod
    def peek(cls, paths: PathLike | Iterable[PathLike], every: int = 1) -> Extent:
        """every: see load()."""
        metadata = [peek_metadata(path) for path in find_dumps(paths)]
        launches = [launch for about in metadata for launch in about["launches"] if not launch["sequence"] % every]
        closed = fmt.STATE_NAMES[fmt.SegmentState.CLOSED]
        return cls(
            sum(launch["records_count"] for launch in launches),
            any(launch.get("by_host") for launch in launches),
            sorted(about["rank"] for about in metadata if about["state"] != closed),
        )


@dataclass(frozen=True)
class WindowedRun:
    """A capture on disk. Its parts are those that parts_of() makes of what load() returns."""

    skeleton: Timeline
    """All tables, and of spans and marks those of lanes of streams, hosts and engines, with the flows between these."""
    windows: list[Mask]
    """[num_launches] of each."""
    why_whole: str
    """Why all launches are one window, however few spans were asked for; "" where there are cuts."""
    _rows: RunRows
    _flows: list[RowFile]
    _folder: Path

    def part(self, number: int) -> Timeline:
        """0: what belongs to no launch, such as lanes of hosts and engines. From 1 on: the windows, in order."""
        if number == 0:
            return parts_of(self.skeleton, ())[0]
        rows, flows = self._rows.window(self.windows[number - 1]), self._flows[number - 1]
        return self.skeleton.replace(spans=rows.spans, marks=rows.marks, flows=Flows(**flows.read()))

    @property
    def sizes(self) -> list[int]:
        """Spans of each window."""
        return _sizes(self._rows, self.windows)

    def close(self) -> None:
        """Removes its files. Windows cannot be read any more."""
        shutil.rmtree(self._folder, ignore_errors=True)


def load_windows(
    paths: PathLike | Iterable[PathLike],
    scratch: Path,
    at_most: int,
    *,
    unaligned: bool = False,
    strict: bool = False,
    partial: bool = False,
    host: Iterable[tuple[int, PathLike]] = (),
    every: int = 1,
    tell: Callable[[int, int, str], None] = lambda *_: None,
    agree: Callable[[str, RunRows, Sequence[int]], None] = lambda *_: None,
    spread: Callable[..., Iterable[Any]] = map,
) -> WindowedRun:
    """Reads a capture as load() does, with no more in memory than its lanes and one rank or one window.

    Args:
        paths: As of load(), like all that is not named here.
        scratch: A folder with room for about 25 bytes a span.
        at_most: Spans of a window, where there are cuts enough.
        tell: Takes how much is done of how much, and of what.
        agree: Takes, before any window is read, why there is only one, all rows, and the spans of each window; what it
            raises ends the reading.
        spread: As map(), maybe by several processes.

    Raises:
        BadInput: As of load(); or `scratch` has no room.
    """
    dumps = sorted((read_dump(path).without_launches() for path in find_dumps(paths)), key=lambda dump: dump.rank)
    beside = [*check_run(dumps, partial), *note_attempts(dumps)]
    lanes, outside = read_lanes(dumps, host)
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="windows_", dir=scratch))
    except OSError as error:
        raise BadInput(f"{scratch}: cannot be written ({error}); name another scratch folder (TMPDIR)") from None
    try:
        read = _spread_ranks([dump.path for dump in dumps], every, folder, tell, spread)
        rows, last_ns = _spool(dumps, read, lanes, [*beside, *outside], unaligned)
        return _join(rows, last_ns, folder, at_most, strict, agree)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_Read = tuple[RankSpool, Timeline]
"""What is put aside of a rank, and what stays in memory."""


def _spread_ranks(
    paths: Sequence[Path],
    every: int,
    folder: Path,
    tell: Callable[[int, int, str], None],
    spread: Callable[..., Iterable[_Read]],
) -> Iterator[_Read]:
    tell(0, len(paths), "reading ranks")
    for number, read in enumerate(spread(functools.partial(_read_rank, every=every, folder=folder), paths), 1):
        tell(number, len(paths), "reading ranks")
        yield read


def _read_rank(path: Path, every: int, folder: Path) -> _Read:
    return RankSpool.write(decode(read_dump(path).each(every)), folder)


def _spool(
    dumps: Sequence[Dump],
    read: Iterable[_Read],
    lanes: Mapping[int, Sequence[HostLane]],
    problems: Sequence[Problem],
    unaligned: bool,
) -> tuple[RunRows, int]:
    """(all rows, without flows; last_event_ns() of them)"""
    spools, pieces = (list(column) for column in zip(*read, strict=True))
    bits = bits_of_ranks(pieces)
    pieces = name_nodes(name_world_ranks(pieces))
    ticks = {
        piece.ranks[0].rank: times
        for spool, piece in zip(spools, pieces, strict=True)
        if (times := join_times([spool.ticks, device_times(piece)]))
    }
    found = fit_ranks(pieces, ticks, join_samples(dumps), unaligned)
    fits = [found[piece.ranks[0].rank] for piece in pieces]
    pieces = [to_ns(piece, fit, not unaligned) for piece, fit in zip(pieces, fits, strict=True)]
    pieces = [add_lanes(piece, lanes[piece.ranks[0].rank]) for piece in pieces]
    spooled = [times_to_ns(fit, spool.ticks) for spool, fit in zip(spools, fits, strict=True)]
    kept = [first_and_last(piece.spans, piece.marks) for piece in pieces]
    origin = find_origin(pieces, [join_times(pair) for pair in zip(spooled, kept, strict=True)])
    timeline, places = concatenate_at(origin, pieces)
    timeline = add_context(name_peers(timeline), problems)
    last_ns = max([last_event_ns(timeline), *(own[1] - origin for own in spooled if own)])
    return RunRows(timeline, spools, places, bits), last_ns


def _join(
    rows: RunRows,
    last_ns: int,
    folder: Path,
    at_most: int,
    strict: bool,
    agree: Callable[[str, RunRows, Sequence[int]], None],
) -> WindowedRun:
    if why := rows.why_whole():
        agree(why, rows, [int(rows.num_spans.sum())])
        return _join_whole(rows, why, folder, strict)
    iterations = launch_iterations(rows.lanes).of_launch
    cuts, calls, flows = find_cuts(rows.lanes, rows.channels).between(iterations), rows.calls, list[RowFile]()
    windows = cuts.windows(rows.num_spans, at_most)
    if len(cuts.ahead) == 1 and rows.num_spans.sum() > at_most:
        why = (
            "at no time between iterations have all launches ahead ended on every rank while no message, barrier or "
            "epoch goes on"
        )
    agree(why, rows, _sizes(rows, windows))

    def join_window(number: int) -> Checks:  # so that no window outlasts its turn
        part, found = join_and_check(rows.window(windows[number - 1]), calls, last_ns)
        flows.append(_write_flows(folder, number, part.flows))
        return found

    lanes, checks = join_and_check(rows.lanes, calls, last_ns)
    for number in range(1, len(windows) + 1):
        checks += join_window(number)
    is_astray = {}
    if lacking := checks.misfits.lacking:
        is_astray = find_astray(rows.lanes, lacking)
        for window in windows:
            for channel, found_here in find_astray(rows.window(window), lacking).items():
                is_astray[channel] = is_astray[channel] | found_here
    skeleton = finish(lanes, checks, is_astray, strict)
    return WindowedRun(skeleton, windows, why, rows, flows, folder)


def _join_whole(rows: RunRows, why: str, folder: Path, strict: bool) -> WindowedRun:
    """All launches as one window, where flows lead from it to what belongs to no launch."""
    whole, checks = join_and_check(rows.whole(), {})
    is_astray = find_astray(whole, checks.misfits.lacking)
    windows = [np.ones(len(whole.launches), bool)]
    apart, window = parts_of(whole, windows)
    row = np.flatnonzero(rows.lanes.spans.launch < 0)
    lanes = rows.lanes.replace(flows=Flows(row[apart.flows.signal], row[apart.flows.wait]))
    skeleton = finish(lanes, checks, is_astray, strict)
    return WindowedRun(skeleton, windows, why, rows, [_write_flows(folder, 1, window.flows)], folder)


def _sizes(rows: RunRows, windows: Sequence[Mask]) -> list[int]:
    num_spans = rows.num_spans
    return [int(num_spans[window].sum()) for window in windows]


def _write_flows(folder: Path, number: int, flows: Flows) -> RowFile:
    return RowFile.write(folder / f"window_{number:05d}.flows", vars(flows))

"""Findings about a capture that is not to be in memory: window by window, in a folder of files.

The folder is that of the capture, of what is asked of it and of this version. Where the command was killed, the next
one that asks the same goes on with what is there.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tracekern import __version__
from tracekern.analysis.findings import Findings
from tracekern.analysis.kept_parts import KeptParts, Workers
from tracekern.analysis.part import Part
from tracekern.analysis.questions.balance import LinkLimit
from tracekern.analysis.scratch import forget, scratch_of
from tracekern.analysis.scratch_folder import folder_of, temporary_folder
from tracekern.errors import BadInput
from tracekern.formatting import count, duration, ranks, size
from tracekern.machine import free_memory, usable_cores
from tracekern.timeline.load import find_dumps
from tracekern.timeline.model import Timeline
from tracekern.timeline.run_rows import RunRows
from tracekern.timeline.select import Window
from tracekern.timeline.windowed import Extent, WindowedRun, load_windows

_BYTES_A_SPAN, _BYTES_OF_A_PROCESS = 300, 250_000_000
"""What a report takes of memory for each span, and each process before it has any."""
_LEAST_SPANS = 10_000
"""A window has room for so many at least."""


class CannotBeCut(BadInput):
    """Why a run has to be in memory as a whole."""


@dataclass(frozen=True)
class Cost:
    """What a report of a capture takes, or what is made of it otherwise."""

    num_spans: int
    memory: int
    """Bytes that it may use."""
    num_processes: int
    why_whole: str = ""
    """Why all of it has to be in memory, as far as metadata say; "" where it may be in windows."""
    disk_a_span: int = 300
    ns_a_span: int = 8_000
    """CPU time."""

    @classmethod
    def of(cls, captures: Sequence[Path], memory: int | None, every: int = 1) -> Cost:
        """memory: None for three quarters of what is free. every: see load().

        Raises BadInput where it is given and too little for any window.
        """
        extent, least = Extent.peek(captures, every), _memory_of(_LEAST_SPANS)
        memory = max(least, free_memory()[0] * 3 // 4) if memory is None else memory
        if memory < least:
            raise BadInput(f"{_said(memory)} of memory are too little for any window; wanted {_said(least)} or more")
        num_processes = min(usable_cores(), max(1, memory // (2 * _BYTES_OF_A_PROCESS)))
        return cls(extent.num_spans, memory, num_processes, _why_whole(extent))

    @property
    def fits(self) -> bool:
        """Whether all of it can be in memory."""
        return _memory_of(self.num_spans) <= self.memory

    @property
    def spans_of_window(self) -> int:
        return (self.memory // self.num_processes - _BYTES_OF_A_PROCESS) // _BYTES_A_SPAN

    def in_windows(self) -> str:
        """Says what windows take."""
        windows, time = -(-self.num_spans // self.spans_of_window), duration(self.num_spans * self.ns_a_span)
        return (
            f"{count(self.num_spans, 'span')} do not fit into {_said(self.memory)}; {count(windows, 'window')} "
            f"or more, {self.num_processes} at a time, take about {time} of CPU time and "
            f"{size(self.num_spans * self.disk_a_span)} of {temporary_folder()}"
        )

    def in_memory(self) -> str:
        """Says what it takes where all of it fits."""
        time = duration(self.num_spans * self.ns_a_span)
        return f"{count(self.num_spans, 'span')} take about {_said(_memory_of(self.num_spans))} and {time} of CPU time"

    def require(self, num_spans: int, why: str) -> str:
        """Says that so many spans have to be in memory at once, and why; "" where there may be so many.

        Raises BadInput where not so much is free.
        """
        if (needed := _memory_of(num_spans)) <= self.memory:
            return ""
        (free, where), has = free_memory(), f"{why}: {count(num_spans, 'span')}"
        if needed > max(free, self.memory):
            raise BadInput(f"{has} take about {_said(needed)} of memory, and {_said(free)} are free {where}")
        return f"{has} take about {_said(needed)} of memory, not {_said(self.memory)}"

    def processes_for(self, num_spans: int) -> int:
        """Returns how many may work on windows of so many spans at once."""
        return max(1, min(self.num_processes, self.memory // _memory_of(num_spans)))


def _memory_of(num_spans: int) -> int:
    return _BYTES_OF_A_PROCESS + num_spans * _BYTES_A_SPAN


def _said(num_bytes: int) -> str:
    """Memory as the option takes it, not less."""
    unit, each = ("GB", 10**9) if num_bytes >= 10**10 else ("MB", 10**6)
    return f"{math.ceil(num_bytes / each)}{unit}"


def _why_whole(extent: Extent) -> str:
    if extent.has_engines:
        return "what transfer engines did goes over all of the run"
    if extent.unclosed:
        return f"{ranks(extent.unclosed)} did not end, and the last that each did is looked for in all of the run"
    return ""


@contextlib.contextmanager
def findings_in_windows(
    captures: Sequence[Path],
    cost: Cost,
    tell: Callable[[int, int, str], None],
    say: Callable[[str], None],
    choose_window: Callable[[Timeline], Window | None],
    link_limit: LinkLimit | None,
    how: Mapping[str, Any],
) -> Iterator[Findings]:
    """Yields what analyze() returns.

    Args:
        tell: Takes how much is done of how much, and of what.
        say: Takes a line for the user.
        choose_window: Tells by the tables, and the lanes, what is to be judged.
        how: Options of load().

    Raises:
        CannotBeCut: All of the run has to be in memory.
        BadInput: As load(); or there is no room for files, or a window takes more memory than there is.
    """
    if cost.why_whole:
        raise CannotBeCut(cost.why_whole)
    about = *map(_identity, find_dumps(captures)), cost.spans_of_window, sorted(how.items()), __version__
    with folder_of(about) as folder:
        try:
            run = _windows_of(captures, folder, cost, tell, say, how)
            window, scratch = choose_window(run.skeleton), scratch_of(folder)
            with Workers(cost.processes_for(max(run.sizes, default=0)), tell) as workers:
                parts = KeptParts.make(scratch, workers, partial(_part_of, run, window), 1 + len(run.windows))
                yield Findings(run.skeleton, link_limit, window, parts)
        finally:
            forget(folder)


def _windows_of(
    captures: Sequence[Path],
    folder: Path,
    cost: Cost,
    tell: Callable[[int, int, str], None],
    say: Callable[[str], None],
    how: Mapping[str, Any],
) -> WindowedRun:
    def agree(why: str, rows: RunRows, sizes: Sequence[int]) -> None:
        opened = [spool.tables.ranks[0].rank for spool in rows.spools if spool.has_open]
        if why or opened:
            raise CannotBeCut(why or f"spans of {ranks(opened)} never ended")
        check(sizes)

    def check(sizes: Sequence[int]) -> None:
        if line := cost.require(max(sizes, default=0), "a window without a cut"):
            say(line)

    if (folder / "run").exists():
        say("going on with what the same report left when it was stopped")
        left: WindowedRun = scratch_of(folder).load("run")
        check(left.sizes)
        return left
    for begun in folder.glob("windows_*"):
        shutil.rmtree(begun)
    with Workers(cost.num_processes) as readers:
        spread = readers.spread
        loaded = load_windows(captures, folder, cost.spans_of_window, tell=tell, agree=agree, spread=spread, **how)
    scratch, tables = scratch_of(folder), loaded.skeleton
    for table in (tables.ranks, tables.tracks, tables.events, tables.launches, tables.problems):
        scratch.share(table)
    scratch.save("run", scratch.share(loaded))
    forget(folder)  # so that all is read from files, and named, as by one that goes on with it
    run: WindowedRun = scratch_of(folder).load("run")
    return run


def _part_of(run: WindowedRun, window: Window | None, number: int) -> Part:
    launches = run.windows[number - 1] if number else np.zeros(len(run.skeleton.launches), bool)
    part = Part(run.part(number), window, launches)
    part.every_wait  # noqa: B018 - kept with it
    return part


def _identity(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path.resolve()), about.st_size, about.st_mtime_ns
